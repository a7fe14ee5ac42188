"""The signal table, signed: only roles that may insert a row can send commands to the daemon.

Every role may emit a logical message with any prefix, so the trigger's function proves that it is
the writer: it runs as its owner (SECURITY DEFINER), the only role that may read the key in
`lockstep.signal_key`, and signs each row with it, together with the xid of the transaction. The
pipeline's role must also be able to read that key. Messages of the first revision have no proof and
are ignored.

The function must sign nothing else: EXECUTE is revoked, so that no other role can attach it to a
trigger on its own table, and it checks for which table it was called. Names are looked up in
pg_catalog only.
"""

from __future__ import annotations

from alembic import op

revision = "signal_table_2"
down_revision = "signal_table_1"
branch_labels = None
depends_on = None

_KEY = """
CREATE TABLE lockstep.signal_key (
    name text PRIMARY KEY,
    inner_key bytea NOT NULL CHECK (length(inner_key) = 64),
    outer_key bytea NOT NULL CHECK (length(outer_key) = 64),
    made_at timestamptz NOT NULL DEFAULT now()
);
REVOKE ALL ON lockstep.signal_key FROM PUBLIC;
INSERT INTO lockstep.signal_key (name, inner_key, outer_key) SELECT
    replace(gen_random_uuid()::text, '-', ''),
    decode(replace(concat(gen_random_uuid(), gen_random_uuid(), gen_random_uuid(),
                          gen_random_uuid()), '-', ''), 'hex'),
    decode(replace(concat(gen_random_uuid(), gen_random_uuid(), gen_random_uuid(),
                          gen_random_uuid()), '-', ''), 'hex');
"""

# As UTF-8 in every database encoding: logical messages are not converted. The MAC is that of the
# DDL audit: sha256(outer, sha256(inner, …)).
_TELL = """
CREATE FUNCTION lockstep.tell_signal() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    said bytea;
    key lockstep.signal_key;
    head text;
    mac bytea;
BEGIN
    IF (tg_table_schema, tg_table_name, tg_op, tg_when, tg_level)
        IS DISTINCT FROM ('lockstep', 'signal', 'INSERT', 'AFTER', 'ROW') THEN
        RAISE EXCEPTION 'lockstep: this function is for lockstep.signal only';
    END IF;
    said := convert_to(
        json_build_object('id', NEW.id, 'type', NEW.type, 'data', NEW.data)::text, 'UTF8');
    SELECT * INTO STRICT key FROM lockstep.signal_key ORDER BY made_at DESC, name LIMIT 1;
    head := concat_ws(' ', '1', key.name, pg_current_xact_id(),
                      (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
                      replace(gen_random_uuid()::text, '-', ''));
    mac := sha256(key.outer_key || sha256(
        key.inner_key || convert_to('signal' || chr(10) || head || chr(10), 'UTF8') || said));
    PERFORM pg_logical_emit_message(true, 'lockstep.signal',
        convert_to(head || ' ' || encode(mac, 'hex') || chr(10), 'UTF8') || said);
    RETURN NULL;
END
$body$
"""


def upgrade() -> None:
    """Create key, function and trigger; keep the table and its rows."""
    _drop()
    op.execute(_KEY)
    op.execute(_TELL)
    op.execute("REVOKE ALL ON FUNCTION lockstep.tell_signal() FROM PUBLIC")
    op.execute(
        "CREATE TRIGGER tell AFTER INSERT ON lockstep.signal"
        " FOR EACH ROW EXECUTE FUNCTION lockstep.tell_signal()"
    )


def downgrade() -> None:
    """Drop them; do not recreate the first revision's, because their messages are ignored."""
    _drop()
    op.execute("DROP TABLE IF EXISTS lockstep.signal_key")


def _drop() -> None:
    # If a user has dropped the table, there is no trigger either.
    op.execute(
        "DO $$ BEGIN IF to_regclass('lockstep.signal') IS NOT NULL THEN"
        " DROP TRIGGER IF EXISTS tell ON lockstep.signal; END IF; END $$"
    )
    op.execute("DROP FUNCTION IF EXISTS lockstep.tell_signal()")
