"""The invariants after each step of the stateful test of the queue's scripts."""

from collections.abc import Mapping

from hypothesis.stateful import invariant

from celery_dlock.store.redis.keys import LockKeys
from tests.contract.queue_helpers import SECOND, TTL
from tests.contract.queue_model import Queue
from tests.contract.queue_state_machine import BUCKET, Machine
from tests.contract.queue_values import Granted, Held

#: Fields of the lock that are set or absent, by their names in the model: of a held lock, and of a grant.
NOTES = {"word": "dup", "wake": "notify"}
GRANT_NOTES = {"published": "published", "wake": "notify"}


class Laws(Machine):
    """The server is looked at once, and each law reads what was seen."""

    @invariant()
    def after_each_step(self) -> None:
        if not hasattr(self, "queues"):
            return
        self.look()
        self.the_server_holds_what_the_model_holds()
        self.all_keys_carry_one_hash_tag()
        self.a_grant_has_no_expiry_and_a_lease_has_one()
        self.who_waits_has_an_entry_and_every_entry_waits()
        self.nobody_is_lost()
        self.a_sweep_will_look_at_every_lock_with_waiters_in_time()

    def the_server_holds_what_the_model_holds(self) -> None:
        index = self.keys[0].queue()[3]
        self.same({key: value for key, value in self.held.items() if key != index}, self.expected())

    def all_keys_carry_one_hash_tag(self) -> None:
        assert all(key.startswith(f"{self.prefix}:{{{BUCKET:03x}}}:") for key in self.held)

    def a_grant_has_no_expiry_and_a_lease_has_one(self) -> None:
        for queue, keys in self.each():
            if queue.lock:
                life = self.lives[keys.lock]
                assert life == -1 if isinstance(queue.lock, Granted) else 0 < life <= TTL

    def who_waits_has_an_entry_and_every_entry_waits(self) -> None:
        for _, keys in self.each():
            waiting, parked, later, _ = keys.queue()
            places = [*self.held.get(waiting, ()), *self.held.get(later, ())]
            places += [self.held[keys.lock]["identity"]] if "due" in self.held.get(keys.lock, {}) else []
            assert sorted(places) == sorted(field for field in self.held.get(parked, ()) if ":" not in field)

    def nobody_is_lost(self) -> None:
        for owed, (_, keys) in zip(self.owed, self.each(), strict=True):
            assert owed <= {*self.held.get(keys.queue()[1], ()), *self.held.get(keys.named("dead"), ())}

    def a_sweep_will_look_at_every_lock_with_waiters_in_time(self) -> None:
        for queue, keys in self.each():
            look = self.held.get(keys.queue()[3], {}).get(keys.name)
            if isinstance(queue.lock, Granted):
                # An expiry is given in whole milliseconds, and before Redis 7 the clock goes on while a script runs.
                assert int(self.held[keys.lock]["due"]) - 50_000 <= look <= int(self.held[keys.lock]["due"])
            elif queue.waiting:
                assert look is not None
                assert look <= self.looked + (self.lives[keys.lock] * 1000 + SECOND if queue.lock else 0)
            elif queue.later and not queue.lock:
                assert look is not None
                assert look <= min(self.number(until) for until in queue.later.values())

    def each(self) -> list[tuple[Queue, LockKeys]]:
        return list(zip(self.queues, self.keys, strict=True))

    def look(self) -> None:
        seen = self.target.look()
        self.looked, self.held, self.lives = seen.at, seen.held, seen.lives

    def expected(self) -> dict[str, object]:
        keys = self.keys[0]
        found: dict[str, object] = {keys.tombstone(acquisition): "1" for acquisition in self.bucket.gone}
        found |= {keys.done(identity): at for identity, at in self.bucket.done.items()}
        found |= {keys.last: self.bucket.last} if self.bucket.last else {}
        indexed = {f"{who} {keys.name}": at for queue, keys in self.each() for who, at in queue.indexed.items()}
        found |= {self.keys[0].named("dead_letters"): indexed} if indexed else {}
        for queue, keys in self.each():
            waiting, parked, later, _ = keys.queue()
            lost = {f"{who}:rank": rank for who, (rank, _) in queue.lost.items()}
            lost |= {f"{who}:tries": str(tries) for who, (_, tries) in queue.lost.items()}
            lost |= {f"{who}:evicted": whom for who, whom in queue.ousted.items()}
            places: dict[str, Mapping[str, object]] = {
                waiting: queue.waiting,
                parked: {**queue.entries, **lost},
                later: queue.later,
                keys.named("dead"): queue.dead,
                keys.lock: self.lock_fields(queue),
            }
            found |= {key: dict(value) for key, value in places.items() if value}
        return found

    def lock_fields(self, queue: Queue) -> dict[str, object]:
        lock = queue.lock
        if lock is None:
            return {}
        fields: dict[str, object]
        if isinstance(lock, Held):
            fields = {"acq": lock.ask.acquisition, "identity": lock.ask.identity, "token": lock.token}
            fields |= {"task": "t", "id": lock.ask.task_id, "process": "n 1", "ttl": "60000"}
            fields |= {field: "1" for name, field in NOTES.items() if getattr(lock, name)}
            return fields | ({"has_waiters": "1"} if lock.crowded else {})
        fields = {"acq": f"grant:{lock.identity}", "identity": lock.identity, "token": "0", "count": "0"}
        fields |= {"task": "app.post", "id": self.task_id(lock.identity), "process": ""}
        fields |= {"has_waiters": "1", "granter": lock.granter, "since": lock.turn, "due": lock.due, "rank": lock.rank}
        fields |= {"dead_letter": lock.buried} if lock.buried else {}
        return fields | {field: "1" for name, field in GRANT_NOTES.items() if getattr(lock, name)}
