"""How much of the loss's rise two ascents find at equal passes: the matched one and the one released for weights.

Networks on scikit-learn's digits, the balls of Euclidean and adaptive sharpness in l2 and linf, at the smallest and the
largest radius that Andriushchenko et al. (arXiv 2302.07011) publish for vision transformers. An iteration of the
released ascent takes two forward passes and one backward, one of the matched ascent a forward and a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from scipy import stats
from torch import nn

from quotient_manifolds.demo.zoo import Digits, draw_recipe, load_digits, one_thread, train
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry
from quotient_manifolds.progress import Progress
from quotient_manifolds.report import Table
from quotient_manifolds.sharpness import Result, cross_entropy, legacy_sharpness, worst_case_sharpness
from quotient_manifolds.version import VERSION
from studies.common import Saves, numbers

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


@final
@dataclass(frozen=True)
class Case:
    """Hold one network in one ball on one batch: the loss, and the rise that each ascent finds.

    norm: of the released ascent's best point, in units of the radius; above 1 where a zero weight turns its projection
    off.
    """

    network: str
    geometry: str
    radius: float
    loss: float
    matched: float
    released: float
    released_norm: float

    @property
    def ratio(self) -> float:
        """Return released over matched."""
        return self.released / self.matched


@final
@dataclass(frozen=True)
class Ascents(Saves):
    """Hold all cases."""

    cases: tuple[Case, ...]
    passes: tuple[int, int]  # forward and backward together, of the matched and the released ascent
    command: str
    version: str

    def median_ratio(self, geometry: str | None = None) -> tuple[float, float, float]:
        """Return the median of released over matched (in a geometry), with a bootstrap interval (95 %)."""
        ratios = np.array([case.ratio for case in self.cases if geometry in (None, case.geometry)])
        found = stats.bootstrap((ratios,), np.median, rng=np.random.default_rng(0), method="percentile")
        low, high = found.confidence_interval
        return float(np.median(ratios)), float(low), float(high)


@one_thread()
def run(out: Path, *, fast: bool, command: str, progress: Progress) -> Ascents:
    """Measure every network in every ball and write OUT/ascents.json; `fast`: two networks, hardly trained."""
    digits = load_digits(train_points=TRAIN_POINTS)
    images, labels = digits.train_images[:BATCH_SIZE].double(), digits.train_labels[:BATCH_SIZE]
    batch = {"pixel_values": images, "labels": labels}
    networks = dict(_networks(digits, 5 if fast else TRAINING_STEPS))
    chosen = dict(list(networks.items())[:2]) if fast else networks
    balls = [(geometry, radius) for geometry, radii in RADII.items() for radius in radii]
    cases: list[Case] = []
    passes = (0, 0)
    for name, make in chosen.items():
        model = make().double().eval()
        for geometry, radius in balls:
            progress("ascents", len(cases), len(chosen) * len(balls))
            case, passes = _case(name, model, batch, geometry, radius)
            cases.append(case)
    progress("ascents", len(cases), len(cases))
    found = Ascents(tuple(cases), passes, command, VERSION)
    found.save(out / "ascents.json")
    return found


def load(folder: Path) -> Ascents:
    """Read the record in a folder."""
    return Ascents.load(folder / "ascents.json")


def _case(
    name: str, model: nn.Module, batch: dict[str, torch.Tensor], geometry: Geometry, radius: float
) -> tuple[Case, tuple[int, int]]:
    shared: dict[str, Any] = {"geometry": geometry, "radius": radius}
    matched = worst_case_sharpness(model, cross_entropy, [batch], steps=MATCHED_STEPS, **shared)
    released = legacy_sharpness(model, cross_entropy, [batch], steps=RELEASED_STEPS, **shared)
    case = Case(
        network=name,
        geometry=geometry.name,
        radius=radius,
        loss=matched.base_losses[0],
        matched=matched.mean,
        released=released.mean,
        released_norm=(released.norms[0] or 0.0) / radius,
    )
    return case, (_passes(matched), _passes(released))


def _passes(found: Result) -> int:
    return found.forward_passes + found.backward_passes


def _networks(digits: Digits, steps: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield each network by name, trained when it is called for."""

    def fitted(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: _fit(layers, digits, steps)

    def linear(rows: int, columns: int) -> Callable[[], nn.Module]:
        return lambda: nn.Linear(rows, columns)

    yield "softmax regression", fitted(nn.Flatten, linear(64, 10))
    yield "tanh network", fitted(nn.Flatten, linear(64, 32), nn.Tanh, linear(32, 32), nn.Tanh, linear(32, 10))
    yield "ReLU network", fitted(nn.Flatten, linear(64, 64), nn.ReLU, linear(64, 64), nn.ReLU, linear(64, 10))
    yield (
        "convolutional network",
        fitted(lambda: nn.Conv2d(1, 8, 3), nn.ReLU, lambda: nn.Conv2d(8, 16, 3), nn.ReLU, nn.Flatten, linear(256, 10)),
    )
    yield "vision transformer", lambda: train(draw_recipe(0, steps=2 * steps), digits.train_images, digits.train_labels)


def _fit(layers: tuple[Callable[[], nn.Module], ...], digits: Digits, steps: int) -> nn.Module:
    """Train by Adam on all training images at once; torch's global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(*(make() for make in layers))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(network(digits.train_images), digits.train_labels).backward()
        optimizer.step()
    return _OnPixels(network)


@final
class _OnPixels(nn.Module):
    """Wrap a network so that it takes the keyword of image classifiers."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network(pixel_values)
        return logits


def tables(found: Ascents) -> list[Table]:
    """Return the medians of released over matched by ball, and a row for each case."""
    ratios = []
    for geometry in dict.fromkeys(case.geometry for case in found.cases):
        median, low, high = found.median_ratio(geometry)
        own = [case.ratio for case in found.cases if case.geometry == geometry]
        less, more = sum(ratio < 0.99 for ratio in own), sum(ratio > 1.01 for ratio in own)
        ratios.append([geometry, f"{median:.3f} [{low:.3f}, {high:.3f}]", f"{less} of {len(own)}", str(more)])
    cases = [
        [
            *(case.network, case.geometry, f"{case.radius:g}", f"{case.loss:.3g}"),
            *(f"{case.matched:.4g}", f"{case.released:.4g}", f"{case.ratio:.3f}", f"{case.released_norm:.3f}"),
        ]
        for case in found.cases
    ]
    columns = ["Network", "Ball", "Radius", "Loss", "Matched", "Released", "Released / matched", "Norm / radius"]
    counts = ["Over 1 % less", "Over 1 % more"]
    return [
        numbers("ratios", "", ["Ball", "Released / matched, median", *counts], ratios),
        numbers("cases", "", columns, cases, words=2),
    ]
