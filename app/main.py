"""Everything put together: what an instance is made of, how it starts, how it ends."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI

from app import __version__, telemetry
from app.db import Database
from app.errors import Unavailable
from app.jobs import epoch, intake, lease
from app.jobs.hints import LATER, Hints
from app.jobs.http import all_doors as job_doors
from app.jobs.prune import prune_pass
from app.jobs.reclaim import Pacing, reclaim_pass
from app.jobs.waiting import DueClock, WaitingRoom
from app.keys.ops import KeyRing
from app.lanes import Lane
from app.loops import Loop, LoopSet
from app.queues import sql as queues_sql
from app.queues.http import doors as queue_doors
from app.schedules import ops as schedule_ops
from app.schedules import sql as schedules_sql
from app.schedules.http import doors as schedule_doors
from app.schedules.tasks import Runs, built_in
from app.schedules.tick import Ticker, tolerance
from app.settings import Settings
from app.web.contract import describe
from app.web.health import Gauge, health_doors
from app.web.reference import reference_doors
from app.web.switch import App, mount

log = logging.getLogger("fencepost")

GAUGE_QUEUES = 5_000
"""All that a scrape looks at; it shows 500 of them and adds the others up."""
GAUGE_SECONDS = 0.35
GAUGE_CAP = 1_000
GAUGE_SCHEDULES = 500
MOST_CLAIMED = 1_000
"""Jobs that one gathered claim takes at most, as many as one call may ask for."""

_UNCOUNTED = frozenset({"claimable", "due_later"})
"""Facts that wake somebody; all others are counted."""


class Service:
    """One instance. Routes see it as `call.app`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        looks = [epoch.look] if settings.test_clock else [epoch.look, epoch.refuse_pretended_clock]
        self.db = Database(
            settings.database_url or "",
            pool_size=settings.pool_size,
            statement_timeout=settings.statement_timeout_seconds,
            prepared=settings.prepared_statements,
            on_connect=looks,
        )
        self.db.hearers.append(self.hear)
        self.keys = KeyRing(self.db, host=settings.host)
        self.waiting = WaitingRoom(settings.max_waiters)
        self.clock = DueClock(self.db, self.waiting)
        # Behind a pooler only a direct connection can listen; without one the clock polls.
        listen_url = settings.direct_url or (settings.database_url if settings.prepared_statements else None)
        self.hints = Hints(self.db, listen_url, self.waiting, self.clock.sooner)
        self.clock.hints_live = lambda: self.hints.live
        # The hot calls, gathered; batches, and claims with a `request_id`, take the pool.
        self.enqueues = Lane(self.db, "enqueue", intake.enqueue, weight=lambda job: len(job.payload))
        self.claims = Lane(
            self.db,
            "claim",
            lease.claim_gathered,
            lease.claim_together,
            key=lambda wish: wish.queues,
            weight=lambda wish: wish.call.max_jobs,
            most_weight=MOST_CLAIMED,
            generic_plan=True,
            lost=lambda wish, grant: lease.give_back(self.db, grant.jobs),
        )
        self.heartbeats = Lane(self.db, "heartbeat", lease.heartbeat, repeatable=True)
        self.endings = Lane(
            self.db,
            "end",
            lease.end,
            key=lambda ending: ending.verb,
            weight=lambda ending: len(ending.result or ending.error_message or ""),
            repeatable=True,
        )
        self._lanes = (self.enqueues, self.claims, self.heartbeats, self.endings)
        # Claims take at most half of the connections, so that heartbeats and completions always find one.
        # Lists take at most a quarter: a dozen readers of heavy pages must not cost a worker its lease.
        self.reads_at_once = asyncio.Semaphore(max(1, settings.pool_size // 4))
        self.claims_at_once = asyncio.Semaphore(max(1, settings.pool_size // 2))
        tasks = built_in(
            self.db, retention=settings.retention_seconds, failed_retention=settings.failed_retention_seconds
        )
        self.runs = Runs(self.db, tasks, settings.task_lease_seconds)
        self.ticker = Ticker(self.db, self.runs, settings.schedule_interval_seconds)
        self.loops = LoopSet(self.db, self._loops(), run_here=settings.loops)
        self.draining = False
        self._stop = asyncio.Event()

    def _loops(self) -> list[Loop]:
        settings = self.settings
        pacing = Pacing(settings.reclaim_interval_seconds, settings.outage_grace_seconds)
        return [
            Loop("reclaim", settings.reclaim_interval_seconds, lambda: reclaim_pass(self.db, pacing)),
            Loop("schedule", settings.schedule_interval_seconds, self.ticker.tick),
            # Beside the schedule `fencepost-prune`, which does the same each hour and leaves a row in the ledger that
            # it really ran: each minute, in small bites, so that tables stay small and short retentions hold.
            Loop(
                "prune",
                settings.prune_interval_seconds,
                lambda: prune_pass(
                    self.db, retention=settings.retention_seconds, failed_retention=settings.failed_retention_seconds
                ),
            ),
        ]

    def hear(self, fact: str, facts: dict[str, Any]) -> None:
        """A committed fact: count it, or wake who waits for it, here and, where nobody does, elsewhere."""
        if fact not in _UNCOUNTED:
            telemetry.publish(fact, **facts)
        elif fact == "claimable":
            more = facts.get("more", False)
            woken = self.waiting.wake(facts["queue"], facts["count"], more=more)
            if woken:
                telemetry.publish("wake", by="local", count=woken)
            if woken < facts["count"] or more:
                self.hints.note(facts["queue"])
        else:
            self.clock.sooner(max(0.0, facts["wait"]))
            self.hints.note(LATER)

    async def start(self) -> list[asyncio.Task[None]]:
        await self.db.open()
        try:
            await self._first_keys()
        except BaseException:
            # The tasks of an open pool would keep the process from ending.
            await self.db.close()
            raise
        running = {
            "keys": self.keys.run(self._stop),
            "loops": self.loops.run(self._stop),
            "clock": self.clock.run(),
            "listen": self.hints.listen(),
            "hints": self.hints.send_gathered(),
        }
        return [asyncio.create_task(work, name=name) for name, work in running.items()]

    async def _first_keys(self) -> None:
        """Keys before the first call. While the database is away nothing is served, so it is waited for."""
        while True:
            try:
                if self.settings.admin_key is not None:
                    await self.keys.install_admin(self.settings.admin_key.get_secret_value())
                await self.keys.refresh()
            except Unavailable as refusal:
                log.warning("the keys cannot be read yet: %s", refusal)
                await asyncio.sleep(0.5)
            else:
                return

    def drain(self) -> None:
        """The instance was told to end: not ready any more, and nobody waits."""
        self.draining = True
        self.waiting.close()

    async def stop(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        self.drain()
        self._stop.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.runs.stop()
        for lane in self._lanes:
            await lane.close()
        await self.db.close()

    async def details(self) -> dict[str, Any]:
        """For `/readyz?verbose`: is what was planned really run?"""
        async with self.db.begin() as tx:
            late = tolerance(self.settings.schedule_interval_seconds)
            return {"schedules": await schedule_ops.trouble(tx, tolerance=late)}

    async def gauges(self) -> list[Gauge]:
        """What the database knows, for a scrape. Counts are capped: a scrape never scans a big table."""
        async with self.db.begin(within=GAUGE_SECONDS) as tx:
            rows = await tx.rows(queues_sql.LIST, {"after": "", "limit": GAUGE_QUEUES})
            names = [row["name"] for row in rows]
            counts = await tx.rows(queues_sql.COUNTS, {"names": names, "cap": GAUGE_CAP})
            oldest = await tx.rows(queues_sql.OLDEST_WAITING, {"names": names})
            late = tolerance(self.settings.schedule_interval_seconds)
            trouble = await schedule_ops.trouble(tx, tolerance=late)
            schedules = await tx.rows(schedules_sql.GAUGES, {"limit": GAUGE_SCHEDULES})
        gauges: list[Gauge] = [
            (
                "fencepost_jobs",
                f"Jobs by queue and status, counted up to {GAUGE_CAP}.",
                {"queue": row["name"], "status": row["status"]},
                row["count"],
            )
            for row in counts
        ]
        gauges += [
            ("fencepost_oldest_waiting_seconds", "Age of the oldest due job.", {"queue": row["name"]}, row["seconds"])
            for row in oldest
        ]
        for row in rows:
            held = {"queue": row["name"]}
            gauges.append(("fencepost_queue_paused", "1 while the queue is paused.", held, float(row["paused"])))
            on_hold = float(row["hold_until"] is not None)
            gauges.append(("fencepost_reclaim_hold", "1 while the queue's reclaim is held.", held, on_hold))
        gauges += _schedule_gauges(trouble, schedules)
        for loop in self.loops.status():
            about = "Seconds since the last successful pass of any instance."
            gauges.append(("fencepost_loop_age_seconds", about, {"loop": loop["loop"]}, loop["age_seconds"]))
        gauges.append(("fencepost_waiters", "Claims that wait on this instance.", {}, float(len(self.waiting))))
        graces = sum(loop["grace_until"] is not None for loop in self.loops.status())
        gauges.append(("fencepost_outage_grace", "1 while reclaim waits after an outage.", {}, float(graces)))
        stats = self.db.pool_stats()
        for name in ("pool_size", "pool_available", "requests_waiting"):
            gauges.append((f"fencepost_db_{name}", "The pool of connections.", {}, float(stats.get(name, 0))))
        return gauges


def _schedule_gauges(trouble: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[Gauge]:
    """Of the first 500 schedules by name each has its own; the counts are of all, up to 1 000."""
    gauges: list[Gauge] = []
    for kind, count in trouble["counts"].items():
        gauges.append((f"fencepost_schedules_{kind}", f"Schedules that are {kind}.", {}, float(count)))
    for row in rows:
        label = {"schedule": row["name"]}
        if row["last_fired"] is not None:
            about = "When it last fired, in seconds since 1970."
            gauges.append(("fencepost_schedule_last_fired_timestamp", about, label, row["last_fired"]))
        gauges.append(("fencepost_schedule_overdue_seconds", "How long its time is past by now.", label, row["late"]))
        if row["worst"] is not None:
            about = "The longest that a slot had to wait, since its cadence was set."
            gauges.append(("fencepost_schedule_worst_lateness_seconds", about, label, row["worst"]))
    return gauges


def create_app(settings: Settings) -> FastAPI:
    """The application; `settings.database_url` must be set. Its lifespan starts and ends everything."""
    service = Service(settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = await service.start()
        try:
            yield
        finally:
            await service.stop(tasks)

    app = App(title="Fencepost", version=__version__, lifespan=lifespan, openapi_url=None)
    app.state.service = service
    app.state.drain = service.drain
    doors = [*job_doors, *queue_doors.doors, *schedule_doors.doors, *health_doors(service).doors]
    document, described = describe(app, doors, version=__version__)
    mount(app, [*doors, *described, *reference_doors(document, doors)], service)
    return app
