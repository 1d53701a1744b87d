"""quotient-manifolds measure: the worst-case sharpness of a text classifier on labelled text."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

from quotient_manifolds.cli.options import (
    EXIT_CODES,
    BadInput,
    Report,
    check_writable,
    common_options,
    console,
    one_sentence_errors,
    progress_bars,
    table,
    write_json,
)
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.load import load_model, read_text_labels, tokenised_batches
from quotient_manifolds.manifolds import GEODESICS, METRICS
from quotient_manifolds.sharpness import Measurement, MeasurementWarning, cross_entropy, worst_case_sharpness
from quotient_manifolds.version import VERSION


@click.command(epilog=EXIT_CODES)
@click.argument("model")
@click.option("--data", required=True, type=click.Path(path_type=Path), help=".jsonl or .csv: text, label, text_pair.")
@click.option(
    "--geometry",
    "--metric",
    "geometries",
    type=click.Choice(["euclidean", "adaptive", *METRICS]),
    multiple=True,
    default=("adaptive", *METRICS),
    show_default=True,
    help="Which ball; give it again for another.",
)
@click.option("--radius", required=True, type=float, help="Of the ball, in the metric's norm over all parameters.")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Of ascent, per batch.")
@click.option(
    "--restarts", type=click.IntRange(min=0), default=0, show_default=True, help="Further ascents, per batch."
)
@click.option("--geodesic", type=click.Choice(GEODESICS), default="second", show_default=True, help="Of inv and mix.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="Examples in a batch.")
@click.option("--max-length", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens kept of a text.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the results to this JSON file.")
@common_options
@one_sentence_errors
def measure(
    model: str,
    data: Path,
    geometries: tuple[str, ...],
    radius: float,
    steps: int,
    restarts: int,
    geodesic: str,
    batch_size: int,
    max_length: int,
    out: Path | None,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    quiet: bool,
) -> None:
    """Measure the worst-case sharpness of the text classifier MODEL.

    MODEL is a Hugging Face directory of a sequence classifier with its tokenizer. On every batch of DATA the loss is
    driven up, by Auto-PGD along geodesics, as far as it rises within RADIUS; the result is the mean rise over batches
    with its standard error. Every batch counts the same, so a last batch that is smaller weighs more per example.
    """
    check_writable(out)
    chosen = [_geometry(name, geodesic) for name in dict.fromkeys(geometries)]
    network = load_model(model)
    examples = read_text_labels(data, num_labels=_number_of_classes(model, network))
    tokenised = tokenised_batches(model, examples, batch_size=batch_size, max_length=max_length)
    network.to(device=device, dtype=dtype)
    batches = [{name: value.to(device) for name, value in batch.items()} for batch in tokenised]
    ascent = {"radius": radius, "steps": steps, "restarts": restarts, "seed": seed}
    with progress_bars(quiet=quiet) as report:
        results = [_measured(network, batches, geometry, ascent, report) for geometry in chosen]
    if not quiet:
        console(quiet=False).print(table_of_results(f"{model} on {len(examples)} examples of {data}", results))
        for sentence in filter(None, (result.warning for result in results)):
            click.echo(f"Warning: {sentence}", err=True)
    if out is not None:
        settings = {"batch_size": batch_size, "max_length": max_length, "dtype": str(dtype).removeprefix("torch.")}
        source = {"version": VERSION, "model": model, "data": str(data), "examples": len(examples), **settings}
        write_json(out, {**source, "results": [result.to_dict() for result in results]})


def _geometry(name: str, geodesic: str) -> Geometry:
    if name in METRICS:
        return Quotient(metric=name, geodesic=geodesic)
    return Euclidean() if name == "euclidean" else Adaptive()


def _number_of_classes(model: str, network: nn.Module) -> int:
    kind = type(network).__name__
    classes: int = getattr(getattr(network, "config", None), "num_labels", 0)
    if not Path(model).is_dir() or not kind.endswith("ForSequenceClassification"):
        raise BadInput(f"Expected the directory of a Hugging Face sequence classifier, found {model} ({kind}).")
    if classes < 2:
        raise BadInput(f"Expected a classifier with at least 2 classes, found {classes} in {model} (a regression).")
    return classes


def _measured(
    network: nn.Module, batches: list[dict[str, Tensor]], geometry: Geometry, ascent: dict[str, Any], report: Report
) -> Measurement:
    def progress(done: int, total: int) -> None:
        report(geometry.name, done, total)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MeasurementWarning)  # it stands below the table
        return worst_case_sharpness(network, cross_entropy, batches, geometry=geometry, progress=progress, **ascent)


def table_of_results(title: str, results: list[Measurement]) -> Any:
    """A row for every geometry: the mean rise of the loss over batches, and how it came about."""
    header = ["geometry", "radius", "sharpness", "standard error", "batches", "loss", "norm reached", "reach", "passes"]
    rows = [
        [
            result.geometry,
            f"{result.settings['radius']:g}",
            f"{result.mean:.6g}",
            "-" if result.standard_error is None else f"{result.standard_error:.2g}",
            str(len(result.values)),
            f"{sum(result.base_losses) / len(result.base_losses):.6g}",
            f"{max(norm or 0.0 for norm in result.norms):.4g}",
            "-" if result.reach is None else f"{result.reach:.3g}",
            f"{result.forward_passes} + {result.backward_passes}",
        ]
        for result in results
    ]
    return table(title, header, rows, [name != "geometry" for name in header])
