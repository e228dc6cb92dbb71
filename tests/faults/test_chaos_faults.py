"""`chaos.faults` carries out each fault of a schedule."""

from types import SimpleNamespace

from chaos.faults import Strikes
from chaos.history import History
from chaos.schedule import Fault
from chaos.stores import RedisChaosStore
from tests.support.servers import Server


def test_command_to_a_store_that_is_still_paused_waits_for_its_end(tmp_path):
    """A busy machine carries out a pause late, and its end with it."""
    with Server(tmp_path / "store") as server:
        store = RedisChaosStore(server)
        faults = [Fault(0.0, "pause store, short", None, 0.5, 0.0), Fault(0.0, "SCRIPT FLUSH", None, 0.0, 0.0)]
        targets = SimpleNamespace(store=store, broker=server, proxy=SimpleNamespace(set_mode=None))
        strikes = Strikes(faults, targets, History(tmp_path / "history"), lambda line: None)
        while strikes.look():
            pass
        assert strikes.done == {"pause store, short": 1, "SCRIPT FLUSH": 1}
        assert strikes.missed == 0
