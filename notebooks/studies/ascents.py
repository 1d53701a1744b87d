"""How much of the increase in loss two ascents find at equal passes: the matched and the released one.

Networks on scikit-learn's digits, the balls of Euclidean and adaptive sharpness in l2 and linf, at the smallest and the
largest radius that Andriushchenko et al. (arXiv 2302.07011) publish for vision transformers. An iteration of the
released ascent takes two forward passes and one backward, one of the matched ascent a forward and a backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor, nn

from quotient_manifolds.demo.zoo import Points, draw_recipe, load_digits, one_thread, train
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry
from quotient_manifolds.messages import Progress
from quotient_manifolds.sharpness import AutoPGD, cross_entropy, legacy_sharpness, worst_case_sharpness
from studies.common import Record, Tables

RADII: dict[Geometry, tuple[float, float]] = {
    Euclidean(): (0.025, 0.2),
    Adaptive(): (0.5, 4.0),
    Euclidean(norm="linf"): (1e-5, 8e-5),
    Adaptive(norm="linf"): (5e-4, 4e-3),
}
RELEASED_STEPS = 20  # 40 forward passes and 20 backward
MATCHED_STEPS = 29  # 30 forward passes and 29 backward: 59 of the released one's 60 passes
TRAINING_STEPS = 200
TRAIN_POINTS, BATCH_SIZE = 300, 128
LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "softmax regression": lambda: [nn.Flatten(), nn.Linear(64, 10)],
    "tanh network": lambda: [
        *(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
    ],
    "ReLU network": lambda: [
        *(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    ],
    "convolutional network": lambda: [
        *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
    ],
}


@one_thread()
def run(out: Path, *, fast: bool, progress: Progress) -> Record:
    """Measure every network in every ball; `fast`: one network, hardly trained."""
    (points, _), steps = load_digits(TRAIN_POINTS), 5 if fast else TRAINING_STEPS
    networks: dict[str, Callable[[], nn.Module]] = {name: partial(_fit, name, points, steps) for name in LAYERS}
    recipe = draw_recipe(0, steps=2 * steps)
    networks["vision transformer"] = partial(train, recipe, *points)
    batch = points[0][:BATCH_SIZE].double(), points[1][:BATCH_SIZE]
    names = list(networks)[:1] if fast else list(networks)
    cases: list[Record] = []
    for place, name in enumerate(names):
        progress("networks", place, len(names))
        model = networks[name]().double().eval()
        balls = [(geometry, radius) for geometry, radii in RADII.items() for radius in radii]
        cases += [{"network": name, **_case(model, batch, *ball)} for ball in balls]
    return {"cases": cases}


def _case(model: nn.Module, batch: tuple[Tensor, Tensor], geometry: Geometry, radius: float) -> Record:
    """Return the increases that both ascents find in one ball, and the passes of both, forward and backward.

    released_norm: of the released ascent's best point, in units of the radius; above 1 where a zero weight turns its
    projection off.
    """
    shared: dict[str, Any] = {"geometry": geometry, "radius": radius}
    matched = worst_case_sharpness(model, cross_entropy, [batch], steps=MATCHED_STEPS, ascent=AutoPGD, **shared)
    released = legacy_sharpness(model, cross_entropy, [batch], steps=RELEASED_STEPS, **shared)
    return {
        "geometry": geometry.name,
        "radius": radius,
        "loss": matched.batches[0].base_loss,
        "matched": matched.mean,
        "released": released.mean,
        "released_norm": (released.batches[0].norm or 0.0) / radius,
        "passes": [found.forward_passes + found.backward_passes for found in (matched, released)],
    }


def _fit(name: str, points: Points, steps: int) -> nn.Module:
    """Train by Adam on all training images at once; torch's global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(*LAYERS[name]())
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(network(points[0]), points[1]).backward()
        optimizer.step()
    return network


def median_ratio(cases: pd.DataFrame) -> tuple[float, float, float]:
    """Return the median of released over matched, with a bootstrap interval (95 %)."""
    ratios = (cases.released / cases.matched).to_numpy()
    found = stats.bootstrap((ratios,), np.median, rng=np.random.default_rng(0), method="percentile")
    return float(np.median(ratios)), *map(float, found.confidence_interval)  # type: ignore[return-value]


def tables(record: Record) -> Tables:
    """Return the medians of released over matched by ball, and a row for each case."""
    cases = pd.DataFrame(record["cases"])
    ratios = []
    for geometry, own in cases.groupby("geometry", sort=False):
        median, low, high = median_ratio(own)
        less, more = (own.released < 0.99 * own.matched).sum(), (own.released > 1.01 * own.matched).sum()
        ratios.append([geometry, f"{median:.3f} [{low:.3f}, {high:.3f}]", f"{less} of {len(own)}", more])
    return {
        "ratios": pd.DataFrame(
            ratios, columns=["Ball", "Released / matched, median", "Over 1 % less", "Over 1 % more"]
        ),
        "cases": cases.assign(ratio=cases.released / cases.matched),
    }
