"""The arithmetic of figures: quantiles, medians with their range, ratios of interleaved pairs, goals and verdicts."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["moonshot", "met", "missed"]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed (nearest rank); nan of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of one thing, in its own unit."""

    median: float
    least: float
    most: float
    count: int
    values: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if not values:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(statistics.median(values), min(values), max(values), len(values), tuple(values))

    def described(self) -> dict[str, Any]:
        """As JSON, with every value in the order of the rounds, so that a reader can check the arithmetic."""
        whole = {name: None if value != value else value for name, value in asdict(self).items() if name != "values"}
        return {**whole, "values": [None if value != value else value for value in self.values]}


def ratios(ours: Sequence[float], floor: Sequence[float]) -> Spread:
    """Pair by pair, ours over the floor's of the same round: the median of the ratios, not the ratio of the medians."""
    if len(ours) != len(floor):
        raise ValueError(f"{len(ours)} figures of ours and {len(floor)} of the floor are no pairs")
    return Spread.of([one / other if other else math.nan for one, other in zip(ours, floor, strict=True)])


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be reached, in the unit of what is judged (a ratio has none)."""

    least: float
    moonshot: float
    lower_is_better: bool = False
    unit: str = "x"

    def verdict(self, value: float) -> Verdict:
        sign = -1 if self.lower_is_better else 1
        if sign * value >= sign * self.moonshot:
            return "moonshot"
        return "met" if sign * value >= sign * self.least else "missed"

    def described(self) -> dict[str, Any]:
        words = ("at_most", "moonshot") if self.lower_is_better else ("at_least", "moonshot")
        return {words[0]: self.least, words[1]: self.moonshot, "unit": self.unit}
