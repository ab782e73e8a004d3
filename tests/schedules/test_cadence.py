"""When schedules are due: the grid of intervals, cron beside clock changes, what is refused, and what it costs."""

import time
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.schedules import cadence
from app.schedules.cadence import BadCadence, cron, interval, next_after, note, overdue

NEW_YORK, BERLIN, LORD_HOWE = "America/New_York", "Europe/Berlin", "Australia/Lord_Howe"


def local(year, month, day, hour=0, minute=0, *, zone=NEW_YORK, fold=0):
    return datetime(year, month, day, hour, minute, tzinfo=cadence.zone(zone), fold=fold).astimezone(UTC)


def times(text, zone, start, count):
    found, schedule = [], cron(text, zone)
    for _ in range(count):
        start = next_after(schedule, start)
        found.append(start.astimezone(schedule.zone).strftime("%m-%d %H:%M%z"))
    return found


@pytest.mark.parametrize(
    ("text", "zone", "start", "expected"),
    [
        # The spring gap: at the first valid minute after it, once; the next day at its time.
        ("30 2 * * *", NEW_YORK, (2026, 3, 7, 12), ["03-08 03:00-0400", "03-09 02:30-0400"]),
        ("*/15 * * * *", NEW_YORK, (2026, 3, 8, 1, 30), ["03-08 01:45-0500", "03-08 03:00-0400", "03-08 03:15-0400"]),
        ("*/15 2 * * *", NEW_YORK, (2026, 3, 7, 12), ["03-08 03:00-0400", "03-09 02:00-0400", "03-09 02:15-0400"]),
        ("30 * * * *", NEW_YORK, (2026, 3, 8, 0, 45), ["03-08 01:30-0500", "03-08 03:30-0400"]),
        ("0,30 2,3 * * *", NEW_YORK, (2026, 3, 8, 0), ["03-08 03:00-0400", "03-08 03:30-0400", "03-09 02:00-0400"]),
        ("30 2 * * *", BERLIN, (2026, 3, 28, 12), ["03-29 03:00+0200", "03-30 02:30+0200"]),
        ("15 2 * * *", LORD_HOWE, (2026, 10, 3, 12), ["10-04 02:30+1100", "10-05 02:15+1100"]),
        ("0 0 * * *", "Africa/Cairo", (2026, 4, 23, 12), ["04-24 01:00+0300", "04-25 00:00+0300"]),
        # Made on the day itself, within the hour before the gap.
        ("30 2 * * *", NEW_YORK, (2026, 3, 8, 1, 59), ["03-08 03:00-0400", "03-09 02:30-0400"]),
        # The autumn overlap: fixed times once, `*` in both hours.
        ("30 1 * * *", NEW_YORK, (2026, 10, 31, 12), ["11-01 01:30-0400", "11-02 01:30-0500"]),
        ("30 * * * *", NEW_YORK, (2026, 11, 1, 0, 45), ["11-01 01:30-0400", "11-01 01:30-0500", "11-01 02:30-0500"]),
        ("*/30 1 * * *", NEW_YORK, (2026, 11, 1, 1, 15), ["11-01 01:30-0400", "11-01 01:00-0500", "11-01 01:30-0500"]),
        ("45 1 * * *", LORD_HOWE, (2026, 4, 4, 12), ["04-05 01:45+1100", "04-06 01:45+1030"]),
        ("*/20 0 * * *", LORD_HOWE, (2026, 4, 5, 12), ["04-06 00:00+1030", "04-06 00:20+1030"]),
        # The calendar.
        ("0 0 29 2 *", "UTC", (2026, 1, 1), ["02-29 00:00+0000", "02-29 00:00+0000"]),
        ("0 0 13 * FRI", "UTC", (2026, 11, 1), ["11-06 00:00+0000", "11-13 00:00+0000", "11-20 00:00+0000"]),
        ("0 0 * * 7", "UTC", (2026, 11, 30), ["12-06 00:00+0000"]),
        ("@weekly", "UTC", (2026, 11, 30), ["12-06 00:00+0000"]),
    ],
)
def test_times(text, zone, start, expected):
    assert times(text, zone, local(*start, zone=zone), len(expected)) == expected


