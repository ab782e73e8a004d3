"""Interleaved rounds of several sides, and the rows of the table that come of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.stats import Goal, Spread, ratios


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement of one side."""

    value: float
    problems: tuple[str, ...] = ()
    """Why it does not count: errors, a table that ran dry."""
    details: Mapping[str, float] = field(default_factory=dict)


Side = Callable[[], Figure]


def interleave(
    sides: Mapping[str, Side], rounds: int, say: Callable[[str], None], *, rehearse: bool = True
) -> dict[str, list[Figure]]:
    """Each side once a round, forwards and backwards by turns; before them a run of each that does not count."""
    found: dict[str, list[Figure]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(-1 if rehearse else 0, rounds):
        for name in names if number % 2 == 0 else reversed(names):
            figure = sides[name]()
            if number >= 0:
                found[name].append(figure)
        if number >= 0:
            values = ", ".join(f"{name} {shown(found[name][-1].value)}" for name in names)
            say(f"  round {number + 1} of {rounds}: {values}")
    return found


@dataclass
class Row:
    """A line of the table."""

    group: str
    what: str
    unit: str
    ours: Spread
    floor_name: str = ""
    floor: Spread | None = None
    ratio: Spread | None = None
    goal: Goal | None = None
    problems: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    judge: bool = True
    """False for a smoke run, whose figures say nothing."""

    @property
    def judged(self) -> float:
        return (self.ratio or self.ours).median

    @property
    def met(self) -> str | None:
        """`moonshot`, `met`, `missed`; None without a goal, and where the figure does not count."""
        if self.goal is None or self.problems or not self.judge or self.judged != self.judged:
            return None
        return self.goal.verdict(self.judged)

    def described(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "unit": self.unit,
            "ours": self.ours.described(),
            "floor": {"name": self.floor_name, **self.floor.described()} if self.floor else None,
            "ratio": self.ratio.described() if self.ratio else None,
            "goal": self.goal.described() if self.goal else None,
            "met": self.met,
            "valid": not self.problems,
            "problems": self.problems,
            "details": {name: None if value != value else value for name, value in self.details.items()},
        }


def row(
    group: str,
    what: str,
    unit: str,
    ours: list[Figure],
    floor_name: str,
    floor: list[Figure],
    goal: Goal | None,
    *,
    judge: bool,
) -> Row:
    """A ratio's row. A problem of either side in any round makes it invalid."""
    problems = [f"ours: {problem}" for figure in ours for problem in figure.problems]
    problems += [f"{floor_name}: {problem}" for figure in floor for problem in figure.problems]
    mine, others = [figure.value for figure in ours], [figure.value for figure in floor]
    return Row(
        group,
        what,
        unit,
        Spread.of(mine),
        floor_name,
        Spread.of(others),
        ratios(mine, others),
        goal,
        list(dict.fromkeys(problems)),
        {**medians(ours), **{f"floor_{name}": value for name, value in medians(floor).items()}},
        judge,
    )


def medians(figures: list[Figure]) -> dict[str, float]:
    """Of each detail over the rounds."""
    names = dict.fromkeys(name for figure in figures for name in figure.details)
    return {name: Spread.of([f.details[name] for f in figures if name in f.details]).median for name in names}


def shown(value: float) -> str:
    """A number with about three places that count."""
    if value != value:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table(rows: list[Row]) -> str:
    head = ("what", "ours", "floor", "", "ratio (range)", "goal / moonshot", "")
    lines = [head]
    for each in rows:
        ratio = f"{each.ratio.median:.2f} ({each.ratio.least:.2f}-{each.ratio.most:.2f})" if each.ratio else ""
        goal = ""
        if each.goal:
            sign = "<=" if each.goal.lower_is_better else ">="
            goal = f"{sign} {each.goal.least:g} / {each.goal.moonshot:g} {each.goal.unit}".removesuffix(" x")
        verdict = "INVALID" if each.problems else each.met or ("not judged" if each.goal else "")
        floor = f"{shown(each.floor.median)}" if each.floor else ""
        ours = f"{shown(each.ours.median)} {each.unit}"
        if not each.ratio and each.ours.count > 1:
            ours += f" ({shown(each.ours.least)}-{shown(each.ours.most)})"
        lines.append((f"{each.group}: {each.what}", ours, floor, each.floor_name, ratio, goal, verdict))
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
