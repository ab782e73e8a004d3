"""The service's own maintenance: tasks by name, and their runs.

A run holds a lease in its row of the ledger and renews it; any tick sets a run whose lease is over to `interrupted`.
The body runs beside the tick, in no transaction of it, so that it holds up nothing and an edit made meanwhile stays.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from app import telemetry
from app.db import Database
from app.errors import Refusal
from app.jobs.prune import prune_pass
from app.schedules import sql

log = logging.getLogger("fencepost.tasks")

LEDGER_DAYS = 30
LEDGER_LEAST = 100
LEDGER_MOST = 10_000
"""The ledger keeps 30 days, but of each schedule at least its last 100 rows and at most its last 10 000."""

_BATCH = 1000

NAMES = ("prune",)
"""What a schedule may name as its `task`."""


@dataclass(frozen=True, slots=True)
class Task:
    """`every` in seconds: how often it runs where the stored schedules cannot be read."""

    body: Callable[[], Awaitable[Any]]
    every: float = 3600.0


def built_in(db: Database, *, retention: float, failed_retention: float) -> dict[str, Task]:
    """Retentions in seconds, of done jobs and of failed and cancelled ones."""

    async def prune() -> None:
        await prune_pass(db, retention=retention, failed_retention=failed_retention)
        await prune_ledger(db)

    return {"prune": Task(prune)}


async def prune_ledger(db: Database) -> int:
    """The number of rows deleted, in short transactions."""
    async with db.begin() as tx:
        names = [row["name"] for row in await tx.rows(sql.LEDGER_NAMES)]
    total = 0
    for name in names:
        deleted = _BATCH
        while deleted == _BATCH:
            async with db.begin() as tx:
                deleted = await tx.run(
                    sql.PRUNE_LEDGER,
                    {
                        "name": name,
                        "least": LEDGER_LEAST,
                        "most": LEDGER_MOST,
                        "age": LEDGER_DAYS * 86400.0,
                        "limit": _BATCH,
                    },
                )
            total += deleted
    return total


class Runs:
    """The maintenance runs of this process. `lease` in seconds."""

    def __init__(self, db: Database, tasks: Mapping[str, Task], lease: float) -> None:
        self._db = db
        self.tasks = tasks
        self.lease = lease
        self._running: set[asyncio.Task[None]] = set()
        self._unrecorded: dict[str, float] = {}

    def begin(self, run_id: UUID, token: UUID, task: str) -> None:
        """Run a task whose slot is committed and leased by `token`."""
        self._start(self._recorded(run_id, token, task))

    def begin_unrecorded(self, task: str, period: float) -> None:
        """Run a task whose slot cannot be written: at most once a period (seconds) and process."""
        last = self._unrecorded.get(task)
        if task not in self.tasks or (last is not None and time.monotonic() - last < period):
            return
        self._unrecorded[task] = time.monotonic()
        log.warning("task %s runs without a row in the ledger, which cannot be written", task)
        self._start(self._bare(task))

    async def idle(self) -> None:
        """Returns when none is running."""
        while self._running:
            await asyncio.gather(*self._running, return_exceptions=True)

    async def stop(self) -> None:
        for running in self._running:
            running.cancel()
        await self.idle()

    def _start(self, work: Any) -> None:
        running: asyncio.Task[None] = asyncio.create_task(work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _bare(self, task: str) -> None:
        try:
            await self.tasks[task].body()
        except Exception as error:
            log.warning("task %s failed: %s", task, error)
            telemetry.publish("task", outcome="failed")
        else:
            telemetry.publish("task", outcome="fired")

    async def _recorded(self, run_id: UUID, token: UUID, task: str) -> None:
        if task not in self.tasks:
            await self._end(run_id, token, "failed", f"this build has no task {task!r}")
            return
        body = asyncio.ensure_future(self.tasks[task].body())
        renewing = asyncio.create_task(self._renew(run_id, token, body))
        outcome, reason = "fired", None
        try:
            await body
        except asyncio.CancelledError:
            outcome, reason = "interrupted", "its process was stopped"
            body.cancel()
            raise
        except Exception as error:
            outcome, reason = "failed", f"{type(error).__name__}: {error}"[:500]
            log.warning("task %s failed: %s", task, reason)
        finally:
            renewing.cancel()
            await self._end(run_id, token, outcome, reason)

    async def _renew(self, run_id: UUID, token: UUID, body: "asyncio.Future[Any]") -> None:
        while True:
            await asyncio.sleep(self.lease / 3)
            with contextlib.suppress(Refusal):
                async with self._db.begin() as tx:
                    kept = await tx.run(sql.RENEW_RUN, {"id": run_id, "token": token, "lease": self.lease})
                if not kept:
                    # Taken as interrupted, after this process stood still: whoever looks believes that nothing runs.
                    body.cancel()
                    return

    async def _end(self, run_id: UUID, token: UUID, outcome: str, reason: str | None) -> None:
        try:
            async with self._db.begin() as tx:
                await tx.run(sql.END_RUN, {"id": run_id, "token": token, "outcome": outcome, "reason": reason})
                tx.tell("task", outcome=outcome)
        except Exception as error:
            log.warning("the end of a run cannot be written, its lease will tell: %s", error)
