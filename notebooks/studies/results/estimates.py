"""Numbers with intervals, and what an interval decides about a claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from studies.paper import MARGIN
from studies.wording import signed

Floats = NDArray[np.float64]
Verdict = Literal["holds", "does not hold here", "not decided at this n", "not run"]


@final
@dataclass(frozen=True)
class Estimate:
    """Hold a number with its interval (95 %), None where there are too few units to have one."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        bounds = (
            "no interval" if self.low is None or self.high is None else f"[{signed(self.low)}, {signed(self.high)}]"
        )
        return f"{signed(self.value)} {bounds}"

    @property
    def sign(self) -> int:
        """Return -1 or 1 where the whole interval lies below or above 0, else 0."""
        if self.low is None or self.high is None:
            return 0
        return int(self.low > 0) - int(self.high < 0)

    @classmethod
    def of(cls, value: float, draws: Floats) -> Estimate:
        """Take the percentile interval of bootstrap draws that have a value; none where more than half have none."""
        if 2 * np.isnan(draws).sum() > len(draws):
            return cls(value, None, None)
        low, high = np.nanquantile(draws, [0.025, 0.975])
        return cls(value, float(low), float(high))


@final
@dataclass(frozen=True)
class Rule:
    """Hold what a claim says of a number, and the two limits between which nothing is decided.

    holds: of an interval (low, high), that all of it is as the claim says; fails: that none of it is.
    """

    words: str
    holds: Callable[[float, float], bool]
    fails: Callable[[float, float], bool]

    def verdict(self, found: Estimate | None) -> Verdict:
        if found is None:
            return "not run"
        if found.low is None or found.high is None:
            return "not decided at this n"
        if self.holds(found.low, found.high):
            return "holds"
        return "does not hold here" if self.fails(found.low, found.high) else "not decided at this n"


RULES: Mapping[str, Rule] = {
    "above": Rule("above 0", lambda low, high: low > 0, lambda low, high: high < 0),
    "below": Rule("below 0", lambda low, high: high < 0, lambda low, high: low > 0),
    "large": Rule(f"above {MARGIN:g}", lambda low, high: low > MARGIN, lambda low, high: high < MARGIN),
    "small": Rule(
        f"within ±{MARGIN:g}",
        lambda low, high: low > -MARGIN and high < MARGIN,
        lambda low, high: low > MARGIN or high < -MARGIN,
    ),
    "apart": Rule(
        "apart from 0",
        lambda low, high: low > 0 or high < 0,
        lambda low, high: low > -MARGIN and high < MARGIN,
    ),
}
"""By name. A claim holds where the whole interval is there, and does not where the whole interval is on the other side:
below the limit for "above" and "large", outside the margin for "small", inside it for "apart"."""
