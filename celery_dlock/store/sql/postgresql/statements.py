"""The statements of the store in PostgreSQL.

``@.`` stands for the schema. ``@us`` stands for the time in microseconds, by the server's clock when the expression is
evaluated, not when the transaction began. ``chr(31)`` is the separator of :mod:`.line`. Integers have a cast, because
psycopg sends small ones as smaller types.
"""

from __future__ import annotations

import functools
from typing import Final

from ..rows import WAKE_US
from .line import GRANT_US

__all__ = ["Statements"]

_CLOCK: Final = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
#: The fields of the first entry of a line (:class:`~.line.Entry`).
_FIRST: Final = "(string_to_array(n.line[1], chr(31)))"
_HEAD: Final = "SELECT owner, until_us, since_us, token, ttl_ms, holder, rest, wake_us, line FROM @.dlock_name"
_WAITER: Final = "SELECT identity, waiting, delayed, entry, dead, facts FROM @.dlock_waiter WHERE name = %s"


class Statements:
    """The statements.

    Args:
        schema: The schema of the tables.
        clock: The expression for the time in microseconds; None: the server's clock. Tests have a clock of their own.
    """

    begin = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
    #: All statements of a transaction that only reads see the same data.
    begin_reading = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
    #: In a transaction behind a pooler, which drops the settings of a session.
    limits = (
        "SELECT set_config('lock_timeout', %(limit)s, true), set_config('statement_timeout', %(limit)s, true),"
        " set_config('idle_in_transaction_session_timeout', %(limit)s, true)"
    )
    head = f"{_HEAD} WHERE name = %s"
    lock = f"{head} FOR UPDATE"
    make = "INSERT INTO @.dlock_name (name) VALUES (%s) ON CONFLICT DO NOTHING"
    #: After :attr:`lock`, which may have waited. A name without a row has a token above all that were removed.
    now = "SELECT @us, (SELECT v FROM @.dlock_meta WHERE k = 'token_floor')"
    put_head = (
        "UPDATE @.dlock_name SET owner = %s, until_us = %s::bigint, since_us = %s::bigint, token = %s::bigint,"
        " ttl_ms = %s::bigint, holder = %s, rest = %s, sweep_us = %s::bigint, version = version + 1 WHERE name = %s"
    )

    marks = (
        "SELECT kind, key, text, until_us FROM @.dlock_mark WHERE name = %(name)s AND (kind, key) IN"
        ' (SELECT a.kind COLLATE "C", a.key COLLATE "C"'
        " FROM unnest(%(kinds)s::text[], %(keys)s::text[]) AS a (kind, key))"
    )
    marks_of_kind = "SELECT key, text, until_us FROM @.dlock_mark WHERE name = %s AND kind = %s"
    put_mark = (
        "INSERT INTO @.dlock_mark (name, kind, key, text, until_us) VALUES (%s, %s, %s, %s, %s::bigint)"
        " ON CONFLICT (name, kind, key) DO UPDATE SET text = excluded.text, until_us = excluded.until_us"
    )
    drop_mark = "DELETE FROM @.dlock_mark WHERE name = %s AND kind = %s AND key = %s"

    waiters = f"{_WAITER} AND identity = ANY(%s)"
    first_waiting = (
        f"{_WAITER} AND waiting BETWEEN %s::bigint AND %s::bigint ORDER BY waiting, identity LIMIT %s::bigint"
    )
    first_delayed = first_waiting.replace("waiting BETWEEN", "delayed BETWEEN").replace("BY waiting", "BY delayed")
    before_waiting = (
        "SELECT count(*) FROM @.dlock_waiter WHERE name = %(name)s AND waiting IS NOT NULL"
        " AND (waiting, identity) < (%(score)s::bigint, %(identity)s)"
    )
    before_delayed = before_waiting.replace("waiting", "delayed")
    entries = "SELECT identity, entry FROM @.dlock_waiter WHERE name = %s AND entry IS NOT NULL"
    put_waiter = (
        "INSERT INTO @.dlock_waiter (name, identity, waiting, delayed, entry, dead, shown, facts)"
        " VALUES (%s, %s, %s::bigint, %s::bigint, %s, %s, %s, %s) ON CONFLICT (name, identity) DO UPDATE"
        " SET waiting = excluded.waiting, delayed = excluded.delayed, entry = excluded.entry, dead = excluded.dead,"
        " shown = excluded.shown, facts = excluded.facts"
    )
    drop_waiter = "DELETE FROM @.dlock_waiter WHERE name = %s AND identity = %s"

    # Guards. The last three and `store_id` are for the connection of the user.
    put_guard = "INSERT INTO @.dlock_guard (name, token, at_us) VALUES (%s, %s::bigint, @us) ON CONFLICT DO NOTHING"
    end_guard = (
        "DELETE FROM @.dlock_guard WHERE (name, token) IN (SELECT name, token FROM @.dlock_guard"
        " WHERE name = %s AND token = %s::bigint FOR UPDATE SKIP LOCKED)"
    )
    has_guard = "SELECT FROM @.dlock_guard WHERE name = %s AND token = %s::bigint"
    store_id = "SELECT v FROM @.dlock_meta WHERE k = 'store_id'"
    can_guard = (
        "SELECT to_regclass('@.dlock_guard') IS NOT NULL AS here,"
        " pg_is_in_recovery() OR current_setting('transaction_read_only')::bool AS read_only, now() AS began"
    )
    #: ``now()`` is the start of the transaction: if it differs from that of :attr:`can_guard`, each statement is one.
    lock_guard = "SELECT now() FROM @.dlock_guard WHERE name = %s AND token = %s::bigint FOR SHARE"

    settle = f"{put_mark} RETURNING 1"

    # The line of calls that wait.
    #: Write the line of a locked row. A wake-up that no call waits for is kept: the next call that waits takes it.
    put_line = (
        "UPDATE @.dlock_name SET line = %(line)s::text[], wake_us ="
        " CASE WHEN %(kept_us)s::bigint > 0 AND wake_us <= @us THEN @us + %(kept_us)s::bigint ELSE wake_us END"
        " WHERE name = %(name)s"
    )
    tell = "SELECT pg_notify(%s, %s)"
    #: Join the line of a lock to be woken, or take the wake-up that was kept.
    join_to_wake = (
        "INSERT INTO @.dlock_name AS n (name, line) VALUES (%(name)s,"
        " ARRAY[%(start)s::text || (@us + %(alive_us)s::bigint) || repeat(chr(31), 3)])"
        " ON CONFLICT (name) DO UPDATE SET wake_us = 0,"
        " line = CASE WHEN n.wake_us > @us THEN n.line ELSE coalesce(n.line, '{}') || excluded.line END"
        " RETURNING coalesce(starts_with(n.line[array_upper(n.line, 1)], %(start)s), false)"
    )
    leave = (
        "UPDATE @.dlock_name AS n SET line = ARRAY(SELECT u.entry FROM unnest(n.line) WITH ORDINALITY AS u (entry, i)"
        " WHERE NOT starts_with(u.entry, %(start)s) ORDER BY u.i) WHERE name = %(name)s"
        " AND EXISTS (SELECT FROM unnest(n.line) AS u (entry) WHERE starts_with(u.entry, %(start)s)) RETURNING 1"
    )
    in_line = (
        "SELECT FROM @.dlock_name AS n WHERE name = %(name)s"
        " AND EXISTS (SELECT FROM unnest(n.line) AS u (entry) WHERE starts_with(u.entry, %(start)s))"
    )
    holds = "SELECT token, since_us, until_us FROM @.dlock_name WHERE name = %(name)s AND owner = %(owner)s"

    # The plain paths: one statement each, for names without a `rest`.
    #: Take a free lock. The marks and the holder are looked at before the row is written, so a refusal writes nothing.
    #: The row may be that of a later transaction than the marks. Then its version differs, and it is not taken.
    _free_row = (
        "INSERT INTO @.dlock_name AS n (name, owner, until_us, since_us, token, ttl_ms, holder, version, line)"
        " SELECT a.name, a.owner, t.us + a.ttl_ms * 1000, t.us, greatest(t.us, m.v + 1, h.token + 1),"
        " a.ttl_ms, a.holder, coalesce(h.version, t.us), %s"
        " FROM (SELECT %%(name)s AS name, %%(owner)s AS owner, %%(identity)s AS identity,"
        " %%(ttl_ms)s::bigint AS ttl_ms, %%(holder)s AS holder) AS a CROSS JOIN"
        # The row may be removed at this moment, and the floor that has its token is not visible yet.
        " (SELECT @us AS us OFFSET 0) AS t CROSS JOIN @.dlock_meta AS m LEFT JOIN @.dlock_name AS h"
        " ON h.name = %%(name)s WHERE m.k = 'token_floor'"
        " AND NOT EXISTS (SELECT FROM @.dlock_mark WHERE name = %%(name)s AND kind = 'tombstone' AND key = %%(owner)s)"
        " AND NOT EXISTS (SELECT FROM @.dlock_mark WHERE name = %%(name)s AND kind = 'done' AND key = %%(identity)s)"
    )
    _same_version = "n.version = excluded.version"
    acquire = (
        _free_row % "NULL::text[]" + " AND coalesce(h.until_us, 0) <= t.us"
        " ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, until_us = excluded.until_us,"
        " since_us = excluded.since_us, token = greatest(excluded.token, n.token + 1), ttl_ms = excluded.ttl_ms,"
        " holder = excluded.holder, line = NULL WHERE n.owner IS NULL AND n.rest IS NULL"
        f" AND (n.line IS NULL OR n.line = '{{}}') AND {_same_version} RETURNING token, since_us"
    )
    #: Take a free lock, or join its line. A lock that is taken has a line, because other calls may wait.
    join = (
        _free_row % "'{}'::text[]"
        + " ON CONFLICT (name) DO UPDATE SET"
        + ",".join(
            f" {column} = CASE WHEN n.owner IS NULL THEN {value} ELSE n.{column} END"
            for column, value in {
                "owner": "excluded.owner",
                "until_us": "excluded.until_us",
                "since_us": "excluded.since_us",
                "token": "greatest(excluded.token, n.token + 1)",
                "ttl_ms": "excluded.ttl_ms",
                "holder": "excluded.holder",
            }.items()
        )
        + ", line = CASE WHEN n.owner IS NULL THEN '{}' ELSE coalesce(n.line, '{}')"
        " || (%(start)s::text || (@us + %(alive_us)s::bigint) || %(rest)s::text) END"
        f" WHERE n.rest IS NULL AND {_same_version} AND CASE"
        " WHEN n.owner IS NULL THEN coalesce(n.line, '{}') = '{}'"
        " ELSE n.until_us > @us AND coalesce(array_length(n.line, 1), 0) < %(most)s::bigint"
        " AND NOT starts_with(n.holder, %(same)s) END RETURNING owner, token, since_us, until_us, @us"
    )
    #: End a plain lock, or transfer it to the first call of its line, and tell that call.
    release = (
        "UPDATE @.dlock_name AS n SET owner = @first[1], holder = @first[6], ttl_ms = @first[4]::bigint,"
        " until_us = CASE WHEN n.line[1] IS NULL THEN 0"
        " ELSE @us + least(@first[4]::bigint * 1000, @grant_us) END,"
        " since_us = CASE WHEN n.line[1] IS NULL THEN n.since_us ELSE @us END,"
        " token = CASE WHEN n.line[1] IS NULL THEN n.token ELSE greatest(n.token + 1, @us) END,"
        " channel = CASE WHEN n.line IS NOT NULL THEN coalesce(@first[2], '') END,"
        " wake_us = CASE WHEN n.line = '{}' AND n.wake_us <= @us THEN @us + @kept_us ELSE n.wake_us END,"
        " line = CASE WHEN n.line[1] IS NOT NULL THEN n.line[2:] END"
        " WHERE name = %s AND owner = %s AND rest IS NULL AND until_us > @us AND (n.line[1] IS NULL"
        " OR @first[3]::bigint > @us AND @first[4] <> '')"
        " RETURNING channel IS NOT NULL, CASE WHEN owner IS NOT NULL THEN pg_notify(channel,"
        " concat_ws(chr(31), owner, token, since_us, until_us)) END"
    )
    _renew = (
        "WITH asked AS (SELECT * FROM unnest(%s::text[], %s::text[], %s::bigint[])"
        " WITH ORDINALITY AS a (name, owner, ttl_ms, number)){}"
        " UPDATE @.dlock_name AS n SET until_us = greatest(n.until_us, @us + a.ttl_ms * 1000),"
        " ttl_ms = greatest(n.ttl_ms, a.ttl_ms) FROM asked AS a{}"
        ' WHERE n.name = a.name COLLATE "C" AND n.owner = a.owner COLLATE "C" AND n.rest IS NULL AND n.until_us > @us'
        " AND n.until_us <= @us + greatest(n.ttl_ms, a.ttl_ms) * 1000 RETURNING a.number"
    )
    #: Fails if another transaction has locked a row (:attr:`at_once`). It costs half of the next statement.
    renew_all = _renew.format("", "")
    at_once = "SET LOCAL lock_timeout = 1"
    #: A row that another transaction has locked is skipped: it must not delay the renewal of the others.
    renew = _renew.format(
        ", unlocked AS MATERIALIZED (SELECT name FROM @.dlock_name WHERE name = ANY (ARRAY(SELECT name FROM asked))"
        " ORDER BY name FOR UPDATE SKIP LOCKED)",
        ' JOIN unlocked AS u ON u.name = a.name COLLATE "C"',
    )

    # The time is a subquery here: an index is not used for a bound that may change from row to row.
    #: The earliest names of each bucket.
    due = (
        "SELECT name, rest, (SELECT @us) FROM (SELECT name, rest, sweep_us,"
        " row_number() OVER (PARTITION BY substr(name, a.bucket_at, 3) ORDER BY sweep_us) AS number"
        " FROM @.dlock_name, (SELECT %(bucket_at)s::int AS bucket_at, %(buckets)s::text[] AS buckets) AS a"
        " WHERE sweep_us <= (SELECT @us) + %(within_us)s::bigint AND name > %(start)s AND name < %(end)s"
        " AND substr(name, a.bucket_at, 3) = ANY (a.buckets)) AS n WHERE number <= %(most)s::bigint ORDER BY sweep_us"
    )
    # Entries behind a cursor: a name and a detail.
    names = (
        "SELECT name, '' FROM (SELECT name FROM @.dlock_name WHERE (owner IS NOT NULL OR rest IS NOT NULL)"
        " AND name > %(name)s AND name < %(end)s ORDER BY name LIMIT %(most)s::bigint) AS n"
        " UNION (SELECT name, '' FROM @.dlock_mark WHERE kind = 'run' AND key = ''"
        " AND name > %(name)s AND name < %(end)s ORDER BY name LIMIT %(most)s::bigint)"
        " ORDER BY name LIMIT %(most)s::bigint"
    )
    queues = (
        "SELECT name, '' FROM @.dlock_name WHERE sweep_us IS NOT NULL AND name > %(name)s AND name < %(end)s"
        " ORDER BY name LIMIT %(most)s::bigint"
    )
    runs = (
        "SELECT name, key FROM @.dlock_mark WHERE kind = 'run' AND (name, key) > (%(name)s, %(detail)s)"
        " AND name < %(end)s ORDER BY name, key LIMIT %(most)s::bigint"
    )
    dead_letters = (
        "SELECT name, identity FROM @.dlock_waiter WHERE shown AND (name, identity) > (%(name)s, %(detail)s)"
        " AND name < %(end)s ORDER BY name, identity LIMIT %(most)s::bigint"
    )
    count = (
        "SELECT count(*) FROM (SELECT FROM @.dlock_name WHERE (owner IS NOT NULL OR rest IS NOT NULL)"
        " AND name > %s AND name < %s LIMIT 100000) AS n"
    )
    clock = "SELECT @us"
    durability_cure = "SELECT CASE current_setting('fsync') WHEN 'on' THEN '' ELSE 'set fsync=on' END"

    # Each of these removes a bounded number of expired rows, and skips rows that another transaction has locked.
    remove_marks = (
        "DELETE FROM @.dlock_mark WHERE (name, kind, key) IN (SELECT name, kind, key FROM @.dlock_mark"
        " WHERE until_us < (SELECT @us) ORDER BY until_us LIMIT 500 FOR UPDATE SKIP LOCKED)"
    )
    #: Guards of names that are gone, or of holders that ended long ago. One that a transaction has stays.
    remove_guards = (
        "DELETE FROM @.dlock_guard WHERE (name, token) IN (SELECT g.name, g.token FROM @.dlock_guard AS g"
        " WHERE at_us < (SELECT @us) - 600000000 AND NOT EXISTS (SELECT FROM @.dlock_name AS n"
        " WHERE n.name = g.name AND n.until_us > (SELECT @us)) LIMIT 500 FOR UPDATE SKIP LOCKED)"
    )
    #: Remove the names of a range that nothing has used for ten minutes. Their tokens must not be issued again.
    remove_names = (
        "WITH gone AS (DELETE FROM @.dlock_name WHERE name IN (SELECT n.name FROM @.dlock_name AS n WHERE n.name > %s"
        " AND name <= %s AND until_us < (SELECT @us) - 600000000 AND since_us < (SELECT @us) - 600000000"
        " AND sweep_us IS NULL AND NOT EXISTS (SELECT FROM @.dlock_guard AS g WHERE g.name = n.name)"
        " FOR UPDATE SKIP LOCKED) RETURNING token)"
        " UPDATE @.dlock_meta SET v = greatest(v, (SELECT max(token) FROM gone)) WHERE k = 'token_floor'"
        " AND EXISTS (SELECT FROM gone)"
    )
    #: The end of the next range of names.
    next_range = (
        "SELECT max(name) FROM (SELECT name FROM @.dlock_name WHERE name > %s AND name < %s ORDER BY name LIMIT 500)"
        " AS n"
    )

    def __init__(self, schema: str, clock: str | None = None) -> None:
        values = {
            "@us": clock or _CLOCK, "@.": f'"{schema}".', "@first": _FIRST, "@grant_us": str(GRANT_US),
            "@kept_us": str(WAKE_US),
        }  # fmt: skip
        for name, text in vars(Statements).items():
            if isinstance(text, str) and not name.startswith("_"):
                setattr(self, name, functools.reduce(lambda made, pair: made.replace(*pair), values.items(), text))
