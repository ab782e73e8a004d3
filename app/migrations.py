"""Bring a database to this build's schema, in one transaction and under one lock.

The lock is a transaction's advisory lock: it holds behind pgbouncer in transaction mode too, where a session's lock
would not. Instances that start at once queue up here; the second finds nothing to do.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, NullPool, create_engine, text

log = logging.getLogger("fencepost.migrations")
logging.getLogger("alembic").setLevel(logging.WARNING)  # it tells each connection's dialect

ROOT = Path(__file__).resolve().parents[1]
LOCK = 0x66656E6365  # "fence"
LOCK_TIMEOUT = "60s"


class SchemaAhead(Exception):
    """The database belongs to a later build that does not declare this one compatible."""


@contextmanager
def connecting(url: str) -> Iterator[Connection]:
    """A connection by anything that libpq understands, which is more than SQLAlchemy's URLs can say."""
    engine = create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(url, prepare_threshold=None), poolclass=NullPool
    )
    with engine.connect() as connection:
        yield connection


def configuration() -> Config:
    return Config(ROOT / "alembic.ini")


def upgrade(url: str) -> str:
    """Upgrade to the newest revision known here and return the revision that the database is at.

    Raises SchemaAhead; psycopg's and SQLAlchemy's errors pass through.
    """
    config = configuration()
    script = ScriptDirectory.from_config(config)
    head = script.get_current_head()
    if head is None:
        raise RuntimeError("There is no migration in this build.")
    with connecting(url) as connection, connection.begin():
        connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
        current = MigrationContext.configure(connection).get_current_revision()
        if current == head:
            return head
        if current is not None and current not in {revision.revision for revision in script.walk_revisions()}:
            compatible = text("SELECT EXISTS (SELECT FROM schema_compatibility WHERE revision = :revision)")
            if connection.execute(compatible, {"revision": head}).scalar_one():
                return current
            raise SchemaAhead(
                f"The database's schema ({current}) is later than this build's ({head}) and does not serve it. "
                "Run the newer build."
            )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        log.info("schema upgraded from %s to %s", current or "nothing", head)
        return head
