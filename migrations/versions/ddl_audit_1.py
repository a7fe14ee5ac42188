"""Event triggers that write each DDL statement to the WAL as a transactional logical message.

So it is ordered among the surrounding changes, and is there if and only if its transaction commits.
Needs a superuser: Postgres allows no other role to create event triggers.

The function never makes a statement fail: an error in it becomes a warning to the statement's
session. Its names are looked up in pg_catalog only. Texts and lists are limited, so that a message
always fits into a Kafka record; a text that may contain a password is left out.
"""

from __future__ import annotations

from alembic import op

revision = "ddl_audit_1"
down_revision = None
branch_labels = ("ddl_audit",)
depends_on = None

# Most characters of a statement and of an identity, and most objects of a list: together, escaped
# in JSON, below the megabyte that a topic accepts.
_STATEMENT, _IDENTITY, _OBJECTS = 50_000, 500, 200

# A message is decoded at its record's end, every other change at its record's start: a change right
# after the message, outside the subtransaction of the EXCEPTION block, has the same LSN, and either
# may then be first. So a second message, which no consumer reads, is emitted in between.
#
# Objects of temporary schemas are visible to their session only, and may come by the thousand; the
# statements of an extension's script are reported as CREATE EXTENSION. In a database with encoding
# SQL_ASCII the encoding of the bytes is unknown, so they are sent unchanged.
_TELL = """
CREATE FUNCTION lockstep.tell_ddl() RETURNS event_trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    total bigint;
    objects json;
    statement text;
    withheld boolean;
    said text;
    encoding text;
BEGIN
    IF tg_event = 'sql_drop' THEN
        SELECT count(*), json_agg(told ORDER BY number) FILTER (WHERE number <= %(objects)s)
        INTO total, objects
        FROM (
            SELECT row_number() OVER () AS number,
                   json_build_object('type', object_type, 'schema', schema_name,
                                     'identity', left(object_identity, %(identity)s)) AS told
            FROM pg_event_trigger_dropped_objects()
            WHERE (original OR normal) AND NOT is_temporary
        ) AS dropped;
    ELSE
        SELECT count(*), json_agg(told ORDER BY number) FILTER (WHERE number <= %(objects)s)
        INTO total, objects
        FROM (
            SELECT row_number() OVER () AS number,
                   json_build_object('type', object_type, 'schema', schema_name,
                                     'identity', left(object_identity, %(identity)s)) AS told
            FROM pg_event_trigger_ddl_commands()
            WHERE NOT in_extension AND schema_name IS DISTINCT FROM 'pg_temp'
        ) AS done;
    END IF;
    IF total > 0 THEN
        statement := current_query();
        encoding := getdatabaseencoding();
        withheld := statement ~* 'password'
            OR tg_tag ~ '(USER MAPPING|SUBSCRIPTION|SERVER|FOREIGN DATA WRAPPER)$';
        said := json_build_object(
            'event', tg_event, 'tag', tg_tag, 'objects', objects, 'object_count', total,
            'statement', CASE WHEN NOT withheld THEN left(statement, %(statement)s) END,
            'statement_characters', length(statement), 'withheld', coalesce(withheld, false),
            'role', current_user, 'session_role', session_user)::text;
        PERFORM pg_logical_emit_message(true, 'lockstep.ddl', convert_to(said,
            CASE encoding WHEN 'SQL_ASCII' THEN encoding ELSE 'UTF8' END));
        PERFORM pg_logical_emit_message(true, 'lockstep.', '');
    END IF;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING USING MESSAGE = 'lockstep: this statement is not in the log (' || SQLSTATE || ')';
END
$body$
"""


def upgrade() -> None:
    """Create the function and its triggers."""
    limits = {"statement": _STATEMENT, "identity": _IDENTITY, "objects": _OBJECTS}
    op.execute(_TELL % limits)
    for name, event in (("lockstep_ddl", "ddl_command_end"), ("lockstep_ddl_drop", "sql_drop")):
        op.execute(f"CREATE EVENT TRIGGER {name} ON {event} EXECUTE FUNCTION lockstep.tell_ddl()")


def downgrade() -> None:
    """Drop them."""
    for name in ("lockstep_ddl", "lockstep_ddl_drop"):
        op.execute(f"DROP EVENT TRIGGER IF EXISTS {name}")
    op.execute("DROP FUNCTION IF EXISTS lockstep.tell_ddl()")
