"""A tiny service with doors of every kind, so that the edge is tested without any capability behind it."""

from types import SimpleNamespace
from typing import Annotated, Any, Literal

import httpx2
from pydantic import Field

from app.errors import KeyRejected, LeaseLost
from app.keys.ops import KEYLESS, Caller
from app.web.contract import describe
from app.web.door import MIB, Answer, Call, Doors
from app.web.health import health_doors
from app.web.reference import reference_doors
from app.web.shapes import (
    Answered,
    ErrorMessage,
    ErrorType,
    Id,
    Instant,
    Key,
    Name,
    Payload,
    Progress,
    Seconds,
    Strict,
    Whole,
)
from app.web.switch import App, mount

TOKEN = "0190a5b2-7c41-7b3e-9d52-5f7f3d9d2c11"


class KeylessRing:
    readable = True
    keyless = True

    def check(self, authorization: str | None) -> Caller:
        return KEYLESS


class KeyedRing:
    readable = True
    keyless = False

    def check(self, authorization: str | None) -> Caller:
        scope = (authorization or "").removeprefix("Bearer ")
        if scope in ("enqueue", "work", "read", "operate", "admin"):
            return Caller(scope, scope, frozenset({scope}))
        raise KeyRejected("The key is unknown, expired or revoked.")


class Thing(Strict):
    queue: Name
    payload: Payload
    count: Annotated[int, Whole(1, 100)] = 5
    delay: Annotated[float, Seconds(0, 366 * 86_400)] = 0
    at: Instant | None = None
    key: Key | None = None
    token: Id | None = None
    policy: Literal["auto", "manual"] = "auto"
    flag: bool = False
    progress: Progress | None = None
    names: list[Name] | None = Field(None, max_length=3)


class Things(Strict):
    jobs: list[Thing] = Field(max_length=1000)


class Report(Strict):
    attempt_token: Id
    error_type: ErrorType | None = None
    error_message: ErrorMessage | None = None


class Spare(Strict):
    reason: str | None = None
    count: Annotated[int, Whole(1, 100)] = 1


class Look(Strict):
    status: list[Literal["queued", "done"]] | None = None
    queue: Name | None = None
    limit: Annotated[int, Whole(1, 500)] = 100
    wait: Annotated[float, Seconds(0, 30)] = 0.0
    after: Instant | None = None
    verbose: bool = False
    key: Key | None = None


class Echo(Answered):
    echo: dict[str, Any]


doors = Doors("jobs")


@doors.post("/v1/things", scope="enqueue", body=Thing, answers={200: Echo}, refusals=("lease-lost",))
async def make_thing(call: Call) -> Answer:
    """Make a thing.

    With everything that a body can hold.
    """
    if call.body.queue == "boom":
        raise RuntimeError("postgresql://secret@host SELECT")
    if call.body.queue == "lost":
        raise LeaseLost("The attempt was reclaimed.", job_id=TOKEN, fence=7, retryable=False, status="queued")
    return Answer(200, {"echo": call.body})


@doors.post("/v1/things/batch", scope="enqueue", body=Things, max_body=16 * MIB, answers={200: Echo})
async def make_things(call: Call) -> Answer:
    """Make many."""
    return Answer(200, {"echo": {"count": len(call.body.jobs)}})


@doors.post("/v1/things/{id}/fail", scope="work", body=Report, lenient=True, max_body=16 * MIB, answers={200: Echo})
async def fail_thing(call: Call) -> Answer:
    """Report."""
    return Answer(200, {"echo": call.body})


@doors.post("/v1/things/{id}/cancel", scope="operate", body=Spare, body_required=False, answers={200: Echo})
async def cancel_thing(call: Call) -> Answer:
    """Cancel."""
    return Answer(200, {"echo": call.body})


@doors.post("/v1/queues/{name}/pause", scope="operate", answers={204: None})
async def pause_queue(call: Call) -> Answer:
    """Pause."""
    return Answer(204)


@doors.get("/v1/things", scope="read", query=Look, answers={200: Echo})
async def list_things(call: Call) -> Answer:
    """List."""
    return Answer(200, {"echo": call.query})


@doors.get("/v1/things/{id}", scope="read", answers={200: Echo}, refusals=("job-not-found",))
async def get_thing(call: Call) -> Answer:
    """Read."""
    return Answer(200, {"echo": {"id": call.path["id"]}})


class Composed(SimpleNamespace):
    async def details(self) -> Any:
        return {}

    async def gauges(self) -> Any:
        return self.gauge_rows


class Pinged:
    """What `db.ping` says."""

    def __init__(self) -> None:
        self.answer: Any = {"writable": True, "revision_ok": True}
        self.calls = 0

    async def ping(self) -> Any:
        self.calls += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        if callable(self.answer):
            return await self.answer()
        return self.answer


class LoopRows:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def status(self) -> list[dict[str, Any]]:
        return self.rows


def make_app(ring: Any = None) -> App:
    app = App(openapi_url=None, docs_url=None, redoc_url=None)
    composed = Composed(keys=ring or KeylessRing(), db=Pinged(), loops=LoopRows(), draining=False, gauge_rows=[])
    served = [*doors.doors, *health_doors(composed).doors]
    document, described = describe(app, served, version="0.0.0")
    mount(app, [*served, *described, *reference_doors(document, served)], composed)
    app.state.composed = composed
    return app


def client_of(app: App, **kwargs: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=app, raise_app_exceptions=False), base_url="http://127.0.0.1", **kwargs
    )
