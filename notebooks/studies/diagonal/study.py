"""The study of diagonal networks, cell by cell: what is finished is kept and not computed again."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from scipy import stats
from torch import Tensor

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.files import write_text
from quotient_manifolds.progress import Progress
from quotient_manifolds.version import VERSION
from studies.diagonal.ascent import Climbed, best_corner, climb, climb_thoroughly
from studies.diagonal.measuring import (
    MEASURES,
    QUOTIENT,
    LineBound,
    far_share,
    objective,
    references,
    truncation_error,
)
from studies.diagonal.networks import Regression, Setting, draw_networks
from studies.diagonal.objectives import METRICS, Along
from studies.diagonal.records import (
    FAMILY_GEODESICS,
    FORMAT,
    MIDDLE,
    Cell,
    Check,
    Columns,
    DiagonalStudy,
    Plan,
    Values,
    family_name,
    to_json,
)

Floats = NDArray[np.float64]
Climbs = dict[str, list[Climbed]]  # by measure, one a radius, of all networks

LARGE = 0.1  # a truncation error above this part of the rise is counted
MATCHES = (("mix first", "1 / min |beta|"), ("mix second", "1 / min |beta|"), ("mix exact", "|beta|_1"))
SHOWN = (1, 0, 0.1)  # place of the setting, seed and radius whose networks are kept one by one


@one_thread()
def run_diagonal(out: Path, plan: Plan, *, command: str = "", progress: Progress | None = None) -> DiagonalStudy:
    """Return all cells of the plan; those that OUT/cells holds from an earlier run of the same plan are read."""
    folder = out / "cells"
    folder.mkdir(parents=True, exist_ok=True)
    places = [(setting, seed) for seed in range(plan.seeds) for setting in plan.settings]
    cells = []
    for done, (setting, seed) in enumerate(places):
        if progress is not None:
            progress("cells", done, len(places))
        cells.append(_kept_or_measured(folder, plan, setting, seed))
    if progress is not None:
        progress("cells", len(places), len(places))
    cells.sort(key=lambda cell: plan.settings.index(cell.setting))  # stable: by seed within a setting
    return DiagonalStudy(plan, tuple(cells), command, VERSION)


def run(out: Path, *, fast: bool, command: str, progress: Progress) -> DiagonalStudy:
    """Take all measures and write OUT/diagonal.json; OUT/cells has a file for each cell, from which a run continues."""
    found = run_diagonal(out, Plan.fast() if fast else Plan(), command=command, progress=progress)
    found.save(out / "diagonal.json")
    return found


def load(folder: Path) -> DiagonalStudy:
    """Read the record in a folder."""
    return DiagonalStudy.load(folder / "diagonal.json")


def _kept_or_measured(folder: Path, plan: Plan, setting: Setting, seed: int) -> Cell:
    scales, rates = ("-".join(f"{end:g}" for end in ends) for ends in (setting.scales, setting.rates))
    file = folder / f"n{setting.points}_scales{scales}_rates{rates}_seed{seed}.json"
    identity = json.loads(to_json({"format": FORMAT, **asdict(plan), "seeds": seed}))  # more seeds: the same cells
    if file.exists():
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["identity"] == identity:
            return TypeAdapter(Cell).validate_python(kept["cell"])
    text = to_json({"identity": identity, "cell": asdict(measure_cell(plan, setting, seed))})
    write_text(file, text)
    return TypeAdapter(Cell).validate_python(json.loads(text)["cell"])


def measure_cell(plan: Plan, setting: Setting, seed: int) -> Cell:
    """Draw data and networks, and take all measures, of one setting with one seed."""
    started = time.perf_counter()
    place = plan.settings.index(setting)
    radii = plan.profile if place < plan.profiled else plan.radii
    generator = torch.Generator().manual_seed(seed)
    regression = Regression.draw(setting.points, generator)
    u, v, drawing = draw_networks(regression, setting, generator, networks=plan.networks)
    betas = u * v
    train, test = regression.loss(betas), regression.test_loss(betas).numpy()
    climbs = {
        measure: [climb(objective(measure, regression, betas), radius, plan.steps) for radius in radii]
        for measure in MEASURES
    }
    rises = {measure: np.stack([found.rise.numpy() for found in rows]) for measure, rows in climbs.items()}
    line = LineBound(regression)
    endless = np.array([[line.at(beta, radius) for beta in betas] for radius in radii])
    again = partial(_thorough, plan, regression, betas, radii, rises, endless, test)
    checks = again(tuple(rises), plan.radii) if seed < plan.thorough else {}
    middle = {measure: check for measure, (check,) in again(MIDDLE, (plan.middle,)).items()}
    far, truncation, truncated = _mechanism(regression, betas, climbs)
    known = references(regression, betas)
    cornered = _cornered(regression, betas, radii, rises)
    shown = (place, seed) == SHOWN[:2] and SHOWN[2] in radii
    return Cell(
        setting,
        seed,
        drawing,
        (float(train.min()), float(train.max())),
        (float(test.min()), float(np.median(test)), float(test.max())),
        float(betas.abs().amin(-1).quantile(0.5)),
        radii,
        taus={measure: _taus(rows, test) for measure, rows in {**rises, "mix endless": endless}.items()},
        family=_family(plan, regression, betas, test),
        cornered={measure: _taus(rows, test) for measure, rows in cornered.items()},
        rises={measure: tuple(np.median(rows, axis=1).tolist()) for measure, rows in rises.items()},
        references={name: tau_b(values, test) for name, values in known.items()},
        matches={f"{measure}, {name}": _taus(rises[measure], known[name]) for measure, name in MATCHES},
        far=far,
        truncation=truncation,
        truncated=truncated,
        agreement={metric: _agreement(rises, metric) for metric in METRICS},
        checks=checks,
        middle=middle,
        points=_points(rises, radii, test) if shown else {},
        seconds=time.perf_counter() - started,
    )


def tau_b(a: Floats, b: Floats) -> float | None:
    """Return Kendall's tau-b; None where one of them is constant."""
    value = float(stats.kendalltau(a, b).statistic)
    return None if np.isnan(value) else value


