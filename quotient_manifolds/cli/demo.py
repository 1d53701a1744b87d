"""quotient-manifolds demo: the whole path on real transformers, from training to the report."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import torch

from quotient_manifolds.cli.options import (
    EXIT_CODES,
    NEGATIVE_FINDING,
    common_options,
    console,
    one_sentence_errors,
    out_option,
    progress_bars,
    table,
)
from quotient_manifolds.experiments import DemoResult, run_demo
from quotient_manifolds.experiments.demo import MODELS, RADIUS, STEPS
from quotient_manifolds.experiments.page import demo_page
from quotient_manifolds.report import Table

SHOWN = ("symmetry-table", "orbit-table", "ranking-table")


@click.command(epilog=EXIT_CODES)
@out_option("results/demo")
@click.option("--models", type=click.IntRange(min=2), default=MODELS, show_default=True, help="Size of the zoo.")
@click.option("--steps", type=click.IntRange(min=1), default=STEPS, show_default=True, help="Of ascent, per batch.")
@click.option("--radius", type=float, default=RADIUS, show_default=True, help="Of the adaptive and quotient balls.")
@common_options
@one_sentence_errors
def demo(
    out: Path,
    models: int,
    steps: int,
    radius: float,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    quiet: bool,
) -> None:
    """Train, measure and rank a zoo of small vision transformers.

    They are trained on scikit-learn's digits, once: the directory OUT keeps them. One is moved along its symmetry
    orbit, where the function stays the same, and its sharpness is compared before and after; all are ranked by
    sharpness and by generalisation gap. OUT receives report.html, records.json and the tables as CSV.

    The exit code is 1 if a symmetry is not proved.
    """
    settings = {"models": models, "seed": seed, "device": device, "dtype": dtype, "steps": steps, "radius": radius}
    with progress_bars(quiet=quiet) as report:
        result = run_demo(
            out,
            models=models,
            seed=seed,
            device=device,
            dtype=dtype,
            steps=steps,
            radius=radius,
            progress=report,
            command=_command(settings),
        )
    if not quiet:
        terminal = console(quiet=False)
        for shown in _tables(result):
            terminal.print(table(shown.caption, shown.columns, shown.rows, shown.numeric))
        terminal.print(f"Report: {out / 'report.html'}")
        terminal.print(f"Records: {out / 'records.json'}")
    if any(pair.verdict != "proved" for pair in result.pairs):
        raise click.exceptions.Exit(NEGATIVE_FINDING)


def _command(settings: dict[str, object]) -> str:
    """The command that gives the same numbers again, wherever its results are to lie."""
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value).removeprefix("torch."))]
    return shlex.join(["quotient-manifolds", "demo", *words])


def _tables(result: DemoResult) -> Iterator[Table]:
    tables = (block for section in demo_page(result).sections for block in section.blocks if isinstance(block, Table))
    yield from sorted((block for block in tables if block.name in SHOWN), key=lambda block: SHOWN.index(block.name))
