"""The ledger: jobs, results, outbox, models, roles."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None
branch_labels: str | None = None
depends_on: str | None = None

moment = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(255), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("model", sa.String(128), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("priority", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer, server_default=sa.text("0"), nullable=False),
        sa.Column("max_attempts", sa.Integer, nullable=False),
        sa.Column("fence", sa.BigInteger, server_default=sa.text("0"), nullable=False),
        sa.Column("cancel_requested", sa.Boolean, server_default=sa.false(), nullable=False),
        sa.Column("worker", sa.String(255)),
        sa.Column("lease_until", moment),
        sa.Column("created_at", moment, nullable=False),
        sa.Column("accepted_at", moment, nullable=False),
        sa.Column("queued_at", moment, nullable=False),
        sa.Column("started_at", moment),
        sa.Column("finished_at", moment),
        sa.Column("deadline", moment),
        sa.Column("error_code", sa.String(32)),
        sa.Column("error_message", sa.Text),
        sa.Column("queue_time_ms", sa.Double),
        sa.Column("time_to_first_token_ms", sa.Double),
        sa.Column("generation_time_ms", sa.Double),
        sa.Column("total_time_ms", sa.Double),
        sa.Column("prompt_tokens", sa.Integer),
        sa.Column("completion_tokens", sa.Integer),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("fingerprint", sa.String(64)),
        sa.Column("metadata", sa.JSON, nullable=False),
        sa.Column("raw", sa.Text),
        sa.Column("request", sa.JSON),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.CheckConstraint("(status = 'running') = (lease_until IS NOT NULL)", name=op.f("ck_jobs_lease")),
        sa.CheckConstraint("(status IN ('queued', 'running')) = (finished_at IS NULL)", name=op.f("ck_jobs_finished")),
        sa.CheckConstraint("attempt BETWEEN 0 AND max_attempts", name=op.f("ck_jobs_attempt")),
    )
    keyed = sa.text("idempotency_key IS NOT NULL")
    op.create_index(
        "ix_jobs_idempotency",
        "jobs",
        ["tenant", "idempotency_key"],
        unique=True,
        postgresql_where=keyed,
        sqlite_where=keyed,
    )
    op.create_index("ix_jobs_created", "jobs", ["created_at", "id"])
    op.create_index("ix_jobs_tenant_created", "jobs", ["tenant", "created_at", "id"])
    op.create_index("ix_jobs_tenant_status_created", "jobs", ["tenant", "status", "created_at", "id"])
    op.create_index("ix_jobs_model_created", "jobs", ["model", "created_at", "id"])
    op.create_index("ix_jobs_status_created", "jobs", ["status", "created_at", "id"])
    op.create_index("ix_jobs_model_status", "jobs", ["model", "status"])
    for name, columns, status in (
        ("ix_jobs_queued", ["model", "queued_at"], "queued"),
        ("ix_jobs_deadline", ["deadline"], "queued"),
        ("ix_jobs_lease", ["lease_until"], "running"),
    ):
        only = sa.text(f"status = '{status}'")
        op.create_index(name, "jobs", columns, postgresql_where=only, sqlite_where=only)

    op.create_table(
        "results",
        sa.Column("job_id", sa.String(255), nullable=False),
        sa.Column("text", sa.Text),
        sa.Column("token_ids", sa.JSON),
        sa.Column("finish_reason", sa.String(16)),
        sa.Column("stop_reason", sa.JSON),
        sa.Column("usage", sa.JSON),
        sa.Column("timings", sa.JSON),
        sa.PrimaryKeyConstraint("job_id", name="pk_results"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_results_job_id_jobs", ondelete="CASCADE"),
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(255), nullable=False),
        sa.Column("topic", sa.String(16), nullable=False),
        sa.Column("due_at", moment, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_outbox_job_id_jobs", ondelete="CASCADE"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_outbox_job_id", "outbox", ["job_id"])
    op.create_index("ix_outbox_due", "outbox", ["due_at", "id"])
    op.create_table(
        "models",
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("card", sa.JSON, nullable=False),
        sa.Column("text_bundle", sa.LargeBinary, nullable=False),
        sa.Column("registered_at", moment, nullable=False),
        sa.PrimaryKeyConstraint("alias", name="pk_models"),
    )
    op.create_table(
        "roles",
        sa.Column("role", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("held_until", moment, nullable=False),
        sa.PrimaryKeyConstraint("role", name="pk_roles"),
    )


def downgrade() -> None:
    for table in ("roles", "models", "outbox", "results", "jobs"):
        op.drop_table(table)
