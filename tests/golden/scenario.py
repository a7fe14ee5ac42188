"""The recorded scenarios: SQL in small steps, each with the messages that it must cause.

A step ends when the stream has caught up with it, so an open transaction spans several steps.
Statements run in session `a` unless they start with `b: `. Only the tables in `PUBLICATION` are
captured: the table `filler` serves to push a transaction over `logical_decoding_work_mem`, which
makes Postgres stream it, without filling the recordings.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Step(NamedTuple):
    name: str
    statements: tuple[str, ...]
    kinds: str  # the messages' names, in order


class Scenario(NamedTuple):
    name: str
    min_major: int
    options: dict[str, str]  # of START_REPLICATION, without the publication's name
    steps: tuple[Step, ...]

    @property
    def two_phase(self) -> bool:
        return "two_phase" in self.options

    @property
    def parallel(self) -> bool:
        return self.options.get("streaming") == "parallel"


SETUP: Final = r"""
DROP SCHEMA IF EXISTS golden CASCADE;
DROP SCHEMA IF EXISTS "Schéma "". \" CASCADE;
DROP PUBLICATION IF EXISTS golden;
CREATE SCHEMA golden;
CREATE SCHEMA "Schéma "". \";
SET search_path = golden;

CREATE TYPE mood AS ENUM ('sad', 'it''s "ok"');
CREATE DOMAIN email AS varchar(40) CHECK (VALUE LIKE '%@%');
CREATE TYPE spot AS (x int, y float8);
CREATE TABLE typed (
    id int PRIMARY KEY, dropped int, mood mood, moods mood[], email email, spot spot,
    price numeric(6, 4), at timestamptz(3), raw bytea, twice int GENERATED ALWAYS AS (id * 2) STORED
);
ALTER TABLE typed DROP COLUMN dropped;
CREATE TABLE "Schéma "". \"."Tablé 🐘" ("Spalte ""ä"" n" int, PRIMARY KEY ("Spalte ""ä"" n"));

CREATE TABLE plain (id int PRIMARY KEY, name text);
CREATE TABLE composite_key (b int, note text, a text, PRIMARY KEY (a, b));
CREATE TABLE whole (id int PRIMARY KEY, name text);
ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE TABLE indexed (id int PRIMARY KEY, code text NOT NULL, name text);
CREATE UNIQUE INDEX indexed_code ON indexed (code);
ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_code;
CREATE TABLE nothing (id int PRIMARY KEY, name text);
ALTER TABLE nothing REPLICA IDENTITY NOTHING;
CREATE TABLE keyless (name text);
CREATE TABLE columnless ();

CREATE TABLE toasted (id int PRIMARY KEY, big text, n int);
ALTER TABLE toasted ALTER big SET STORAGE EXTERNAL;
INSERT INTO toasted VALUES (1, repeat('x', 2100), 0);
CREATE TABLE toasted_whole (id int PRIMARY KEY, big text, n int);
ALTER TABLE toasted_whole ALTER big SET STORAGE EXTERNAL;
ALTER TABLE toasted_whole REPLICA IDENTITY FULL;
INSERT INTO toasted_whole VALUES (1, repeat('y', 2100), 0);

CREATE TABLE parent (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY);
CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent);
CREATE TABLE other (id int PRIMARY KEY);

CREATE TABLE filler (pad text);
ALTER TABLE filler ALTER pad SET STORAGE EXTERNAL;
"""

PUBLICATION: Final = r"""
CREATE PUBLICATION golden FOR TABLE
    typed, "Schéma "". \"."Tablé 🐘", plain, composite_key, whole, indexed, nothing, keyless,
    columnless, toasted, toasted_whole, parent, child, other
