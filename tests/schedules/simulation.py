"""Ten years in minutes: the real tick on PostgreSQL with its clock moved, three tickers, restarts, kills and outages.

`python -m tests.schedules.simulation [--seed N] [--years 10]` prints what was planned and what became of it. Planned
times are reckoned here by other means than `app/schedules/cadence.py` (day by day, with the same zones: those of the
machine may be older than the pinned ones, as Morocco's were when this was written).
"""

import argparse
import asyncio
import contextlib
import logging
import random
import shutil
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from app.db import Database
from app.errors import Refusal
from app.migrations import upgrade
from app.schedules.cadence import zone as pinned
from app.schedules.tick import Ticker
from tests import harness
from tests.schedules.clock import Clock, change, only_mine, put, rows, ticker

START = datetime(2026, 1, 1, tzinfo=UTC)
ZONES = [
    *("America/New_York", "America/Santiago", "America/St_Johns", "Europe/Berlin", "Europe/Lisbon", "Asia/Jerusalem"),
    *("Asia/Beirut", "Africa/Cairo", "Africa/Casablanca", "Australia/Lord_Howe", "Australia/Sydney", "UTC"),
]
INTERVAL = 6 * 3600.0
"""Seconds between passes at most, so that only what is longer than three of them is an outage."""


@dataclass
class Plan:
    name: str
    given: dict
    expected: list[datetime] = field(default_factory=list)


def plans(rng: random.Random, until: datetime) -> list[Plan]:
    made = []
    for number in range(20):
        every = rng.randrange(6 * 3600, 24 * 3600 + 1)
        made.append(Plan(f"interval-{number}", {"every_seconds": every}))
    for number in range(30):
        minute, hour = rng.choice([0, 15, 30, 59]), rng.choice([0, 1, 1, 2, 2, 3, 12, 23])
        day, month = [("*", "*"), (str(rng.randint(1, 28)), "*"), (rng.choice(["29", "30", "31"]), "*"), ("29", "2")][
            (0, 0, 0, 0, 0, 0, 1, 1, 2, 3)[number % 10]
        ]
        weekday = str(rng.randint(0, 6)) if number % 10 in (4, 5) else "*"
        zone = ZONES[number % len(ZONES)]
        plan = Plan(f"cron-{number}", {"cron": f"{minute} {hour} {day} {month} {weekday}", "timezone": zone})
        plan.expected = by_days(minute, hour, day, month, weekday, pinned(zone), until)
        made.append(plan)
    for number, plan in enumerate(made):
        plan.given["overlap"] = "skip" if number % 5 == 0 else "allow"
    return made


def by_days(minute: int, hour: int, day: str, month: str, weekday: str, zone, until: datetime) -> list[datetime]:
    found, today = [], date(2025, 12, 31)
    while today <= until.date() + timedelta(days=1):  # east of us it is tomorrow
        if (
            (day == "*" or today.day == int(day))
            and (month == "*" or today.month == int(month))
            and (weekday == "*" or today.isoweekday() % 7 == int(weekday))
        ):
            at = datetime(today.year, today.month, today.day, hour, minute, tzinfo=zone)
            while at.astimezone(UTC).astimezone(zone).replace(tzinfo=None) != at.replace(tzinfo=None):
                at += timedelta(minutes=1)  # wall clock: out of the gap
            if START < at.astimezone(UTC) <= until:
                found.append(at.astimezone(UTC))
        today += timedelta(days=1)
    return found


@dataclass
class Report:
    seed: int
    planned: int = 0
    fired: int = 0
    collapsed: int = 0
    skipped: int = 0
    doubled: int = 0
    missed: int = 0
    wrong: list[str] = field(default_factory=list)
    events: Counter = field(default_factory=Counter)
    seconds: float = 0.0

    def __str__(self) -> str:
        events = ", ".join(f"{count} {what}" for what, count in sorted(self.events.items()))
        return (
            f"seed {self.seed}: {self.planned} slots planned, {self.fired} fired, {self.collapsed} collapsed, "
            f"{self.skipped} skipped; doubled {self.doubled}, missed {self.missed}; {events}; {self.seconds:.0f} s"
        )


class Instance:
    """One process: its connections and what it remembers."""

    def __init__(self, url: str, clock: Clock) -> None:
        self.url, self.clock = url, clock

    async def start(self) -> "Instance":
        self.db = Database(self.url, pool_size=1, statement_timeout=30.0)
        await self.db.open()
        self.clock.databases.append(self.db)
        self.clock.set(self.clock.now)
        self.ticker: Ticker = ticker(self.db, interval=INTERVAL)
        return self

    async def end(self) -> None:
        self.clock.databases.remove(self.db)
        await self.db.close()

    async def tick(self) -> None:
        with contextlib.suppress(Refusal):
            await self.ticker.tick()


