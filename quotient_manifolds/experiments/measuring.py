"""The demonstration's measurements: one model along its orbit, then every model of the zoo."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import nn

from quotient_manifolds.experiments.digits import Batch
from quotient_manifolds.experiments.orbit import DTYPES, along_orbit, like
from quotient_manifolds.experiments.records import (
    CorrelationRow,
    Measure,
    ModelRow,
    OrbitRow,
    PairRow,
    Settings,
    Sharpness,
)
from quotient_manifolds.experiments.zoo import TrainedModel
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.progress import Progress
from quotient_manifolds.sharpness import MeasureResult, SharpnessWarning, cross_entropy, worst_case_sharpness
from quotient_manifolds.statistics import correlation
from quotient_manifolds.symmetries import Proof, Symmetries

Batches = tuple[Batch, ...]
Curves = dict[str, tuple[float, ...]]

# key in the records: name for readers, geometry
GEOMETRIES: dict[str, tuple[str, Geometry]] = {
    "euclidean": ("Euclidean", Euclidean()),
    "adaptive": ("Adaptive", Adaptive()),
    "inv": ("Quotient inv", Quotient("inv", geodesic="second")),
    "mix": ("Quotient mix", Quotient("mix", geodesic="second")),
}
ON_ORBIT = ("adaptive", "inv", "mix")


def measures(settings: Settings) -> tuple[Measure, ...]:
    """All measures of a run: Euclidean with a radius of its own, the others with a common one."""
    return tuple(
        Measure(key, label, settings.euclidean_radius if key == "euclidean" else settings.radius)
        for key, (label, _) in GEOMETRIES.items()
    )


def sharpness(model: nn.Module, measure: Measure, batches: Batches, settings: Settings) -> MeasureResult:
    """One measure of one model, on its own device and in its own dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SharpnessWarning)  # the page says how many models it is about
        return worst_case_sharpness(
            model,
            cross_entropy,
            [like(batch, next(model.parameters())) for batch in batches],
            geometry=GEOMETRIES[measure.key][1],
            radius=measure.radius,
            steps=settings.steps,
            seed=settings.seed,
        )


def on_orbit(
    model: nn.Module, symmetries: Symmetries, batches: Batches, settings: Settings, progress: Progress
) -> tuple[OrbitRow, ...]:
    """The adaptive and both quotient measures of one model along its orbit."""
    wanted = {measure.key: measure for measure in measures(settings) if measure.key in ON_ORBIT}
    return along_orbit(
        model,
        symmetries,
        tuple(wanted),
        lambda at, key: sharpness(at, wanted[key], batches, settings),
        scales=settings.scales,
        seed=settings.seed,
        progress=progress,
    )


def across_zoo(
    zoo: list[TrainedModel], batches: Batches, settings: Settings, progress: Progress
) -> tuple[tuple[ModelRow, ...], Curves]:
    """Every measure of every model; and, for the first model and batch, the loss at every step of the ascent."""
    rows: list[ModelRow] = []
    curves: Curves = {}
    total, done = len(zoo) * len(GEOMETRIES), 0
    for trained in zoo:
        model = trained.load().to(device=settings.device, dtype=DTYPES[settings.dtype])
        values: dict[str, Sharpness] = {}
        for measure in measures(settings):
            progress("measuring", done, total)
            result = sharpness(model, measure, batches, settings)
            values[measure.key] = Sharpness(result.mean, result.standard_error, bool(result.beyond_reach))
            curves.setdefault(measure.key, result.loss_steps[0])
            done += 1
        rows.append(ModelRow(f"model {len(rows)}", trained.recipe, trained.scores, values))
    progress("measuring", total, total)
    return tuple(rows), curves


def rank(rows: tuple[ModelRow, ...], settings: Settings) -> tuple[CorrelationRow, ...]:
    """Kendall's tau of every measure with the gap in error and with the gap in loss."""
    gaps: dict[str, Callable[[ModelRow], float]] = {
        "error_gap": lambda row: row.scores.error_gap,
        "loss_gap": lambda row: row.scores.loss_gap,
    }
    return tuple(
        CorrelationRow(
            measure.key,
            gap,
            correlation(
                [row.sharpness[measure.key].mean for row in rows],
                [value(row) for row in rows],
                resamples=settings.resamples,
                seed=settings.seed,
            ),
        )
        for gap, value in gaps.items()
        for measure in measures(settings)
    )


def pair_rows(symmetries: Symmetries, proof: Proof) -> tuple[PairRow, ...]:
    """What was found and what was proved, a row a pair."""
    return tuple(
        PairRow(pair.name, pair.kind, pair.group, pair.n, pair.m, pair.h, proved.change, proved.control, proved.verdict)
        for pair, proved in zip(symmetries.pairs, proof.pairs, strict=True)
    )
