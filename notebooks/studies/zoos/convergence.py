"""See how much more ascents find that take more steps, or start at more points, for some models of a zoo."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import numpy as np

from quotient_manifolds.compare import MeasureEntry, read_spec
from quotient_manifolds.geometry import KnownSymmetries, Quotient
from quotient_manifolds.load import load_checkpoint
from quotient_manifolds.progress import Progress
from quotient_manifolds.sharpness import WorstCase, cross_entropy

MORE: Final = {"four times the steps": (4, 0), "these and two restarts": (4, 2)}
"""What is done more, in words: how many times the steps, and how many restarts."""


@final
@dataclass(frozen=True)
class Climb:
    """Hold what ascents found in one ball around one model: as in the zoo, and with more of what `MORE` says (nats)."""

    model: str
    measure: str
    value: float
    more: tuple[float, ...]


@final
@dataclass(frozen=True)
class Convergence:
    """Hold the climbs of some models of a zoo."""

    zoo: str
    command: str
    climbs: tuple[Climb, ...]

    def shares(self, measure: str) -> list[tuple[float, ...]]:
        """Return, model by model, what the zoo's ascent found over what those with more found."""
        return [tuple(each.value / more for more in each.more) for each in self.climbs if each.measure == measure]


def check_convergence(specs: Sequence[Path], *, zoo: str, models: int, command: str, progress: Progress) -> Convergence:
    """Climb again from models drawn from a zoo, one a part in turn.

    That is in every geometry that a spec takes at several radii, at the middle one of the first three, and divided by
    all symmetries where there are some.
    """
    draw = np.random.default_rng(0)
    order = [specs[place] for place in draw.permutation(len(specs))]
    climbs: list[Climb] = []
    for number in range(models):
        spec = read_spec(order[number % len(order)])
        checkpoint = spec.checkpoints[int(draw.integers(len(spec.checkpoints)))]
        model, known = load_checkpoint(checkpoint), KnownSymmetries()
        batches = spec.data.batches(model, checkpoint)
        for label, measure in _middles(spec.measures).items():
            values = [
                WorstCase(measure.geometry, measure.radius, steps=times * measure.steps, restarts=restarts)
                .of(model, cross_entropy, batches, known=known)
                .mean
                for times, restarts in ((1, 0), *MORE.values())
            ]
            climbs.append(Climb(checkpoint.name, label, values[0], tuple(values[1:])))
        progress("models", number + 1, models)
    return Convergence(zoo, command, tuple(climbs))


def _middles(entries: Iterable[MeasureEntry]) -> dict[str, WorstCase]:
    """Return by label the measures to climb again."""
    families: dict[str, dict[str, WorstCase]] = {}
    for each in entries:
        measure = each.measure
        whole = not isinstance(measure.geometry, Quotient) or measure.geometry.symmetries == "all"
        if isinstance(measure, WorstCase) and whole:
            families.setdefault(each.family, {})[each.label] = measure
    return dict(list(family.items())[:3][1] for family in families.values() if len(family) > 1)
