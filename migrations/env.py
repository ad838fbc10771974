"""How Alembic reaches the ledger's database: through the connection that `ledger.migrate` hands it."""

from alembic import context

from ledger.migrate import VERSION_TABLE
from ledger.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    version_table=VERSION_TABLE,
)
with context.begin_transaction():
    context.run_migrations()
