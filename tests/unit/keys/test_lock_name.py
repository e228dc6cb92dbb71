"""The form of lock names and of their Redis keys."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from celery_dlock.keys.key_spec import BUCKETS, KeySpec, LockName, shared_name
from celery_dlock.keys.lock_name import name_from_member, name_from_text
from celery_dlock.store.redis.keys import LockKeys
from tests.unit.keys.naming import without_digest

pytestmark = pytest.mark.core


def name(function: Callable[..., Any], *args: Any, key: Any = None, task: str = "shop.pay") -> str:
    return KeySpec(task, inspect.signature(function), key, "task").name_of(args, {}).text


def one(a: Any) -> None: ...


def two(a: Any, b: Any) -> None: ...


class TestNames:
    @given(st.text(), st.text(st.characters()), st.text(min_size=1, alphabet=st.characters()))
    def test_a_name_is_ascii_without_spaces_and_braces_and_short(self, task: str, a: str, text: str) -> None:
        for made in (name(one, a, key="t:{a}", task=task), name(one, a, task=task), shared_name(text).text):
            assert re.fullmatch(r"[A-Za-z0-9_.@=,/+%:-]*:[0-9a-f]{32}", made)
            assert len(made) <= 234

    def test_text_is_cut_at_100_characters_and_between_escapes(self) -> None:
        assert without_digest(shared_name("x" * 101).text) == "x" * 100
        assert without_digest(shared_name("é" * 60).text) == "%C3%A9" * 16 + "%C3"
        assert without_digest(shared_name("x" * 99 + " ").text) == "x" * 99
        assert without_digest(shared_name("x" * 98 + " ").text) == "x" * 98
        assert shared_name("x" * 101) != shared_name("x" * 102)

    def test_surrogates_do_no_harm(self) -> None:
        assert without_digest(shared_name("a\ud800").text) == "a%ED%A0%80"
        for before in range(3):
            assert shared_name("x" * before + "\ud83d\ude00" * 99) == shared_name("x" * before + "\U0001f600" * 99)
            assert shared_name("x" * (97 + before) + "\ud83d\ude00") == shared_name("x" * (97 + before) + "\U0001f600")
        assert name(one, "\ud800") != name(one, "\udc00")

    def test_a_name_is_a_value(self) -> None:
        lock = shared_name("x")
        assert lock == shared_name("x")
        assert hash(lock) == hash(shared_name("x"))
        assert str(lock) == f"{lock}" == lock.text
        with pytest.raises(AttributeError):
            lock.text = "y"  # type: ignore[misc]

    def test_the_bucket_is_the_top_ten_bits_of_the_digest(self) -> None:
        names = [shared_name(str(i)) for i in range(20_000)]
        assert all(lock.bucket == int(lock.text[-32:], 16) >> 118 for lock in names)
        assert {lock.bucket for lock in names} == set(range(BUCKETS)) == set(range(1024))

    def test_the_digest_is_blake2b_of_kind_and_forms(self) -> None:
        told = b"[s4:tasks8:shop.pays9:argumentss1:as1:b]" + b"i1;s1:2"
        assert name(two, 1, "2") == "shop.pay:" + hashlib.blake2b(told, digest_size=16).hexdigest()


class TestLockKeys:
    NAME = LockName("shop.pay:5f0c", 0x2A)

    def test_layout(self) -> None:
        keys = LockKeys.of("dlock", self.NAME)
        root = "dlock:{02a}:"
        assert keys == LockKeys(f"{root}lock:shop.pay:5f0c", f"{root}last", f"{root}wake:shop.pay:5f0c", root)
        assert keys.run() == "dlock:{02a}:run:shop.pay:5f0c"
        assert keys.done("ab12") == "dlock:{02a}:done:ab12"
        assert keys.tombstone("o1.3") == "dlock:{02a}:tombstone:o1.3"
        assert keys.named("dead") == "dlock:{02a}:dead:shop.pay:5f0c"
        assert keys.named("dead_letters") == "dlock:{02a}:dead_letters"

    def test_key_of_an_unknown_kind_is_refused(self) -> None:
        with pytest.raises(KeyError, match="deaf"):
            LockKeys.of("dlock", self.NAME).named("deaf")

    def test_all_keys_of_a_name_are_in_one_cluster_slot(self) -> None:
        for prefix in ("dlock", "my:app", ""):
            keys = LockKeys.of(prefix, shared_name("account:{42}"))
            every = (keys.lock, keys.last, keys.wake, keys.run(), keys.done("{x}"), keys.tombstone("{y}"))
            assert len({key_slot(key.encode()) for key in every}) == 1

    def test_names_of_one_bucket_share_only_the_counter(self) -> None:
        one, other = LockKeys.of("d", LockName("x:1", 7)), LockKeys.of("d", LockName("y:2", 7))
        assert one.last == other.last
        assert len({one.lock, other.lock, one.wake, other.wake, one.run(), other.run()}) == 6

    def test_seat_has_a_lock_of_its_own_and_the_queue_of_its_name(self) -> None:
        name = shared_name("gpu")._replace(seats=3)
        every, second = LockKeys.of("d", name), LockKeys.of("d", name_from_text(f"{name.text}:2"))
        assert second.lock == f"{every.lock}:2"
        assert (second.wake, second.queue(), second.named("dead")) == (every.wake, every.queue(), every.named("dead"))
        assert every.name == second.name == f"{name.text}:*"
        assert name_from_member(every.name, name.bucket) == name._replace(seats=0)
