"""Liveness, readiness and metrics.

Liveness asks nothing of the database: tied to it, one outage would become two. Readiness says whether this instance can
do work now; a background loop that fails is told there (`degraded`) but does not turn it red, since claims still work.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry
from pydantic import ConfigDict

from app.errors import Refusal, Unavailable
from app.keys.ops import KeyRing
from app.telemetry import MAX_QUEUES, get_logger, render_counters
from app.web import gate
from app.web.door import Answer, Call, Doors
from app.web.shapes import Answered, Instant, Strict

PING_SECONDS = 0.5
PING_CACHE_SECONDS = 1.0
GAUGE_SECONDS = 0.4
GAUGE_CACHE_SECONDS = 2.0

Gauge = tuple[str, str, Mapping[str, str], float]
"""name, help, labels, value"""

log = get_logger("fencepost.health")


class Loops(Protocol):
    def status(self) -> Sequence[Mapping[str, Any]]:
        """For each background loop: `loop`, `last_pass_at` (an instant or None), `degraded`, perhaps `error`."""


class Composed(Protocol):
    """What is asked of the composed application."""

    keys: KeyRing
    db: Any
    draining: bool

    @property
    def loops(self) -> Loops | None: ...

    async def gauges(self) -> Sequence[Gauge]: ...

    async def details(self) -> Mapping[str, Any]:
        """What the capabilities tell in `/readyz?verbose`, by name."""


class Alive(Answered):
    status: Literal["ok"]


class ReadyQuery(Strict):
    strict: bool = False
    """Not ready, too, while a background loop is failing."""
    verbose: bool = False
    """With details: what the database and each loop say."""


class DegradedLoop(Answered):
    model_config = ConfigDict(json_schema_serialization_defaults_required=False)

    loop: str
    last_pass_at: Instant | None
    error: str | None = None


class Ready(Answered):
    model_config = ConfigDict(json_schema_serialization_defaults_required=False)

    status: Literal["ready"]
    degraded: list[DegradedLoop]
    """Background loops that are failing or late."""


T = TypeVar("T")


class _Cached(Generic[T]):
    """One answer for everybody who asks within `seconds`, got by one call at a time."""

    def __init__(self, get: Callable[[], Awaitable[T]], seconds: float) -> None:
        self._get = get
        self._seconds = seconds
        self._lock = asyncio.Lock()
        self._at = float("-inf")
        self.value: T | None = None

    async def __call__(self) -> T:
        async with self._lock:
            if self.value is None or time.monotonic() - self._at > self._seconds:
                self.value = await self._get()
                self._at = time.monotonic()
            return self.value


def health_doors(composed: Composed) -> Doors:
    """`/livez`, `/readyz`, `/metrics` of this application."""
    doors = Doors("health")

    async def look() -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(PING_SECONDS):
                found: Mapping[str, Any] = await composed.db.ping()
                return found
        except (Refusal, TimeoutError):
            return {"writable": False, "revision_ok": None}

    async def details() -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(PING_SECONDS):
                return await composed.details()
        except (Refusal, TimeoutError):
            return {}

    async def read() -> Sequence[Gauge]:
        return await composed.gauges()

    database = _Cached(look, PING_CACHE_SECONDS)
    gauges = _Cached(read, GAUGE_CACHE_SECONDS)

    @doors.get("/livez", scope=None, answers={200: Alive})
    async def get_livez(call: Call) -> Answer:
        """Whether this process answers.

        The database is not asked.
        """
        return Answer(200, {"status": "ok"})

    @doors.get("/readyz", scope=None, query=ReadyQuery, answers={200: Ready}, refusals=("unavailable",))
    async def get_readyz(call: Call) -> Answer:
        """Whether this instance can do work now.

        A background loop that does not pass is told in `degraded` and turns only `strict` red. Open to all; `verbose`
        needs a key with the scope `read` where keys are asked.
        """
        if call.query.verbose:
            headers = {name.lower(): value for name, value in call.request.headers.items()}
            gate.identify(composed.keys, "read", headers, {})
        found = await database()
        degraded = [
            {"loop": row["loop"], "last_pass_at": row["last_pass_at"]}
            | ({"error": row.get("error")} if call.query.verbose else {})
            for row in (composed.loops.status() if composed.loops is not None else ())
            if row["degraded"]
        ]
        facts: dict[str, Any] = {"degraded": degraded}
        if call.query.verbose:
            facts["database"] = dict(found)
            told = ("loop", "last_pass_at", "error", "grace_until")
            rows = composed.loops.status() if composed.loops is not None else ()
            facts["loops"] = [{name: row.get(name) for name in told} for row in rows]
        if composed.draining:
            raise Unavailable("This instance is shutting down.", **facts)
        if not found["writable"]:
            raise Unavailable("The database cannot be written now.", **facts)
        if not found["revision_ok"]:
            raise Unavailable("The database's schema is not the one of this build; run migrate.", **facts)
        if not composed.keys.readable:
            raise Unavailable("The keys cannot be read now.", **facts)
        if call.query.strict and degraded:
            raise Unavailable("A background loop is failing.", **facts)
        if call.query.verbose:
            facts |= await details()
        return Answer(200, {"status": "ready", **facts})

    @doors.get("/metrics", scope="read", answers={200: None}, media=CONTENT_TYPE_PLAIN_0_0_4)
    async def get_metrics(call: Call) -> Answer:
        """Counters of this instance, and gauges read from the database, as Prometheus text.

        Without the database the counters come alone, and `fencepost_database_up` is 0.
        """
        up = True
        found: Sequence[Gauge] = ()
        try:
            async with asyncio.timeout(GAUGE_SECONDS):
                found = await gauges()
        except (Refusal, TimeoutError):
            up = False
        return Answer(200, render_counters() + render_gauges(found, up=up))

    return doors


class _Gauges(Collector):
    def __init__(self, families: Sequence[GaugeMetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield from self._families


def render_gauges(gauges: Sequence[Gauge], *, up: bool) -> bytes:
    """Prometheus text. Past 500 queues the rest are one series `other`: counts are added, seconds are the longest."""
    weight: dict[str, float] = {}
    for _, _, labels, value in gauges:
        if "queue" in labels:
            weight[labels["queue"]] = weight.get(labels["queue"], 0.0) + value
    kept = set(sorted(weight, key=lambda queue: (-weight[queue], queue))[:MAX_QUEUES])
    families: dict[str, tuple[str, tuple[str, ...], dict[tuple[str, ...], float]]] = {}
    for name, about, labels, value in gauges:
        family = families.setdefault(name, (about, tuple(sorted(labels)), {}))
        key = tuple("other" if label == "queue" and labels[label] not in kept else labels[label] for label in family[1])
        before = family[2].get(key)
        if before is None:
            family[2][key] = value
        else:
            family[2][key] = max(before, value) if name.endswith("_seconds") else before + value
    made = [GaugeMetricFamily("fencepost_database_up", "Whether the gauges could be read.", value=float(up))]
    for name, (about, names, values) in sorted(families.items()):
        gauge = GaugeMetricFamily(name, about, labels=names)
        for key, value in sorted(values.items()):
            gauge.add_metric(key, value)
        made.append(gauge)
    registry = CollectorRegistry()
    registry.register(_Gauges(made))
    return generate_latest(registry)
