"""Every named statement is PREPAREd on the migrated schema, and none uses what a distributed PostgreSQL refuses."""

import importlib
import re

import psycopg
import pytest

MODULES = (
    *(f"app.{capability}.sql" for capability in ("jobs", "queues", "schedules", "keys")),
    "app.audit.record",
    "app.db",
    "app.jobs.hints",
)
STATEMENT = re.compile(r"\s*(WITH|SELECT|INSERT|UPDATE|DELETE|LOCK)\s")


def statements():
    for module in MODULES:
        for name, value in vars(importlib.import_module(module)).items():
            if name.isupper() and not name.startswith("_") and isinstance(value, str) and STATEMENT.match(value):
                yield pytest.param(value, id=f"{module.removeprefix('app.')}.{name}")


ALL = list(statements())


def numbered(sql: str) -> str:
    names: dict[str, int] = {}
    return re.sub(r"%\((\w+)\)s", lambda m: f"${names.setdefault(m[1], len(names) + 1)}", sql).replace("%%", "%")


@pytest.fixture(scope="module")
def connection(server_url, template):
    from tests import harness

    url = harness.create_database(server_url, template)
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection
    harness.drop_database(server_url, url)


@pytest.mark.parametrize("sql", ALL)
def test_statement_is_valid_on_the_schema(connection, sql):
    if sql.startswith("LOCK"):
        connection.execute(f"BEGIN; {sql}; ROLLBACK")
        return
    connection.execute(f"PREPARE one AS {numbered(sql)}".encode())
    connection.execute("DEALLOCATE one")


@pytest.mark.parametrize("sql", ALL)
def test_statement_has_no_volatile_function_and_one_clock(sql):
    found = re.findall(r"\b(now|clock_timestamp|random|gen_random_uuid|uuidv7|statement_timestamp)\(", sql)
    assert not found


def test_there_are_many():
    assert len(ALL) > 40


def test_the_build_names_the_newest_revision(database_url):
    from alembic.script import ScriptDirectory

    from app.migrations import configuration
    from app.tables import REVISION

    assert ScriptDirectory.from_config(configuration()).get_current_head() == REVISION
    with psycopg.connect(database_url) as connection:
        rows = connection.execute("SELECT revision FROM schema_compatibility").fetchall()
    assert (REVISION,) in rows
