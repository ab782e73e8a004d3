"""The long runs of schedules with real processes and real time: `python -m tests.schedules.processes [part …]`.

- loops: three databases, each with one instance that is up and down in turns: 50 s / 20 s, 55 s / 6 s, 6 s / 1 s, ended
  by SIGTERM and by kill -9 in turns; each start sends its schedules again, as deploys do. The grace is 60 s
- crowd: three instances, 20 schedules of 1 s, while instances are killed, stopped, frozen and started again (B32)
- starts: three instances that start at the same instant with 20 overdue schedules, by turns after an outage and not

Every choice is drawn from the seed. Ends with 1 where a rule of `checker.py` was broken. All of it takes eight minutes.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2

from app.migrations import upgrade
from tests import harness
from tests.harness import wait_for
from tests.schedules.checker import ROOM, Book, Figures, Plan, Row, Up, check, unkept
from tests.schedules.figures import place, query

LOOPS = ((50.0, 20.0), (55.0, 6.0), (6.0, 1.0))
"""Seconds up and down. The start, about two seconds, comes to the down time."""

GRACE = 60.0
PLANS: dict[str, dict[str, Any]] = {
    "every-20": {"every_seconds": 20, "queue": "q", "overlap": "allow"},
    "every-60": {"every_seconds": 60, "queue": "q", "overlap": "allow"},
    "every-150": {"every_seconds": 150, "queue": "q", "overlap": "allow"},
    "each-minute": {"cron": "* * * * *", "queue": "q", "overlap": "allow"},
    "prune-45": {"every_seconds": 45, "task": "prune"},
}
CROWD = {"every_seconds": 1, "queue": "q", "overlap": "allow", "startup_grace_seconds": 30}
"""With a grace that shows where one is given though somebody was up."""
OWN = "fencepost-prune"
"""The schedule that the migration makes."""
OVERDUE = {"every_seconds": 3600, "queue": "q", "overlap": "allow"}
FAULTS = {"kill": 4, "stop": 2, "freeze": 4, "kill all": 1}
"""How often each is drawn, in parts."""

PARTS = ("loops", "crowd", "starts")
Say = Callable[[str], None]


def run(seed: int, *, parts: tuple[str, ...] = PARTS, seconds: float = 345.0, say: Say = print) -> dict[str, Any]:
    """The figures of each part, and all `violations` in words. `seconds` of the loops, at least."""
    found: dict[str, Any] = {}
    if "loops" in parts:
        found["loops"] = loops(seed, seconds, say)
    if "crowd" in parts:
        found["crowd"] = crowd(seed, 60.0, say)
    if "starts" in parts:
        found["starts"] = starts(seed, 6, say)
    found["violations"] = [text for part in found.values() for text in part.pop("violations")]
    for text in found["violations"]:
        say(f"WRONG: {text}")
    return found


# --- a process and when it was up ------------------------------------------------------------------------------------


@dataclass
class Member:
    """One instance over its restarts. Instants are of this machine's clock, which is the database's as well."""

    folder: Path
    url: str
    ups: list[Up] = field(default_factory=list)
    frozen: list[tuple[float, float]] = field(default_factory=list)
    number: int = 0
    service: harness.Service | None = None

    def start(self) -> None:
        self.number += 1
        self.started, self.ready = time.time(), None
        folder = self.folder / str(self.number)
        self.service = harness.Service(folder, ["--port", "0"], {"FENCEPOST_DATABASE_URL": self.url})

    def wait_ready(self) -> str:
        assert self.service is not None
        if self.ready is None:
            self.service.wait_ready()
            self.ready = time.time()
        return self.service.url

    def look(self) -> None:
        """Note it when it has become ready."""
        if self.service is not None and self.ready is None and harness.READY.search(self.service.out.read_text()):
            self.ready = time.time()

    def end(self, *, kill: bool) -> None:
        """By kill -9 or by SIGTERM."""
        if self.service is None:
            return
        self.look()
        told = time.time()
        if kill:
            self.service.kill()
        else:
            code = self.service.stop()
            # One that begins cannot answer a signal yet.
            assert code == 0 or self.ready is None, f"{code}: {self.service.log()[-2000:]}"
        self._was_up(told, time.time())
        self.service = None

    def freeze(self, rest: Callable[[], None]) -> None:
        """SIGSTOP, `rest`, SIGCONT."""
        self.wait_ready()
        assert self.service is not None
        pid, froze = self.service.process.pid, time.time()
        os.kill(pid, signal.SIGSTOP)
        rest()
        os.kill(pid, signal.SIGCONT)
        self._was_up(froze, froze)
        self.started = self.ready = time.time()
        self.frozen.append((froze, self.ready))

    def _was_up(self, told: float, gone: float) -> None:
        self.ups.append(Up(self.started, told if self.ready is None else self.ready, told, gone))

    def complaints(self) -> Counter[str]:
        """What it logged at the levels of error and warning, with how often."""
        found: Counter[str] = Counter()
        for path in self.folder.rglob("*.log"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError, AttributeError):
                    told = json.loads(line)
                    if told.get("level") in ("error", "critical", "warning"):
                        found[f"{told['level']}: {told.get('event', told)}"[:160]] += 1
        return found


@contextlib.contextmanager
def members(folder: Path, url: str, count: int) -> Iterator[list[Member]]:
    made = [Member(folder / f"instance-{number}", url) for number in range(count)]
    try:
        yield made
    finally:
        for member in made:
            member.end(kill=True)


def put(service_url: str, name: str, body: dict[str, Any]) -> None:
    answer = httpx2.put(f"{service_url}/v1/schedules/{name}", json=body, timeout=20)
    assert answer.status_code in (200, 201), answer.text


def plans_made(url: str) -> list[Plan]:
    """To be read as soon as the schedules are made: a service that moves an anchor later must not move our grid, too.
    The first time is reckoned (specification, section 4): the making + the smaller of grace and period, or of a cron
    its next slot. All but the service's own schedule.
    """
    return [
        Plan(
            name,
            float(every or 60),
            made + min(grace, every) if every else (made // 60 + 1) * 60,
            made,
            grace,
            task is not None,
        )
        for name, every, made, grace, task in query(
            url,
            "SELECT name, every_seconds, extract(epoch FROM created_at)::float8, startup_grace_seconds, task "
            f"FROM schedules WHERE name <> '{OWN}' ORDER BY name",
        )
    ]


def book(url: str, plans: list[Plan], ups: list[Up], frozen: list[tuple[float, float]]) -> Book:
    """What the database holds now."""
    until = time.time()
    rows: dict[str, list[Row]] = {plan.name: [] for plan in plans}
    for name, *row in query(
        url,
        "SELECT schedule, extract(epoch FROM first_slot_at)::float8, extract(epoch FROM slot_at)::float8, outcome, "
        f"count, extract(epoch FROM fired_at)::float8, job_id::text FROM schedule_slots WHERE schedule <> '{OWN}'",
    ):
        rows[name].append(Row(*row))
    jobs: dict[str, dict[str, float]] = {plan.name: {} for plan in plans}
    for name, job, slot in query(url, "SELECT schedule, id::text, extract(epoch FROM slot_at)::float8 FROM jobs"):
        jobs[name][job] = slot
    return Book(plans, rows, jobs, ups, until, frozen)


# --- the loops that starve naive designs -----------------------------------------------------------------------------


def loops(seed: int, seconds: float, say: Say) -> dict[str, Any]:
    with place() as (url, folder), ThreadPoolExecutor(len(LOOPS)) as pool:
        urls = [url, *(harness.create_database(url) for _ in LOOPS[1:])]
        for other in urls[1:]:
            upgrade(other)
        turns = [
            pool.submit(
                _loop, random.Random(f"{seed} {up:.0f}/{down:.0f}"), own, folder / str(number), up, down, seconds
            )
            for number, (own, (up, down)) in enumerate(zip(urls, LOOPS, strict=True))
        ]
        books = [turn.result() for turn in turns]
    found: dict[str, Any] = {"violations": []}
    for (up, down), seen in zip(LOOPS, books, strict=True):
        name = f"up {up:.0f} s, down {down:.0f} s"
        figures, wrong = check(seen)
        found["violations"] += [f"{name}: {text}" for text in [*wrong, *unkept(figures)]]
        downs = [b.ready - a.told for a, b in pairwise(seen.ups)]
        found[name] = {
            "ends": len(seen.ups),
            "down_seconds": [round(down, 1) for down in (min(downs), max(downs))] if downs else [],
            "schedules": [_rounded(each) for each in figures],
        }
        was = f"down {min(downs):.1f} to {max(downs):.1f} s" if downs else "never down in so short a time"
        say(f"{name}: {len(seen.ups)} ends, kill -9 and SIGTERM in turns; {was}")
        _table(figures, say)
    return found


def _loop(draw: random.Random, url: str, folder: Path, up: float, down: float, seconds: float) -> Book:
    kill, end = draw.random() < 0.5, time.monotonic() + seconds
    plans: list[Plan] = []
    with members(folder, url, 1) as [member]:
        while time.monotonic() < end:
            member.start()
            service_url = member.wait_ready()
            over = time.monotonic() + up
            for name, body in PLANS.items():
                if member.number == 1:
                    time.sleep(draw.uniform(0, 1))  # so that they do not all have the same phase
                put(service_url, name, {**body, "startup_grace_seconds": GRACE})
            if member.number == 1:
                plans = plans_made(url)
            time.sleep(max(0.0, over - time.monotonic()))
            member.end(kill=kill)
            kill = not kill
            if time.monotonic() < end:
                time.sleep(down)
        seen = book(url, plans, member.ups, [])
        seen.until = member.ups[-1].told
        return seen


def _rounded(figures: Figures) -> dict[str, Any]:
    return {key: round(value, 1) if isinstance(value, float) else value for key, value in asdict(figures).items()}


def _table(figures: list[Figures], say: Say) -> None:
    say("  schedule      period  runs  collapsed  skipped  longest wait  largest gap  period+grace+down  beyond")
    for each in figures:
        say(
            f"  {each.name:<12}  {each.period:>4.0f} s  {each.runs:>4}  {each.collapsed:>9}  {each.skipped:>7}  "
            f"{each.longest_wait:>10.1f} s  {each.largest_gap:>9.1f} s  {each.promised:>15.1f} s  {each.beyond:>6}"
        )


# --- many instances (B32) --------------------------------------------------------------------------------------------


def crowd(seed: int, seconds: float, say: Say) -> dict[str, Any]:
    draw, faults, began = random.Random(f"{seed} crowd"), Counter[str](), time.monotonic()

    def rest(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for member in herd:
                member.look()
            time.sleep(0.02)

    with place() as (url, folder), members(folder, url, 3) as herd:
        for member in herd:
            member.start()
        for number in range(20):
            put(herd[number % 3].wait_ready(), f"s{number:02}", CROWD)
        plans = plans_made(url)
        over = time.monotonic() + seconds
        while time.monotonic() < over:
            rest(draw.uniform(0.3, 2.0))
            [fault] = draw.choices(list(FAULTS), list(FAULTS.values()))
            member = draw.choice(herd)
            faults[fault] += 1
            say(f"{time.monotonic() - began:6.1f} s  {fault}")
            if fault == "freeze":
                seconds = draw.uniform(0.2, 5.0)
                member.freeze(lambda seconds=seconds: rest(seconds))
            else:
                hit = herd if fault == "kill all" else [member]
                for each in hit:
                    each.end(kill=fault != "stop")
                rest(draw.uniform(0.0, 1.0))
                for each in hit:
                    each.start()
                if fault == "kill all":
                    # Else nobody would be up for long, and what is looked for is many that are up at once.
                    for each in hit:
                        each.wait_ready()
        for member in herd:
            member.wait_ready()
        rest(ROOM + 1)
        seen_at = time.time()
        for member in herd:
            member.end(kill=True)
        frozen = [span for member in herd for span in member.frozen]
        seen = book(url, plans, [up for member in herd for up in member.ups], frozen)
        seen.until = seen_at
        complaints = sum((member.complaints() for member in herd), Counter[str]())
    figures, wrong = check(seen)
    wrong += [f"logged {count} times: {text}" for text, count in complaints.items() if not text.startswith("warning")]
    worst = max(figures, key=lambda each: each.largest_gap)
    found = {
        "faults": dict(faults),
        "runs": sum(each.runs for each in figures),
        "collapsed": sum(each.collapsed for each in figures),
        "held_by_a_frozen_process": sum(each.held for each in figures),
        "longest_wait": round(max(each.longest_wait for each in figures), 2),
        "largest_gap": round(worst.largest_gap, 2),
        "logged": dict(complaints),
    }
    say(f"crowd: {found}")
    return {**found, "violations": [f"crowd: {text}" for text in wrong]}


def make_overdue(url: str, *, outage: bool) -> None:
    """All schedules but the service's own are ten minutes late. Nobody passed for an hour, or somebody does now."""
    late = "now() - interval '10 minutes'"
    query(url, f"UPDATE schedules SET anchor_at = {late}, next_run_at = {late} WHERE task IS NULL")
    last = "now() - interval '1 hour'" if outage else "now() + interval '1 minute'"
    query(url, f"UPDATE loops SET last_pass_at = {last} WHERE name = 'schedule'")


