"""Run every measure on every checkpoint, into a store that survives a crash: of a spec, of one model, of the demo."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quotient_manifolds.cli import common
from quotient_manifolds.files import expanded

if TYPE_CHECKING:
    import torch

    from quotient_manifolds.compare import Comparison, Forecast, MeasureEntry, Spec


@common.command
@click.argument("spec", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the results.  [default: results/NAME beside NAME.yaml]",
)
@click.option("--check", is_flag=True, help="Measure nothing; list the tasks and estimate the time.")
@click.option(
    "--workers", type=click.IntRange(min=1), help="Number of processes on this machine; on CUDA, one per device."
)
@click.option("--scheduler", metavar="ADDRESS", help="Address of a running Dask cluster to measure on.")
@common.device_option
@common.quiet_option
def compare(
    spec: Path, out: Path | None, check: bool, workers: int | None, scheduler: str | None, device: torch.device
) -> None:
    """Measure every checkpoint that the YAML file SPEC names, and rank the measures.

    \b
      checkpoints: {paths: models/*, loader: huggingface}  # or package.module:function
      data: {path: train.jsonl, batch_size: 32, max_batches: 8}
      measures:
        - {measure: worst-case, geometry: [inv, mix], radius: [0.1, 0.2]}
        - {measure: gradient-norm, geometry: euclidean}
      test: {path: test.jsonl}  # for the gaps between its error and loss and those of data
      scores: scores.csv        # more to rank by: a column checkpoint, and any others
      against: [error_gap]      # what to rank by
      given: [learning_rate]    # hyperparameters held fixed in partial correlations
      loss: package.module:function  # loss(model, batch); cross-entropy if not given
      dtype: float32

    Only checkpoints, data and measures are needed; paths are relative to SPEC. Measures: worst-case, average-case,
    legacy-worst-case, gradient-norm, hessian-trace, top-eigenvalue. Geometries: euclidean, adaptive, inv, mix, or a
    number t. Options of a measure and of its geometry are keys beside them.

    OUT receives report.html, comparison.json, values.csv, and store.sqlite, to which every value is written as soon as
    it is computed. After an interruption, a crash or a change of SPEC, the same command measures only what is missing.
    Without --workers or --scheduler everything runs in this process. Values agree bit for bit between processes with
    the same number of threads; a worker has one, unless OMP_NUM_THREADS is set.

    The exit code is 1 if a checkpoint or one of its measures failed; the others are measured nevertheless.
    """
    from quotient_manifolds.compare import forecast, read_spec

    folder = spec.resolve().parent / "results" / spec.stem if out is None else out
    wanted = read_spec(spec)
    if check:
        found = forecast(wanted, folder, device)
        _print_forecast(found, wanted, folder)
        common.say_failures(found.failures)
    else:
        common.say_failures(_measured(wanted, folder, device=device, workers=workers, scheduler=scheduler))


# ---- one model


@common.command
@click.argument("model")
@click.option("--data", required=True, help=common.DATA)
@click.option(
    "--geometry",
    "geometries",
    metavar="NAME[:RADIUS,...]",
    multiple=True,
    default=("adaptive", "inv", "mix"),
    show_default=True,
    help="euclidean, adaptive, inv, mix or a number t, with its own radii after a colon; may be given several times.",
)
@click.option(
    "--radius",
    "radii",
    type=float,
    multiple=True,
    help="Radius of geometries without radii of their own, a length in the metric over all parameters; may be given "
    "several times.  [default: one suggested for each geometry]",
)
@click.option("--geodesic", help="Geodesics of quotient geometries: first, second or exact.  [default: second]")
@click.option("--symmetries", help="Which are quotiented out: all, pairs or paper.  [default: all]")
@click.option(
    "--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Steps of the ascent on each batch."
)
@click.option(
    "--loss",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="A function loss(model, batch) that returns a scalar.  [default: cross-entropy]",
)
@common.batch_size_option
@click.option(
    "--examples", "max_examples", type=click.IntRange(min=1), help="Largest number of examples.  [default: all]"
)
@click.option(
    "--draw", type=click.IntRange(min=0), metavar="SEED", help="Take examples at random instead of the first ones."
)
@click.option(
    "--max-length",
    type=click.IntRange(min=1),
    help="Tokens kept of a text.  [default: 128, or the positions of the model, if fewer]",
)
@common.task_option
@click.option(
    "--column",
    "columns",
    type=(str, str),
    multiple=True,
    metavar="text|text_pair|label NAME",
    help="Name of a column in DATA; may be given several times.",
)
@click.option(
    "--label",
    "labels",
    type=(str, int),
    multiple=True,
    metavar="NAME CLASS",
    help="Class of a label in DATA; may be given several times.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for report.html, comparison.json, values.csv and store.sqlite; an existing one is resumed.",
)
@click.option(
    "--dtype",
    type=click.Choice(("float32", "float64")),
    default="float32",
    show_default=True,
    help="Precision of the model.",
)
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
    **options: Any,
) -> None:
    """Measure the worst-case sharpness of MODEL on DATA.

    MODEL is a Hugging Face directory, an adapter of peft, or package.module:function, a function that returns a torch
    module. On every batch of DATA the loss is maximised within the radius, by an ascent along geodesics; the result is
    the mean increase over batches with its standard error. Every batch has equal weight, so examples of a smaller last
    batch weigh more.

    This is `compare` for one model. `compare` has all measures and their options; OUT receives the same files, and the
    same command resumes.
    """
    from quotient_manifolds.compare import Spec
    from quotient_manifolds.load import Checkpoint, data_of

    ascent = {name: options.pop(name) for name in ("steps", "seed")}
    given: dict[str, Any] = {name: value for name, value in options.items() if value not in (None, ())}
    given |= {name: dict(given[name]) for name in ("columns", "labels") if name in given}
    of_quotients: dict[str, Any] = {name: given.pop(name) for name in ("geodesic", "symmetries") if name in given}
    measures = [each for word in geometries for each in _balls(word, radii, ascent, of_quotients)]
    if "draw" in given:
        given["seed"] = given.pop("draw")
    path = expanded(model)
    function = ":" in model and not path.exists()
    checkpoint = Checkpoint(model, None, model) if function else Checkpoint(path.absolute().name, path, "huggingface")
    spec = Spec((checkpoint,), data_of(data, given), measures, loss=loss, dtype=dtype, name=checkpoint.name)
    if failures := _measured(spec, out, device=device):
        raise common.BadInput(failures[0])


def _balls(
    word: str, radii: Sequence[float], ascent: Mapping[str, Any], of_quotients: Mapping[str, Any]
) -> Iterator[MeasureEntry]:
    """Yield a measure for each radius of a geometry, NAME or NAME:RADIUS,RADIUS, ascending. Raises common.BadInput."""
    from quotient_manifolds.compare import measures_of

    name, colon, listed = word.partition(":")
    try:
        own = [float(each) for each in listed.split(",")] if colon else [*radii]
    except ValueError:
        raise common.BadInput(f"Expected a geometry and its radii, such as inv:0.1,0.2. Found {word!r}") from None
    geometry: str | float = name
    with suppress(ValueError):
        geometry = float(name)
    options = {**ascent, **({} if name in ("euclidean", "adaptive") else of_quotients)}
    yield from measures_of("worst-case", [geometry], {"radius": own} if own else {}, options=options)


@common.command
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="results/demo",
    show_default=True,
    help="Directory to write.",
)
@click.option(
    "--models", type=click.IntRange(min=5), default=8, show_default=True, help="Number of models; a ranking needs 5."
)
@click.option(
    "--workers", type=click.IntRange(min=1), help="Number of training processes.  [default: one for each core]"
)
@common.run_options
def demo(out: Path, models: int, workers: int | None, seed: int, device: torch.device) -> None:
    """Train, measure and rank a zoo of small vision transformers.

    They are trained on scikit-learn's digits, once, and kept in OUT. OUT/report.html shows three results for the first
    two: along its symmetry orbit a model's function stays the same while its adaptive sharpness changes; all continuous
    symmetries are found; aligned models are connected by a path of low loss. Then all models are ranked by sharpness
    and compared with the generalisation gap, as `compare` does with OUT/zoo.yaml. Edit OUT/zoo.yaml and run `compare`
    on it to see more.
    """
    from quotient_manifolds.compare import Comparison, comparison_page
    from quotient_manifolds.demo import one_thread, prepare, tell
    from quotient_manifolds.files import write_text

    processes = workers or os.cpu_count() or 1
    with common.progress_bars() as progress:
        spec = prepare(out, models=models, seed=seed, workers=processes, progress=progress)
        chapters = tell(out / "models" / "vit-00", out / "models" / "vit-01", out / "train.npz", processes, progress)
    with one_thread():
        failures = _measured(spec, out, device=device)
    title = "Symmetries, sharpness and generalisation of small vision transformers"
    lead = (
        f"{models} small vision transformers were trained on scikit-learn’s digits with different settings. This page "
        "shows the symmetries of two of them, then ranks all by sharpness."
    )
    page = comparison_page(Comparison.load(out), title=title, lead=lead, chapters=chapters)
    write_text(out / "report.html", page)
    common.show(*(f"{each.heading}: {each.sentence}" for each in chapters))
    common.say_failures(failures)


# ---- what all of them do


def _measured(spec: Spec | Path, folder: Path | None, **how: Any) -> list[str]:
    """Measure what is missing, print what to know of it, and return a sentence for each failure."""
    from quotient_manifolds.compare import run_comparison

    try:
        with common.progress_bars() as progress:
            found = run_comparison(spec, folder, progress=progress, command=common.command_line(), **how)
    except KeyboardInterrupt:
        kept = "what was measured is kept. The same command resumes from there" if folder else "nothing is kept"
        raise common.BadInput(f"Interrupted: {kept}.") from None
    if len(found.values):
        _print_comparison(found, folder)
    return [f"{', '.join(filter(None, where))}: {why}" for *where, why in found.failure_groups()]


def _print_comparison(found: Comparison, folder: Path | None) -> None:
    from quotient_manifolds.compare import summary_tables

    if len(found.scores) == 1:
        columns = ["label", "mean", "standard_error", "batches", "seconds"]
        common.show(found.values[columns].to_string(index=False, na_rep="", float_format="{:.6g}".format))
    else:
        common.show(*summary_tables(found))
    known, values = found.known
    tasks = f"Measured now: {found.measured_now} tasks (each a measure, or loss and error, on one batch)."
    common.show(
        (tasks if found.measured_now else "Nothing was left to measure.") + f" Computed: {known} of {values} values.",
        *(f"Note: {note}" for note in found.notes),
        *(f"Caution: {sentence}" for sentence in found.cautions),
        *([f"Report: {folder / 'report.html'}"] if folder else []),
    )


def _print_forecast(found: Forecast, wanted: Spec, folder: Path) -> None:
    names = ", ".join(each.name for each in wanted.checkpoints)
    common.show(f"{len(wanted.checkpoints)} checkpoints: {names}. A task is a measure on a checkpoint and a batch.")
    if len(found.measures):
        common.show(
            found.measures.to_string(na_rep="unknown", float_format="{:.3g}".format),
            f"About {timedelta(seconds=round(found.measures['time'].sum()))} (h:mm:ss) in one process. Timed on the "
            "first checkpoint: one pass in each geometry, in seconds. Loading, checks of symmetries and correlations "
            "are not counted.",
        )
    common.show(*(f"Note: {note}" for note in found.notes), f"Nothing was measured. Results will be in {folder}")
