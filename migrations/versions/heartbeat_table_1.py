"""A table that a running daemon writes to, one row per pipeline: `lockstep.heartbeat`.

The daemon itself does not need it: keepalives advance an idle slot. It shows in the database that
the daemon runs, and, if published, allows measuring a row's latency from end to end.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "heartbeat_table_1"
down_revision = None
branch_labels = ("heartbeat_table",)
depends_on = None

_SCHEMA = "lockstep"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "heartbeat",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("beat_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        schema=_SCHEMA,
    )


def downgrade() -> None:
    """Drop it, with its rows."""
    op.drop_table("heartbeat", schema=_SCHEMA, if_exists=True)