def test_29_february():
    first = next_after(cron("0 0 29 2 *", "UTC"), datetime(2026, 1, 1, tzinfo=UTC))
    assert (first.year, next_after(cron("0 0 29 2 *", "UTC"), first).year) == (2028, 2032)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "0 0 30 2 *",
            "0 0 31 4 *",
            "0 0 */31 * MON#5",
            "* * * * * *",
            "* * * *",
            "",
            "@reboot",
            "@often",
            "H * * * *",
            "0\x1c0 * * *",
            "0\n0 * * *",
        ),
        *("*/90 * * * *", "*/0 * * * *", "60 * * * *", "0 24 * * *", "٣ * * * *", "0 0 * * MON#2/3", "0 0 ? * *"),
        *("0 0 " + "1," * 200 + "1 * *", " 0 0 * * *", "*/" + "9" * 100 + " * * * *"),
    ],
)
def test_refused_quickly(text):
    began = time.perf_counter()
    with pytest.raises(BadCadence) as refused:
        cron(text, "UTC")
    assert time.perf_counter() - began < 0.1, "0.01 on a machine that does nothing else"
    assert refused.value.member == "cron"


@pytest.mark.parametrize(
    "name", ["Mars/Olympus", "europe/berlin", "../../etc/passwd", "", "EST5EDT\0", "localtime", "Factory"]
)
def test_zones_are_those_of_the_package(name):
    with pytest.raises(BadCadence) as refused:
        cron("0 0 * * *", name)
    assert refused.value.member == "timezone"


def test_every_zone_can_be_read():
    for name in sorted(cadence.zone_names()):
        assert next_after(cron("0 0 * * *", name), datetime(2026, 12, 1, tzinfo=UTC)).year == 2026


@pytest.mark.parametrize("text", ["* * * * *", "*/7 1-5 * * MON", "30 2 * * *", "0 0 29 2 *", "0 0 13 * FRI"])
def test_from_1970_in_no_time(text):
    schedule, now = cron(text, NEW_YORK), datetime(2026, 12, 1, 0, 30, 5, tzinfo=UTC)
    began = time.perf_counter()
    found = overdue(schedule, datetime(1970, 1, 1, tzinfo=UTC), now)
    took = time.perf_counter() - began
    assert found.slot <= now < next_after(schedule, found.slot)
    assert found.collapsed > 12
    assert took < 0.5, "0.05 on a machine that does nothing else"


def test_an_interval_from_1970_is_arithmetic():
    now = datetime(2026, 12, 1, tzinfo=UTC)
    found = overdue(
        interval(1, datetime(2026, 11, 30, 23, 59, 59, 500_000, tzinfo=UTC)), datetime(1970, 1, 1, tzinfo=UTC), now
    )
    assert (found.slot, found.collapsed) == (now - timedelta(seconds=0.5), 1796083199)


def test_a_time_off_the_grid_stands_for_itself():
    now = datetime(2026, 12, 1, 12, 0, 30, tzinfo=UTC)
    for schedule in (interval(3600, now - timedelta(seconds=40)), cron("0 12 * * *", "UTC")):
        assert overdue(schedule, now - timedelta(seconds=5), now) == (now - timedelta(seconds=5),) * 3 + (0,)


