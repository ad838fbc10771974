"""Results may be vectors of texts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision: str | None = "0006"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.add_column("results", sa.Column("embedding", sa.JSON))


def downgrade() -> None:
    with op.batch_alter_table("results") as results:
        results.drop_column("embedding")
