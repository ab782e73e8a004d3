"""Fixtures: a real PostgreSQL for the session, a fresh migrated database a test, the service in and out of process.

FENCEPOST_TEST_DATABASE_URL names a server to use (its user must be allowed to create databases); otherwise an
embedded one is started for the session (one per xdist worker) in a temporary folder.
"""

import os
import shutil
import tempfile
from pathlib import Path

import psycopg
import pytest
import pytest_asyncio

from tests import harness


@pytest.fixture(scope="session")
def server_url():
    """The URL of the session's server."""
    if given := os.environ.get("FENCEPOST_TEST_DATABASE_URL"):
        yield given
        return
    folder = Path(tempfile.mkdtemp(prefix="fencepost-test-"))
    server = harness.PostgresServer(folder / "postgres")
    try:
        yield server.start().url
    finally:
        server.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def template(server_url):
    """The name of a migrated database that nobody connects to."""
    from app.migrations import upgrade

    url = harness.create_database(server_url)
    upgrade(url)
    with psycopg.connect(url) as connection:
        # The service's own schedule is due soon after a migration: not in the middle of a test, at whatever age.
        connection.execute("UPDATE schedules SET next_run_at = fencepost_now() + interval '1 day'")
    yield psycopg.conninfo.conninfo_to_dict(url)["dbname"]
    harness.drop_database(server_url, url)


@pytest.fixture
def empty_database_url(server_url):
    """A fresh database without a schema."""
    url = harness.create_database(server_url)
    yield url
    harness.drop_database(server_url, url)


@pytest.fixture
def database_url(server_url, template):
    """A fresh migrated database."""
    url = harness.create_database(server_url, template)
    yield url
    harness.drop_database(server_url, url)


@pytest_asyncio.fixture
async def db(database_url):
    """An opened app.db.Database on it."""
    from app.db import Database

    database = Database(database_url, pool_size=5, statement_timeout=10.0)
    await database.open()
    yield database
    await database.close()


@pytest_asyncio.fixture
async def client_for(database_url):
    """A factory: `async with client_for(loops=True) as client`; keywords are those of Settings."""

    def make(**settings):
        return harness.in_process(**{"database_url": database_url, "loops": False, "test_clock": True, **settings})

    return make


@pytest_asyncio.fixture
async def client(client_for):
    """A client of the service in this process, without its loops; the application is `client.app`."""
    async with client_for() as client:
        yield client


@pytest.fixture
def serve(request, tmp_path):
    """A factory of real service processes: `serve(FENCEPOST_LOOPS="false")`, `serve("--workers", "2")`.

    Without a FENCEPOST_DATABASE_URL among the keywords it serves the test's own database; with None, the embedded
    one. `ready=False` returns at once. All are killed at the end.
    """
    services: list[harness.Service] = []

    def start(*arguments: str, ready: bool = True, **environment: str | None) -> harness.Service:
        if "FENCEPOST_DATABASE_URL" not in environment:
            environment["FENCEPOST_DATABASE_URL"] = request.getfixturevalue("database_url")
        if "--port" not in arguments:
            arguments = (*arguments, "--port", "0")
        given = {key: value for key, value in environment.items() if value is not None}
        service = harness.Service(tmp_path / f"service-{len(services)}", list(arguments), given)
        services.append(service)
        return service.wait_ready() if ready else service

    # Before the database is dropped, so it must be set up after it.
    yield start
    for service in services:
        service.kill()


@pytest.fixture
def postgres_server():
    """A factory of private PostgreSQL servers, started: `postgres_server(max_connections="20")`."""
    servers: list[harness.PostgresServer] = []
    folder = Path(tempfile.mkdtemp(prefix="fencepost-test-"))

    def make(**settings: str) -> harness.PostgresServer:
        server = harness.PostgresServer(folder / f"server-{len(servers)}", settings)
        servers.append(server)
        return server.start()

    yield make
    for server in servers:
        server.stop("immediate")
    shutil.rmtree(folder, ignore_errors=True)
