"""A table that a running daemon writes to, one row a pipeline: `lockstep.heartbeat`.

The daemon itself needs none: keepalives move an idle slot. It is for whoever wants to see in the
database that it runs, or to measure the way of a row from end to end by publishing this one.
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
    """Make the table."""
    op.create_table(
        "heartbeat",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("beat_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        schema=_SCHEMA,
    )


def downgrade() -> None:
    """Take it away, with the rows."""
    op.drop_table("heartbeat", schema=_SCHEMA, if_exists=True)
