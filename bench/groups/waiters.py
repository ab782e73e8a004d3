"""Idle waiters: memory of each above a bare uvicorn long-poll's in the same run, and transactions a second."""

import resource
import time
from dataclasses import dataclass
from pathlib import Path

import psycopg

from bench.compare import Row
from bench.context import Bench
from bench.rig import Server, Trouble
from bench.stats import Goal, Spread

GROUP = "waiters"
QUEUES = 100
WAIT_SECONDS = 30
"""The longest that a claim may wait; what is counted must lie within."""
REPORT_SECONDS = 10.5
"""So long an idle session of PostgreSQL may keep its counts to itself."""


@dataclass(frozen=True)
class Held:
    each: float
    """Bytes of a waiter."""
    without: float
    """Transactions a second before they came."""
    rate: float
    """And while they wait."""
    problem: str


def run(bench: Bench) -> list[Row]:
    count, quick = bench.size.waiters, bench.size.quick
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    room = count if hard == resource.RLIM_INFINITY else max(50, int((hard - 400) / 1.25))
    if room < count:
        bench.say(f"  only {hard} open files are allowed (ulimit -Hn): {room} waiters instead of {count}")
        count = room
    contents = [
        {"worker_id": f"bench-{number}", "queues": [f"idle-{number % QUEUES}"], "wait_seconds": WAIT_SECONDS}
        for number in range(QUEUES)
    ]
    above, ours_each, bare_each, idle, busy, problems = [], [], [], [], [], list[str]()
    for number in range(1 if quick else min(3, bench.size.rounds)):
        figures = {}
        for side in ("bare", "ours") if number % 2 else ("ours", "bare"):
            if side == "bare":
                with bench.floor("longpoll") as server:
                    figures["bare"] = _memory(bench, server, "/wait", contents, count, None)
            else:
                with bench.product(FENCEPOST_MAX_WAITERS=str(count)) as product:
                    figures["ours"] = _memory(
                        bench, product.server, "/v1/jobs/claim", contents, count, product.database_url
                    )
        ours, bare = figures["ours"], figures["bare"]
        idle.append(ours.without)
        busy.append(ours.rate)
        problems += [ours.problem] if ours.problem else []
        above.append((ours.each - bare.each) / 1024)
        ours_each.append(ours.each / 1024)
        bare_each.append(bare.each / 1024)
        bench.say(
            f"  {count} waiters: ours {ours_each[-1]:.1f} KiB each, bare {bare_each[-1]:.1f}; {busy[-1]:.1f} tx/s"
        )
    memory = Row(
        GROUP,
        f"{count} idle waiters: memory of each above the bare long-poll",
        "KiB",
        Spread.of(above),
        goal=Goal(8, 2, lower_is_better=True, unit="KiB"),
        details={"ours_kib": Spread.of(ours_each).median, "bare_kib": Spread.of(bare_each).median, "count": count},
        judge=not quick,
    )
    rate_row = Row(
        GROUP,
        f"{count} idle waiters: transactions of the service",
        "1/s",
        Spread.of(busy),
        goal=Goal(10, 2, lower_is_better=True, unit="1/s"),
        problems=problems,
        details={"without_waiters": Spread.of(idle).median, "count": count},
        judge=not quick,
    )
    return [memory, rate_row]


def _memory(
    bench: Bench, server: Server, path: str, contents: list[dict[str, object]], count: int, database_url: str | None
) -> Held:
    look, report = (1.0, 0.0) if bench.size.quick else (8.0, REPORT_SECONDS)
    # The first calls load code and fill pools; that is no waiter's. Few of them, for what they free is used again.
    bench.load.ask("hold", url=server.url, path=path, contents=contents, count=max(1, count // 100), settle=0.3)
    bench.load.ask("let-go")
    if database_url:
        time.sleep(report)
    without = _transactions(bench, database_url, look) if database_url else 0.0
    before = resident(server.pid)
    told = bench.load.ask("hold", url=server.url, path=path, contents=contents, count=count, settle=1.5)
    if told["waiting"] < count:
        raise Trouble(f"of {count} waiters {told['waiting']} wait: {told['answered']}")
    after = resident(server.pid)
    rate, left_over = 0.0, WAIT_SECONDS - 1 - report - told["seconds"]
    if database_url and left_over < 1:
        raise Trouble(
            f"{count} waiters came in {told['seconds']:.0f} s, so that no time is left to count; fewer, please"
        )
    if database_url:
        time.sleep(report)
        rate = _transactions(bench, database_url, min(look, left_over))
    left = bench.load.ask("let-go")
    problem = f"waits ended while they were counted: {left['answered']}" if left["answered"] else ""
    return Held((after - before) / count, without, rate, problem)


def resident(pid: int) -> int:
    """Bytes in memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise Trouble("the system does not tell a process's memory")


def _transactions(bench: Bench, database_url: str, seconds: float) -> float:
    """Committed and rolled back a second in this database; each statement of the service is in one. Asked from another
    database, so that the question does not count.
    """
    name = psycopg.conninfo.conninfo_to_dict(database_url)["dbname"]
    ask = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s"
    with psycopg.connect(bench.cluster.url, autocommit=True) as connection:
        counts = []
        for _ in range(2):
            row = connection.execute(ask, [str(name)]).fetchone()
            counts.append((int(row[0]) if row else 0, time.monotonic()))
            if len(counts) == 1:
                time.sleep(seconds)
    return (counts[1][0] - counts[0][0]) / (counts[1][1] - counts[0][1])
