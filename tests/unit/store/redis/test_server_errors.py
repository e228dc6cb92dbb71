"""A server's error becomes an exception that says whether to wait or what to change."""

from __future__ import annotations

import re

import pytest

from celery_dlock.errors import ScriptStopped, StoreNotReady, StoreRefused
from celery_dlock.store.redis.server_errors import error_from_reply, overwritten

IN_6_2 = "ERR Error running script (call to f_1): @user_script:1: @user_script: 1: "
#: ... and where a command that the script calls fails by itself.
CALLED_IN_6_2 = "ERR Error running script (call to f_1): @user_script:1: "

#: Errors of servers (Valkey 9.1, Redis 7.0 and 6.2), and the text for the user.
PASSING = [
    ("LOADING Redis is loading the dataset in memory", "it is loading its data"),
    ("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", "busy with another"),
    ("READONLY You can't write against a read only replica. script: on @user_script:1.", "it is a replica"),
    (f"{IN_6_2}-READONLY You can't write against a read only replica.", "it is a replica"),
    ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", "lost its primary"),
    ("NOREPLICAS Not enough good replicas to write. script: on @user_script:1.", "min-replicas-to-write"),
    ("CLUSTERDOWN Hash slot not served", "its cluster is down"),
    ("TRYAGAIN Multiple keys request during rehashing of slot", "moving this key"),
    ("ERR max number of clients reached", "maxclients"),
]
LASTING = [
    ("OOM command not allowed when used memory > 'maxmemory'. script: on @user_script:1.", "raise its maxmemory"),
    (f"{IN_6_2}-OOM command not allowed when used memory > 'maxmemory'.", "raise its maxmemory"),
    ("MISCONF Valkey is configured to save RDB snapshots, but it's currently unable to persist to disk.", "its disk"),
    ("NOAUTH Authentication required.", "put it into dlock_url"),
    ("ERR Protocol error: unauthenticated multibulk length", "put it into dlock_url"),
    ("Authentication required.", "put it into dlock_url"),
    ("HELLO must be called with the client already authenticated, otherwise the HELLO AUTH", "put it into dlock_url"),
    ("WRONGPASS invalid username-password pair or user is disabled.", "correct dlock_url"),
    ("invalid username-password pair or user is disabled.", "correct dlock_url"),
    ("AUTH <password> called without any password configured for the default user.", "correct dlock_url"),
    ("NOPERM User dlock has no permissions to run the 'evalsha' command", "run the 'evalsha' command"),
    ("ERR ACL failure in script: User dlock has no permissions to run the 'hget' command", "Permissions"),
    (f"{IN_6_2}The user executing the script can't run this command or subcommand", "Permissions"),
    (f"{IN_6_2}The user executing the script can't access at least one of the keys", "Permissions"),
    ("MOVED 866 127.0.0.1:7001", "let dlock_url begin with redis+cluster://"),
    ("CROSSSLOT Keys in request don't hash to the same slot", "redis+cluster://, and name its nodes"),
    ("ERR This instance has cluster support disabled", "let dlock_url begin with redis://"),
    ("ERR unknown command 'EVALSHA'", "let dlock_url begin with sentinel://, and set master_name"),
    ("DB index is out of range", "correct the number at the end of dlock_url"),
    ("WRONGTYPE Operation against a key holding the wrong kind of value", "another dlock_prefix"),
    (f"{CALLED_IN_6_2}WRONGTYPE Operation against a key holding the wrong kind of value", "another dlock_prefix"),
]


@pytest.mark.parametrize(("said", "told"), PASSING)
def test_what_passes_by_itself_is_not_ready(said: str, told: str) -> None:
    error = error_from_reply(said)
    assert type(error) is StoreNotReady
    assert told in str(error)


@pytest.mark.parametrize(("said", "told"), LASTING)
def test_what_needs_somebody_is_refused_with_what_to_change(said: str, told: str) -> None:
    error = error_from_reply(said)
    # A script may have written before the server refused one of its commands. A full server refuses its first write.
    stopped = "@user_script" in said and not re.search("OOM|MISCONF", said)
    assert type(error) is (ScriptStopped if stopped else StoreRefused)
    assert told in str(error)


@pytest.mark.parametrize("said", [said for said, _ in PASSING + LASTING])
def test_the_servers_own_words_are_kept_in_one_line(said: str) -> None:
    text = str(error_from_reply(said))
    assert text.startswith("the lock store refused: ")
    assert text.endswith(f"; server reply: {said}")
    assert "\n" not in text


def test_what_nobody_foresaw_is_refused_in_the_servers_words() -> None:
    error = error_from_reply("ERR something\nnew")
    assert (type(error), str(error)) == (StoreRefused, "the lock store refused: ERR something new")


def test_what_a_server_quotes_of_a_command_is_cut_off() -> None:
    said = "ERR unknown command 'SPUBLISH', with args beginning with: 'abc' '1' 's3cret'"
    assert str(error_from_reply(said)) == "the lock store refused: ERR unknown command 'SPUBLISH'"


def test_a_code_that_a_driver_took_off_counts_as_if_it_stood_there() -> None:
    assert type(error_from_reply("Redis is loading the dataset in memory", "LOADING")) is StoreNotReady
    assert "Permissions" in str(
        error_from_reply("this user has no permissions to run the 'subscribe' command", "NOPERM")
    )


@pytest.mark.parametrize("said", [said for said, _ in PASSING + LASTING])
def test_overwritten_key_is_told_by_wrongtype_alone(said: str) -> None:
    assert overwritten(said) is ("WRONGTYPE" in said)
