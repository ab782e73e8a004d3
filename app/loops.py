"""The background loops: patience only. What a tick does, and what makes it safe beside others, is elsewhere.

A loop never ends but when the instance does: not by an exception, not by a stray cancel. While it fails it says so
(`/readyz`, the log, the metric) and comes back with a back-off of at most five seconds.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from app import telemetry
from app.db import Database
from app.jobs.model import Pass
from app.jobs.sql import PASSES

log = logging.getLogger("fencepost.loops")

MISSED_PERIODS = 5
"""A loop without a pass for so many of its periods (and at least five seconds) is degraded."""

MAX_BACK_OFF_SECONDS = 5.0
OBSERVE_SECONDS = 2.0


@dataclass
class Loop:
    """`every` in seconds. Ages are of this process's clock; the instants are the database's."""

    name: str
    every: float
    tick: Callable[[], Awaitable[Pass]]
    failures: int = 0
    error: str | None = None
    last_pass_at: datetime | None = None
    passed: float = field(default_factory=time.monotonic)

    async def once(self) -> float:
        """One tick; the seconds to wait before the next."""
        try:
            done = await self.tick()
        except Exception as error:
            self.failures += 1
            cause = error.__cause__ or error
            self.error = f"{type(cause).__name__}: {cause}".splitlines()[0][:300]
            telemetry.publish("pass", loop=self.name, ok=False)
            log.warning("loop %s failed (%d in a row): %s", self.name, self.failures, self.error)
            return min(self.every * float(2 ** min(self.failures, 10)), MAX_BACK_OFF_SECONDS)
        if self.failures:
            log.info("loop %s works again after %d failures", self.name, self.failures)
        self.failures, self.error = 0, None
        self.last_pass_at, self.passed = done.at, time.monotonic()
        telemetry.publish("pass", loop=self.name, ok=True)
        # Early, but not in a frenzy, where the tick knows when there is more to do.
        return self.every if done.soon is None else min(self.every, max(done.soon, self.every / 20))

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                wait = await self.once()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await stop.wait()
            except asyncio.CancelledError:
                # Somebody else's cancel must not end a loop; the instance ends it by `stop`.
                if stop.is_set():
                    raise
                log.error("loop %s was cancelled from outside and goes on", self.name)


class LoopSet:
    """The loops that somebody must run, and what is known of their passes: of this instance and of all others."""

    def __init__(self, db: Database, loops: Sequence[Loop], *, run_here: bool) -> None:
        self._db = db
        self.loops = list(loops)
        self._run_here = run_here
        self._seen: dict[str, tuple[datetime, float]] = {}
        self._graces: dict[str, datetime] = {}
        self._since = time.monotonic()

    async def run(self, stop: asyncio.Event) -> None:
        tasks = [loop.run(stop) for loop in self.loops] if self._run_here else []
        await asyncio.gather(self._observe(stop), *tasks)

    async def _observe(self, stop: asyncio.Event) -> None:
        """The instants that all instances keep: one without loops of its own knows from here whether anybody passes."""
        while not stop.is_set():
            try:
                async with self._db.begin() as tx:
                    rows = await tx.rows(PASSES)
                now = time.monotonic()
                passed = [row for row in rows if row["last_pass_at"] is not None]
                self._seen = {row["name"]: (row["last_pass_at"], now - row["age"]) for row in passed}
                self._graces = {row["name"]: row["grace_until"] for row in rows if row["grace_until"] is not None}
            except Exception as error:
                log.debug("the passes of the loops cannot be read: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(OBSERVE_SECONDS):
                    await stop.wait()

    def status(self) -> list[dict[str, Any]]:
        """For each loop: `loop`, `last_pass_at`, `age_seconds`, `degraded`, `error`, `grace_until`.

        Degraded is a loop that passed nowhere for five periods, or one of this instance that keeps failing so long.
        """
        now = time.monotonic()
        found = []
        for loop in self.loops:
            at, passed = self._seen.get(loop.name, (None, self._since))
            if loop.last_pass_at is not None and loop.passed > passed:
                at, passed = loop.last_pass_at, loop.passed
            late = max(MISSED_PERIODS * loop.every, 5.0)
            failing_here = self._run_here and loop.failures > 0 and now - loop.passed > late
            found.append(
                {
                    "loop": loop.name,
                    "last_pass_at": at,
                    "age_seconds": max(0.0, now - passed),
                    "degraded": failing_here or now - passed > late + OBSERVE_SECONDS,
                    "error": loop.error,
                    "grace_until": self._graces.get(loop.name),
                }
            )
        return found