ZONES = [NEW_YORK, BERLIN, LORD_HOWE, "Africa/Cairo", "America/Sao_Paulo", "Asia/Tehran", "Pacific/Apia", "UTC"]
TEXTS = ["30 2 * * *", "*/15 2 * * *", "30 1 * * *", "30 * * * *", "*/20 0 * * *", "15 2,3 * * *", "30 0-3 * * *"]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(ZONES),
    st.sampled_from(TEXTS),
    st.datetimes(datetime(2010, 1, 1), datetime(2030, 1, 1)),
    st.booleans(),
)
def test_backward_and_forward_agree(zone, text, start, beside_a_change):
    schedule, now = cron(text, zone), start.replace(tzinfo=UTC)
    if beside_a_change:
        for days in range(400):
            day = now + timedelta(days=days)
            if (
                day.astimezone(schedule.zone).utcoffset()
                != (day + timedelta(days=1)).astimezone(schedule.zone).utcoffset()
            ):
                now = day + timedelta(seconds=start.second * 1440 + start.minute)
                break
    slot = now - timedelta(days=3)
    while (following := next_after(schedule, slot)) <= now:
        assert following > slot
        slot = following
    assert cadence._latest_cron(schedule, now) == slot


def test_notes():
    daily, both = cron("30 2 * * *", NEW_YORK), cron("30 * * * *", NEW_YORK)
    assert "02:30 does not exist" in note(daily, local(2026, 3, 8, 3))
    assert note(daily, local(2026, 3, 9, 2, 30)) is None
    assert "runs once" in note(cron("30 1 * * *", NEW_YORK), local(2026, 11, 1, 1, 30))
    assert "first" in note(both, local(2026, 11, 1, 1, 30))
    assert "second" in note(both, local(2026, 11, 1, 1, 30, fold=1))
    assert note(interval(60, local(2026, 1, 1)), local(2026, 1, 1)) is None


def day_of(text: str, zone: str, day: datetime) -> list[datetime]:
    """The slots of the 25 hours and more of a local day."""
    schedule, at, found = cron(text, zone), day - timedelta(minutes=1), []
    while (at := next_after(schedule, at)) < day + timedelta(hours=30):
        found.append(at)
    return found


@pytest.mark.parametrize(
    ("zone", "change"),
    [
        ("Europe/London", datetime(2027, 10, 31, 1, 0, tzinfo=UTC)),
        ("Europe/Lisbon", datetime(2027, 10, 31, 1, 0, tzinfo=UTC)),
        ("Antarctica/Troll", datetime(2027, 10, 31, 1, 0, tzinfo=UTC)),
        ("Africa/Casablanca", datetime(2027, 3, 14, 2, 0, tzinfo=UTC)),
        ("Europe/Berlin", datetime(2027, 10, 31, 1, 0, tzinfo=UTC)),
        ("America/Sao_Paulo", datetime(2019, 2, 17, 2, 0, tzinfo=UTC)),
    ],
)
def test_every_hour_of_an_overlap_runs_also_where_the_later_offset_is_zero(zone, change):
    """The autumn of London ends at the offset zero, which Python takes for false."""
    begin = change - timedelta(hours=6)
    found = day_of("30 * * * *", zone, begin)
    assert found == [begin + timedelta(minutes=30 + 60 * n) for n in range(len(found))], "each real hour, once"
    assert len(day_of("* * * * *", zone, begin)) == 30 * 60
    for at in found:
        assert overdue(cron("30 * * * *", zone), at, at + timedelta(minutes=59)).slot == at


@pytest.mark.parametrize(
    ("text", "zone", "slot"),
    [
        ("0 */12 * * *", "Africa/Cairo", datetime(2027, 4, 29, 22, 0, tzinfo=UTC)),
        ("0 */12 * * *", "America/Santiago", datetime(2027, 9, 5, 4, 0, tzinfo=UTC)),
        ("0 */2 * * *", "Europe/Berlin", datetime(2027, 3, 28, 1, 0, tzinfo=UTC)),
    ],
)
def test_a_stepped_hour_in_the_gap_runs_after_it(text, zone, slot):
    """Only where every hour is meant is none missing."""
    assert slot in day_of(text, zone, slot - timedelta(hours=5))
    assert next_after(cron(text, zone), slot - timedelta(minutes=1)) == slot
