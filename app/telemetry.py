"""What the service tells about itself: one JSON line per event on stderr, and counters of facts.

`publish(fact)` counts something that has happened (after its commit). Every fact is declared in FACTS; a label is
never taken from what a client typed, but for `queue`, of which 500 values are kept and the rest is `other`.
This module must never know HTTP routes, SQL or a capability.
"""

import logging
import logging.config
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import generate_latest
from prometheus_client.multiprocess import MultiProcessCollector  # type: ignore[no-untyped-call, unused-ignore]

MAX_QUEUES = 500
"""Values of the label `queue`, in each process (spec 8)."""


class Fact(NamedTuple):
    metric: str
    help: str
    labels: tuple[str, ...] = ()
    values: Mapping[str, tuple[str, ...]] = {}
    """For labels other than `queue`: the values that exist. Anything else counts as `other`."""


_OUTCOMES = ("queued", "failed", "manual_review", "cancelled", "done")

FACTS: Mapping[str, Fact] = {
    "enqueue": Fact("enqueues", "Jobs enqueued.", ("queue",)),
    "deduplicate": Fact("deduplications", "Enqueues answered with a job that was there already.", ("queue",)),
    "claim": Fact("claims", "Jobs handed to a worker.", ("queue",)),
    "heartbeat": Fact("heartbeats", "Leases extended by a heartbeat."),
    "complete": Fact("completions", "Jobs completed.", ("queue",)),
    "fail": Fact("failures", "Attempts reported as failed.", ("queue", "to"), {"to": _OUTCOMES}),
    "release": Fact("releases", "Attempts given back by their worker.", ("queue", "to"), {"to": _OUTCOMES}),
    "reclaim": Fact("reclaims", "Attempts ended because their lease ran out.", ("queue", "to"), {"to": _OUTCOMES}),
    "cancel": Fact("cancellations", "Jobs cancelled, or asked to be.", ("queue",)),
    "requeue": Fact("requeues", "Jobs put back in their queue by an operator.", ("queue",)),
    "resolve": Fact("resolutions", "Jobs decided by an operator.", ("queue", "to"), {"to": _OUTCOMES}),
    "prune": Fact("prunes", "Finished jobs deleted after their retention time."),
    "stale_refused": Fact(
        "stale_refusals",
        "Calls refused because their attempt was over.",
        ("verb",),
        {"verb": ("heartbeat", "complete", "fail", "release")},
    ),
    "give_back": Fact("give_backs", "Claimed jobs given back because the poller was gone."),
    "wake": Fact("wakes", "Waiting claims woken.", ("by",), {"by": ("local", "notify", "poll", "clock")}),
    "late_result": Fact("late_results", "Results that came after their attempt was reclaimed, kept for an operator."),
    "set_aside": Fact("set_asides", "Rows that a loop could not move and set aside.", ("loop",)),
    "grace": Fact("graces", "Graces given by the reclaim loop after an outage."),
    "hold": Fact("holds", "Holds of a queue's automatic reclaim.", ("queue",)),
    "fire": Fact("fires", "Slots of schedules fired.", ("target",), {"target": ("job", "task")}),
    "skip": Fact("skips", "Slots of schedules not fired.", ("why",), {"why": ("overlap", "paused")}),
    "collapse": Fact("collapses", "Missed slots of schedules that a later one stands for."),
    "adopt": Fact("adoptions", "Overdue schedules that got a grace after an outage."),
    "repair": Fact("repairs", "Schedules whose next time could not be used and was set anew."),
    "broken": Fact("brokens", "Firings of schedules that failed."),
    "task": Fact(
        "task_runs",
        "Maintenance runs that ended.",
        ("outcome",),
        {"outcome": ("fired", "failed", "interrupted")},
    ),
    "pass": Fact("loop_passes", "Passes of a background loop.", ("loop", "ok"), {"ok": ("true", "false")}),
    "unavailable": Fact("database_refusals", "Calls refused because the database could not be used."),
}

disable_created_metrics()  # type: ignore[no-untyped-call]
registry = CollectorRegistry()
_counters: dict[str, Counter] = {
    fact: Counter(f"fencepost_{kind.metric}", kind.help, kind.labels, registry=registry) for fact, kind in FACTS.items()
}
_requests = Histogram(
    "fencepost_request_seconds",
    "Time from the end of the head to the end of the answer, by operation and class of status.",
    ("operation", "status"),
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    registry=registry,
)
_lateness = Histogram(
    "fencepost_schedule_lateness_seconds",
    "Time from a slot of a schedule to its firing.",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600),
    registry=registry,
)
_gathered = Histogram(
    "fencepost_lane_calls",
    "Calls that went to the database together in one statement, by lane.",
    ("lane",),
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 500),
    registry=registry,
)
_queues: set[str] = set()
_LOOPS = frozenset({"reclaim", "prune", "schedule", "wake", "keys", "listen", "flush"})
_children: dict[tuple[Any, ...], Any] = {}


