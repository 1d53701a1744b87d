"""Show the symmetries of two models of the demonstration, in an orbit, a certificate and an alignment."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds.demo.zoo import one_thread, run_jobs
from quotient_manifolds.geometry import Adaptive, KnownSymmetries, Quotient
from quotient_manifolds.load import load_model
from quotient_manifolds.messages import Progress
from quotient_manifolds.orbit import align, loss_along_path
from quotient_manifolds.orbit.path import along_orbit
from quotient_manifolds.plots import orbit_figure, path_figure
from quotient_manifolds.report import Table
from quotient_manifolds.sharpness import SharpnessWarning, WorstCase, cross_entropy, suggest_radius
from quotient_manifolds.symmetries import find_symmetries, output_change, random_representative
from quotient_manifolds.symmetries.certificate import certify
from quotient_manifolds.symmetries.names import meaning

IMAGES = 32
SCALES = (0.1, 1.0, 10.0)  # sizes of group elements
STEPS, REFINING = 20, 20  # steps of an ascent, and of Adam on the loss along the path


@dataclass(frozen=True)
class Chapter:
    """Hold a heading, a sentence that states the result, and a figure (HTML) or a table that shows it."""

    heading: str
    sentence: str
    figure: str = ""
    table: Table | None = None


def tell(first: Path, second: Path, data: Path, workers: int, progress: Progress) -> list[Chapter]:
    """Return an orbit, a certificate and an alignment of two trained models. data: a .npz file."""
    with np.load(data, allow_pickle=False) as points:
        images, labels = (torch.from_numpy(points[name][:IMAGES]) for name in ("images", "labels"))
    batch = {"pixel_values": images.double(), "labels": labels}
    model, other = (load_model(path).double() for path in (first, second))
    jobs: list[Callable[[], Chapter]] = [partial(orbit_chapter, model, batch), partial(certificate_chapter, model)]
    jobs.append(partial(alignment_chapter, model, other, batch))
    return run_jobs(jobs, workers, "symmetries of a model", progress)


@one_thread()
def orbit_chapter(model: nn.Module, batch: dict[str, Tensor]) -> Chapter:
    """Act on a model by random elements of its symmetry group, and measure its output and its sharpness."""
    inputs, known, measures = {"pixel_values": batch["pixel_values"]}, KnownSymmetries(), []
    symmetries = find_symmetries(model, inputs)
    for geometry in (Adaptive(), Quotient("inv"), Quotient("mix")):
        # The ascent converges at half of the suggested radius.
        radius = suggest_radius(model, cross_entropy, [batch], geometry, known) / 2
        measures.append(WorstCase(geometry, radius, steps=STEPS))
    ratios: dict[str, list[float]] = {each.geometry.name: [] for each in measures}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SharpnessWarning)  # ratios need few steps
        for row in along_orbit(model, symmetries, measures, cross_entropy, batch, SCALES, known=known):
            if row["failed"]:
                raise ValueError(row["failed"])
            if row["scale"] is not None:
                ratios[row["measure"]].append(row["ratio"])
    points = (random_representative(model, symmetries, scale=scale, seed=seed) for seed, scale in enumerate(SCALES))
    output = max(output_change(model, inputs, {}, point) for point in points)
    adaptive, *invariant = ratios.values()
    change = max(abs(ratio - 1) for row in invariant for ratio in row)
    least, most = (f"{float(f'{bound(adaptive):.2g}'):g}" for bound in (min, max))  # two digits without exponent
    return Chapter(
        "The function stays, adaptive sharpness does not",
        f"Random elements of the symmetry group change the weights of one model. Its output changes by at most "
        f"{output:.0e} of its size, which is rounding. Adaptive sharpness is multiplied by {least} to {most}; inv and "
        f"mix change by at most {change:.0e}.",
        orbit_figure(SCALES, ratios).html(),
    )


@one_thread()
def certificate_chapter(model: nn.Module) -> Chapter:
    """Compare the dimension of the symmetries with the dimension of all parameters that compute the same function."""
    # Two blocks are needed: the last block has a query of one token only, and the query of the first is constant.
    certificate = certify(model, blocks=2)
    rows = [[name, meaning(name), str(size)] for name, size in certificate.found.families.items()]
    columns = ["Symmetry", "What may change", "Dimensions"]
    return Chapter(
        "Symmetries are complete" if certificate.missing == 0 else "How many symmetries are found",
        f"All weights of a small copy that compute the same function are counted: {str(certificate).splitlines()[0]}.",
        table=Table("certificate", "Dimensions by kind of symmetry", columns, rows, words=2),
    )


@one_thread()
def alignment_chapter(model: nn.Module, to: nn.Module, batch: dict[str, Tensor]) -> Chapter:
    """Align a model with one from another seed, and compare the loss along the straight path between them."""
    inputs: Any = {"pixel_values": batch["pixel_values"]}
    alignment = align(model, to, inputs, loss=cross_entropy, batches=[batch], steps=REFINING)
    before, after = (loss_along_path(each, to, cross_entropy, [batch]) for each in (model, alignment.model))
    return Chapter(
        "Two models from different seeds, aligned",
        f"Along the straight path between two trained models the loss reaches {max(before.losses):.2g}. After one of "
        f"them is moved along its orbit to the other, it reaches {max(after.losses):.2g}. Neither function changes.",
        path_figure(before.t, {"as trained": before.losses, "aligned": after.losses}).html(),
    )
