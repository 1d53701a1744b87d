"""Act on a model by its symmetries: write it at another point of its orbit, or measure its sharpness at such points."""

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

POSITIVE = click.FloatRange(min=0, min_open=True)


@common.command
@click.argument("model")
@click.option("--radius", type=float, help="Radius of the balls.  [default: the smallest suggested]")
@common.count_option("--steps", "Number of steps of an ascent.", default=10)
@click.option(
    "--scale",
    "scales",
    type=POSITIVE,
    multiple=True,
    default=(0.01, 1.0, 100.0),
    show_default=True,
    help="Scale of the group elements; may be given several times.",
)
@common.inputs_option
@common.symmetries_option
@common.record_option("measurements")
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

    MODEL is a Hugging Face directory, a peft adapter, or package.module:function. A random group element, which
    changes no output, acts on it: on the pairs of each head by A = SCALE times a Gaussian matrix, on biases, gains and
    all others by random numbers. The loss is the mean squared distance of the output, on example inputs, from fixed
    Gaussian targets; it is computed in float32 and in float64. Inputs are made from the model's configuration; a model
    without one needs --inputs. All geometries have one radius, by default the smallest of those suggested for them.

    The file of --out is JSON with `rows`: precision, measure, scale (null: the model itself), value, and its ratio to
    the value of the model itself. If a point cannot be measured, value and ratio are null and `failed` says why; the
    figure leaves it out.

    The exit code is 1 if a point could not be measured; all others are measured.
    """
    for file in filter(None, (out, figure)):
        check_file(file, model)
    from quotient_manifolds.cli.subject import distance, distance_batch, inputs_of, symmetries_of
    from quotient_manifolds.geometry import Adaptive, KnownSymmetries, Quotient
    from quotient_manifolds.load import load_model
    from quotient_manifolds.orbit.path import along_orbit, attempted
    from quotient_manifolds.sharpness import WorstCase, suggest_radius

    network = load_model(model).to(device=device)
    examples = inputs_of(network, inputs, seed=seed)
    group = symmetries_of(network, symmetries, examples)
    group = group.beside([name for name, w in network.named_parameters() if not w.requires_grad])
    batch, known = distance_batch(network, examples, seed), KnownSymmetries()
    quotiented: Any = group if symmetries else "all"
    geometries = [Adaptive(), Quotient("inv", symmetries=quotiented), Quotient("mix", symmetries=quotiented)]
    suggested = partial(suggest_radius, network, distance, [batch], known=known)
    sizes = [(radius, "") if radius is not None else attempted(partial(suggested, each)) for each in geometries]
    size = min((size for size, _ in sizes if size is not None), default=0.0)
    measures = [
        WorstCase(each, size, steps=steps, seed=seed) for each, (own, _) in zip(geometries, sizes, strict=True) if own
    ]
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = [
        {"measure": each.name, "scale": scale, "value": None, "ratio": None, "failed": why}
        for each, (own, why) in zip(geometries, sizes, strict=True)
        for scale in (None, *scales)
        if own is None
    ]
    with common.progress_bars() as progress, common.warnings_without_advice():
        for precision, start in (("float32", copy.deepcopy(network).float()), ("float64", network.double())):
            for row in chain(
                along_orbit(start, group, measures, distance, batch, scales, seed=seed, known=known), failed
            ):
                rows.append({"precision": precision, **row, "failed": without_advice(row["failed"])})
                progress("points of the orbit", len(rows), 2 * 3 * (1 + len(scales)))
    if all(row["failed"] for row in rows):
        raise ValueError(rows[0]["failed"])
    radii = {measure.geometry.name: size for measure in measures}
    if out is not None:
        record = {"model": model, "version": VERSION, "command": common.command_line(), "radius": radii}
        write_text(out, json.dumps(record | {"steps": steps, "seed": seed, "rows": rows}, indent=1) + "\n")
    lines = _ratios(rows)
    if figure is not None:
        from quotient_manifolds.plots import orbit_figure

        orbit_figure(scales, lines).save(figure)
    cells = [
        [name, *("failed" if ratio is None else f"{ratio - 1:+.1e}" for ratio in ratios)]
        for name, ratios in lines.items()
    ]
    caption = f"{model}: relative change of sharpness at radius {size:g}, {steps} steps"
    common.show(Table("changes", caption, ["measure", *(f"a = {scale:g}" for scale in scales)], cells))
    common.exit_if_failed(_failures(rows))


def _line(row: Mapping[str, Any]) -> str:
    return f"{row['measure']}, {row['precision']}"


def _ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Return the ratios of each measure and precision, in the order of the scales."""
    lines: dict[str, list[float | None]] = {}
    for row in rows:
        if row["scale"] is not None:
            lines.setdefault(_line(row), []).append(row["ratio"])
    return lines


def _failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one sentence for all points at which a measure fails for the same reason."""
    places: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["failed"]:
            place = "the model itself" if row["scale"] is None else f"a = {row['scale']:g}"
            places.setdefault((_line(row), row["failed"]), []).append(place)
    return [f"{', '.join([line, *at])}: {why}" for (line, why), at in places.items()]


@common.command
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--balance", "balanced", is_flag=True, help="Write the canonical representative, not a random one.")
@click.option("--scale", type=POSITIVE, default=1.0, show_default=True, help="Scale of the random group element.")
@common.seed_option
@common.more_inputs
@common.symmetries_option
@common.quiet_option
def move(
    source: str, target: Path, balanced: bool, scale: float, seed: int, inputs: tuple[str, ...], symmetries: str | None
) -> None:
    """Transform the Hugging Face model in IN by a random group element, and write it to the new directory OUT.

    The weights change, but not their dtype. The function is unchanged up to rounding on the inputs tried: text, images
    or sound made from the model's configuration, with and without its optional inputs (token types, padding, masked
    patches), and --inputs. Symmetries that may matter to parameters which none of these inputs reached (experts, heads)
    are left out. The model written is loaded again and compared on other example inputs before OUT appears. Other files
    in IN, such as a tokenizer, are copied.
    """
    check_new(target, source)
    from quotient_manifolds.cli.subject import all_inputs, load_directory, symmetries_of, write_moved
    from quotient_manifolds.symmetries import balance, random_representative, verify_symmetries

    network = load_directory(source)
    described = all_inputs(network, inputs, seed=seed)
    with common.progress_bars() as progress:
        with common.step(progress, "symmetries found"):
            proposed = symmetries_of(network, symmetries, *described.values())
        with common.step(progress, "verified"):
            first = next(iter(described.values()))
            group = verify_symmetries(network, first, proposed, seed=seed).holding(proposed)
        if not group.moved:
            raise ValueError(f"{source} must have a symmetry that holds. Found none; `inspect` says why")
        with common.step(progress, "transformed and compared"):
            params = {name: w.detach().double() for name, w in network.named_parameters()}
            moved = balance(params, group) if balanced else random_representative(params, group, scale=scale, seed=seed)
            change = write_moved(network, moved, described, source, target, seed=seed + 1)
    common.show(
        f"{target}: {len(group.pairs)} pairs and {len(group.reparameterizations)} reparameterizations transformed; "
        f"the output changed by {change:.1e} of its size."
    )
