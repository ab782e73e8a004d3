"""Judges what real processes left behind: the ledger, the jobs, and when somebody was up. It starts nothing itself.

Instants and durations in seconds. The rules, and where they come from (specification, section 4):

- once: a slot of the grid runs at most once, and is in the ledger once, as a run or in a count
- all: from the first slot on, none is missing between two rows of the ledger
- latest: a run carries the latest slot of the grid; the earlier ones are counted, not replayed
- jobs: each run of the ledger has its job, each job its run
- wait: a slot runs when somebody sees it; one that came due in an outage one grace later, and if nobody is up then,
  as soon as somebody is again. A second grace, or a time that a restart moves, is beyond that
- grace: a slot that came due in an outage does not run before its grace is over
- skips: only a maintenance task is skipped here (no other plan has overlap `skip`), and only while a run of it is
  unfinished: till the lease is over of a run whose process was killed

`wait` says what may be had. What is promised in one sentence (no schedule waits longer than its period + one grace +
one down time) is judged by `unkept` for the wait from slot to run. From run to run it cannot hold where a grace ends in
the next down time: that is a period, a grace and up to two down times, so what is beyond it is counted.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

OUTAGE = 5.0
"""Without a pass for longer is an outage, at the interval of one second that a fresh installation has."""

ROOM = 2.0
"""What a pass may take on a busy machine."""

LAST = 1.0
"""What comes due so shortly before an end may be left to the next start."""

LEASE = 60.0
"""Of a maintenance run (specification, section 4): so long it may block after its process was killed."""

BEGUN = ("fired", "failed", "interrupted")


@dataclass(frozen=True)
class Up:
    """A process, or its time between two freezes: `told` to end or killed; `gone` when it was seen to be."""

    started: float
    ready: float
    told: float
    gone: float


@dataclass(frozen=True)
class Plan:
    """A schedule, its grid `first` + n * `period`; `since` it was made."""

    name: str
    period: float
    first: float
    since: float
    grace: float
    task: bool = False

    def index(self, instant: float) -> int:
        return round((instant - self.first) / self.period)

    def on_grid(self, instant: float) -> bool:
        return abs(self.first + self.index(instant) * self.period - instant) < 1e-4


@dataclass(frozen=True)
class Row:
    """Of the ledger; for each of its `count` slots, `first` to `slot`."""

    first: float
    slot: float
    outcome: str
    count: int
    fired: float
    job: str | None = None


@dataclass
class Book:
    """`frozen`: from and to; a process that stood still may have held rows. `until` is the end of what was seen."""

    plans: list[Plan]
    rows: dict[str, list[Row]]
    jobs: dict[str, dict[str, float]]
    """Of each schedule: id → slot."""
    ups: list[Up]
    until: float
    frozen: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Figures:
    name: str
    period: float
    runs: int = 0
    collapsed: int = 0
    skipped: int = 0
    longest_wait: float = 0.0
    """From the first slot that a run stands for to the run, or to the end of what was seen."""
    largest_gap: float = 0.0
    """From run to run, from the making to the first run, and from the last to the end of what was seen."""
    promised: float = 0.0
    beyond: int = 0
    """Gaps larger than `promised`, though within the rule `wait`."""
    held: int = 0
    """Runs that are within the rule only because a process stood still meanwhile."""

    def passed(self, since: float | None, until: float) -> None:
        """A time without a run."""
        if since is not None:
            self.largest_gap = max(self.largest_gap, until - since)
            self.beyond += until - since > self.promised


def check(book: Book) -> tuple[list[Figures], list[str]]:
    """The figures of each schedule, and every violation in words."""
    presence = _Presence(book)
    found, wrong = [], []
    for plan in book.plans:
        figures, said = _check(plan, book, presence)
        found.append(figures)
        wrong += [f"{plan.name}: {text}" for text in said]
    return found, wrong


def unkept(found: Iterable[Figures]) -> list[str]:
    """The waits longer than the promise. For loops that are up about as long as a grace; after shorter ones that are
    down for longer than a period, two down times may be in one wait.
    """
    return [
        f"{each.name}: waited {each.longest_wait:.1f} s, promised were {each.promised:.1f} s"
        for each in found
        if each.longest_wait > each.promised
    ]


class _Presence:
    """When anybody was up, out of many processes."""

    def __init__(self, book: Book) -> None:
        self.up = _merged((up.ready, up.told - LAST) for up in book.ups)
        self.alive = _merged((up.started, up.gone) for up in book.ups)
        self.frozen = book.frozen
        ends = [end for _, end in _merged((up.ready, up.told) for up in book.ups)]
        starts = [start for start, _ in _merged((up.ready, up.told) for up in book.ups)]
        self.longest_down = max((b - a for a, b in zip(ends, starts[1:], strict=False)), default=0.0)

    def seen(self, instant: float) -> float:
        """When somebody is up first, from the instant on."""
        at = bisect_right(self.up, (instant, inf)) - 1
        if at >= 0 and instant <= self.up[at][1]:
            return instant
        return self.up[at + 1][0] if at + 1 < len(self.up) else inf

    def latest(self, slot: float, grace: float) -> float:
        """By when a slot must have run."""
        seen = self.seen(slot)
        left = max((end for _, end in self.up if end < slot), default=-inf)
        if seen > slot and seen - left > OUTAGE:
            seen = self.seen(seen + grace)
        return seen + ROOM

    def earliest(self, slot: float, grace: float) -> float:
        """Before when it must not have run. Only where it is certain that nobody passed for long enough."""
        for (_, gone), (started, _) in pairwise(self.alive):
            if gone < slot < started and started - gone > OUTAGE:
                return started + grace
        return slot

    def blocks_until(self, began: float) -> float:
        """How long a maintenance run that began then may hold back the next ones, at most."""
        at = bisect_right(self.alive, (began, inf)) - 1
        return (self.alive[at][1] if at >= 0 else began) + LEASE + ROOM

    def thawed(self, start: float, end: float) -> float:
        """The end of the last freeze that touches these instants, and what a pass may take."""
        return max((thaw + ROOM for froze, thaw in self.frozen if froze <= end and thaw >= start), default=-inf)


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _check(plan: Plan, book: Book, presence: _Presence) -> tuple[Figures, list[str]]:
    figures, wrong = Figures(plan.name, plan.period), []
    figures.promised = plan.period + plan.grace + presence.longest_down + ROOM
    rows = sorted(book.rows.get(plan.name, []), key=lambda row: (row.first, row.slot))
    expected, previous, pending = 0, plan.since, None
    began: float | None = None
    for row in rows:
        if not plan.on_grid(row.first) or not plan.on_grid(row.slot):
            wrong.append(f"a slot off the grid: {row}")
            continue
        first, last = plan.index(row.first), plan.index(row.slot)
        if last - first + 1 != row.count:
            wrong.append(f"counts {row.count} slots, not {last - first + 1}: {row}")
        if first < expected:
            wrong.append(f"slot {first} twice in the ledger: {row}")
        elif first > expected:
            wrong.append(f"slots {expected} to {first - 1} are not in the ledger")
        expected = max(expected, last + 1)
        if row.outcome == "collapsed":
            figures.collapsed += row.count
            pending = row
        elif row.outcome in BEGUN:
            figures.runs += 1
            due = pending.first if pending is not None and pending.fired == row.fired else row.slot
            pending = None
            wrong += _waited(plan, row, due, presence, figures)
            figures.passed(previous, row.fired)
            previous = began = row.fired
        else:
            # The run that was still going on is what the schedule has; the gap is not of the schedule's making.
            figures.skipped += row.count
            if not plan.task or row.outcome != "skipped_overlap":
                wrong.append(f"skipped, and nothing here may skip it: {row}")
            elif began is None or row.fired > presence.blocks_until(began):
                wrong.append(f"still skipped at {row.fired:.1f}, when no run of it was left: {row}")
            previous = pending = None
    due = plan.first + expected * plan.period
    # What still waits counts as well: of a starved schedule there are no runs to tell it.
    figures.passed(previous, book.until)
    figures.longest_wait = max(figures.longest_wait, book.until - due)
    if (latest := max(presence.latest(due, plan.grace), presence.thawed(due, book.until))) < book.until:
        wrong.append(f"slot {expected}, due at {due:.1f}, had not run at {book.until:.1f}; it had to by {latest:.1f}")
    wrong += _jobs(plan, rows, book.jobs.get(plan.name, {}))
    return figures, wrong


def _waited(plan: Plan, row: Row, due: float, presence: _Presence, figures: Figures) -> list[str]:
    wait = row.fired - due
    if row.fired >= row.slot + plan.period:
        return [
            f"slot {plan.index(row.slot)} ran {row.fired - row.slot:.1f} s after its time, when a later one had come"
        ]
    figures.longest_wait = max(figures.longest_wait, wait)
    if row.fired > (latest := presence.latest(due, plan.grace)):
        if row.fired > presence.thawed(due, row.fired):
            return [f"slot {plan.index(due)} waited {wait:.1f} s, {row.fired - latest:.1f} s more than it may"]
        figures.held += 1
    if row.fired < (earliest := presence.earliest(due, plan.grace)):
        return [f"slot {plan.index(due)} ran {earliest - row.fired:.1f} s before its time or the end of its grace"]
    return []


def _jobs(plan: Plan, rows: list[Row], jobs: dict[str, float]) -> list[str]:
    wrong = []
    slots = sorted(plan.index(slot) for slot in jobs.values())
    wrong += [f"slot {a} has two jobs" for a, b in pairwise(slots) if a == b]
    if plan.task:
        return wrong
    ran = {row.job: row.slot for row in rows if row.outcome in BEGUN}
    wrong += [f"the run of slot {plan.index(slot)} has no job" for job, slot in ran.items() if job not in jobs]
    wrong += [f"job {job} is not in the ledger" for job in jobs if job not in ran]
    wrong += [
        f"job {job} has another slot than its run" for job, at in ran.items() if abs(jobs.get(job, at) - at) > 1e-4
    ]
    return wrong