"""

ORIGIN: Final = "golden_upstream"

_FILL: Final = "INSERT INTO filler VALUES (repeat('f', 100000))"

_ROWS: Final = (
    Step(
        "user-defined types, NULLs, and values at the edge",
        (
            "BEGIN",
            r"""INSERT INTO typed VALUES
                (1, 'sad', '{sad,NULL}', 'a@b', '(1,2.5)', 22.22, '2016-11-04 13:51:30.123+02',
                 '\x000102'),
                (2, NULL, NULL, NULL, NULL, 'NaN', 'infinity', '')""",
            "COMMIT",
        ),
        "Begin Type Type Type Type Relation Insert Insert Commit",
    ),
    Step(
        "names that need quotes and more than one byte a character",
        ("""INSERT INTO "Schéma "". \\"."Tablé 🐘" VALUES (-1)""",),
        "Begin Relation Insert Commit",
    ),
    Step(
        "identity default: the key is sent when it changes",
        (
            "BEGIN",
            "INSERT INTO plain VALUES (1, ''), (2, 'größer 🐘'), (3, NULL)",
            "UPDATE plain SET name = 'b' WHERE id = 1",
            "UPDATE plain SET id = 4 WHERE id = 2",
            "DELETE FROM plain WHERE id = 3",
            "COMMIT",
        ),
        "Begin Relation Insert Insert Insert Update Update Delete Commit",
    ),
    Step(
        "a key of several columns",
        (
            "BEGIN",
            "INSERT INTO composite_key VALUES (1, 'n', 'a')",
            "UPDATE composite_key SET b = 2",
            "DELETE FROM composite_key",
            "COMMIT",
        ),
        "Begin Relation Insert Update Delete Commit",
    ),
    Step(
        "identity full: the old row is sent",
        (
            "BEGIN",
            "INSERT INTO whole VALUES (1, NULL)",
            "UPDATE whole SET name = 'b'",
            "DELETE FROM whole",
            "COMMIT",
        ),
        "Begin Relation Insert Update Delete Commit",
    ),
    Step(
        "identity index: the index's columns are sent when they change",
        (
            "BEGIN",
            "INSERT INTO indexed VALUES (1, 'c', 'n')",
            "UPDATE indexed SET name = 'm'",
            "UPDATE indexed SET code = 'd'",
            "DELETE FROM indexed",
            "COMMIT",
        ),
        "Begin Relation Insert Update Update Delete Commit",
    ),
    Step(
        "tables without an identity",
        (
            "BEGIN",
            "INSERT INTO nothing VALUES (1, 'n')",
            "INSERT INTO keyless VALUES ('n')",
            "INSERT INTO columnless DEFAULT VALUES",
            "COMMIT",
        ),
        "Begin Relation Insert Relation Insert Relation Insert Commit",
    ),
    Step(
        "an unchanged TOASTed value is not sent",
        ("BEGIN", "UPDATE toasted SET n = 1", "UPDATE toasted SET id = 2", "COMMIT"),
        "Begin Relation Update Update Commit",
    ),
    Step(
        "the relation is sent again after it changed",
        (
            "BEGIN",
            "ALTER TABLE plain ADD COLUMN extra varchar(7) DEFAULT 'e'",
            "UPDATE plain SET extra = 'f' WHERE id = 1",
            "ALTER TABLE plain DROP COLUMN extra",
            "UPDATE plain SET name = NULL WHERE id = 1",
            "COMMIT",
        ),
        "Begin Relation Update Relation Update Commit",
    ),
    Step(
        "truncate: cascade to a table that is not named; the relation is sent again after it",
        (
            "BEGIN",
            "TRUNCATE parent, other RESTART IDENTITY CASCADE",
            "TRUNCATE child",
            "COMMIT",
        ),
        "Begin Relation Relation Relation Truncate Relation Truncate Commit",
    ),
    Step(
        "a transaction from a replication origin",
        (
            f"SELECT pg_replication_origin_session_setup('{ORIGIN}')",
            "BEGIN",
            "SELECT pg_replication_origin_xact_setup('0/ABCDEF', '2020-02-02 02:02:02+00')",
            "INSERT INTO other VALUES (1)",
            "COMMIT",
            "SELECT pg_replication_origin_session_reset()",
        ),
        "Begin Origin Relation Insert Commit",
    ),
    Step(
        "logical messages, in a transaction and outside",
        (
            "BEGIN",
            "SELECT pg_logical_emit_message(true, 'golden/ä', 'in a transaction')",
            r"SELECT pg_logical_emit_message(false, '', '\x00ff'::bytea)",
            "COMMIT",
        ),
        "LogicalMessage Begin LogicalMessage Commit",
    ),
    Step(
        "a rolled back transaction and subtransaction leave nothing",
        (
            "BEGIN",
            "INSERT INTO other VALUES (2)",
            "ROLLBACK",
            "BEGIN",
            "SAVEPOINT s",
            "INSERT INTO other VALUES (3)",
            "ROLLBACK TO s",
            "INSERT INTO other VALUES (4)",
            "COMMIT",
        ),
        "Begin Insert Commit",
    ),
)

_COMPLETE_TOAST: Final = Step(
    "identity full: an unchanged TOASTed value is in the old row",
    ("UPDATE toasted_whole SET n = 1",),
    "Begin Relation Update Commit",
)

_STREAMED: Final = (
    Step(
        "a block, cut in a subtransaction",
        (
            "BEGIN",
            "INSERT INTO typed VALUES (101, 'sad', NULL, 'a@b', '(1,2)', 1, '2020-02-02', '')",
            "SAVEPOINT s",
            "INSERT INTO plain VALUES (101, 'dropped')",
            _FILL,
        ),
        "StreamStart Type Type Type Type Relation Insert Relation Insert StreamStop",
    ),
    Step("the subtransaction is rolled back", ("ROLLBACK TO s",), "StreamAbort"),
    Step(
        "another transaction's block comes between",
        ("b: BEGIN", "b: INSERT INTO plain VALUES (201, 'between')", f"b: {_FILL}"),
        "StreamStart Relation Insert StreamStop",
    ),
    Step(
        "a small transaction comes between",
        ("c: INSERT INTO other VALUES (301)",),
        "Begin Relation Insert Commit",
    ),
    Step(
        "a later block of the first transaction",
        (
            "INSERT INTO plain VALUES (102, 'kept')",
            "UPDATE plain SET id = 103 WHERE id = 102",
            "DELETE FROM plain WHERE id = 103",
            "SELECT pg_logical_emit_message(true, 'golden', 'in a block')",
            "TRUNCATE parent CASCADE",
            _FILL,
        ),
        "StreamStart Relation Insert Update Delete LogicalMessage Relation Relation Truncate"
        " StreamStop",
    ),
    Step("the other transaction is rolled back", ("b: ROLLBACK",), "StreamAbort"),
    Step(
        "the first transaction commits with what was left",
        ("INSERT INTO plain VALUES (104, 'last')", "COMMIT"),
        "StreamStart Insert StreamStop StreamCommit",
    ),
    Step(
        "a block from a replication origin",
        (
            f"SELECT pg_replication_origin_session_setup('{ORIGIN}')",
            "BEGIN",
            "INSERT INTO keyless VALUES ('o')",
            _FILL,
        ),
        "StreamStart Origin Relation Insert StreamStop",
    ),
    Step(
        "its commit",
        (
            "SELECT pg_replication_origin_xact_setup('0/ABCDEF', '2020-02-02 02:02:02+00')",
            "COMMIT",
            "SELECT pg_replication_origin_session_reset()",
        ),
        "StreamCommit",
    ),
)

_PREPARED: Final = (
    Step(
        "prepare",
        ("BEGIN", "INSERT INTO plain VALUES (401, 'p')", "PREPARE TRANSACTION 'golden 1 ä'"),
        "BeginPrepare Relation Insert Prepare",
    ),
    Step("commit prepared", ("COMMIT PREPARED 'golden 1 ä'",), "CommitPrepared"),
    Step(
        "prepare again",
        ("BEGIN", "INSERT INTO plain VALUES (402, 'p')", "PREPARE TRANSACTION 'golden 2'"),
        "BeginPrepare Insert Prepare",
    ),
    Step("rollback prepared", ("ROLLBACK PREPARED 'golden 2'",), "RollbackPrepared"),
    Step(
        "a block of a transaction that will be prepared",
        ("BEGIN", "INSERT INTO plain VALUES (403, 'p')", _FILL),
        "StreamStart Relation Insert StreamStop",
    ),
    Step(
        "prepare what was streamed",
        ("INSERT INTO plain VALUES (404, 'p')", "PREPARE TRANSACTION 'golden 3'"),
        "StreamStart Insert StreamStop StreamPrepare",
    ),
    Step("commit prepared what was streamed", ("COMMIT PREPARED 'golden 3'",), "CommitPrepared"),
)

SCENARIOS: Final = (
    Scenario("rows", 14, {"proto_version": "1", "messages": "true"}, (*_ROWS, _COMPLETE_TOAST)),
    Scenario(
        "rows-binary", 14, {"proto_version": "1", "messages": "true", "binary": "true"}, _ROWS
    ),
    Scenario(
        "streamed",
        14,
        {"proto_version": "2", "messages": "true", "streaming": "on"},
        _STREAMED,
    ),
    Scenario(
        "prepared",
        15,
        {"proto_version": "3", "streaming": "on", "two_phase": "on"},
        _PREPARED,
    ),
    Scenario(
        "parallel",
        16,
        {
            "proto_version": "4",
            "messages": "true",
            "streaming": "parallel",
        },
        _STREAMED,
    ),
)