def _taus(rows: Floats, test: Floats) -> Values:
    return tuple(tau_b(row, test) for row in rows)


def _family(plan: Plan, regression: Regression, betas: Tensor, test: Floats) -> Columns:
    """Compute tau along the family of metrics, second-order and exact, a value for each of its radii."""
    found: Columns = {}
    for t in plan.family:
        for geodesic in FAMILY_GEODESICS:
            goal = Along.of(regression, betas, t, geodesic)
            rises = [climb(goal, radius, plan.steps).rise.numpy() for radius in plan.family_radii]
            found[family_name(t, geodesic)] = tuple(tau_b(rise, test) for rise in rises)
    return found


def _thorough(
    plan: Plan,
    regression: Regression,
    betas: Tensor,
    radii: tuple[float, ...],
    rises: dict[str, Floats],
    endless: Floats,
    test: Floats,
    measures: tuple[str, ...],
    chosen: tuple[float, ...],
) -> dict[str, tuple[Check, ...]]:
    """Take measures once more, at chosen radii, by the thorough ascent; never below what the plain one found."""
    generator = torch.Generator().manual_seed(0)
    checks: dict[str, list[Check]] = {measure: [] for measure in measures}
    for radius in chosen:
        place = radii.index(radius)
        for measure in measures:
            goal, rows = objective(measure, regression, betas), rises[measure]
            again = climb_thoroughly(goal, radius, plan.thorough_steps, plan.thorough_restarts, generator)
            best = np.maximum(again.rise.numpy(), rows[place])
            bound = _middle_and_least(best / endless[place]) if measure == "mix exact" else None
            checks[measure].append(Check(tau_b(best, test), _middle_and_least(rows[place] / best), bound))
    return {measure: tuple(found) for measure, found in checks.items()}


def _middle_and_least(ratios: Floats) -> tuple[float, float]:
    return float(np.median(ratios)), float(ratios.min())


def _cornered(
    regression: Regression, betas: Tensor, radii: tuple[float, ...], rises: dict[str, Floats]
) -> dict[str, Floats]:
    """Return the measures, with the best single coordinate where that rises more than the ascent found."""
    return {
        measure: np.stack(
            [
                np.maximum(row, best_corner(objective(measure, regression, betas), radius).rise.numpy())
                for row, radius in zip(rows, radii, strict=True)
            ]
        )
        for measure, rows in rises.items()
    }


def _mechanism(regression: Regression, betas: Tensor, climbs: Climbs) -> tuple[Columns, Columns, Columns]:
    """Return far shares by measure and truncation errors by metric, medians over networks, and how many are large."""
    far: Columns = {
        measure: tuple(float(far_share(measure, regression, betas, found).quantile(0.5)) for found in climbs[measure])
        for measure in QUOTIENT
    }
    errors = {
        metric: [truncation_error(metric, regression, betas, found) for found in climbs[f"{metric} second"]]
        for metric in METRICS
    }
    truncation: Columns = {metric: tuple(float(e.quantile(0.5)) for e in rows) for metric, rows in errors.items()}
    truncated: Columns = {
        metric: tuple(float((e > LARGE).double().mean()) for e in rows) for metric, rows in errors.items()
    }
    return far, truncation, truncated


def _agreement(rises: dict[str, Floats], metric: str) -> Values:
    """Compute tau-b between second-order and exact sharpness, a value a radius."""
    return tuple(tau_b(a, b) for a, b in zip(rises[f"{metric} second"], rises[f"{metric} exact"], strict=True))


def _points(rises: dict[str, Floats], radii: tuple[float, ...], test: Floats) -> dict[str, tuple[float, ...]]:
    place = radii.index(SHOWN[2])
    return {"test loss": tuple(test.tolist()), **{name: tuple(rows[place].tolist()) for name, rows in rises.items()}}
