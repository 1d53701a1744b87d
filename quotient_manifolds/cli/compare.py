"""Measure the checkpoints of a spec, one model, or the models of the demo, into a store that survives a crash."""

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
@common.directory_option("Directory of the results.  [default: results/NAME beside NAME.yaml]")
@click.option("--check", is_flag=True, help="Measure nothing; list the tasks and estimate the time.")
@common.count_option("--workers", "Number of processes on this machine; on CUDA, one per device.")
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
      test: {path: test.jsonl}  # for the gaps in error and loss between it and data
      scores: scores.csv        # further scores: a column checkpoint, and any others
      against: [error_gap]      # scores to correlate with
      given: [learning_rate]    # hyperparameters held fixed in partial correlations
      loss: package.module:function  # loss(model, batch); cross-entropy by default
      dtype: float32

    Only checkpoints, data and measures are required; paths are relative to SPEC. Measures: worst-case, average-case,
    legacy-worst-case, gradient-norm, hessian-trace, top-eigenvalue. Geometries: euclidean, adaptive, inv, mix, or a
    number t. Options of a measure and of its geometry are further keys of its entry.

    OUT receives report.html, comparison.json, values.csv, and store.sqlite, to which every value is written as soon as
    it is computed. After an interruption, a crash or a change of SPEC, the same command measures only what is missing.
    Without --workers or --scheduler everything runs in this process. Values agree bit for bit between processes with
    the same number of threads; a worker has one, unless OMP_NUM_THREADS is set.

    The exit code is 1 if a checkpoint or one of its measures failed; all others are measured.
    """
    from quotient_manifolds.compare import forecast, read_spec

    folder = spec.resolve().parent / "results" / spec.stem if out is None else out
    comparison = read_spec(spec)
    if check:
        estimate = forecast(comparison, folder, device)
        _print_forecast(estimate, comparison, folder)
        common.exit_if_failed(estimate.failures)
    else:
        common.exit_if_failed(_measure(comparison, folder, device=device, workers=workers, scheduler=scheduler))


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
@click.option("--symmetries", help="Symmetries to quotient out: all, pairs or paper.  [default: all]")
@common.count_option("--steps", "Number of steps of the ascent on each batch.", default=20)
@click.option(
    "--loss",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="A function loss(model, batch) that returns a scalar.  [default: cross-entropy]",
)
@common.data_options("batch_size", "max_examples", "seed", "max_length", "task", "columns", "labels")
@common.directory_option(
    "Directory for report.html, comparison.json, values.csv and store.sqlite; an existing one is resumed."
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
    geodesic: str | None,
    symmetries: str | None,
    steps: int,
    out: Path | None,
    seed: int,
    device: torch.device,
    dtype: str,
) -> None:
    """Measure the worst-case sharpness of MODEL on DATA.

    MODEL is a Hugging Face directory, a peft adapter, or package.module:function, a function that returns a torch
    module. On every batch of DATA the loss is maximized within the radius, by an ascent along geodesics; the result is
    the mean increase over batches with its standard error. Every batch has equal weight, so examples in a smaller last
    batch count more.

    This is `compare` for one model. `compare` has all measures and their options. OUT receives the same files, and the
    same command resumes an interrupted run.
    """
    from quotient_manifolds.compare import Spec
    from quotient_manifolds.load import Checkpoint, data_of

    ascent = {"steps": steps, "seed": seed}
    of_quotients = {"geodesic": geodesic, "symmetries": symmetries}
    of_quotients = {name: value for name, value in of_quotients.items() if value is not None}
    measures = [each for word in geometries for each in _balls(word, radii, ascent, of_quotients)]
    path = expanded(model)
    is_function = ":" in model and not path.exists()
    checkpoint = (
        Checkpoint(model, None, model) if is_function else Checkpoint(path.absolute().name, path, "huggingface")
    )
    source = data_of(data, common.data_settings())
    spec = Spec((checkpoint,), source, measures, loss=loss, dtype=dtype, name=checkpoint.name)
    if failures := _measure(spec, out, device=device):
        raise common.BadInput(failures[0])


def _balls(
    word: str, radii: Sequence[float], ascent: Mapping[str, Any], of_quotients: Mapping[str, Any]
) -> Iterator[MeasureEntry]:
    """Yield a measure for each radius of a geometry, NAME or NAME:RADIUS,RADIUS, ascending. Raises common.BadInput."""
    from quotient_manifolds.compare import measures_of

    name, colon, listed = word.partition(":")
    try:
        sizes = [float(each) for each in listed.split(",")] if colon else [*radii]
    except ValueError:
        raise common.BadInput(f"A geometry and its radii must be given as in inv:0.1,0.2. Found {word!r}") from None
    geometry: str | float = name
    with suppress(ValueError):
        geometry = float(name)
    options = {**ascent, **({} if name in ("euclidean", "adaptive") else of_quotients)}
    yield from measures_of("worst-case", [geometry], {"radius": sizes} if sizes else {}, options=options)


@common.command
@common.directory_option("Directory to write.", default="results/demo", show_default=True)
@common.count_option("--models", "Number of models; a ranking needs 5.", least=5, default=8)
@common.count_option("--workers", "Number of training processes.  [default: one for each core]")
@common.run_options
def demo(out: Path, models: int, workers: int | None, seed: int, device: torch.device) -> None:
    """Train, measure and rank a zoo of small vision transformers.

    They are trained once on scikit-learn's digits, and kept in OUT. OUT/report.html shows three results for the first
    two: a model's adaptive sharpness changes along its symmetry orbit although its function does not; all continuous
    symmetries are found; aligned models are connected by a path of low loss. Then all models are ranked by sharpness
    and compared with the generalization gap, as `compare` does with OUT/zoo.yaml. For further measures, edit
    OUT/zoo.yaml and run `compare` on it.
    """
    from quotient_manifolds.compare import Comparison, comparison_page
    from quotient_manifolds.demo import one_thread, prepare, tell
    from quotient_manifolds.files import write_text

    processes = workers or os.cpu_count() or 1
    with common.progress_bars() as progress:
        spec = prepare(out, models=models, seed=seed, workers=processes, progress=progress)
        chapters = tell(out / "models" / "vit-00", out / "models" / "vit-01", out / "train.npz", processes, progress)
    with one_thread():
        failures = _measure(spec, out, device=device)
    title = "Symmetries, sharpness and generalization of small vision transformers"
    lead = (
        f"{models} small vision transformers were trained on scikit-learn’s digits with different settings. This page "
        "shows the symmetries of two of them, then ranks all by sharpness."
    )
    page = comparison_page(Comparison.load(out), title=title, lead=lead, chapters=chapters)
    write_text(out / "report.html", page)
    common.show(*(f"{each.heading}: {each.sentence}" for each in chapters))
    common.exit_if_failed(failures)


# ---- running and printing


def _measure(spec: Spec | Path, folder: Path | None, **how: Any) -> list[str]:
    """Compute the missing values, print the comparison, and return a sentence for each failure."""
    from quotient_manifolds.compare import run_comparison

    try:
        with common.progress_bars() as progress:
            comparison = run_comparison(spec, folder, progress=progress, command=common.command_line(), **how)
    except KeyboardInterrupt:
        kept = "the values computed are kept; the same command resumes from there" if folder else "nothing is kept"
        raise common.BadInput(f"Interrupted: {kept}") from None
    if len(comparison.values):
        _print_comparison(comparison, folder)
    return [f"{', '.join(filter(None, where))}: {why}" for *where, why in comparison.failure_groups()]


def _print_comparison(comparison: Comparison, folder: Path | None) -> None:
    from quotient_manifolds.compare import summary_tables

    if len(comparison.scores) == 1:
        columns = ["label", "mean", "standard_error", "batches", "seconds"]
        common.show(comparison.values[columns].to_string(index=False, na_rep="", float_format="{:.6g}".format))
    else:
        common.show(*summary_tables(comparison))
    computed, values = comparison.known
    tasks = f"Measured now: {comparison.measured_now} tasks (each a measure, or loss and error, on one batch)."
    common.show(
        (tasks if comparison.measured_now else "Nothing was left to measure.")
        + f" Computed: {computed} of {values} values.",
        *(f"Note: {note}" for note in comparison.notes),
        *(f"Caution: {sentence}" for sentence in comparison.cautions),
        *([f"Report: {folder / 'report.html'}"] if folder else []),
    )


def _print_forecast(estimate: Forecast, spec: Spec, folder: Path) -> None:
    names = ", ".join(each.name for each in spec.checkpoints)
    common.show(f"{len(spec.checkpoints)} checkpoints: {names}. A task is one measure on one checkpoint and one batch.")
    if len(estimate.measures):
        common.show(
            estimate.measures.to_string(na_rep="unknown", float_format="{:.3g}".format),
            f"About {timedelta(seconds=round(estimate.measures['time'].sum()))} (h:mm:ss) in one process. Timed on the "
            "first checkpoint: one pass in each geometry, in seconds. Loading, checks of symmetries and correlations "
            "are not counted.",
        )
    common.show(*(f"Note: {note}" for note in estimate.notes), f"Nothing was measured. Results will be in {folder}")
