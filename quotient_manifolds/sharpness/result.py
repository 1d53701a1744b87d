"""Hold the result of a measure: its value on every batch, the mean over batches, and a table of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

from quotient_manifolds.check import needs
from quotient_manifolds.geometry.pair_block import REACH
from quotient_manifolds.sharpness.ascent import KEPT

if TYPE_CHECKING:
    import pandas as pd

Setting = str | int | float | bool

SIZES = ("radius", "sigma")
"""The settings that set the scale of a measure: the radius of its ball, or the standard deviation per coordinate."""

RESOLVED = 100.0
"""A change of the loss by this many spacings of its floating point numbers has about two reliable digits."""

CONVERGED = 0.01
"""The largest gap, as a share of the increase in loss, at which an ascent counts as converged."""


@final
@dataclass(frozen=True)
class BatchResult:
    """Hold one measure of one model on one batch, in plain numbers.

    value: the measure. base_loss: L(w). standard_error: the standard error of the value over random directions.
    residual: |H v - value v| of an eigenpair. losses: the losses of the best run, from its start on. norm: the length
    of the worst direction in the ball's own norm. critical_start: the gradient at w was exactly 0, so the ascent began
    in a random direction. reach: the largest initial relative speed of truncated geodesics of a quotient geometry, in
    the directions that the value comes from. spacing: the distance between floating point numbers of the loss at L(w).
    group: the symmetries that were quotiented out, as a `group_key`; None without any. The passes are the measure's
    own, without the checks before it.

    The other fields belong to an ascent, with |.|_* the dual of the ball's norm. gap: radius |g|_* - <g, z>, with g the
    gradient at the best point z (or the best earlier point that has one); it is 0 exactly at critical points of the
    loss on the ball. multiplier: |g|_* there; at a maximum, the derivative of the value in the radius. promise:
    radius |g_0|_*, the increase of a linear loss, with g_0 the gradient at w. inner_radius: the radius of the smaller
    ball that was also searched, because the loss bends down inside. change: the largest |L - L(w)| that was evaluated.
    """

    value: float
    base_loss: float
    forward_passes: int
    backward_passes: int
    standard_error: float | None = None
    residual: float | None = None
    losses: tuple[float, ...] = ()
    norm: float | None = None
    critical_start: bool = False
    reach: float | None = None
    spacing: float | None = None
    group: str | None = None
    gap: float | None = None
    multiplier: float | None = None
    promise: float | None = None
    inner_radius: float | None = None
    change: float | None = None

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> BatchResult:
        """Return the result from a record made by `asdict` and JSON. Raises TypeError or KeyError for other keys."""
        return cls(**{**record, "losses": tuple(record["losses"])})


@final
@dataclass(frozen=True)
class Result:
    """Hold one measure of one model: its value on every batch, and the mean over batches.

    geometry: the name of the geometry, as tables show it. geometry_settings: its kind and settings. settings: the other
    arguments of the call.
    """

    measure: str
    geometry: str
    settings: Mapping[str, Setting]
    batches: tuple[BatchResult, ...]
    version: str
    geometry_settings: Mapping[str, Setting] = field(default_factory=dict)

    @property
    def values(self) -> tuple[float, ...]:
        """Return the measure on every batch."""
        return tuple(each.value for each in self.batches)

    @property
    def value(self) -> float:
        """Return the measure on the only batch. Raises ValueError if there are several: use `mean`."""
        if len(self.batches) > 1:
            raise ValueError(f"value is that of a single batch. Found {len(self.batches)}; use mean, or values")
        return self.batches[0].value

    @property
    def mean(self) -> float:
        """Return the mean over batches, with equal weights."""
        return mean_and_error(self.values)[0]

    @property
    def standard_error(self) -> float | None:
        """Return the standard error of the mean.

        With several batches it is taken over batches. Each batch draws its own random directions, so their scatter is
        included. With a single batch it is taken over the directions; None if nothing is random.
        """
        error = mean_and_error(self.values)[1]
        return self.batches[0].standard_error if error is None else error

    @property
    def reach(self) -> float | None:
        """Return the largest `BatchResult.reach`; None if no geodesic is truncated."""
        return max((each.reach for each in self.batches if each.reach is not None), default=None)

    @property
    def relative_gap(self) -> float | None:
        """Return the sum of the gaps over the sum of the increases: the relative gain that one more step promises.

        None without an ascent, or if the loss does not increase.
        """
        ascended = [each for each in self.batches if each.gap is not None]
        increase = math.fsum(each.value for each in ascended)
        return math.fsum(each.gap or 0.0 for each in ascended) / increase if increase > 0 else None

    @property
    def promise_kept(self) -> float | None:
        """Return the smallest increase / promise of a batch; promise: radius times the gradient's dual norm at w.

        If it is well below 1, the loss bends down inside the ball. None if no batch has a promise above 0.
        """
        return min((each.value / each.promise for each in self.batches if each.promise), default=None)

    @property
    def forward_passes(self) -> int:
        """Return the number of evaluations of the model, on all batches."""
        return sum(each.forward_passes for each in self.batches)

    @property
    def backward_passes(self) -> int:
        """Return the number of differentiations of the loss, on all batches."""
        return sum(each.backward_passes for each in self.batches)

    @property
    def truncation_warning(self) -> str | None:
        """Return a sentence if truncated geodesics were followed beyond their reach, else None."""
        limit = REACH.get(str(self.geometry_settings.get("geodesic")), REACH["second"])
        if self.reach is None or self.reach <= limit:
            return None
        return self._warning(
            f"geodesics were followed to relative speed {self.reach:.3g}, beyond {limit:g}, where their Taylor "
            f"polynomials may be far off; take a smaller {{size}}, or geodesic='exact'"
        )

    @property
    def convergence_warning(self) -> str | None:
        """Return a sentence if the loss bends down inside the ball, or the gap is above `CONVERGED`, else None."""
        kept, gap = self.promise_kept, self.relative_gap
        if kept is not None and kept < KEPT:
            return self._warning(
                f"the loss increases by {kept:.2%} of radius times gradient norm, under {KEPT:.0%}: it bends down well "
                f"inside the ball, and a higher maximum may be missed; take a smaller {{size}}, restarts, or more steps"
            )
        if gap is not None and gap > CONVERGED:
            share = f"{gap:.1%}" if gap < 0.1 else f"{gap:.0%}"  # 1.2 % is not 1 %, and above it
            return self._warning(
                f"one more step promises {share} of the increase, above {CONVERGED:.0%}, so the ascent has not "
                f"converged and the maximum may be larger; take more steps, or a smaller {{size}}"
            )
        return None

    @property
    def rounding_warning(self) -> str | None:
        """Return a sentence if the loss changed by less than `RESOLVED` of its spacings, else None."""
        spaced = [each for each in self.batches if each.spacing]
        rise = math.fsum(abs(each.value) if each.change is None else each.change for each in spaced)
        spacing = math.fsum(each.spacing or 0.0 for each in spaced)
        if not spaced or rise >= RESOLVED * spacing:
            return None
        return self._warning(
            f"the loss changes by {rise / spacing:.2g} times the spacing of its floating point numbers, less than "
            f"{RESOLVED:g}, so rounding may decide the digits; take a larger {{size}}, or float64"
        )

    @property
    def warning(self) -> str | None:
        """Return all warnings about the value on one line, or None."""
        sentences = (self.truncation_warning, self.convergence_warning, self.rounding_warning)
        return ". ".join(filter(None, sentences)) or None

    def _warning(self, words: str) -> str:
        size = size_of(self.settings)
        return f"{self.geometry} {self.measure} at {size}: {words.format(size=size.partition(' ')[0])}"

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" +- {self.standard_error:.3g}"
        count = len(self.batches)
        stated = [f"{count} batch{'es' if count > 1 else ''}"]
        stated += [f"{key} {value}" for key, value in self.settings.items() if value != ""]
        if self.truncation_warning:
            stated.append(f"beyond reach, at relative speed {self.reach:.3g}")
        return f"{self.geometry} {self.measure} {self.mean:.6g}{error} ({', '.join(stated)})"

    def to_frame(self) -> pd.DataFrame:
        """Return a data frame with a row for every batch. Raises ImportError if pandas is not installed.

        Columns: measure, geometry, `geometry.NAME` and `settings.NAME` for the settings of geometry and measure, batch,
        and the fields of `BatchResult` except the losses.
        """
        with needs("A data frame", "pandas", "compare"):
            import pandas as pd
        known: dict[str, Any] = {"measure": self.measure, "geometry": self.geometry}
        known |= {f"geometry.{key}": value for key, value in self.geometry_settings.items()}
        known |= {f"settings.{key}": value for key, value in self.settings.items()}
        numbers = ({key: value for key, value in asdict(each).items() if key != "losses"} for each in self.batches)
        return pd.DataFrame([{**known, "batch": index, **each} for index, each in enumerate(numbers)])


def nested(radii: Sequence[float], found: Sequence[BatchResult]) -> list[BatchResult]:
    """Return the results on one batch in balls of ascending radii, each the best up to its own radius.

    A point of a smaller ball also lies in the larger one, so its value is a lower bound there, too. It is kept if the
    larger ball's ascent ended lower, with the passes of that ascent, and with gap and promise of the larger ball.
    """
    kept: list[BatchResult] = []
    for index, own in enumerate(found):
        if kept and kept[-1].value > own.value:
            own = _enlarged(kept[-1], own, radii[index - 1], radii[index])
        kept.append(own)
    return kept


def _enlarged(best: BatchResult, own: BatchResult, smaller: float, radius: float) -> BatchResult:
    """Return a smaller ball's result as a result in the ball of `own`."""
    known = best.gap is not None and best.multiplier is not None
    gap = (best.gap or 0.0) + (radius - smaller) * (best.multiplier or 0.0) if known else None
    return replace(
        best,
        forward_passes=own.forward_passes,
        backward_passes=own.backward_passes,
        gap=gap,
        promise=own.promise,
        inner_radius=own.inner_radius,
        change=max((each.change for each in (best, own) if each.change is not None), default=None),
    )


def group_key(names: Sequence[str]) -> str | None:
    """Return the number of symmetries with these names, and a digest of the names; None without any."""
    told = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:12]
    return f"{len(names)} symmetries {told}" if names else None


def size_of(settings: Mapping[str, Setting]) -> str:
    """Return "radius 0.1" or "sigma 0.1", whichever a measure with these settings has; "" if neither."""
    return next((f"{name} {settings[name]:g}" for name in SIZES if name in settings), "")


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error s / sqrt(n), s the sample standard deviation; None for n = 1."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
