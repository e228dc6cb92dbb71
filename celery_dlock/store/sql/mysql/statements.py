"""The statements of the store in MySQL and MariaDB.

``@us`` stands for the time in microseconds, by the server's clock when the expression is evaluated. ``@began`` is the
time when the statement began: an index can be searched for it. Both are in the time zone of the session, which is UTC.
``@.`` stands for the database, in statements for a connection of the user.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Statements"]

_MICROSECONDS: Final = "CAST(UNIX_TIMESTAMP(%s) * 1000000 AS SIGNED)"
_HEAD: Final = "SELECT owner, until_us, since_us, token, ttl_ms, holder, rest, wake_us FROM dlock_name"
_WAITER: Final = "SELECT identity, waiting, `delayed`, entry, dead, facts FROM dlock_waiter WHERE name = %s"
#: The row is free. It has the version that the same statement has read with the marks, so they have not changed since.
_FREE: Final = "dlock_name.owner IS NULL AND dlock_name.rest IS NULL AND dlock_name.version = VALUES(version)"


def _if_free(**values: str) -> str:
    """Return assignments that take place if the row is free. They run from left to right: the owner is the last."""
    return ", ".join(f"{name} = IF({_FREE}, {value}, dlock_name.{name})" for name, value in values.items())


class Statements:
    """The statements.

    Args:
        database: The database of the tables.
        clock: The expression for the time in microseconds; None: the server's clock. Tests have a clock of their own.
    """

    begin = "START TRANSACTION READ WRITE"
    #: All statements of a transaction that only reads see the same data.
    begin_reading = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "START TRANSACTION READ ONLY"
    head = f"{_HEAD} WHERE name = %s"
    lock = f"{head} FOR UPDATE"
    #: Make and lock the row. ``INSERT IGNORE`` would take a shared lock first, and two such calls a deadlock.
    make = "INSERT INTO dlock_name (name) VALUES (%s) ON DUPLICATE KEY UPDATE name = VALUES(name)"
    #: After :attr:`lock`, which may have waited. A name without a row has a token above all that were removed.
    now = "SELECT @us, (SELECT v FROM dlock_meta WHERE k = 'token_floor')"
    put_head = (
        "UPDATE dlock_name SET owner = %s, until_us = %s, since_us = %s, token = %s, ttl_ms = %s, holder = %s,"
        " rest = %s, sweep_us = %s, version = version + 1 WHERE name = %s"
    )

    marks = "SELECT kind, `key`, text, until_us FROM dlock_mark WHERE (kind, name, `key`) IN %(marks)s"
    marks_of_kind = "SELECT `key`, text, until_us FROM dlock_mark WHERE name = %s AND kind = %s"
    put_mark = (
        "INSERT INTO dlock_mark (name, kind, `key`, text, until_us) VALUES (%s, %s, %s, %s, %s)"
        " ON DUPLICATE KEY UPDATE text = VALUES(text), until_us = VALUES(until_us)"
    )
    drop_mark = "DELETE FROM dlock_mark WHERE name = %s AND kind = %s AND `key` = %s"
    lock_mark = "SELECT text FROM dlock_mark WHERE name = %s AND kind = %s AND `key` = %s FOR UPDATE"

    waiters = f"{_WAITER} AND identity IN %s"
    first_waiting = f"{_WAITER} AND waiting BETWEEN %s AND %s ORDER BY waiting, identity LIMIT %s"
    first_delayed = f"{_WAITER} AND `delayed` BETWEEN %s AND %s ORDER BY `delayed`, identity LIMIT %s"
    before_waiting = (
        "SELECT COUNT(*) FROM dlock_waiter WHERE name = %(name)s AND waiting <= %(score)s"
        " AND (waiting < %(score)s OR identity < %(identity)s)"
    )
    before_delayed = before_waiting.replace("waiting", "`delayed`")
    entries = "SELECT identity, entry FROM dlock_waiter WHERE name = %s AND entry IS NOT NULL"
    put_waiter = (
        "INSERT INTO dlock_waiter (name, identity, waiting, `delayed`, entry, dead, shown, facts)"
        " VALUES (%s, %s, %s, %s, %s, %s, %s, %s) ON DUPLICATE KEY UPDATE waiting = VALUES(waiting),"
        " `delayed` = VALUES(`delayed`), entry = VALUES(entry), dead = VALUES(dead), facts = VALUES(facts),"
        " shown = VALUES(shown)"
    )
    drop_waiter = "DELETE FROM dlock_waiter WHERE name = %s AND identity = %s"

    # Guards. The last three are for the connection of the user.
    #: ``INSERT IGNORE`` shares the row that a transaction of the same holder has locked.
    put_guard = "INSERT IGNORE INTO dlock_guard (name, token, at_us) VALUES (%s, %s, @us)"
    free_guard = "SELECT 1 FROM dlock_guard WHERE name = %s AND token = %s FOR UPDATE SKIP LOCKED"
    end_guard = "DELETE FROM dlock_guard WHERE name = %s AND token = %s"
    has_guard = "SELECT 1 FROM dlock_guard WHERE name = %s AND token = %s"
    #: What tells these tables and this server from others: a replica has the same tables.
    store_id = "SELECT v, @@server_id, @@hostname, @@port FROM @.dlock_meta WHERE k = 'store_id'"
    #: Whether the transaction sees the guard. The next statement finds it in any case, and locks it.
    sees_guard = "SELECT COUNT(*) FROM @.dlock_guard WHERE name = %s AND token = %s"
    lock_guard = "SELECT 1 FROM @.dlock_guard WHERE name = %s AND token = %s LOCK IN SHARE MODE"
    settle = put_mark.replace("INTO ", "INTO @.")

    # A wake-up that no call waits for is kept: the next call that begins to wait takes it.
    keep_wake = (
        "UPDATE dlock_name SET wake_us = @us + %(kept_us)s WHERE name = %(name)s AND wake_us <= @us AND %(wakes)s >"
        " (SELECT COUNT(*) FROM dlock_call WHERE name = %(name)s AND NOT woken AND until_us > @us)"
    )
    wake = (
        "UPDATE dlock_call SET woken = true WHERE name = %(name)s AND NOT woken AND until_us > @us"
        " ORDER BY id LIMIT %(wakes)s"
    )
    take_wake = "UPDATE dlock_name SET wake_us = 0 WHERE name = %s AND wake_us > @us"
    begin_to_wait = "INSERT INTO dlock_call (name, until_us) VALUES (%s, @us + %s)"
    waits = "SELECT woken FROM dlock_call WHERE name = %s AND id = %s"
    waits_locked = f"{waits} FOR UPDATE"
    still_waits = "UPDATE dlock_call SET until_us = @us + %s WHERE name = %s AND id = %s"
    end_to_wait = "DELETE FROM dlock_call WHERE name = %s AND id = %s"

    # The plain paths, for names without a `rest`.
    #: Take a free lock. The marks and the row are looked at before it is written, so a refusal writes nothing.
    acquire = (  # noqa: S608  # no values
        "INSERT INTO dlock_name (name, owner, until_us, since_us, token, ttl_ms, holder, version)"
        " SELECT %(name)s, %(owner)s, t.us + %(ttl_ms)s * 1000, t.us,"
        " GREATEST(t.us, m.v + 1, COALESCE(h.token, 0) + 1), %(ttl_ms)s, %(holder)s, COALESCE(h.version, 0)"
        " FROM (SELECT @us AS us) AS t JOIN dlock_meta AS m LEFT JOIN dlock_name AS h ON h.name = %(name)s"
        " WHERE m.k = 'token_floor' AND h.owner IS NULL AND h.rest IS NULL"
        " AND NOT EXISTS (SELECT 1 FROM dlock_mark AS k WHERE (k.kind, k.name, k.`key`) IN"
        " (('tombstone', %(name)s, %(owner)s), ('done', %(name)s, %(identity)s)))"
        " ON DUPLICATE KEY UPDATE "
    ) + _if_free(
        until_us="VALUES(until_us)",
        since_us="VALUES(since_us)",
        token="GREATEST(VALUES(token), dlock_name.token + 1)",  # noqa: S106  # no password
        ttl_ms="VALUES(ttl_ms)",
        holder="VALUES(holder)",
        owner="VALUES(owner)",
    )
    acquired = "SELECT token, since_us FROM dlock_name WHERE name = %(name)s AND owner = %(owner)s"
    release = (
        "UPDATE dlock_name SET owner = NULL, until_us = 0, ttl_ms = NULL, holder = NULL"
        " WHERE name = %s AND owner = %s AND rest IS NULL AND until_us > @us"
    )
    #: One time for both statements: what the first one finds, the second one renews.
    renew_at = "SET @dlock_now = @us"
    renewable = (
        "SELECT name, owner FROM dlock_name WHERE (name, owner) IN %(leases)s AND rest IS NULL"
        " AND until_us > @dlock_now AND until_us <= @dlock_now + GREATEST(ttl_ms, %(ttl_ms)s) * 1000"
        " FOR UPDATE SKIP LOCKED"
    )
    renew = (
        "UPDATE dlock_name SET until_us = GREATEST(until_us, @dlock_now + %(ttl_ms)s * 1000),"
        " ttl_ms = GREATEST(ttl_ms, %(ttl_ms)s) WHERE (name, owner) IN %(leases)s AND rest IS NULL"
        " AND until_us > @dlock_now AND until_us <= @dlock_now + GREATEST(ttl_ms, %(ttl_ms)s) * 1000"
    )
    #: Without a transaction: if as many rows change as there are leases, all were renewed.
    renew_all_waiting = renew.replace("@dlock_now", "@us")
    #: A row that another transaction has locked ends it at once. MySQL has no such option for one statement.
    renew_all = f"SET STATEMENT innodb_lock_wait_timeout = 0 FOR {renew_all_waiting}"

    #: The earliest names of each bucket.
    due = (
        "SELECT name, rest, @began FROM (SELECT name, rest, sweep_us,"
        " ROW_NUMBER() OVER (PARTITION BY SUBSTR(name, %(bucket_at)s, 3) ORDER BY sweep_us) AS number"
        " FROM dlock_name WHERE sweep_us <= @began + %(within_us)s AND name > %(start)s AND name < %(end)s"
        " AND SUBSTR(name, %(bucket_at)s, 3) IN %(buckets)s) AS n WHERE number <= %(most)s ORDER BY sweep_us"
    )
    # Entries behind a cursor: a name and a detail.
    names = (
        "SELECT name, '' FROM (SELECT name FROM dlock_name WHERE (owner IS NOT NULL OR rest IS NOT NULL)"
        " AND name > %(name)s AND name < %(end)s ORDER BY name LIMIT %(most)s) AS n"
        " UNION (SELECT name, '' FROM dlock_mark WHERE kind = 'run' AND `key` = ''"
        " AND name > %(name)s AND name < %(end)s ORDER BY name LIMIT %(most)s)"
        " ORDER BY name LIMIT %(most)s"
    )
    queues = (
        "SELECT name, '' FROM dlock_name WHERE sweep_us IS NOT NULL AND name > %(name)s AND name < %(end)s"
        " ORDER BY name LIMIT %(most)s"
    )
    runs = (
        "SELECT name, `key` FROM dlock_mark WHERE kind = 'run' AND name >= %(name)s AND name < %(end)s"
        " AND (name > %(name)s OR `key` > %(detail)s) ORDER BY name, `key` LIMIT %(most)s"
    )
    dead_letters = (
        "SELECT name, identity FROM dlock_waiter WHERE shown = true AND name >= %(name)s AND name < %(end)s"
        " AND (name > %(name)s OR identity > %(detail)s) ORDER BY name, identity LIMIT %(most)s"
    )
    count = (
        "SELECT COUNT(*) FROM (SELECT 1 FROM dlock_name WHERE (owner IS NOT NULL OR rest IS NOT NULL)"
        " AND name > %s AND name < %s LIMIT 100000) AS n"
    )
    clock = "SELECT @us"
    durability_cure = "SELECT IF(@@innodb_flush_log_at_trx_commit = 1, '', 'set innodb_flush_log_at_trx_commit=1')"

    # Each of these removes a bounded number of expired rows, and skips rows that another transaction has locked.
    old_marks = (
        "SELECT kind, name, `key` FROM dlock_mark WHERE until_us < @began ORDER BY until_us LIMIT 500"
        " FOR UPDATE SKIP LOCKED"
    )
    remove_marks = "DELETE FROM dlock_mark WHERE (kind, name, `key`) IN %s"
    old_calls = "SELECT name, id FROM dlock_call WHERE until_us < @began - 60000000 LIMIT 500 FOR UPDATE SKIP LOCKED"
    remove_calls = "DELETE FROM dlock_call WHERE (name, id) IN %s"
    #: Guards of holders that ended long ago, and which of them no transaction has.
    old_guards = (
        "SELECT name, token FROM dlock_guard AS g WHERE at_us < @began - 600000000 AND NOT EXISTS"
        " (SELECT 1 FROM dlock_name AS n WHERE n.name = g.name AND n.until_us > @began) LIMIT 500"
    )
    free_guards = "SELECT name, token FROM dlock_guard WHERE (name, token) IN %s FOR UPDATE SKIP LOCKED"
    remove_guards = "DELETE FROM dlock_guard WHERE (name, token) IN %s"
    guarded = "SELECT name FROM dlock_guard WHERE name IN %s"
    #: The names of a range that nothing has used for ten minutes. Their tokens must not be issued again.
    old_names = (
        "SELECT name, token FROM dlock_name WHERE name > %s AND name <= %s AND until_us < @began - 600000000"
        " AND since_us < @began - 600000000 AND sweep_us IS NULL FOR UPDATE SKIP LOCKED"
    )
    raise_floor = "UPDATE dlock_meta SET v = GREATEST(v, %s) WHERE k = 'token_floor'"
    remove_names = "DELETE FROM dlock_name WHERE name IN %s"
    #: The end of the next range of names.
    next_range = (
        "SELECT MAX(name) FROM (SELECT name FROM dlock_name WHERE name > %s AND name < %s ORDER BY name LIMIT 500) AS n"
    )

    def __init__(self, database: str, clock: str | None = None) -> None:
        quoted = database.replace("`", "``")
        for name, text in vars(Statements).items():
            if isinstance(text, str) and not name.startswith("_"):
                now, began = (clock or _MICROSECONDS % time for time in ("SYSDATE(6)", "NOW(6)"))
                setattr(self, name, text.replace("@us", now).replace("@began", began).replace("@.", f"`{quoted}`."))
