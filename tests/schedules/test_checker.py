"""The checker of ledgers: catches every naive design, and cries wolf at no right one. The time here is reckoned."""

from math import floor

import pytest

from tests.schedules.checker import Book, Plan, Row, Up, check, unkept

GRACE, STEP = 60.0, 0.25

DESIGNS = {
    "next time reckoned at each start": "had not run",
    "a grace at each start": "had not run",
    "no grace": "the end of its grace",
    "a grace at quick restarts, too": "more than it may",
    "replayed": "when a later one had come",
    "not counted": "are not in the ledger",
    "fired by two": "twice in the ledger",
    "fired a moment apart by two": "off the grid",
    "job lost": "has no job",
    "job doubled": "has two jobs",
}
"""Design → words of the violation that it must be caught by, in one of the loops."""


def lived(design: str, up: float, down: float, period: float, seconds: float = 600.0, first: float = 3.0) -> Book:
    """What a service of this design leaves behind, with one process that is up and down in turns."""
    ups, rows, jobs = [], [], {}
    due, grace_for, started = first, None, 0.0
    while started < seconds:
        ups.append(Up(started, started + 0.5, started + up, started + up))
        away = len(ups) > 1 and started - ups[-2].told > (0.5 if design == "a grace at quick restarts, too" else 5)
        if design == "next time reckoned at each start":
            due = started + period
        elif (
            due <= started and away and design != "no grace" and (grace_for is None or design.startswith("a grace at"))
        ):
            grace_for = due if grace_for is None else grace_for
            due = started + GRACE
        now = started
        while now < started + up:
            if due <= now:
                oldest = floor(((grace_for if grace_for is not None else due) - first) / period)
                latest = floor((now - first) / period)
                if design == "replayed":
                    rows += [_run(first + n * period, now) for n in range(oldest, latest)]
                elif latest > oldest and design != "not counted":
                    span = first + oldest * period, first + (latest - 1) * period
                    rows.append(Row(*span, "collapsed", latest - oldest, now))
                rows.append(_run(first + latest * period, now))
                due, grace_for = first + (latest + 1) * period, None
                if design == "next time reckoned at each start":
                    due = now + period
            now += STEP
        started += up + down
    runs = [row for row in rows if row.outcome == "fired"]
    jobs = {row.job or "": row.slot for row in runs}
    if design == "fired by two":
        rows.append(runs[3])
    if design == "fired a moment apart by two":
        rows.append(_run(runs[3].slot + 0.01, runs[3].fired))
    if design == "job lost":
        del jobs[runs[3].job or ""]
    if design == "job doubled":
        jobs["another"] = runs[3].slot
    return Book([Plan("s", period, first, 0.0, GRACE)], {"s": rows}, {"s": jobs}, ups, ups[-1].told)


def _run(slot: float, now: float) -> Row:
    return Row(slot, slot, "fired", 1, now, f"job of {slot}")


LOOPS = [(up, down, period) for up, down in ((50, 20), (55, 6), (6, 1)) for period in (20, 60, 150)]


@pytest.mark.parametrize(("up", "down", "period"), LOOPS)
def test_a_right_ledger_has_no_violation(up, down, period):
    for first in (0.25, 3, 11, 17):
        [figures], wrong = check(lived("right", up, down, period, first=first))
        assert not wrong
        assert not unkept([figures])
        assert figures.runs >= 3


@pytest.mark.parametrize("design", DESIGNS)
def test_a_naive_design_is_caught(design):
    said = [text for loop in LOOPS for text in check(lived(design, *loop))[1]]
    assert any(DESIGNS[design] in text for text in said), said


def test_a_grace_that_ends_in_a_down_time_is_beyond_the_promise_but_not_wrong():
    """Due right after the end of an up time: 20 s down, 60 s of grace over 50 s up, and 10 s of the next down time."""
    [figures], wrong = check(lived("right", 50, 20, 150, first=52))
    assert not wrong
    assert figures.longest_wait > GRACE + 20
    [figures], _ = check(lived("right", 50, 20, 20, first=11.5))
    assert figures.beyond > 0


def test_a_wait_longer_than_the_promise_is_told():
    [figures], _ = check(lived("right", 50, 20, 20))
    assert not unkept([figures])
    figures.longest_wait = figures.promised + 1
    assert "waited" in unkept([figures])[0]


def test_a_schedule_that_never_ran_has_waited_to_the_end():
    ups = [Up(-1.0, -0.5, 200.0, 200.0)]
    [figures], wrong = check(Book([Plan("s", 20.0, 0.0, -0.2, GRACE)], {}, {}, ups, 200.0))
    assert (figures.longest_wait, figures.largest_gap, figures.beyond) == (200.0, 200.2, 1)
    assert wrong
    assert unkept([figures])


def skipping(until: float, *, task: bool) -> list[str]:
    """What is said of a run at 0.2 s whose process is killed at 10 s, and skips of every slot of 20 s until then."""
    run, count = Row(0.0, 0.0, "fired", 1, 0.2), int(until // 20)
    skips = Row(20.0, count * 20.0, "skipped_overlap", count, count * 20.0 + 0.2)
    ups = [Up(-5.0, -4.0, 10.0, 10.0), Up(12.0, 13.0, until, until)]
    rows = [run, skips]
    if not task:
        rows[0] = Row(0.0, 0.0, "fired", 1, 0.2, "job")
    jobs = {} if task else {"job": 0.0}
    return check(Book([Plan("s", 20.0, 0.0, -1.0, GRACE, task)], {"s": rows}, {"s": jobs}, ups, until))[1]


def test_a_killed_run_of_a_task_blocks_till_its_lease_is_over_and_not_longer():
    assert not skipping(70.0, task=True)
    assert ["still skipped" in text for text in skipping(90.0, task=True)] == [True]


def test_a_job_with_overlap_allowed_is_never_skipped():
    assert ["nothing here may skip it" in text for text in skipping(70.0, task=False)] == [True]
