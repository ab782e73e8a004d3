"""Instances for the cases. `pair` is shared by all cases that only send requests (each takes queues of its own)."""

import re
from dataclasses import dataclass

import pytest

from tests import harness
from tests.cases.support import QUICK, Api, Sql

SCARS = re.compile(r"Traceback \(most recent call last\)|\" 500 |never retrieved|was never awaited")


@dataclass(frozen=True)
class Pair:
    """Two instances on one database."""

    a: Api
    b: Api
    sql: Sql
    services: tuple[harness.Service, harness.Service]

    def each(self, number: int) -> Api:
        """The one or the other in turn."""
        return (self.a, self.b)[number % 2]


@pytest.fixture(scope="session")
def pair(server_url, template, tmp_path_factory):
    url = harness.create_database(server_url, template)
    environment = {**QUICK, "FENCEPOST_DATABASE_URL": url}
    folder = tmp_path_factory.mktemp("pair")
    services = tuple(harness.Service(folder / name, ["--port", "0"], environment) for name in "ab")
    for service in services:
        service.wait_ready()
    a, b = (Api(service.url) for service in services)
    yield Pair(a, b, Sql(url), services)
    a.close()
    b.close()
    for service in services:
        service.kill()
    harness.drop_database(server_url, url)


@pytest.fixture(autouse=True)
def no_scars(request):
    """No instance of the shared pair logs a crash while a case runs."""
    if "pair" not in request.fixturenames:
        yield
        return
    pair = request.getfixturevalue("pair")
    services = pair.services
    before = [len(service.log()) for service in services]
    yield
    for api in (pair.a, pair.b):
        api.drop_sockets()
    for service, length in zip(services, before, strict=True):
        assert service.process.poll() is None, service.log()[-3000:]
        assert not SCARS.search(service.log()[length:]), service.log()[length:][-3000:]


@pytest.fixture
def instance(serve):
    """A factory of instances of the case's own, with quick loops: `instance(FENCEPOST_LOOPS="false")`.

    Answers an Api whose `.service` is the process. `away=True` allows it 503s.
    """
    apis = []

    def start(*arguments: str, away: bool = False, **environment: str | None) -> Api:
        service = serve(*arguments, **{**QUICK, **environment})
        api = Api(service.url, may_be_away=away)
        api.service = service
        apis.append(api)
        return api

    yield start
    for api in apis:
        api.close()
        assert not SCARS.search(api.service.log()), api.service.log()[-3000:]


@pytest.fixture
def sql(database_url):
    return Sql(database_url)
