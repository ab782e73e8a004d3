"""Alembic's way in: on a connection that app/migrations.py hands over, else by FENCEPOST_DIRECT_URL or DATABASE_URL."""

import os

from alembic import context

from app.migrations import connecting
from app.tables import metadata


def run(connection) -> None:
    context.configure(connection=connection, target_metadata=metadata, compare_server_default=True)
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    context.configure(dialect_name="postgresql", target_metadata=metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
elif (given := context.config.attributes.get("connection")) is not None:
    run(given)
else:
    url = os.environ.get("FENCEPOST_DIRECT_URL") or os.environ.get("FENCEPOST_DATABASE_URL")
    if not url:
        raise SystemExit("Set FENCEPOST_DATABASE_URL to the database that Alembic shall look at.")
    with connecting(url) as connection:
        run(connection)
        connection.commit()
