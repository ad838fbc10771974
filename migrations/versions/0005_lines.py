"""Places in the queue stay until they are claimed; jobs know their tokens; counts and ends have one index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision: str | None = "0004"
branch_labels: str | None = None
depends_on: str | None = None

UNSENT, SENT = sa.text("sent_at IS NULL"), sa.text("sent_at IS NOT NULL")
QUEUED = sa.text("status = 'queued'")
LINE = "model || CASE priority WHEN 'high' THEN ' 0 ' WHEN 'normal' THEN ' 1 ' ELSE ' 2 ' END || tenant"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("tokens", sa.BigInteger))
    op.drop_index("ix_jobs_queued", "jobs")
    op.create_index(
        "ix_jobs_waiting", "jobs", ["model", "tenant", "tokens"], postgresql_where=QUEUED, sqlite_where=QUEUED
    )
    op.drop_index("ix_jobs_model_status", "jobs")
    op.create_index("ix_jobs_model_status_finished", "jobs", ["model", "status", "finished_at"])

    op.add_column("outbox", sa.Column("line", sa.String(300)))
    op.add_column("outbox", sa.Column("sent_at", sa.DateTime(timezone=True)))
    op.add_column("outbox", sa.Column("raised", sa.Boolean, server_default=sa.false(), nullable=False))
    op.drop_index("ix_outbox_due", "outbox")
    op.create_index(
        "ix_outbox_unsent", "outbox", ["line", "due_at", "id"], postgresql_where=UNSENT, sqlite_where=UNSENT
    )
    op.create_index("ix_outbox_sent", "outbox", ["line", "sent_at"], postgresql_where=SENT, sqlite_where=SENT)
    op.execute(
        "DELETE FROM outbox WHERE topic = 'publish' AND job_id IN (SELECT id FROM jobs WHERE status <> 'queued')"
    )
    op.execute(
        f"UPDATE outbox SET line = (SELECT {LINE} FROM jobs WHERE jobs.id = outbox.job_id) WHERE topic = 'publish'"  # noqa: S608
    )
    op.execute(
        f"INSERT INTO outbox (topic, job_id, line, due_at, sent_at) SELECT 'publish', id, {LINE}, queued_at, queued_at"  # noqa: S608
        " FROM jobs WHERE status = 'queued' AND id NOT IN (SELECT job_id FROM outbox)"
    )


def downgrade() -> None:
    op.execute("DELETE FROM outbox WHERE sent_at IS NOT NULL")
    op.drop_index("ix_outbox_unsent", "outbox")
    op.drop_index("ix_outbox_sent", "outbox")
    for column in ("raised", "sent_at", "line"):
        op.drop_column("outbox", column)
    op.create_index("ix_outbox_due", "outbox", ["due_at", "id"])
    op.drop_index("ix_jobs_model_status_finished", "jobs")
    op.create_index("ix_jobs_model_status", "jobs", ["model", "status"])
    op.drop_index("ix_jobs_waiting", "jobs")
    op.create_index("ix_jobs_queued", "jobs", ["model", "queued_at"], postgresql_where=QUEUED, sqlite_where=QUEUED)
    op.drop_column("jobs", "tokens")
