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
Verdict = Literal["for it", "against it", "not decided at this n", "not run"]


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

    speaks_for: of an interval (low, high), that all of it is as the claim says; speaks_against: that none of it is.
    """

    words: str
    speaks_for: Callable[[float, float], bool]
    speaks_against: Callable[[float, float], bool]

    def verdict(self, found: Estimate | None) -> Verdict:
        if found is None:
            return "not run"
        if found.low is None or found.high is None:
            return "not decided at this n"
        if self.speaks_for(found.low, found.high):
            return "for it"
        return "against it" if self.speaks_against(found.low, found.high) else "not decided at this n"


RULES: Mapping[str, Rule] = {
    "above": Rule("above 0", lambda low, high: low > 0, lambda low, high: high < 0),
    "below": Rule("below 0", lambda low, high: high < 0, lambda low, high: low > 0),
    "small": Rule(
        f"within ±{MARGIN:g}",
        lambda low, high: low > -MARGIN and high < MARGIN,
        lambda low, high: low > MARGIN or high < -MARGIN,
    ),
}
"""By name. An interval speaks for a claim where all of it is as the claim says, and against it where all of it is on
the other side: beyond 0 for "above" and "below", outside the margin for "small"."""
