"""Measure the worst-case sharpness of any model on any labelled data."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from quotient_manifolds.cli.exits import INTERRUPTED
from quotient_manifolds.cli.options import (
    LANGUAGE,
    check_outputs,
    command,
    common_options,
    report_option,
    symmetries_option,
)
from quotient_manifolds.cli.terminal import Terminal, command_line, progress_bars
from quotient_manifolds.files import is_special

if TYPE_CHECKING:
    import torch

    from quotient_manifolds.cli.record import SharpnessRecord
    from quotient_manifolds.geometry import Geometry
    from quotient_manifolds.sharpness import Result


def _numbers(word: str, where: str) -> list[float]:
    try:
        return [float(part) for part in word.split(",")]
    except ValueError:
        raise click.BadParameter(f"{where} takes numbers, with commas between them. Found {word!r}") from None


def _listed(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> tuple[float, ...]:
    """Read numbers that are given again and again, or with commas."""
    return tuple(number for word in words for number in _numbers(word, parameter.opts[0]))


def _named(context: click.Context, parameter: click.Parameter, word: str | None) -> dict[str, str] | None:
    """Read NAME=VALUE,NAME=VALUE as a dict."""
    if word is None:
        return None
    parts = [part.partition("=") for part in word.split(",")]
    if any(not name.strip() or not equals or not value.strip() for name, equals, value in parts):
        raise click.BadParameter(f"Expected name=value with commas between them. Found {word!r}")
    return {name.strip(): value.strip() for name, _, value in parts}


def _classes(context: click.Context, parameter: click.Parameter, word: str | None) -> dict[str, int] | None:
    named = _named(context, parameter, word)
    try:
        return None if named is None else {name: int(value) for name, value in named.items()}
    except ValueError:
        raise click.BadParameter(f"Expected label=class, the class as a number from 0. Found {word!r}") from None


def _normalisation(context: click.Context, parameter: click.Parameter, word: str | None) -> Any:
    """Read clip or imagenet by name, or a number for each channel."""
    return word if word is None or word.isalpha() else _numbers(word, parameter.opts[0])


@command
@click.argument("model")
@click.option(
    "--data",
    required=True,
    help="A .jsonl, .csv or .tsv file, a .npz file, or package.module:function, a function that returns batches.",
)
@click.option(
    "--geometry",
    "--metric",
    "geometries",
    metavar="NAME[:RADIUS,...]",
    multiple=True,
    default=("adaptive", "inv", "mix"),
    show_default=True,
    help="euclidean, adaptive, inv, mix or a number t, with its own radii after a colon; give it again for another.",
)
@click.option(
    "--radius",
    "radii",
    multiple=True,
    metavar="RADIUS",
    callback=_listed,
    help="Of the balls of geometries without radii of their own, in the metric's norm over all parameters; give it "
    "again for another.",
)
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Of ascent, per batch.")
@click.option(
    "--restarts", type=click.IntRange(min=0), default=0, show_default=True, help="Further ascents, per batch."
)
@click.option(
    "--method",
    type=click.Choice(("auto_pgd", "quasi_newton")),
    default="auto_pgd",
    show_default=True,
    help="The ascent. quasi_newton often needs fewer steps on small models; it climbs no linf balls.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="End an ascent before --steps where so small a share of its rise is left, by estimate.",
)
@click.option("--geodesic", help="first, second or exact, of quotient geometries.  [default: second]")
@click.option("--eps", type=float, help="The paper's relaxation of a quotient's metric.  [default: 0]")
@click.option("--eta", type=float, help="Added to |w| in the adaptive geometry.  [default: 0]")
@click.option("--norm", help="l2 or linf, of euclidean and adaptive.  [default: l2]")
@symmetries_option
@click.option(
    "--loss",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="A function loss(model, batch) that returns a scalar.  [default: cross-entropy]",
)
@click.option("--batch-size", type=click.IntRange(min=1), help="Examples in a batch.  [default: 32]")
@click.option("--examples", type=click.IntRange(min=1), help="Use so many examples at most.  [default: all]")
@click.option(
    "--draw", type=click.IntRange(min=0), metavar="SEED", help="Take examples at random instead of the first ones."
)
@click.option(
    "--max-length",
    type=click.IntRange(min=1),
    help="Tokens kept of a text.  [default: 128, or the positions of the model, if fewer]",
)
@click.option("--tokenizer", metavar="DIRECTORY", help="Of texts, where the model's directory has none.")
@click.option(
    "--task",
    type=click.Choice(("classification", *LANGUAGE)),
    help="What a model of text has to tell: a label, or the tokens of a language model, for which DATA needs no labels "
    "and may be a .txt file.  [default: classification]",
)
@click.option("--columns", callback=_named, metavar="text=NAME,label=NAME", help="What the columns are called in DATA.")
@click.option(
    "--labels", callback=_classes, metavar="NAME=CLASS,...", help="The class of each label, where DATA has its own."
)
@click.option(
    "--mean", callback=_normalisation, help="Of pixels from 0 to 1: a number a channel, imagenet, clip or none (raw)."
)
@click.option("--std", callback=_normalisation, help="Of pixels: a number a channel.")
@click.option("--out", type=click.Path(path_type=Path), help="Write each result to this JSON file when it is there.")
@report_option
@common_options
def measure(
    model: str,
    data: str,
    geometries: tuple[str, ...],
    radii: tuple[float, ...],
    steps: int,
    restarts: int,
    method: str,
    tolerance: float,
    symmetries: str | None,
    loss: str | None,
    out: Path | None,
    report: Path | None,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    quiet: bool,
    **others: Any,
) -> None:
    """Measure the worst-case sharpness of MODEL on DATA.

    MODEL is a Hugging Face directory, an adapter of peft, or package.module:function, a function that returns a torch
    module. On every batch of DATA the loss is driven up, by an ascent along geodesics, as far as it rises within the
    radius; the result is the mean rise over batches with its standard error. Every batch counts the same, so a last
    batch that is smaller weighs more per example.

    The file OUT is JSON, written atomically after each result.
    """
    check_outputs([model, data, others["tokenizer"]], quiet=quiet, out=out, report=report)
    from quotient_manifolds.cli import pages
    from quotient_manifolds.cli.balls import balls, with_symmetries
    from quotient_manifolds.cli.batches import batches_from, like, try_loss
    from quotient_manifolds.cli.record import SharpnessRecord
    from quotient_manifolds.cli.subject import described, model_named
    from quotient_manifolds.geometry import GEOMETRY_OPTIONS, KnownSymmetries
    from quotient_manifolds.load import load_object, load_symmetries
    from quotient_manifolds.sharpness import (
        SharpnessWarning,
        WorstCase,
        cross_entropy,
        next_token_cross_entropy,
    )
    from quotient_manifolds.symmetries import Scope

    scope = symmetries if symmetries in get_args(Scope) else None
    of_geometries = {"symmetries": scope, **{name: others.pop(name) for name in GEOMETRY_OPTIONS if name in others}}
    of_data = {name: value for name, value in others.items() if value is not None}
    wanted = balls(geometries, radii, of_geometries)  # what is wrong is said before anything is loaded
    network = model_named(model)
    if symmetries is not None and scope is None:
        wanted = with_symmetries(wanted, load_symmetries(symmetries, network))
    causal = others["task"] == "causal"
    usual = next_token_cross_entropy if causal else cross_entropy
    function = usual if loss is None else load_object(loss, "a function loss(model, batch)")
    loaded, how, notes = batches_from(data, of_data, network, model, own_loss=loss is not None)
    network.to(device=device, dtype=dtype)
    batches = [like(batch, next(network.parameters())) for batch in loaded]
    try_loss(network, function, batches, data)

    settings = {"dtype": str(dtype).removeprefix("torch."), "device": str(device), **how}
    record = SharpnessRecord((), model, data, settings, command=command_line(), asked=len(wanted))
    about = described(network, model)

    def show(record: SharpnessRecord, *more: str) -> None:
        if not quiet:
            on = f"{how['examples']} examples of {data}" if "examples" in how else data
            Terminal().show(*about, pages.table_of_results(record, f"{model} on {on}"), *notes, *more)
            for sentence in record.warnings:
                click.echo(f"Warning: {sentence}", err=True)

    with progress_bars(quiet=quiet) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore", SharpnessWarning)  # they stand below the table
        known = KnownSymmetries()

        def ascend(geometry: Geometry, radius: float) -> Result:
            chosen = WorstCase(geometry, radius, steps, restarts, tolerance, seed, method=method, progress=progress)
            return chosen.of(network, function, batches, known)

        record = _measured(record, wanted, ascend, out, show)
    if report is not None:
        pages.write_page(pages.measure_page(record, [*about, *notes]), report)
    show(record, *([] if report is None else [f"Report: {report}"]))


def _measured(
    record: SharpnessRecord,
    wanted: list[tuple[Geometry, float]],
    ascend: Callable[..., Result],
    out: Path | None,
    show: Callable[[SharpnessRecord], None],
) -> SharpnessRecord:
    """Measure in every ball; a file holds each result as soon as it is there, a pipe or device gets all at the end."""
    in_file = 0
    try:
        for geometry, radius in wanted:
            record = record.with_result(ascend(geometry=geometry, radius=radius))
            if out is not None and (record.complete or not is_special(out)):
                record.save(out)
                in_file = len(record)
    except KeyboardInterrupt:
        if in_file:
            click.echo(f"Interrupted: {in_file} of {len(wanted)} results are in {out}.", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None
        raise
    except Exception:
        if len(record):  # what is there is not lost to the one that fails
            show(record)
        raise
    return record
