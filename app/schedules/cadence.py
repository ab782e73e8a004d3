"""When a schedule is due: intervals on their grid, cron in its zone; pure, knows no database and no clock.

Instants come in and go out in UTC. What holds for cron (and is shown by the preview):
- five fields, Debian's rules: both day fields set means either, 7 is Sunday, names are allowed;
- a time that the spring gap swallows runs at the first minute after the gap;
- a fixed time in the autumn overlap runs once, in the first pass; where the minute or the hour field begins with `*`
  both passes run;
- zones are those of the pinned `tzdata` package, never of the machine, so that all instances reckon alike.
Nothing here loops over what was missed: intervals are arithmetic, cron is asked backward from now.
"""

import functools
import importlib.resources
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import NamedTuple
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

MAX_CRON_LENGTH = 200
ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
COUNTED = 64
"""So many missed slots of a cron are counted one by one; of more, the days between are counted (see `overdue`)."""

_SECOND = timedelta(seconds=1)
_STEPS = ((59, "minute"), (23, "hour"), (31, "day of month"), (12, "month"), (7, "day of week"))


class BadCadence(ValueError):
    """`member` is the one to blame: `cron` or `timezone`."""

    def __init__(self, member: str, says: str) -> None:
        super().__init__(says)
        self.member = member


@dataclass(frozen=True, slots=True)
class Interval:
    """`anchor + n × every` for every whole n."""

    every: timedelta
    anchor: datetime


@dataclass(frozen=True, slots=True)
class Cron:
    expression: str
    zone: tzinfo
    both_passes: bool
    """Whether it runs in both hours of the autumn overlap."""
    every_hour: bool


Cadence = Interval | Cron


class Overdue(NamedTuple):
    """What is due: the slot to run, and the earlier ones that it stands for."""

    slot: datetime
    first: datetime
    """The first of the collapsed slots; `slot` itself where there are none."""
    last: datetime
    """The last of the collapsed slots; `slot` itself where there are none."""
    collapsed: int


# --- reading ---------------------------------------------------------------------------------------------------------


@functools.cache
def zone_names() -> frozenset[str]:
    """The zones of the pinned package; names count as written."""
    text = importlib.resources.files("tzdata").joinpath("zones").read_text()
    return frozenset(text.split()) - {"Factory"}  # which stands for "not set yet"


@functools.lru_cache(maxsize=700)
def zone(name: str) -> tzinfo:
    """Raises BadCadence for a zone that the package does not have."""
    if name in ("UTC", "Etc/UTC"):
        return UTC
    if name not in zone_names():
        raise BadCadence("timezone", "is no zone of the time zone database, such as Europe/Berlin")
    with importlib.resources.files("tzdata.zoneinfo").joinpath(*name.split("/")).open("rb") as data:
        return ZoneInfo.from_file(data, key=name)


@functools.lru_cache(maxsize=4096)
def cron(text: str, timezone: str) -> Cron:
    """Raises BadCadence for what is no cron expression of five fields, or one that never comes."""
    found = zone(timezone)
    if len(text) > MAX_CRON_LENGTH:
        raise BadCadence("cron", f"at most {MAX_CRON_LENGTH} characters")
    if text.startswith("@"):
        if text.lower() not in ALIASES:
            raise BadCadence("cron", f"of the names with @ only {', '.join(ALIASES)} are known")
        expression = ALIASES[text.lower()]
    else:
        expression = text
    fields = expression.split()
    if not re.fullmatch(r"[!-~ \t]+", text) or len(fields) != 5 or text != text.strip():
        raise BadCadence("cron", "five fields are needed: minute, hour, day of month, month, day of week")
    for part, (most, name) in zip(fields, _STEPS, strict=True):
        if any(int(step) > most for step in re.findall(r"/(\d{1,200})", part)):
            raise BadCadence("cron", f"a step of the {name} is larger than its range")
    try:
        # From a fixed instant, so that the verdict does not depend on the day; it gives up after 50 years.
        one = CronSim(" ".join(fields), datetime(2024, 1, 1, tzinfo=UTC))
        next(one)
    except StopIteration:
        raise BadCadence("cron", "no such date ever comes") from None
    except CronSimError as error:
        never = " (or no such date ever comes)" if "day-of-month" in str(error) else ""
        raise BadCadence("cron", f"{str(error).replace('Bad ', 'cannot be read: ')}{never}") from None
    except (AssertionError, ValueError, TypeError, IndexError, OverflowError):
        raise BadCadence("cron", "cannot be read") from None
    both = fields[0].startswith("*") or fields[1].startswith("*")
    return Cron(" ".join(fields), found, both, len(one.hours) == 24)


