"""Show on the models of the demonstration what the package does, in three figures, each of a few seconds."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds.demo.zoo import each_finished, one_thread
from quotient_manifolds.geometry import Adaptive, Geometry, KnownSymmetries, Quotient
from quotient_manifolds.load import load_model
from quotient_manifolds.messages import Progress
from quotient_manifolds.orbit import align, loss_along_path
from quotient_manifolds.plots import orbit_figure, path_figure
from quotient_manifolds.report import Table
from quotient_manifolds.sharpness import WorstCase, cross_entropy, suggest_radius
from quotient_manifolds.symmetries import find_symmetries, random_representative
from quotient_manifolds.symmetries.certificate import certify
from quotient_manifolds.symmetries.wires.labels import meaning

IMAGES = 32
SCALES = (0.1, 1.0, 10.0)  # of the group elements
STEPS, REFINING = 20, 20  # of ascent; of Adam on the loss along the path


@dataclass(frozen=True)
class Chapter:
    """Hold a heading, a sentence that states what was found, and a figure (HTML) or a table that shows it."""

    heading: str
    sentence: str
    figure: str = ""
    table: Table | None = None


def tell(first: Path, second: Path, data: Path, workers: int, progress: Progress) -> list[Chapter]:
    """Return what is shown of two trained models: an orbit, a certificate, an alignment. data: an npz file."""
    with np.load(data, allow_pickle=False) as points:
        images, labels = (torch.from_numpy(points[name][:IMAGES]) for name in ("images", "labels"))
    batch = {"pixel_values": images.double(), "labels": labels}
    one, other = (load_model(path).double() for path in (first, second))
    jobs = [partial(orbit_chapter, one, batch), partial(certificate_chapter, one)]
    jobs.append(partial(alignment_chapter, one, other, batch))
    told: list[Chapter] = []
    progress("symmetries of a model", 0, len(jobs))
    for chapter in each_finished(jobs, workers):
        told.append(chapter)
        progress("symmetries of a model", len(told), len(jobs))
    return told


@one_thread()
def orbit_chapter(model: nn.Module, batch: dict[str, Tensor]) -> Chapter:
    """Act on a model by random elements of its symmetry group, and measure its output and its sharpness."""
    inputs = {"pixel_values": batch["pixel_values"]}
    symmetries = find_symmetries(model, inputs)
    geometries: tuple[Geometry, ...] = (Adaptive(), Quotient("inv"), Quotient("mix"))
    known = KnownSymmetries()
    # Half of what is suggested, where the ascent converges
    radii = [suggest_radius(model, cross_entropy, [batch], each, known) / 2 for each in geometries]

    def sharpness(at: nn.Module, known: KnownSymmetries) -> list[float]:
        settings = zip(geometries, radii, strict=True)
        return [WorstCase(g, r, steps=STEPS).of(at, cross_entropy, [batch], known).mean for g, r in settings]

    before, output, changes = sharpness(model, known), _logits(model, inputs), []
    ratios: dict[str, list[float]] = {each.name: [] for each in geometries}
    for seed, scale in enumerate(SCALES):
        moved = copy.deepcopy(model)
        moved.load_state_dict(random_representative(model, symmetries, scale=scale, seed=seed), strict=False)
        changes.append(float((_logits(moved, inputs) - output).norm() / output.norm()))
        for each, here, there in zip(geometries, before, sharpness(moved, KnownSymmetries()), strict=True):
            ratios[each.name].append(there / here)
    adaptive, *invariant = ratios.values()
    change = max(abs(ratio - 1) for row in invariant for ratio in row)
    return Chapter(
        "The function stays, adaptive sharpness does not",
        f"Random elements of the symmetry group change the weights of one model. Its output changes by at most "
        f"{max(changes):.0e} of its size, which is rounding. Adaptive sharpness is multiplied by "
        f"{_two_digits(min(adaptive))} to {_two_digits(max(adaptive))}; inv and mix change by at most {change:.0e}.",
        orbit_figure(SCALES, ratios).html(),
    )


@one_thread()
def certificate_chapter(model: nn.Module) -> Chapter:
    """Count how many dimensions of all parameters with the same function are found."""
    found = certify(model, blocks=2)  # in the last block the query is that of one token, in the first a constant
    dimension, known = found.fibre.dimension, found.found.dimension - found.shared + found.unreached
    share = "all" if known == dimension else known
    said = "; the check is inconclusive" if found.missing is None else f", of which {share} are found"
    rows = [[name, meaning(name), str(size)] for name, size in found.found.families.items()]
    columns = ["Symmetry", "What may change", "Dimensions"]
    return Chapter(
        "Symmetries are complete" if found.missing == 0 else "How many symmetries are found",
        f"The weights of a small copy of the model that compute the same function form a set of dimension {dimension}"
        f"{said}.",
        table=Table("certificate", "Dimensions by kind of symmetry", columns, rows, words=2),
    )


@one_thread()
def alignment_chapter(model: nn.Module, to: nn.Module, batch: dict[str, Tensor]) -> Chapter:
    """Align a model with one of another seed, and compare the loss along the straight path between them."""
    inputs: Any = {"pixel_values": batch["pixel_values"]}
    found = align(model, to, inputs, loss=cross_entropy, batches=[batch], steps=REFINING)
    moved = copy.deepcopy(model)
    moved.load_state_dict(found.params, strict=False)
    before, after = (loss_along_path(each, to, cross_entropy, [batch]) for each in (model, moved))
    return Chapter(
        "Two models from different seeds, aligned",
        f"Along the straight path between two trained models the loss reaches {max(before.losses):.2g}. After one of "
        f"them is moved along its orbit to the other, it reaches {max(after.losses):.2g}. Neither function changes.",
        path_figure(before.t, {"as trained": before.losses, "aligned": after.losses}).html(),
    )


def _logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(**inputs).logits
    return logits


def _two_digits(value: float) -> str:
    """Return a number to two digits, without a power of ten where it is below a million."""
    return f"{float(f'{value:.2g}'):g}"
