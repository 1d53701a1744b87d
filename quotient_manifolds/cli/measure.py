"""quotient-manifolds measure: the worst-case sharpness of any model on any labelled data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quotient_manifolds.cli.options import (
    EXIT_CODES,
    BadInput,
    check_different,
    check_writable,
    common_options,
    one_sentence_errors,
    report_option,
    symmetries_option,
)


def _listed(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> tuple[float, ...]:
    """Numbers that are given again and again, or with commas."""
    return tuple(_number(part, parameter.opts[0]) for word in words for part in word.split(","))


def _number(word: str, where: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise click.BadParameter(f"{where} takes numbers, with commas between them. Found {word!r}") from None


def _named(context: click.Context, parameter: click.Parameter, word: str | None) -> dict[str, str] | None:
    """NAME=VALUE,NAME=VALUE as a dict."""
    if word is None:
        return None
    parts = [part.partition("=") for part in word.split(",")]
    if any(not name.strip() or not equals or not value.strip() for name, equals, value in parts):
        raise click.BadParameter(f"Expected name=value with commas between them. Found {word!r}")
    return {name.strip(): value.strip() for name, _, value in parts}


def _classes(context: click.Context, parameter: click.Parameter, word: str | None) -> dict[str, int] | None:
    found = _named(context, parameter, word)
    try:
        return None if found is None else {name: int(value) for name, value in found.items()}
    except ValueError:
        raise click.BadParameter(f"Expected label=class, the class as a number from 0. Found {word!r}") from None


def _pixels(context: click.Context, parameter: click.Parameter, word: str | None) -> Any:
    """clip and imagenet by name, or a number for each channel."""
    if word is None or word.isalpha():
        return word
    return [_number(part, parameter.opts[0]) for part in word.split(",")]


@click.command(epilog=EXIT_CODES)
@click.argument("model")
@click.option(
    "--data",
    required=True,
    help="A .jsonl, .csv or .tsv file, a .npz file, a folder with a folder of images for each class, or "
    "package.module:function, a function that returns batches.",
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
@click.option("--geodesic", help="first, second or exact, of quotient geometries.  [default: second]")
@click.option("--eps", type=float, help="The paper's relaxation of a quotient's metric.  [default: 0]")
@click.option("--biases", help="quotient or paper: how quotient geometries treat biases.  [default: quotient]")
@click.option("--eta", type=float, help="Added to |w| in the adaptive geometry.  [default: 0]")
@click.option(
    "--norm", help="l2 or linf of euclidean and adaptive, metric or adaptive of quotients.  [default: l2, metric]"
)
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
@click.option("--columns", callback=_named, metavar="text=NAME,label=NAME", help="What the columns are called in DATA.")
@click.option(
    "--labels", callback=_classes, metavar="NAME=CLASS,...", help="The class of each label, where DATA has its own."
)
@click.option("--size", type=click.IntRange(min=1), help="Images of a folder are resized and cropped to it.")
@click.option("--channels", type=int, help="Of the images of a folder: 1 or 3.")
@click.option(
    "--mean",
    callback=_pixels,
    help="Of pixels from 0 to 1: a number a channel, imagenet, clip or none (raw).",
)
@click.option("--std", callback=_pixels, help="Of pixels: a number a channel.")
@click.option("--out", type=click.Path(path_type=Path), help="Write each result to this JSON file when it is there.")
@report_option
@common_options
@one_sentence_errors
def measure(out: Path | None, report: Path | None, quiet: bool, **settings: Any) -> None:
    """Measure the worst-case sharpness of MODEL on DATA.

    MODEL is a Hugging Face directory, an adapter of peft, or package.module:function, a function that returns a torch
    module. On every batch of DATA the loss is driven up, by Auto-PGD along geodesics, as far as it rises within the
    radius; the result is the mean rise over batches with its standard error. Every batch counts the same, so a last
    batch that is smaller weighs more per example.

    The file OUT is whole after each result; SharpnessRecord.load reads it, and its frame() makes a table.
    """
    if quiet and out is None and report is None:
        raise BadInput("With --quiet nothing is printed, so the results would be lost: give --out or --report.")
    inputs = [settings["model"], settings["data"], settings["tokenizer"]]
    check_writable(out, *inputs)
    check_writable(report, *inputs)
    check_different(out=out, report=report)
    from quotient_manifolds.cli.measuring import Asked, measure_all

    measure_all(Asked(**settings), out=out, report=report, quiet=quiet)
