-- The tables of celery-dlock. Times are microseconds since the epoch, by the server's clock.
-- A name is the prefix of the app, the bucket as three hexadecimal digits, and the lock name, with colons between them.
-- All texts are binary: a collation would make two names equal. Each statement may run again on tables that exist.

CREATE TABLE IF NOT EXISTS dlock_meta (
    k varbinary(40) PRIMARY KEY,
    v bigint NOT NULL
) ENGINE = InnoDB;

-- One row for each lock name. If rest is null, the name has nothing but a plain lock, or none (owner is null).
-- The version grows with every transaction of the rules, which may have changed the marks or the waiters, too.
CREATE TABLE IF NOT EXISTS dlock_name (
    name varbinary(1000) PRIMARY KEY,
    owner varbinary(1000),
    until_us bigint NOT NULL DEFAULT 0,
    since_us bigint NOT NULL DEFAULT 0,
    token bigint NOT NULL DEFAULT 0,
    ttl_ms bigint,
    holder blob,
    rest mediumblob,
    wake_us bigint NOT NULL DEFAULT 0,
    version bigint NOT NULL DEFAULT 0,
    sweep_us bigint,
    KEY dlock_name_sweep (sweep_us)
) ENGINE = InnoDB;

-- Parked messages and dead letters.
CREATE TABLE IF NOT EXISTS dlock_waiter (
    name varbinary(1000),
    identity varbinary(200),
    waiting bigint,
    `delayed` bigint,
    entry mediumblob,
    dead mediumblob,
    shown boolean NOT NULL,
    facts mediumblob NOT NULL,
    PRIMARY KEY (name, identity),
    KEY dlock_waiter_waiting (name, waiting, identity),
    KEY dlock_waiter_delayed (name, `delayed`, identity),
    KEY dlock_waiter_dead (shown, name, identity)
) ENGINE = InnoDB;

-- Done marks, tombstones, run marks, and the records of workers.
CREATE TABLE IF NOT EXISTS dlock_mark (
    kind varbinary(20),
    name varbinary(1000),
    `key` varbinary(1000),
    text mediumblob NOT NULL,
    until_us bigint NOT NULL,
    PRIMARY KEY (kind, name, `key`),
    KEY dlock_mark_until (until_us)
) ENGINE = InnoDB;

-- One row for each fencing token with which a body has guarded a transaction of its own. That transaction locks the row.
-- The lock of the name itself would block the renewals of the lease.
CREATE TABLE IF NOT EXISTS dlock_guard (
    name varbinary(1000),
    token bigint,
    at_us bigint NOT NULL,
    PRIMARY KEY (name, token)
) ENGINE = InnoDB;

-- Calls that wait for a release, each until its process has not asked for a few seconds.
-- All statements find them by the primary key: a second index would be locked in another order.
CREATE TABLE IF NOT EXISTS dlock_call (
    name varbinary(1000),
    id bigint AUTO_INCREMENT,
    until_us bigint NOT NULL,
    woken boolean NOT NULL DEFAULT false,
    PRIMARY KEY (name, id),
    KEY dlock_call_id (id)
) ENGINE = InnoDB;

INSERT INTO dlock_meta (k, v) VALUES ('token_floor', 0) ON DUPLICATE KEY UPDATE v = v;
-- Tells these tables from those of another database.
INSERT INTO dlock_meta (k, v) VALUES ('store_id', CAST(CONV(LEFT(MD5(UUID()), 15), 16, 10) AS SIGNED))
    ON DUPLICATE KEY UPDATE v = v;
INSERT INTO dlock_meta (k, v) VALUES ('schema_version', 1) ON DUPLICATE KEY UPDATE v = v;
