"""The study of diagonal networks, cell by cell: what is finished is kept and not computed again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.messages import Progress
from studies.common import Floats, Record, resume
from studies.diagonal.maxima import Climbed, climb, climb_thoroughly, line_bound
from studies.diagonal.networks import (
    MEASURES,
    METRICS,
    NETWORKS,
    QUOTIENT,
    Regression,
    Setting,
    along,
    draw_networks,
    objective,
)

LARGE = 0.1  # a truncation error above this part of the increase is counted
FAR = 0.5  # |b| above this counts as outside the reach of the Taylor series: a geodesic of mix ends at b = -1/2
FAMILY_GEODESICS = ("second", "exact")
MIDDLE = ("adaptive", "inv exact", "mix exact")
"""What is maximized thoroughly in every cell, because these rankings depend on how far an ascent comes."""

SETTINGS = tuple(
    Setting(points, scales, rates)
    for scales in ((0.1, 1.0), (0.01, 0.1))
    for rates in ((0.01, 0.1), (0.1, 0.3))
    for points in (50, 100, 150)
)


@final
@dataclass(frozen=True)
class Plan:
    """Say what is measured: settings at `radii`, the first `profiled` of them at all of `profile`, which holds `radii`.

    steps: of the ascent. thorough: seeds of every setting that are measured a second time, at `radii`, by an ascent of
    `thorough_steps` with `thorough_restarts`; those of `MIDDLE` are in all seeds, at the middle radius. family: the t
    of the metrics that all settings are measured in at `family_radii`; above those a metric with t < 0 may be
    infinitely sharp.
    """

    settings: tuple[Setting, ...] = SETTINGS
    seeds: int = 20
    networks: int = NETWORKS
    radii: tuple[float, ...] = (0.01, 0.1, 1.0)
    profile: tuple[float, ...] = tuple(float(f"{10 ** (k / 2):.3g}") for k in range(-12, 1))
    profiled: int = 3
    family: tuple[float, ...] = tuple(k / 4 for k in range(-2, 7))
    family_radii: tuple[float, ...] = (0.01, 0.1)
    steps: int = 20
    thorough: int = 5
    thorough_steps: int = 100
    thorough_restarts: int = 10


FAST = Plan(
    settings=(Setting(50, (0.1, 1.0), (0.03, 0.1)), Setting(50, (0.3, 1.0), (0.03, 0.1))),
    seeds=3,
    networks=8,
    radii=(0.1,),
    profile=(1e-3, 0.1),
    profiled=1,
    family=(0.0, 0.5, 1.0),
    family_radii=(0.1,),
    steps=5,
    thorough=1,
    thorough_steps=20,
    thorough_restarts=1,
)


@one_thread()
def run(out: Path, *, fast: bool, progress: Progress, plan: Plan | None = None) -> Record:
    """Take all measures; OUT/cells has a file for each cell, from which a run continues."""
    plan = plan or (FAST if fast else Plan())
    cells = {
        f"n{each.points} scales{'-'.join(map(str, each.scales))} rates{'-'.join(map(str, each.rates))} seed{seed}": (
            partial(measure_cell, plan, each, seed)
        )
        for each in plan.settings
        for seed in range(plan.seeds)
    }
    settings = asdict(plan) | {"seeds": None}  # more seeds: the same cells
    found = resume(out / "cells", cells, what="cells", settings=settings, progress=progress)
    return {"plan": asdict(plan), "cells": found}


def measure_cell(plan: Plan, setting: Setting, seed: int) -> Record:
    """Draw data and networks, and take all measures, of one setting with one seed; five significant digits.

    Columns hold a value for every one of `radii`. taus: Kendall's
    tau-b between test loss and each measure; "mix endless" is the upper bound of mix exact. family: the same along the
    family of metrics, at the plan's `family_radii`. rises: the median of the measure. references: tau-b of test loss
    with what has no radius. far: the median share of |z|^2 in coordinates with |b| > 1/2. truncation: by metric, the
    median of the truncation error over the increase; truncated: in how many of all networks that is above 0.1.
    agreement: tau-b between second-order and exact sharpness. checks: by measure, at the plan's radii, against thorough
    ascents; middle: those of `MIDDLE`, at the middle radius.
    """
    radii = plan.profile if plan.settings.index(setting) < plan.profiled else plan.radii
    generator = torch.Generator().manual_seed(seed)
    regression = Regression.draw(setting.points, generator)
    u, v = draw_networks(regression, setting, generator, networks=plan.networks)
    betas = u * v
    test = regression.test_loss(betas).numpy()
    goals = {measure: objective(measure, regression, betas) for measure in MEASURES}
    climbs = {measure: [climb(goal, radius, plan.steps) for radius in radii] for measure, goal in goals.items()}
    rises = {measure: [found.rise.numpy() for found in row] for measure, row in climbs.items()}
    rises["mix endless"] = [line_bound(regression, betas, radius) for radius in radii]

    def thorough(measures: Sequence[str], chosen: Sequence[float]) -> dict[str, list[Record]]:
        """Measure once more by thorough ascents, radius by radius, with one generator."""
        draws = torch.Generator().manual_seed(0)
        found: dict[str, list[Record]] = {measure: [] for measure in measures}
        for radius in chosen:
            for measure in measures:
                again = climb_thoroughly(goals[measure], radius, plan.thorough_steps, plan.thorough_restarts, draws)
                bound = rises["mix endless"][radii.index(radius)] if measure == "mix exact" else None
                found[measure].append(_check(again, rises[measure][radii.index(radius)], bound, test))
        return found

    checks = thorough(MEASURES, plan.radii) if seed < plan.thorough else {}
    middle = thorough(MIDDLE, (plan.radii[len(plan.radii) // 2],))
    errors = {m: [truncation_error(m, regression, betas, each) for each in climbs[f"{m} second"]] for m in METRICS}
    return rounded(
        {
            "setting": asdict(setting),
            "seed": seed,
            "radii": radii,
            "taus": {measure: [tau_b(row, test) for row in rows] for measure, rows in rises.items()},
            "family": _family(plan, regression, betas, test),
            "rises": {measure: [float(np.median(row)) for row in rises[measure]] for measure in MEASURES},
            "references": {name: tau_b(values, test) for name, values in references(regression, betas).items()},
            "far": {
                measure: [float(far_share(measure, regression, betas, each).quantile(0.5)) for each in climbs[measure]]
                for measure in QUOTIENT
            },
            "truncation": {metric: [float(each.quantile(0.5)) for each in row] for metric, row in errors.items()},
            "truncated": {
                metric: [float((each > LARGE).double().mean()) for each in row] for metric, row in errors.items()
            },
            "agreement": {
                metric: [tau_b(a, b) for a, b in zip(rises[f"{metric} second"], rises[f"{metric} exact"], strict=True)]
                for metric in METRICS
            },
            "checks": checks,
            "middle": {measure: check for measure, (check,) in middle.items()},
        }
    )


def rounded(value: Any) -> Any:
    """Return what JSON holds with five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


