"""The migrations make what app/tables.py says, whole or not at all, also when several ask at once."""

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from app.migrations import connecting, upgrade
from app.tables import metadata


def test_models_and_migrations_agree(database_url):
    with connecting(database_url) as connection:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(context, metadata) == []


def test_several_at_once(empty_database_url):
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(upgrade, [empty_database_url] * 4))) == 1


def test_a_migration_that_fails_leaves_nothing(empty_database_url):
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE jobs (in_the_way int)")
    with pytest.raises(Exception, match="jobs"):
        upgrade(empty_database_url)
    with psycopg.connect(empty_database_url) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
    assert tables == [("jobs",)]
