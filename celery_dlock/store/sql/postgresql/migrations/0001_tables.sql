-- The tables of celery-dlock. Times are microseconds since the epoch, by the server's clock.
-- A name is the prefix of the app, the bucket as three hexadecimal digits, and the lock name, with colons between them.
-- Each statement may run again on tables that exist.

CREATE TABLE IF NOT EXISTS dlock_meta (
    k text COLLATE "C" PRIMARY KEY,
    v bigint NOT NULL
);

-- One row for each lock name. If rest is null, the name has nothing but a plain lock, or none (owner is null).
-- Each page keeps free space, and no index has a column that an acquire or a release changes. So an update finds room
-- in the page of its row, and touches no index (HOT).
CREATE TABLE IF NOT EXISTS dlock_name (
    name text COLLATE "C" PRIMARY KEY,
    owner text COLLATE "C",
    until_us bigint NOT NULL DEFAULT 0,
    since_us bigint NOT NULL DEFAULT 0,
    token bigint NOT NULL DEFAULT 0,
    ttl_ms bigint,
    holder text,
    rest text,
    wake_us bigint NOT NULL DEFAULT 0,
    sweep_us bigint,
    -- Changes with each transaction that may write marks. A row that is made again does not repeat a version.
    version bigint NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
    -- The calls that wait for the release, in their order. Not null: the release wakes a call, see wake_us.
    line text[],
    -- Where the last release told a call that it has the lock.
    channel text
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 200,
    autovacuum_vacuum_cost_delay = 0
);
-- A long line stays in the row, compressed.
ALTER TABLE dlock_name ALTER COLUMN line SET STORAGE MAIN;
CREATE INDEX IF NOT EXISTS dlock_name_sweep ON dlock_name (sweep_us) WHERE sweep_us IS NOT NULL;

-- Parked messages and dead letters.
CREATE TABLE IF NOT EXISTS dlock_waiter (
    name text COLLATE "C",
    identity text COLLATE "C",
    waiting bigint,
    delayed bigint,
    entry text,
    dead text,
    shown boolean NOT NULL,
    facts text NOT NULL,
    PRIMARY KEY (name, identity)
);
CREATE INDEX IF NOT EXISTS dlock_waiter_waiting ON dlock_waiter (name, waiting, identity) WHERE waiting IS NOT NULL;
CREATE INDEX IF NOT EXISTS dlock_waiter_delayed ON dlock_waiter (name, delayed, identity) WHERE delayed IS NOT NULL;
CREATE INDEX IF NOT EXISTS dlock_waiter_dead ON dlock_waiter (name, identity) WHERE shown;

-- Done marks, tombstones, run marks, and the records of workers.
CREATE TABLE IF NOT EXISTS dlock_mark (
    name text COLLATE "C",
    kind text COLLATE "C",
    key text COLLATE "C",
    text text NOT NULL,
    until_us bigint NOT NULL,
    PRIMARY KEY (name, kind, key)
);
CREATE INDEX IF NOT EXISTS dlock_mark_until ON dlock_mark (until_us);
CREATE INDEX IF NOT EXISTS dlock_mark_run ON dlock_mark (name, key) WHERE kind = 'run';

-- One row for each fencing token with which a body has guarded a transaction of its own. That transaction locks the row.
-- The lock of the name itself would block the renewals of the lease.
CREATE TABLE IF NOT EXISTS dlock_guard (
    name text COLLATE "C",
    token bigint,
    at_us bigint NOT NULL,
    PRIMARY KEY (name, token)
);

INSERT INTO dlock_meta (k, v) VALUES ('schema_version', 1), ('token_floor', 0),
    -- Tells these tables from those of another database.
    ('store_id', ('x' || left(md5(random()::text || clock_timestamp()::text), 15))::bit(60)::bigint)
    ON CONFLICT DO NOTHING;