def interval(every_seconds: int, anchor: datetime) -> Interval:
    return Interval(timedelta(seconds=every_seconds), anchor)


# --- reckoning -------------------------------------------------------------------------------------------------------


def next_after(cadence: Cadence, instant: datetime) -> datetime:
    """The first slot of the grid after `instant`. Raises BadCadence where none comes before year 9999."""
    if isinstance(cadence, Interval):
        n = (instant - cadence.anchor) // cadence.every + 1
        try:
            return cadence.anchor + n * cadence.every
        except OverflowError:
            raise BadCadence("every_seconds", "no further time can be written") from None
    return _next_cron(cadence, instant)


def overdue(cadence: Cadence, first_due: datetime, now: datetime) -> Overdue:
    """The latest slot of the grid in first_due … now, else `first_due` itself (a time that was set by hand).

    `collapsed` is exact for intervals, and for cron up to 64 slots; beyond that it is reckoned by days, and the clock
    changes of those days may make it wrong by a few slots.
    """
    if isinstance(cadence, Interval):
        n, low = (now - cadence.anchor) // cadence.every, -((cadence.anchor - first_due) // cadence.every)
        slot, first = cadence.anchor + n * cadence.every, cadence.anchor + low * cadence.every
        if slot < first_due:
            return Overdue(first_due, first_due, first_due, 0)
        return Overdue(slot, first, slot - cadence.every if n > low else slot, n - low)
    first = _next_cron(cadence, first_due - timedelta(microseconds=1))
    if first > now:
        return Overdue(first_due, first_due, first_due, 0)
    previous, slot, count = first, first, 0
    while (following := _next_cron(cadence, slot)) <= now:
        previous, slot, count = slot, following, count + 1
        if count == COUNTED:
            break
    else:
        return Overdue(slot, first, previous, count)
    slot = _latest_cron(cadence, now)
    return Overdue(slot, first, _latest_cron(cadence, slot - _SECOND), _reckoned(cadence, first, slot))


def latest(cadence: Cadence, now: datetime) -> datetime:
    """The latest slot of the grid that is not after `now`. Raises BadCadence where the grid begins later."""
    if isinstance(cadence, Cron):
        return _latest_cron(cadence, now)
    if now < cadence.anchor:
        raise BadCadence("every_seconds", "its grid begins later")
    return cadence.anchor + (now - cadence.anchor) // cadence.every * cadence.every


def _walls(expression: str, start: datetime, *, reverse: bool = False) -> Iterator[datetime]:
    """Wall-clock times after (or before) a wall-clock time. cronsim is asked without a zone: with one it leaves out
    times on days whose clock moves by half an hour."""
    return iter(CronSim(expression, start.replace(tzinfo=None, fold=0), reverse=reverse))


def _instant(cadence: Cron, wall: datetime) -> datetime | None:
    """When a wall-clock time is (of two equal ones the first); the end of the gap for one that is swallowed, or None
    where every hour is meant, for then no real hour is missing."""
    local = wall.replace(tzinfo=cadence.zone)
    if cadence.zone is UTC or not _imaginary(local):
        return local.astimezone(UTC)
    return None if cadence.every_hour else _gap_end(local)


def _imaginary(local: datetime) -> bool:
    return local.astimezone(UTC).astimezone(local.tzinfo).replace(tzinfo=None) != local.replace(tzinfo=None)


def _gap_end(local: datetime) -> datetime:
    """The first valid minute after the gap in which `local` lies."""
    while _imaginary(local):
        local = (local.replace(tzinfo=None) + timedelta(minutes=1)).replace(tzinfo=local.tzinfo)
    return local.astimezone(UTC)


