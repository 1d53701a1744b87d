"""Measure the worst-case sharpness of any model on any labelled data: a comparison of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quotient_manifolds.cli import common
from quotient_manifolds.cli.compare import failures_of, print_comparison

if TYPE_CHECKING:
    import torch

    from quotient_manifolds.compare import BatchFunction, MeasureEntry
    from quotient_manifolds.load import DataSource

# What DataSource calls two options of the command line.
_RENAMED = {"draw": "seed", "examples": "max_examples"}


def _named(context: click.Context, parameter: click.Parameter, word: str | None) -> dict[str, Any] | None:
    """Read NAME=VALUE,NAME=VALUE as a dict, whole numbers as such."""
    if word is None:
        return None
    parts = [part.partition("=") for part in word.split(",")]
    if any(not name.strip() or not value.strip() for name, _, value in parts):
        raise click.BadParameter(f"Expected name=value with commas between them. Found {word!r}")
    return {name.strip(): int(value) if value.strip().isdigit() else value.strip() for name, _, value in parts}


@common.command
@click.argument("model")
@click.option(
    "--data",
    required=True,
    help="A .jsonl, .csv, .tsv, .txt or .npz file, or package.module:function, a function that returns batches.",
)
@click.option(
    "--geometry",
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
    type=float,
    multiple=True,
    help="Of the balls of geometries without radii of their own, in the metric's norm over all parameters; give it "
    "again for another.",
)
@click.option("--geodesic", help="first, second or exact, of quotient geometries.  [default: second]")
@click.option("--symmetries", help="all, pairs or paper: which are quotiented out.  [default: all]")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Of ascent, per batch.")
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
@click.option(
    "--task",
    type=click.Choice(("classification", "causal", "masked", "seq2seq")),
    help="What a model of text predicts: a label, or the tokens of a language model, for which DATA needs no labels "
    "and may be a .txt file.  [default: classification]",
)
@click.option("--columns", callback=_named, metavar="text=NAME,label=NAME", help="What the columns are called in DATA.")
@click.option(
    "--labels", callback=_named, metavar="NAME=CLASS,...", help="The class of each label, where DATA has its own."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of report.html, comparison.json, values.csv and store.sqlite; one that is there is resumed.",
)
@click.option("--dtype", type=click.Choice(("float32", "float64")), default="float32", show_default=True)
@common.run_options
def measure(
    model: str,
    data: str,
    geometries: tuple[str, ...],
    radii: Sequence[float],
    loss: str | None,
    out: Path | None,
    device: torch.device,
    dtype: str,
    quiet: bool,
    **options: Any,
) -> None:
    """Measure the worst-case sharpness of MODEL on DATA.

    MODEL is a Hugging Face directory, an adapter of peft, or package.module:function, a function that returns a torch
    module. On every batch of DATA the loss is maximised within the radius, by an ascent along geodesics; the result is
    the mean increase over batches with its standard error. Every batch counts the same, so a last batch that is smaller
    weighs more per example.

    This is `compare` of one model, which has all measures and their options: the directory OUT receives the same files,
    and the same command resumes there.
    """
    from quotient_manifolds.compare import Spec, run_comparison
    from quotient_manifolds.load import Checkpoint

    given = {name: value for name, value in options.items() if value is not None}
    ascent = {name: given.pop(name) for name in ("steps", "seed")}
    of_quotients: dict[str, Any] = {name: given.pop(name) for name in ("geodesic", "symmetries") if name in given}
    measures = [each for word in geometries for each in _balls(word, radii, ascent, of_quotients)]
    path = Path(model).expanduser()
    function = ":" in model and not path.exists()
    checkpoint = Checkpoint(model, None, model) if function else Checkpoint(path.name, path, "huggingface")
    spec = Spec((checkpoint,), _source(data, given), measures, loss=loss, dtype=dtype, name=checkpoint.name)
    with common.progress_bars(quiet=quiet) as progress:
        found = run_comparison(spec, out, device=device, progress=progress, command=common.command_line())
    if not quiet and len(found.values):
        print_comparison(found, out)
    if failures := failures_of(found):
        raise common.BadInput(failures[0])


def _balls(
    word: str, radii: Sequence[float], ascent: Mapping[str, Any], of_quotients: Mapping[str, Any]
) -> list[MeasureEntry]:
    """Return a measure for each radius of a geometry, NAME or NAME:RADIUS,RADIUS, ascending. Raises common.BadInput."""
    from quotient_manifolds.compare import measures_of

    name, colon, listed = word.partition(":")
    try:
        own = [float(each) for each in listed.split(",")] if colon else radii
    except ValueError:
        raise common.BadInput(f"Expected a geometry and its radii, as inv:0.1,0.2. Found {word!r}") from None
    if not own:
        raise common.BadInput(f"The geometry {word} has no radius: give --radius, or --geometry {word}:0.1")
    options = {**ascent, **({} if name in ("euclidean", "adaptive") else of_quotients)}
    number = name.lstrip("-").replace(".", "", 1).isdigit()
    geometry: str | float = float(name) if number else name
    return list(measures_of("worst-case", [geometry], {"radius": list(own)}, options=options))


def _source(data: str, settings: Mapping[str, Any]) -> DataSource | BatchFunction:
    from quotient_manifolds.compare import BatchFunction
    from quotient_manifolds.load import DataSource

    if ":" not in data or Path(data).exists():
        return DataSource(data, **{_RENAMED.get(name, name): value for name, value in settings.items()})
    if other := [name for name in settings if name != "task"]:
        raise common.BadInput(
            f"--{other[0].replace('_', '-')} means nothing for batches that {data} makes: leave it out"
        )
    return BatchFunction(data, settings.get("task"))
