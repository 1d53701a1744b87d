"""Show what each measure says of the same function elsewhere on its symmetry orbit."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quotient_manifolds.cli import common
from quotient_manifolds.files import write_text
from quotient_manifolds.report import Table
from quotient_manifolds.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor, nn

    from quotient_manifolds.geometry import Geometry
    from quotient_manifolds.progress import Progress
    from quotient_manifolds.symmetries import Symmetries

SCALES = (0.01, 0.1, 1.0, 10.0, 100.0)
FIGURES = (".svg", ".pdf", ".png")
Row = dict[str, Any]


@common.command
@click.argument("model")
@click.option("--radius", type=float, default=0.3, show_default=True, help="Of the ball, in the metric's norm.")
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Of ascent.")
@click.option("--scale", "scales", type=float, multiple=True, default=SCALES, show_default=True, help="Of the move.")
@common.inputs_option
@common.symmetries_option
@click.option("--out", type=click.Path(path_type=Path), help="Write the measurements to this JSON file.")
@click.option("--figure", type=click.Path(path_type=Path), help="Draw the ratios into this .svg, .pdf or .png.")
@common.run_options
def orbit(
    model: str,
    radius: float,
    steps: int,
    scales: tuple[float, ...],
    inputs: str | None,
    symmetries: str | None,
    out: Path | None,
    figure: Path | None,
    seed: int,
    device: torch.device,
    quiet: bool,
) -> None:
    """Measure the sharpness of MODEL before and after moving it along its symmetry orbit.

    MODEL is a Hugging Face directory, an adapter of peft, or package.module:function. Each head's pairs are acted on by
    A = SCALE times a Gaussian matrix, biases, gains and all other symmetries by random numbers, which changes no
    output. The loss is the mean squared distance of the output, on example inputs, from fixed Gaussian targets; it is
    measured in float32 and in float64. Inputs are made from the model's configuration; a model without one needs
    --inputs.

    The file of --out is JSON with `rows`: precision, measure, scale (null: the model itself), value, and its ratio to
    that of the model itself.
    """
    for file in (out, figure):
        common.check_output(file, model)
    if figure is not None and figure.suffix not in FIGURES:
        raise common.BadInput(f"A figure must be {', '.join(FIGURES)}. Found {figure.name!r}.")
    from quotient_manifolds.cli.subject import inputs_for, symmetries_of
    from quotient_manifolds.geometry import Adaptive, Quotient
    from quotient_manifolds.load import load_model

    network = load_model(model).to(device=device)
    with inputs_for(network, inputs, seed=seed) as given:
        found = symmetries_of(network, given, symmetries)
        if not found.moved:
            raise common.BadInput(f"{model} has no symmetry, so there is no orbit to move along (see `inspect`).")
        batch = distance_batch(network, like(given, next(network.parameters())), seed)
    found = found.beside([name for name, w in network.named_parameters() if not w.requires_grad])
    quotiented: Any = found if symmetries else "all"
    geometries = (Adaptive(), Quotient("inv", symmetries=quotiented), Quotient("mix", symmetries=quotiented))
    ascent = {"radius": radius, "steps": steps, "seed": seed}
    with common.progress_bars(quiet=quiet) as progress:
        rows = list(along_orbit(network, found, geometries, batch, scales, ascent=ascent, progress=progress))
    moved = [row for row in rows if row["scale"] is not None]
    if out is not None:
        record = {"model": model, "version": VERSION, "command": common.command_line(), **ascent, "rows": rows}
        write_text(out, json.dumps(record, indent=1) + "\n")
    if figure is not None:
        from quotient_manifolds.plots import orbit_figure

        lines: dict[str, list[float | None]] = {}
        for row in moved:
            lines.setdefault(f"{row['measure']}, {row['precision']}", []).append(row["ratio"])
        orbit_figure(scales, lines).save(figure)
    if not quiet:
        common.Terminal().show(_table(f"{model}: sharpness after / before, radius {radius:g}", moved))


def along_orbit(
    model: nn.Module,
    symmetries: Symmetries,
    geometries: Sequence[Geometry],
    batch: Any,
    scales: Sequence[float],
    *,
    ascent: dict[str, Any],
    progress: Progress,
) -> Iterator[Row]:
    """Yield the sharpness of a model and of its moves by A = scale x Gaussian per head, in float32 and in float64.

    On copies; A is drawn anew for every scale. [paper, ICML version, Sec. 6.2]
    Raises ValueError if a sharpness to compare with is not positive.
    """
    from quotient_manifolds.sharpness import worst_case_sharpness
    from quotient_manifolds.symmetries import random_move

    total, done = 2 * len(geometries) * (1 + len(scales)), 0
    for precision, start in (("float32", copy.deepcopy(model).float()), ("float64", copy.deepcopy(model).double())):
        before: dict[str, float] = {}
        for index, scale in enumerate((None, *scales)):
            moved = copy.deepcopy(start)
            if scale is not None:
                there = random_move(start, symmetries, scale=scale, seed=ascent["seed"] + index - 1)
                moved.load_state_dict(there, strict=False)  # buffers stay
            here = [like(batch, next(moved.parameters()))]
            for geometry in geometries:
                value = worst_case_sharpness(moved, distance, here, geometry=geometry, **ascent).mean
                done += 1
                progress("moving along the orbit", done, total)
                if scale is None and not value > 0:
                    raise ValueError(
                        f"The loss of the model must rise within radius {ascent['radius']:g} of {geometry.name}. Found "
                        f"no rise in {precision}; choose a larger radius"
                    )
                ratio = value / before.setdefault(geometry.name, value)
                row = {"precision": precision, "measure": geometry.name, "scale": scale, "value": value}
                yield {**row, "ratio": ratio}


def _table(caption: str, moved: Sequence[Row]) -> Table:
    """Return a row for every precision and measure, a column for every scale of the move."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for each in moved:
        key = {"precision": each["precision"], "measure": each["measure"]}
        # Near 1 the distance from it tells invariance from rounding; 4 digits would hide it.
        away = each["ratio"] - 1
        near_one = f"1 {'-' if away < 0 else '+'} {abs(away):.1e}"
        row = rows.setdefault((each["precision"], each["measure"]), key)
        row[f"a = {each['scale']:g}"] = near_one if abs(away) <= 0.01 else f"{each['ratio']:.4g}"
    return Table.of("ratios", caption, list(rows.values()), words={"precision", "measure"})


# ---- a loss for a model without a head


def distance(model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
    """Return the mean squared distance of the model's first output from targets."""
    from torch.nn import functional as F

    from quotient_manifolds.symmetries.outputs import answer, floating

    inputs, targets = batch
    return F.mse_loss(floating(answer(model, inputs))[0], targets)


def distance_batch(model: nn.Module, inputs: Any, seed: int) -> tuple[Any, Tensor]:
    """Return a batch for `distance`: the inputs, and standard Gaussian targets of the shape of the output."""
    import torch

    from quotient_manifolds.symmetries.outputs import ModelOutputs

    output = ModelOutputs(model, inputs, double=False).outputs[0]
    targets = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return inputs, targets.to(output)


def like(batch: Any, parameter: Tensor) -> Any:
    """Return the batch on the device of a parameter, its floating-point tensors in the parameter's dtype."""
    from quotient_manifolds.replica import private_batch

    def moved(value: Tensor) -> Tensor:
        return value.to(parameter.device, parameter.dtype if value.is_floating_point() else value.dtype)

    return private_batch(batch, moved)