async def simulate(url: str, seed: int, years: float) -> Report:
    rng, report, began = random.Random(seed), Report(seed), time.monotonic()
    until = START + timedelta(days=365.25 * years)
    db = Database(url, pool_size=2, statement_timeout=60.0)
    await db.open()
    await only_mine(db)
    clock = Clock(db, at=START)
    # At the end a slot that an outage made wait gets its grace, so the plan goes on for some minutes.
    end = until + timedelta(minutes=4)
    made = plans(rng, end)
    for plan in made:
        row = await put(db, plan.name, **plan.given)
        if "every_seconds" in plan.given:
            at = row["anchor_at"]
            while at <= end:
                plan.expected.append(at)
                at += timedelta(seconds=plan.given["every_seconds"])
    instances = [await Instance(url, clock).start() for _ in range(3)]
    while clock.now < until:
        await step(db, url, clock, instances, rng, report, until)
    for at in (until, until + timedelta(seconds=61), until + timedelta(seconds=122), end, end):
        clock.set(at)
        await instances[0].tick()
    for instance in instances:
        await instance.end()
    await judge(db, made, report)
    await db.close()
    report.seconds = time.monotonic() - began
    return report


async def step(db, url, clock, instances, rng, report, until) -> None:
    chance = rng.random()
    if chance < 0.002:
        clock.set(min(until, clock.now + timedelta(hours=rng.uniform(19, 90))))
        report.events["outages"] += 1
    else:
        clock.set(min(until, clock.now + timedelta(hours=rng.uniform(4, 5.9))))
    ticking = rng.sample(range(3), rng.choice([1, 1, 1, 2, 3]))
    tasks = {index: asyncio.create_task(instances[index].tick()) for index in ticking}
    killed = [index for index in ticking if rng.random() < 0.02]
    if killed:
        await asyncio.sleep(rng.uniform(0, 0.012))
        if rng.random() < 0.3:
            await change(
                db,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'",
            )
            report.events["cut connections"] += 1
        for index in killed:
            tasks[index].cancel()
            report.events["kills"] += 1
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    for index in range(3):
        if index in killed or rng.random() < 0.005:
            await instances[index].end()
            instances[index] = await Instance(url, clock).start()
            report.events["restarts"] += index not in killed
    if rng.random() < 0.3:
        # Workers finish everything; what schedules with overlap `skip` wait for among it.
        await change(
            db,
            "UPDATE jobs SET status = 'done', finished_at = fencepost_now() "
            "WHERE status = 'queued' AND schedule IS NOT NULL",
        )


async def judge(db: Database, made: list[Plan], report: Report) -> None:
    ran = Counter((row["schedule"], row["slot_at"]) for row in await rows(db, "SELECT schedule, slot_at FROM jobs"))
    report.doubled = sum(count - 1 for count in ran.values())
    ledger: dict[str, list[dict]] = {plan.name: [] for plan in made}
    for row in await rows(db, "SELECT schedule, slot_at, first_slot_at, outcome, count FROM schedule_slots"):
        ledger[row["schedule"]].append(row)
    for plan in made:
        expected = set(plan.expected)
        fired = {row["slot_at"] for row in ledger[plan.name] if row["outcome"] == "fired"}
        if fired != {slot for name, slot in ran if name == plan.name}:
            report.wrong.append(f"{plan.name}: jobs and ledger differ")
        if not fired <= expected:
            report.wrong.append(f"{plan.name}: fired off the grid {sorted(fired - expected)[:3]}")
        covered = set(fired)
        for row in ledger[plan.name]:
            if row["outcome"] in ("collapsed", "skipped_overlap"):
                low = bisect_right(plan.expected, row["first_slot_at"] - timedelta(microseconds=1))
                inside = plan.expected[low : bisect_right(plan.expected, row["slot_at"])]
                # A run in between, when the run before had ended, makes a row of its own and is not counted here.
                inside = [slot for slot in inside if slot not in fired]
                if len(inside) != row["count"] or covered & set(inside):
                    report.wrong.append(f"{plan.name}: {row['outcome']} counts {row['count']}, not {len(inside)}")
                covered |= set(inside)
                report.collapsed += row["count"] * (row["outcome"] == "collapsed")
                report.skipped += row["count"] * (row["outcome"] == "skipped_overlap")
        report.planned += len(expected)
        report.fired += len(fired)
        left = sorted(expected - covered)
        report.missed += len(left)
        if left:
            report.wrong.append(f"{plan.name}: missed {left[:3]}")


async def _whole(seed: int, years: float) -> Report:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-simulation-"))
    server = harness.PostgresServer(folder / "postgres", {"synchronous_commit": "off"}).start()
    try:
        url = server.create_database()
        upgrade(url)
        return await simulate(url, seed, years)
    finally:
        server.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--years", type=float, default=10.0)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)  # of cut connections and adoptions there are many
    print(f"seed {given.seed}", flush=True)
    report = asyncio.run(_whole(given.seed, given.years))
    print(report)
    for line in report.wrong[:20]:
        print("WRONG:", line)
    raise SystemExit(bool(report.doubled or report.missed or report.wrong))


if __name__ == "__main__":
    main()
