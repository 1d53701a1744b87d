"""Redo study `vit`: a zoo of vision transformers, compared."""

from __future__ import annotations

from pathlib import Path

import click

from quotient_manifolds.cli.options import EXIT_CODES, one_sentence_errors, out_option, progress_bars, quiet_option
from studies.commands.zoos import fail_if_troubled, print_ranking


@click.command(epilog=EXIT_CODES)
@out_option("results/vit")
@click.option("--fast", is_flag=True, help="Four models, hardly trained, and two measures: to try the command.")
@quiet_option
@one_sentence_errors
def vit(out: Path, fast: bool, quiet: bool) -> None:
    """How measures rank 48 vision transformers fine-tuned on few digits.

    With it: what each part of a measure adds, the family of metrics, the relaxation of the metric, larger radii.

    Trains once, then does what `compare` does with OUT/zoo.yaml, and goes on after an interruption. OUT receives
    study.html, the files of `compare`, and record/ in a compact form. About 35 minutes of one processor core.
    """
    from studies.vit_page import VIT
    from studies.vit_study import run_vit_study

    command = f"make study NAME=vit{' ARGS=--fast' if fast else ''}"
    with progress_bars(quiet=quiet) as report:
        found = run_vit_study(out, fast=fast, command=command, progress=report)
    if not quiet:
        print_ranking(VIT, found, out)
    fail_if_troubled(found, out)
