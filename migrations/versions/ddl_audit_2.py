"""The DDL audit, signed: only its function can write a record that the daemon accepts.

Every role may emit a logical message with any prefix, so the function proves that it is the writer.
It runs as its owner (SECURITY DEFINER), the only role that may read the key in `lockstep.ddl_key`,
and signs each message with it, together with the xid of the transaction. The pipeline's role must
also be able to read that key. Messages of the first revision have no proof and are not accepted.

Because it runs as its owner, the function does not see the statement's `current_user`: `role` is
the role of SET ROLE, or else the session's. Inside another SECURITY DEFINER function it is the
caller's.

The MAC is HMAC-SHA256's construction with two independent blocks: sha256(outer, sha256(inner, …)).
Names are looked up in pg_catalog only, and no other role may call the function or attach it to a
trigger: event triggers need a superuser, and EXECUTE is revoked.
"""

from __future__ import annotations

from alembic import op

revision = "ddl_audit_2"
down_revision = "ddl_audit_1"
branch_labels = None
depends_on = None

# As in the first revision: below the megabyte that a topic accepts.
_STATEMENT, _IDENTITY, _OBJECTS = 50_000, 500, 200

_KEY = """
CREATE TABLE lockstep.ddl_key (
    name text PRIMARY KEY,
    inner_key bytea NOT NULL CHECK (length(inner_key) = 64),
    outer_key bytea NOT NULL CHECK (length(outer_key) = 64),
    made_at timestamptz NOT NULL DEFAULT now()
);
REVOKE ALL ON lockstep.ddl_key FROM PUBLIC;
INSERT INTO lockstep.ddl_key (name, inner_key, outer_key) SELECT
    replace(gen_random_uuid()::text, '-', ''),
    decode(replace(concat(gen_random_uuid(), gen_random_uuid(), gen_random_uuid(),
                          gen_random_uuid()), '-', ''), 'hex'),
    decode(replace(concat(gen_random_uuid(), gen_random_uuid(), gen_random_uuid(),
                          gen_random_uuid()), '-', ''), 'hex');
"""

# Why another message follows, and what is left out: see the first revision.
_TELL = """
CREATE FUNCTION lockstep.tell_ddl() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    total bigint;
    objects json;
    statement text;
    withheld boolean;
    said bytea;
    encoding text;
    key lockstep.ddl_key;
    head text;
    mac bytea;
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
        said := convert_to(json_build_object(
            'event', tg_event, 'tag', tg_tag, 'objects', objects, 'object_count', total,
            'statement', CASE WHEN NOT withheld THEN left(statement, %(statement)s) END,
            'statement_characters', length(statement), 'withheld', coalesce(withheld, false),
            'role', coalesce(nullif(current_setting('role'), 'none'), session_user),
            'session_role', session_user)::text,
            CASE encoding WHEN 'SQL_ASCII' THEN encoding ELSE 'UTF8' END);
        SELECT * INTO STRICT key FROM lockstep.ddl_key ORDER BY made_at DESC, name LIMIT 1;
        head := concat_ws(' ', '1', key.name, pg_current_xact_id(),
                          (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
                          replace(gen_random_uuid()::text, '-', ''));
        mac := sha256(key.outer_key || sha256(
            key.inner_key || convert_to('ddl' || chr(10) || head || chr(10), 'UTF8') || said));
        PERFORM pg_logical_emit_message(true, 'lockstep.ddl',
            convert_to(head || ' ' || encode(mac, 'hex') || chr(10), 'UTF8') || said);
        PERFORM pg_logical_emit_message(true, 'lockstep.', '');
    END IF;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING USING MESSAGE = 'lockstep: this statement is not in the log (' || SQLSTATE || ')';
END
$body$
"""


def upgrade() -> None:
    """Create key, function and triggers; drop the first revision's."""
    _drop()
    op.execute(_KEY)
    op.execute(_TELL % {"statement": _STATEMENT, "identity": _IDENTITY, "objects": _OBJECTS})
    op.execute("REVOKE ALL ON FUNCTION lockstep.tell_ddl() FROM PUBLIC")
    for name, event in (("lockstep_ddl", "ddl_command_end"), ("lockstep_ddl_drop", "sql_drop")):
        op.execute(f"CREATE EVENT TRIGGER {name} ON {event} EXECUTE FUNCTION lockstep.tell_ddl()")


def downgrade() -> None:
    """Drop them; do not recreate the first revision's, because their messages are not accepted."""
    _drop()
    op.execute("DROP TABLE IF EXISTS lockstep.ddl_key")


def _drop() -> None:
    for name in ("lockstep_ddl", "lockstep_ddl_drop"):
        op.execute(f"DROP EVENT TRIGGER IF EXISTS {name}")
    op.execute("DROP FUNCTION IF EXISTS lockstep.tell_ddl()")
