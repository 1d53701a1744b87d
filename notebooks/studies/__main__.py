"""Redo one of the studies, each by one command: `python -m studies NAME`, with this folder's parent on the path."""

from __future__ import annotations

from pathlib import Path

import click

from quotient_manifolds.cli.options import (
    EXIT_CODES,
    console,
    one_sentence_errors,
    out_option,
    progress_bars,
    quiet_option,
    table,
)
from studies.ascents import Ascents, compare_ascents
from studies.commands.bert import bert
from studies.commands.diagonal import diagonal
from studies.commands.full_scale import full_scale
from studies.commands.results import results
from studies.commands.toy import toy
from studies.commands.vit import vit


@click.group(epilog=EXIT_CODES)
def study() -> None:
    """Redo one of the package's own experiments."""


study.add_command(bert)
study.add_command(diagonal)
study.add_command(full_scale)
study.add_command(results)
study.add_command(toy)
study.add_command(vit)


@study.command(epilog=EXIT_CODES)
@out_option("results/ascents")
@click.option("--fast", is_flag=True, help="Two networks, hardly trained: to try the command.")
@quiet_option
@one_sentence_errors
def ascents(out: Path, fast: bool, quiet: bool) -> None:
    """How much of the loss's rise the matched and the released ascent find at equal passes.

    OUT receives ascents.json, which Ascents.load reads. About half a minute.
    """
    out.mkdir(parents=True, exist_ok=True)
    command = f"make study NAME=ascents{' ARGS=--fast' if fast else ''}"
    with progress_bars(quiet=quiet) as report:
        found = compare_ascents(fast=fast, command=command, progress=report)
    found.save(out / "ascents.json")
    if not quiet:
        _print(found)
        console(quiet=False).print(f"Record: {out / 'ascents.json'}")


def _print(found: Ascents) -> None:
    matched, released = found.passes
    rows = [
        [
            *(case.network, case.geometry, f"{case.radius:g}", f"{case.loss:.3g}"),
            *(f"{case.matched:.4g}", f"{case.released:.4g}", f"{case.ratio:.3f}", f"{case.released_norm:.3f}"),
        ]
        for case in found.cases
    ]
    columns = ["network", "ball", "radius", "loss", "matched", "released", "released / matched", "norm / radius"]
    numeric = [False, False, *[True] * 6]
    title = f"Rise of the loss that is found in {matched} (matched) and {released} passes (released)"
    terminal = console(quiet=False)
    terminal.print(table(title, columns, rows, numeric))
    medians = []
    for geometry in dict.fromkeys(case.geometry for case in found.cases):
        median, low, high = found.median_ratio(geometry)
        less = sum(case.ratio < 0.99 for case in found.cases if case.geometry == geometry)
        more = sum(case.ratio > 1.01 for case in found.cases if case.geometry == geometry)
        medians.append([geometry, f"{median:.3f}", f"{low:.3f} to {high:.3f}", str(less), str(more)])
    columns = ["ball", "median ratio", "interval (95 %)", "released finds less by 1 %", "more by 1 %"]
    terminal.print(table("", columns, medians, [False, *[True] * 4]))


if __name__ == "__main__":
    study(prog_name="python -m studies")