def _second_pass(cadence: Cron, instant: datetime) -> list[datetime]:
    """Times of the second pass of an overlap that is no further than three hours; mostly there is none."""
    zone, near = cadence.zone, timedelta(hours=3)
    before, after = (instant - near).astimezone(zone), (instant + near).astimezone(zone)
    # An offset may be zero, which is false.
    summer, winter = before.utcoffset(), after.utcoffset()
    if not cadence.both_passes or summer is None or winter is None or winter >= summer:
        return []
    found = []
    for wall in _walls(cadence.expression, before):
        if wall > after.replace(tzinfo=None):
            break
        first, second = wall.replace(tzinfo=zone), wall.replace(tzinfo=zone, fold=1)
        if first.utcoffset() != second.utcoffset() and not _imaginary(first):
            found.append(second.astimezone(UTC))
    return found


def _next_cron(cadence: Cron, instant: datetime) -> datetime:
    try:
        for wall in _walls(cadence.expression, instant.astimezone(cadence.zone)):
            at = _instant(cadence, wall)
            if at is not None and at > instant:
                return min([at, *(second for second in _second_pass(cadence, instant) if second > instant)])
    except (StopIteration, OverflowError, RuntimeError):
        pass
    raise BadCadence("cron", "no further time comes")


def _latest_cron(cadence: Cron, now: datetime) -> datetime:
    """The latest slot not after `now`."""
    # In the second pass of an overlap the wall clock stands before times that the first pass has already run.
    local = now.astimezone(cadence.zone)
    for wall in _walls(cadence.expression, local + (timedelta(hours=3) if local.fold else _SECOND), reverse=True):
        at = _instant(cadence, wall)
        if at is not None and at <= now:
            seconds = [at, *_second_pass(cadence, at), *_second_pass(cadence, now)]
            return max(second for second in seconds if second <= now)
    raise BadCadence("cron", "no earlier time is known")


def _reckoned(cadence: Cron, first: datetime, slot: datetime) -> int:
    """How many slots lie in first … slot, without `slot`, by whole days."""
    one = CronSim(cadence.expression, datetime(2024, 1, 1))
    begin, end = first.astimezone(cadence.zone), slot.astimezone(cadence.zone)
    a_day = len(one.minutes) * len(one.hours)
    days, day = 0, begin.date() + timedelta(days=1)
    while day < end.date():
        if day.month in one.months and one.match_day(day):
            days += 1
        day += timedelta(days=1)
    if begin.date() == end.date():
        return _of_day(one, begin.date(), begin, end)
    return days * a_day + _of_day(one, begin.date(), begin, None) + _of_day(one, end.date(), None, end)


def _of_day(one: CronSim, day: date, since: datetime | None, until: datetime | None) -> int:
    """Times of one day at or after the wall clock of `since` and before that of `until`."""
    if not (day.month in one.months and one.match_day(day)):
        return 0
    low = (since.hour, since.minute) if since is not None else (0, 0)
    high = (until.hour, until.minute) if until is not None else (24, 0)
    return sum(low <= (hour, minute) < high for hour in one.hours for minute in one.minutes)


def period_seconds(cadence: Cadence, slot: datetime) -> float:
    """From a slot to the next."""
    return (next_after(cadence, slot) - slot).total_seconds()


# --- showing ---------------------------------------------------------------------------------------------------------


def note(cadence: Cadence, slot: datetime) -> str | None:
    """What is odd about a slot of a cron: moved out of a gap, or one of two equal wall-clock times."""
    if isinstance(cadence, Interval) or cadence.zone is UTC:
        return None
    local = slot.astimezone(cadence.zone)
    wall = local.replace(tzinfo=None, fold=0)
    named = next(_walls(cadence.expression, wall - _SECOND))
    if named != wall:
        meant = next(_walls(cadence.expression, wall, reverse=True))
        return f"{meant:%H:%M} does not exist on this day: the clock jumps over it; runs at {local:%H:%M}"
    other = local.replace(fold=1 - local.fold)
    if not _imaginary(local) and other.utcoffset() != local.utcoffset():
        if not cadence.both_passes:
            return f"{local:%H:%M} comes twice on this day; runs once, the first time"
        return f"{local:%H:%M} comes twice on this day; this is the {'second' if local.fold else 'first'}"
    return None