def wait_for_passes(url: str, count: int) -> None:
    """Until the loop has passed so many times since now."""
    query(url, "UPDATE loops SET last_pass_at = least(last_pass_at, now()) WHERE name = 'schedule'")
    seen: set[Any] = set()

    def enough() -> bool:
        seen.update(query(url, "SELECT last_pass_at FROM loops WHERE name = 'schedule'"))
        return len(seen) > count

    wait_for(enough, 30)


def starts(seed: int, rounds: int, say: Say) -> dict[str, Any]:
    """The outage of each second round gives each schedule one grace, however many start."""
    grace, wrong, late = 6.0, [], []
    draw = random.Random(f"{seed} starts")
    with place() as (url, folder), members(folder, url, 3) as herd:
        herd[0].start()
        for number in range(20):
            put(herd[0].wait_ready(), f"s{number:02}", {**OVERDUE, "startup_grace_seconds": grace})
        for turn in range(rounds):
            outage = turn % 2 == 0
            for member in herd:
                member.end(kill=draw.random() < 0.5)
            make_overdue(url, outage=outage)
            before = len(query(url, "SELECT 1 FROM jobs"))
            began = time.time()
            for member in herd:
                member.start()
            for member in herd:
                member.wait_ready()
            ready = min(member.ready or 0.0 for member in herd)
            wait_for(lambda before=before: len(query(url, "SELECT 1 FROM jobs")) >= before + 20, grace + 30)
            wait_for_passes(url, 6)
            rows = query(
                url,
                "SELECT schedule, count(*), count(DISTINCT job_id), sum(count), min(at), max(at) FROM (SELECT *, "
                "extract(epoch FROM fired_at)::float8 AS at FROM schedule_slots WHERE task IS NULL) s "
                f"WHERE at >= {began} GROUP BY schedule",
            )
            jobs = len(query(url, "SELECT 1 FROM jobs")) - before
            if len(rows) != 20 or jobs != 20 or any(row[1:4] != (1, 1, 1) for row in rows):
                wrong.append(f"round {turn}: {jobs} jobs of 20, ledger {[row[:4] for row in rows]}")
            first, last = min(row[4] for row in rows) - began, max(row[5] for row in rows) - ready
            late.append(round(last, 2))
            if first < (grace if outage else 0) or last > (grace if outage else 0) + ROOM:
                wrong.append(
                    f"round {turn}: fired {first:.2f} s after the start, {last:.2f} s after the first was ready"
                )
        complaints = sum((member.complaints() for member in herd), Counter[str]())
    adopted = sum(
        count * int(given[1])
        for text, count in complaints.items()
        if (given := re.match(r"warning: adopt: (\d+),", text))
    )
    if adopted != 20 * ((rounds + 1) // 2):
        wrong.append(f"{adopted} graces given to 20 schedules in {(rounds + 1) // 2} outages: {dict(complaints)}")
    wrong += [f"logged {count} times: {text}" for text, count in complaints.items() if not text.startswith("warning")]
    found = {"rounds": rounds, "graces": adopted, "last_run_after_first_ready": late, "logged": dict(complaints)}
    say(f"starts: {found}")
    return {**found, "violations": [f"starts: {text}" for text in wrong]}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", metavar="part", help="only this; more may be given")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--seconds", type=float, default=345.0, help="of the loops")
    given = parser.parse_args(arguments)
    print(f"seed {given.seed}", flush=True)
    found = run(
        given.seed,
        parts=tuple(given.part) or PARTS,
        seconds=given.seconds,
        say=lambda text: print(text, flush=True),
    )
    return 1 if found["violations"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
