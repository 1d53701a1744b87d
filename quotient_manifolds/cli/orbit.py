"""Act on a model by its symmetries: write the same function elsewhere on its orbit, or measure it there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quotient_manifolds.cli import common
from quotient_manifolds.files import write_text
from quotient_manifolds.report import Table
from quotient_manifolds.version import VERSION

if TYPE_CHECKING:
    import torch


SCALES = (0.01, 0.1, 1.0, 10.0, 100.0)
FIGURES = (".svg", ".pdf", ".png")


@common.command
@click.argument("model")
@click.option("--radius", type=float, help="Radius of the balls.  [default: one suggested for each geometry]")
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Steps of an ascent.")
@click.option(
    "--scale",
    "scales",
    type=float,
    multiple=True,
    default=SCALES,
    show_default=True,
    help="Scale of the group elements; may be given several times.",
)
@common.inputs_option
@common.symmetries_option
@click.option("--out", type=click.Path(path_type=Path), help="Write the measurements to this JSON file.")
@click.option("--figure", type=click.Path(path_type=Path), help="Draw the ratios into this .svg, .pdf or .png.")
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
    quiet: bool,
) -> None:
    """Measure the sharpness of MODEL at random points of its symmetry orbit.

    MODEL is a Hugging Face directory, an adapter of peft, or package.module:function. A random group element, which
    changes no output, acts on it: on the pairs of each head by A = SCALE times a Gaussian matrix, on biases, gains and
    all others by random numbers. The loss is the mean squared distance of the output, on example inputs, from fixed
    Gaussian targets; it is computed in float32 and in float64. Inputs are made from the model's configuration; a model
    without one needs --inputs.

    The file of --out is JSON with `rows`: precision, measure, scale (null: the model itself), value, and its ratio to
    that of the model itself.
    """
    for file in (out, figure):
        common.check_output(file, model)
    if figure is not None and figure.suffix not in FIGURES:
        raise common.BadInput(f"A figure must be {', '.join(FIGURES)}. Found {figure.name!r}.")
    from quotient_manifolds.cli.subject import along_orbit, distance, distance_batch, inputs_for, symmetries_of
    from quotient_manifolds.geometry import Adaptive, KnownSymmetries, Quotient
    from quotient_manifolds.load import load_model
    from quotient_manifolds.sharpness import suggest_radius

    network = load_model(model).to(device=device)
    with inputs_for(network, inputs, seed=seed) as given:
        found = symmetries_of(network, given, symmetries)
        if not found.moved:
            raise common.BadInput(f"{model} has no symmetry, so there is no orbit to move along (see `inspect`).")
        batch = distance_batch(network, given, seed)
    found = found.beside([name for name, w in network.named_parameters() if not w.requires_grad])
    quotiented: Any = found if symmetries else "all"
    geometries = (Adaptive(), Quotient("inv", symmetries=quotiented), Quotient("mix", symmetries=quotiented))
    known = KnownSymmetries()
    at = {
        each.name: suggest_radius(network, distance, [batch], each, known) if radius is None else radius
        for each in geometries
    }
    ascent = {"radius": at, "steps": steps, "seed": seed}
    with common.progress_bars(quiet=quiet) as progress:
        rows = list(along_orbit(network, found, geometries, batch, scales, ascent=ascent, progress=progress))
    lines: dict[str, list[float]] = {}
    for row in rows:
        if row["scale"] is not None:
            lines.setdefault(f"{row['measure']}, {row['precision']}", []).append(row["ratio"])
    if out is not None:
        record = {"model": model, "version": VERSION, "command": common.command_line(), **ascent, "rows": rows}
        write_text(out, json.dumps(record, indent=1) + "\n")
    if figure is not None:
        from quotient_manifolds.plots import orbit_figure

        orbit_figure(scales, lines).save(figure)
    if not quiet:
        cells = [[name, *(f"{ratio - 1:+.1e}" for ratio in ratios)] for name, ratios in lines.items()]
        columns = ["measure", *(f"a = {scale:g}" for scale in scales)]
        radii = ", ".join(f"{name} at radius {each:g}" for name, each in at.items())
        caption = f"{model}: relative change of sharpness, {radii}"
        common.show(Table("changes", caption, columns, cells, [False] + [True] * len(scales)))


@common.command
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--balance", "balanced", is_flag=True, help="Write the canonical representative, not a random one.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="Scale of the random group element.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random group element."
)
@click.option(
    "--inputs",
    metavar="PACKAGE.MODULE:FUNCTION",
    multiple=True,
    help="A function that returns inputs on which the model must compute the same, besides those made from its "
    "configuration; may be given several times.",
)
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
    quiet: bool,
) -> None:
    """Transform the Hugging Face model in IN by a random group element, and write it to the new directory OUT.

    The weights change, but not their dtype. The function stays the same up to rounding on the inputs tried: text,
    images or sound made from the model's configuration, with and without its optional inputs (token types, padding,
    masked patches), and --inputs. Symmetries that may matter to parameters which none of these inputs reached (experts,
    heads) are left out. The model written is loaded again and compared on other example inputs before OUT appears.
    Other files in IN, such as a tokenizer, are copied.
    """
    common.check_new(target, source)
    from quotient_manifolds.cli.subject import all_inputs, symmetries_of, write_moved
    from quotient_manifolds.load import load_model
    from quotient_manifolds.symmetries import balance, random_representative, verify_symmetries

    network = load_model(source)
    given = all_inputs(network, inputs, seed=seed)
    first, *others = given.values()
    found = symmetries_of(network, first, symmetries, *others)
    holding = verify_symmetries(network, first, found, seed=seed).holding(found)
    if not holding.moved:
        raise common.BadInput(f"{source} ({type(network).__name__}) has no verified symmetry; `inspect` says why.")
    params = {name: w.detach().double() for name, w in network.named_parameters()}
    moved = balance(params, holding) if balanced else random_representative(params, holding, scale=scale, seed=seed)
    change = write_moved(network, moved, given, Path(source), target, seed=seed + 1)
    if not quiet:
        common.show(
            f"{target}: {len(holding.pairs)} pairs and {len(holding.reparameterizations)} reparameterizations "
            "transformed; "
            f"the output changed by {change:.1e} of its size."
        )
