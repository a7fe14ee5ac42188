"""The demo's tables: a small social network with a shop in it.

Chosen so that every kind of change and most types occur: composite keys, a table without a key,
long text that Postgres stores out of line (TOAST), money on which two tables must agree. There are
no foreign keys: the writers change only their own rows, and a truncate needs no cascade.
"""

from __future__ import annotations

from typing import Final

TABLES: Final = (
    "accounts",
    "clicks",
    "follows",
    "orders",
    "payments",
    "searches",
    "tweets",
    "users",
)

# Followed by mirrors only: the other stores identify rows by their keys.
KEYLESS: Final = ("clicks",)

# Money only moves between accounts: at every commit their balances add up to accounts * opening.
ACCOUNTS: Final = 100
OPENING_BALANCE: Final = "1000.00"

DDL: Final = """
CREATE TYPE plan AS ENUM ('free', 'plus', 'pro');
CREATE TYPE order_status AS ENUM ('placed', 'paid', 'packed', 'shipped', 'returned');

CREATE TABLE users (
    id bigint PRIMARY KEY,
    handle varchar(40) NOT NULL,
    name text NOT NULL,
    plan plan NOT NULL DEFAULT 'free',
    verified boolean NOT NULL DEFAULT false,
    born date,
    interests text[] NOT NULL DEFAULT '{}',
    settings jsonb NOT NULL DEFAULT '{}',
    avatar bytea,
    bio text,
    last_seen timestamptz NOT NULL DEFAULT now()
);
-- Kept uncompressed, so that a long one is stored apart and not sent when it has not changed.
ALTER TABLE users ALTER COLUMN bio SET STORAGE EXTERNAL;

CREATE TABLE tweets (
    id bigint PRIMARY KEY,
    author bigint NOT NULL,
    body text NOT NULL,
    likes integer NOT NULL DEFAULT 0,
    score double precision NOT NULL DEFAULT 0,
    posted_at timestamptz NOT NULL DEFAULT now(),
    edited_at timestamp(3)
);
CREATE INDEX ON tweets (author);

CREATE TABLE follows (
    follower bigint,
    followee bigint,
    muted boolean NOT NULL DEFAULT false,
    since timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (follower, followee)
);

CREATE TABLE accounts (
    id integer PRIMARY KEY,
    currency char(3) NOT NULL DEFAULT 'EUR',
    balance numeric(14,2) NOT NULL,
    version integer NOT NULL DEFAULT 1
);

CREATE TABLE payments (
    id bigint PRIMARY KEY,
    from_account integer NOT NULL,
    to_account integer NOT NULL,
    amount numeric(14,2) NOT NULL CHECK (amount > 0),
    memo text,
    paid_at timestamp NOT NULL DEFAULT now()
);

CREATE TABLE orders (
    id uuid PRIMARY KEY,
    customer bigint NOT NULL,
    status order_status NOT NULL DEFAULT 'placed',
    items jsonb NOT NULL,
    total numeric(12,2) NOT NULL,
    deliver_on date,
    deliver_at time,
    placed_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE searches (
    id bigint PRIMARY KEY,
    words text NOT NULL,
    hits smallint,
    took real NOT NULL,
    waited interval
);

CREATE TABLE clicks (
    visitor bigint NOT NULL,
    url text NOT NULL,
    address inet,
    at timestamp NOT NULL DEFAULT clock_timestamp()
);
ALTER TABLE clicks REPLICA IDENTITY FULL;
"""

# The rows that exist before the start: the initial snapshot copies them. Actors take over the rows
# with their own ids; searches start empty.
OLD_ROWS: Final = 5_500
OLD: Final = """
INSERT INTO users (id, handle, name, born, interests, settings, avatar, bio)
SELECT n, 'member_' || n, 'Member ' || n, date '1970-01-01' + n, ARRAY['tea', 'trains'],
    '{"theme": "dark"}', decode(md5(n::text), 'hex'),
    CASE WHEN n % 3 = 0 THEN repeat(md5(n::text) || ' ', 100) END
FROM generate_series(1, 1000) n;

INSERT INTO tweets (id, author, body, likes)
SELECT n, 1 + n % 1000, 'posted long ago: ' || md5(n::text), n % 50 FROM generate_series(1, 2000) n;

INSERT INTO follows (follower, followee)
SELECT n, 1 + n * 7 % 499 FROM generate_series(1, 1000) n;

INSERT INTO orders (id, customer, status, items, total)
SELECT md5(n::text)::uuid, n, 'shipped', '[{"n": 1, "item": "teapot"}]', n FROM
generate_series(1, 500) n;

INSERT INTO clicks (visitor, url)
SELECT n, '/archive/' || n % 10 FROM generate_series(1, 1000) n;
"""
