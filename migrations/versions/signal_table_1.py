"""A table whose new rows are commands to the daemon: `lockstep.signal`.

For users who may write to a table but not run `cdc`. The trigger writes each new row to the WAL as
a logical message, so the table need not be published, and a command is ordered among the changes.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "signal_table_1"
down_revision = None
branch_labels = ("signal_table",)
depends_on = None

_SCHEMA = "lockstep"

# As UTF-8 in every database encoding: logical messages are not converted.
_TELL = """
CREATE FUNCTION lockstep.tell_signal() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    said text := json_build_object('id', NEW.id, 'type', NEW.type, 'data', NEW.data)::text;
BEGIN
    PERFORM pg_logical_emit_message(true, 'lockstep.signal', convert_to(said, 'UTF8'));
    RETURN NULL;
END
$body$
"""


def upgrade() -> None:
    """Create table and trigger."""
    op.create_table(
        "signal",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("data", postgresql.JSONB),
        sa.Column(
            "created_at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.func.now()
        ),
        schema=_SCHEMA,
    )
    op.execute(_TELL)
    op.execute(
        "CREATE TRIGGER tell AFTER INSERT ON lockstep.signal"
        " FOR EACH ROW EXECUTE FUNCTION lockstep.tell_signal()"
    )


def downgrade() -> None:
    """Drop both, with the rows."""
    op.drop_table("signal", schema=_SCHEMA, if_exists=True)
    op.execute("DROP FUNCTION IF EXISTS lockstep.tell_signal()")