def tau_b(a: Floats, b: Floats) -> float | None:
    """Return Kendall's tau-b; None where one of them is constant."""
    value = float(stats.kendalltau(a, b).statistic)
    return None if math.isnan(value) else value


def _check(again: Climbed, rises: Floats, bound: Floats | None, test: Floats) -> Record:
    """Compare the ascent with a thorough one, by network: tau by the best of both, and ratios of the rises found.

    found: median and least of (ascent / best). bound: for mix exact, median and least of (best / upper bound).
    """
    best = np.maximum(again.rise.numpy(), rises)
    ratios = {"found": rises / best, "bound": None if bound is None else best / bound}
    ends = {name: None if r is None else [float(np.median(r)), float(r.min())] for name, r in ratios.items()}
    return {"tau": tau_b(best, test), **ends}


def _family(plan: Plan, regression: Regression, betas: Tensor, test: Floats) -> dict[str, list[float | None]]:
    """Compute tau along the family of metrics, second-order and exact, a value for each of its radii."""
    goals = {
        f"{t:g} {geodesic}": along(regression, betas, t, geodesic) for t in plan.family for geodesic in FAMILY_GEODESICS
    }
    return {
        name: [tau_b(climb(goal, radius, plan.steps).rise.numpy(), test) for radius in plan.family_radii]
        for name, goal in goals.items()
    }


def far_share(measure: str, regression: Regression, beta: Tensor, climbed: Climbed) -> Tensor:
    """Return the part of |z|^2 in coordinates with |b| > 1/2, (...,)."""
    square = climbed.z**2
    far = (climbed.z / objective(measure, regression, beta).lengths).abs() > FAR
    return (square * far).sum(-1) / square.sum(-1)


def truncation_error(metric: str, regression: Regression, beta: Tensor, climbed: Climbed) -> Tensor:
    """Compute |L(second order) - L(exact)| / rise where the ascent along second-order geodesics ended, (...,)."""
    second, exact = (objective(f"{metric} {geodesic}", regression, beta) for geodesic in ("second", "exact"))
    return (second.value(climbed.z) - exact.value(climbed.z)).abs() / climbed.rise


def references(regression: Regression, betas: Tensor) -> dict[str, Floats]:
    """Return quantities without a radius or an ascent, one value a network, to compare the measures with.

    The gradient norms are sharpness over radius in the limit of small radii. nearest: the solution X^+ y of least norm,
    in whose place the paper's closed forms have X'y.
    """
    gradient = regression.loss_and_gradient(betas)[1]
    nearest = torch.linalg.pinv(regression.X) @ regression.y
    found = {
        "1 / min |beta|": 1 / betas.abs().amin(-1),
        "|beta|_1": betas.abs().sum(-1),
        "inv gradient": math.sqrt(2) * (betas * gradient).norm(dim=-1),
        "mix gradient": math.sqrt(2) * gradient.norm(dim=-1),
        "|beta (beta - nearest)|": (betas * (betas - nearest)).norm(dim=-1),
        "|beta - nearest|": (betas - nearest).norm(dim=-1),
    }
    return {name: values.numpy() for name, values in found.items()}