def publish(fact: str, **facts: Any) -> None:
    """Count a fact; `count` (default 1) of it. Labels that were not given are empty. Never raises."""
    kind = FACTS.get(fact)
    if kind is None:
        get_logger("fencepost.telemetry").error("a fact that is not declared", fact=fact)
        return
    count = facts.get("count", 1)
    labels = tuple(_label(kind, name, facts.get(name)) for name in kind.labels)
    child = _children.get((fact, *labels))
    if child is None:
        counter = _counters[fact]
        child = _children[(fact, *labels)] = counter.labels(*labels) if labels else counter
    child.inc(count)


def _label(kind: Fact, name: str, value: Any) -> str:
    if value is None:
        return ""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if name == "queue":
        return bounded_queue(text)
    if name == "loop":
        return text if text in _LOOPS else "other"
    return text if text in kind.values.get(name, ()) else "other"


def bounded_queue(queue: str) -> str:
    """The queue's name while it is one of the first 500 seen by this process, else `other`."""
    if queue in _queues:
        return queue
    if len(_queues) < MAX_QUEUES:
        _queues.add(queue)
        return queue
    return "other"


def observe_request(operation: str, status: int, seconds: float) -> None:
    """`operation` is an operationId or `unknown`; never a path."""
    key = ("request", operation, status // 100)
    child = _children.get(key)
    if child is None:
        child = _children[key] = _requests.labels(operation, f"{status // 100}xx")
    child.observe(seconds)


def observe_gathered(lane: str, calls: int) -> None:
    """`lane` is one of the service's own."""
    child = _children.get(("lane", lane))
    if child is None:
        child = _children["lane", lane] = _gathered.labels(lane)
    child.observe(calls)


def observe_lateness(seconds: float) -> None:
    _lateness.observe(seconds)


def render_counters() -> bytes:
    """The counters as Prometheus text.

    With several server processes each counts for itself; `serve` then sets PROMETHEUS_MULTIPROC_DIR (an empty folder
    of its own) before they start, and any of them answers for all.
    """
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        shared = CollectorRegistry()
        MultiProcessCollector(shared)  # type: ignore[no-untyped-call]
        return generate_latest(shared)
    return generate_latest(registry)


# Logs -----------------------------------------------------------------------------------------------------

_LONG = 2_000
_LONGER = 16_000


def _short(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A megabyte that a client typed stays out of the log; JSON itself keeps CR, LF and escape signs harmless."""
    for name, value in event.items():
        if isinstance(value, str):
            limit = _LONGER if name == "exception" else _LONG
            if len(value) > limit:
                event[name] = value[:limit] + f"… ({len(value)} characters)"
    return event


class _NoQuery(logging.Filter):
    """uvicorn's access lines without the query: a key that somebody put there must not be kept."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and len(record.args) == 5:
            client, method, path, version, status = record.args
            record.args = (client, method, str(path).partition("?")[0], version, status)
        return True


_shared: tuple[structlog.typing.Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
    _short,
)


def log_config(level: str = "INFO") -> dict[str, Any]:
    """For `logging.config.dictConfig` and uvicorn's `log_config`: every logger as JSON lines on stderr."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"no_query": {"()": _NoQuery}},
        "formatters": {"json": {"()": _formatter}},
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stderr"},
        },
        "root": {"handlers": ["stderr"], "level": level},
        "loggers": {
            "uvicorn": {"level": level, "handlers": [], "propagate": True},
            "uvicorn.error": {"level": level, "handlers": [], "propagate": True},
            "uvicorn.access": {"level": level, "handlers": [], "propagate": True, "filters": ["no_query"]},
            "psycopg.pool": {"level": "ERROR"},
        },
    }


def _formatter() -> logging.Formatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(sort_keys=False, ensure_ascii=True),
        ],
    )


def configure_logs(level: str = "INFO") -> None:
    """Called once by a program's start; a library user who never calls it keeps his own logging."""
    logging.config.dictConfig(log_config(level))


# At import, and not by the program's start: structlog's own default prints a traceback with the local variables of
# every frame, Authorization headers among them.
structlog.configure(
    processors=[*_shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
    logger_factory=structlog.stdlib.LoggerFactory(),
    wrapper_class=structlog.stdlib.BoundLogger,
    cache_logger_on_first_use=False,
)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger
