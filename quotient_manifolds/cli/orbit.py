"""Act on a model by its symmetries: write the same function elsewhere on its orbit, or measure it there."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quotient_manifolds.cli import common
from quotient_manifolds.files import check_file, check_new, write_text
from quotient_manifolds.messages import without_advice
from quotient_manifolds.report import Table
from quotient_manifolds.version import VERSION

if TYPE_CHECKING:
    import torch
NOTHING = {"value": None, "ratio": None}  # of a point that cannot be measured


@common.command
@click.argument("model")
@click.option("--radius", type=float, help="Radius of the balls.  [default: one suggested for each geometry]")
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Steps of an ascent.")
@click.option(
    "--scale",
    "scales",
    type=click.FloatRange(min=0, min_open=True),
    multiple=True,
    default=(0.01, 0.1, 1.0, 10.0, 100.0),
    show_default=True,
    help="Scale of the group elements; may be given several times.",
)
@common.inputs_option
@common.symmetries_option
@click.option("--out", type=click.Path(path_type=Path), help="Write the measurements to this JSON file.")
@common.figure_option
@common.run_options
def orbit(
    model: str,
    radius: float | None,
    steps: int,
    scales: tuple[float, ...],
    inputs: str | None,
    symmetries: str | None,
    out: Path | None,
    figure: Path | None,
    seed: int,
    device: torch.device,
) -> None:
    """Measure the sharpness of MODEL at random points of its symmetry orbit.

    MODEL is a Hugging Face directory, an adapter of peft, or package.module:function. A random group element, which
    changes no output, acts on it: on the pairs of each head by A = SCALE times a Gaussian matrix, on biases, gains and
    all others by random numbers. The loss is the mean squared distance of the output, on example inputs, from fixed
    Gaussian targets; it is computed in float32 and in float64. Inputs are made from the model's configuration; a model
    without one needs --inputs.

    The file of --out is JSON with `rows`: precision, measure, scale (null: the model itself), value, and its ratio to
    that of the model itself. If a point cannot be measured, these are null and `failed` says why; the figure leaves it
    out.

    The exit code is 1 if a point could not be measured; the others are measured nevertheless.
    """
    for file in filter(None, (out, figure)):
        check_file(file, model)
    from quotient_manifolds.cli.subject import distance, distance_batch, inputs_of, symmetries_of
    from quotient_manifolds.geometry import Adaptive, KnownSymmetries, Quotient
    from quotient_manifolds.load import load_model
    from quotient_manifolds.orbit.path import along_orbit, attempted
    from quotient_manifolds.sharpness import WorstCase, suggest_radius

    network = load_model(model).to(device=device)
    given = inputs_of(network, inputs, seed=seed)
    found = symmetries_of(network, symmetries, given)
    found = found.beside([name for name, w in network.named_parameters() if not w.requires_grad])
    batch, known = distance_batch(network, given, seed), KnownSymmetries()
    quotiented: Any = found if symmetries else "all"
    measures, lost, rows = list[WorstCase](), list[dict[str, Any]](), list[dict[str, Any]]()
    for each in (Adaptive(), Quotient("inv", symmetries=quotiented), Quotient("mix", symmetries=quotiented)):
        suggested = partial(suggest_radius, network, distance, [batch], each, known)
        size, why = attempted(suggested) if radius is None else (radius, "")
        if size is None:
            lost += [{"measure": each.name, "scale": scale, **NOTHING, "failed": why} for scale in (None, *scales)]
        else:
            measures.append(WorstCase(each, size, steps=steps, seed=seed))
    with common.progress_bars() as progress, common.findings_alone():
        for precision, start in (("float32", copy.deepcopy(network).float()), ("float64", network.double())):
            for row in chain(
                along_orbit(start, found, measures, distance, batch, scales, seed=seed, known=known), lost
            ):
                rows.append({"precision": precision, **row, "failed": without_advice(row["failed"])})
                progress("moving along the orbit", len(rows), 2 * 3 * (1 + len(scales)))
    if all(row["failed"] for row in rows):
        raise ValueError(rows[0]["failed"])
    lines: dict[str, list[float | None]] = {}
    for row in rows:
        if row["scale"] is not None:
            lines.setdefault(_line(row), []).append(row["ratio"])
    radii = {each.geometry.name: each.radius for each in measures}
    if out is not None:
        record = {"model": model, "version": VERSION, "command": common.command_line(), "radius": radii}
        write_text(out, json.dumps(record | {"steps": steps, "seed": seed, "rows": rows}, indent=1) + "\n")
    if figure is not None:
        from quotient_manifolds.plots import orbit_figure

        orbit_figure(scales, lines).save(figure)
    cells = [
        [name, *("failed" if ratio is None else f"{ratio - 1:+.1e}" for ratio in ratios)]
        for name, ratios in lines.items()
    ]
    listed = ", ".join(f"{name} at radius {size:g}" for name, size in radii.items())
    caption = f"{model}: relative change of sharpness, {listed}"
    common.show(Table("changes", caption, ["measure", *(f"a = {scale:g}" for scale in scales)], cells))
    common.say_failures(_failures(rows))


def _line(row: Mapping[str, Any]) -> str:
    return f"{row['measure']}, {row['precision']}"


def _failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence on all points of one measure that cannot be measured for one reason."""
    places: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["failed"]:
            at = "the model itself" if row["scale"] is None else f"a = {row['scale']:g}"
            places.setdefault((_line(row), row["failed"]), []).append(at)
    return [f"{', '.join([line, *at])}: {why}" for (line, why), at in places.items()]


