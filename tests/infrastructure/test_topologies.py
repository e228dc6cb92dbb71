from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from tests.support.polling import eventually
from tests.support.processes import session_of
from tests.support.topologies import MASTER_NAME, ClusterSet, RedlockSet, SentinelSet, TlsServer

KEYS = [f"{{tag}}:{n}" for n in range(5)]


def _fill(cluster: ClusterSet) -> int:
    with cluster.client() as client:
        for key in KEYS:
            client.set(key, key)
    return cluster.slot_of(KEYS[0])


#: What else is tested on these fails, too, where they are no good; here it shows why.
pytestmark = pytest.mark.slow


class TestSentinels:
    def test_a_killed_primary_is_replaced_by_one_with_the_data(self, own_sentinels: Callable[..., SentinelSet]) -> None:
        whole = own_sentinels()
        with whole.client() as client:
            client.set("x", "1")
            assert client.wait(2, 5000) == 2
        old = whole.fail_over("kill")
        assert whole.primary() is not old
        assert not old.running
        with whole.client() as client:
            assert client.get("x") == "1"

    def test_stopped_primary_is_replaced_and_loses_its_late_writes_as_a_replica(
        self, own_sentinels: Callable[..., SentinelSet]
    ) -> None:
        """It still takes writes at first after it wakes."""
        whole = own_sentinels(replicas=1)
        old = whole.fail_over("stop")
        assert whole.primary() is not old
        whole.bring_back(wait=False)
        with old.client() as client:
            assert client.set("late", "1")
        whole.wait_until_whole()
        with old.client() as client:
            assert client.info("replication")["role"] == "slave"
            eventually(lambda: client.get("late") is None)

    def test_an_ordered_failover_promotes_another_while_all_live(
        self, own_sentinels: Callable[..., SentinelSet]
    ) -> None:
        whole = own_sentinels(password="secret", replicas=1)
        old = whole.fail_over("manual")
        assert whole.primary() is not old
        assert old.answering
        with whole.client() as client:
            assert client.set("x", "1")

    def test_a_primary_that_must_have_replicas_refuses_when_it_has_none(
        self, own_sentinels: Callable[..., SentinelSet]
    ) -> None:
        whole = own_sentinels(min_replicas=True, replicas=1, sentinels=1)
        whole.replicas()[0].kill()
        with whole.primary().client() as client:

            def refused() -> str:
                try:
                    client.set("x", "1")
                except redis.ResponseError as error:
                    return str(error)
                return ""

            # It finds out within a second or two.
            assert "NOREPLICAS" in eventually(refused, within=20)

    @pytest.mark.core
    def test_every_sentinel_of_the_url_names_the_primary(self, sentinel_set: SentinelSet) -> None:
        places = [part.removeprefix("sentinel://") for part in sentinel_set.url().split(";")]
        assert len(places) == 3
        named = set()
        for place in places:
            with redis.Redis.from_url(f"redis://{place}") as client:
                named.add(client.sentinel_get_master_addr_by_name(MASTER_NAME)[1])
        assert named == {sentinel_set.primary().port}


class TestCluster:
    @pytest.mark.core
    def test_every_slot_is_served(self, cluster_set: ClusterSet) -> None:
        owners = {cluster_set.node_of(slot) for slot in (0, 5460, 5461, 10922, 10923, 16383)}
        assert len(owners) == 3
        assert all(len(cluster_set.replicas_of(owner)) == 1 for owner in owners)

    @pytest.mark.parametrize("how", ["kill", "stop", "manual"])
    def test_a_failover_promotes_the_replica_with_the_data(
        self, own_cluster: Callable[..., ClusterSet], how: str
    ) -> None:
        cluster = own_cluster(node_timeout_ms=1500)  # a disk that hangs for longer than that makes failovers of its own
        slot = _fill(cluster)
        (replica,) = cluster.replicas_of(cluster.node_of(slot))
        old = cluster.fail_over(slot, how)  # type: ignore[arg-type]  # one of its three
        assert cluster.node_of(slot) is replica
        cluster.bring_back()
        assert cluster.replicas_of(replica) == [old]
        with cluster.client() as client:
            assert client.get(KEYS[0]) == KEYS[0]

    def test_a_slot_moves_with_its_keys_and_half_way_they_are_in_both_places(self, cluster_set: ClusterSet) -> None:
        slot = _fill(cluster_set)
        source = cluster_set.node_of(slot)
        to = next(node for node in cluster_set.primaries() if node is not source)
        cluster_set.begin_move(slot, to)
        assert cluster_set.move_keys(slot, 2) == 2
        with source.client() as client:
            with pytest.raises(redis.ResponseError, match=r"TRYAGAIN|Multiple keys request during rehashing"):
                client.mget(KEYS)
            with pytest.raises(redis.exceptions.AskError):
                client.get("{tag}:none")
        assert cluster_set.move_keys(slot) == 3
        cluster_set.end_move(slot)
        assert cluster_set.node_of(slot) is to
        with cluster_set.client() as client:
            assert client.mget(KEYS) == KEYS
        cluster_set.move_slot(slot, source)
        assert cluster_set.node_of(slot) is source


class TestRedlock:
    def test_the_nodes_are_independent(self, own_redlock: Callable[..., RedlockSet]) -> None:
        nodes = own_redlock(nodes=3)
        with nodes.node(0).client() as client:
            client.set("x", "1")
        with nodes.node(1).client() as client:
            assert client.get("x") is None
        nodes.node(2).kill()
        assert not nodes.whole()
        nodes.node(1).pause()
        with nodes.node(0).client() as client:
            assert client.get("x") == "1"
        assert len(set(nodes.urls() + nodes.lock_urls())) == 6

    def test_none_outlives_its_set(self, tmp_path: Path) -> None:
        with RedlockSet(tmp_path / "nodes") as nodes:
            pids = [node.pid for node in nodes.nodes]
            nodes.node(0).pause()
        assert not any(map(session_of, pids))


@pytest.mark.servers
class TestTls:
    def test_only_who_trusts_the_authority_connects(self, own_tls_server: Callable[..., TlsServer]) -> None:
        server = own_tls_server()
        with redis.Redis.from_url(server.url()) as client:
            assert client.ping()
        with redis.Redis.from_url(server.url().split("?")[0]) as stranger, pytest.raises(redis.ConnectionError):
            stranger.ping()

    def test_a_mutual_server_asks_for_a_certificate(self, own_tls_server: Callable[..., TlsServer]) -> None:
        server = own_tls_server(mutual=True)
        with redis.Redis.from_url(server.url()) as client:
            assert client.ping()
        with redis.Redis.from_url(server.url().split("&")[0]) as stranger, pytest.raises(redis.ConnectionError):
            stranger.ping()
