"""What is remembered of attempts that were lost with their workers; dead letters have an index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision: str | None = "0005"
branch_labels: str | None = None
depends_on: str | None = None

moment = sa.DateTime(timezone=True)
DEAD = sa.text("error_code = 'dead_letter'")


def upgrade() -> None:
    op.create_table(
        "losses",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(255), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("worker", sa.String(255), nullable=False),
        sa.Column("started_at", moment),
        sa.Column("lost_at", moment, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_losses_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_losses"),
    )
    op.create_index("ix_losses_job_id", "losses", ["job_id"])
    op.create_index("ix_losses_worker", "losses", ["worker"])
    op.create_index("ix_jobs_dead", "jobs", ["created_at", "id"], postgresql_where=DEAD, sqlite_where=DEAD)


def downgrade() -> None:
    op.drop_index("ix_jobs_dead", "jobs")
    op.drop_table("losses")