@common.command
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--balance", "balanced", is_flag=True, help="Write the canonical representative, not a random one.")
@click.option(
    "--scale",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Scale of the random group element.",
)
@common.seed_option
@common.more_inputs
@common.symmetries_option
@common.quiet_option
def move(
    source: str,
    target: Path,
    balanced: bool,
    scale: float,
    seed: int,
    inputs: tuple[str, ...],
    symmetries: str | None,
) -> None:
    """Transform the Hugging Face model in IN by a random group element, and write it to the new directory OUT.

    The weights change, but not their dtype. The function stays the same up to rounding on the inputs tried: text,
    images or sound made from the model's configuration, with and without its optional inputs (token types, padding,
    masked patches), and --inputs. Symmetries that may matter to parameters which none of these inputs reached (experts,
    heads) are left out. The model written is loaded again and compared on other example inputs before OUT appears.
    Other files in IN, such as a tokenizer, are copied.
    """
    check_new(target, source)
    from quotient_manifolds.cli.subject import all_inputs, load_directory, symmetries_of, write_moved
    from quotient_manifolds.symmetries import balance, random_representative, verify_symmetries

    network = load_directory(source)
    given = all_inputs(network, inputs, seed=seed)
    with common.progress_bars() as progress:
        progress("symmetries found", 0, 1)
        found = symmetries_of(network, symmetries, *given.values())
        progress("symmetries found", 1, 1)
        progress("verified", 0, 1)
        holding = verify_symmetries(network, next(iter(given.values())), found, seed=seed).holding(found)
        progress("verified", 1, 1)
        if not holding.moved:
            raise ValueError(f"{source} must have a symmetry that holds. Found none; `inspect` says why.")
        progress("moved and compared", 0, 1)
        params = {name: w.detach().double() for name, w in network.named_parameters()}
        moved = balance(params, holding) if balanced else random_representative(params, holding, scale=scale, seed=seed)
        change = write_moved(network, moved, given, source, target, seed=seed + 1)
        progress("moved and compared", 1, 1)
    common.show(
        f"{target}: {len(holding.pairs)} pairs and {len(holding.reparameterizations)} reparameterizations transformed; "
        f"the output changed by {change:.1e} of its size."
    )
