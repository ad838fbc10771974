"""Revocations of jobs that the ledger doesn't know yet."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision: str | None = "0001"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "revocations",
        sa.Column("job_id", sa.String(255), nullable=False),
        sa.Column("asked_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_revocations"),
    )
    op.create_index("ix_revocations_asked_at", "revocations", ["asked_at"])


def downgrade() -> None:
    op.drop_table("revocations")
