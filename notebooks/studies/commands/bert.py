"""Redo study `bert`: a zoo of BERTs, compared."""

from __future__ import annotations

from pathlib import Path

import click

from quotient_manifolds.cli.options import EXIT_CODES, one_sentence_errors, out_option, progress_bars, quiet_option
from studies.commands.zoos import fail_if_troubled, print_ranking


@click.command(epilog=EXIT_CODES)
@out_option("results/bert")
@click.option("--fast", is_flag=True, help="Four models, hardly trained, and two measures: to try the command.")
@quiet_option
@one_sentence_errors
def bert(out: Path, fast: bool, quiet: bool) -> None:
    """How measures rank BERTs fine-tuned on sentences that heuristics mistake.

    With it: what each part of a measure adds, the family of metrics, the relaxation of the metric, larger radii.

    Fine-tunes all-MiniLM-L6-v2 once, then does what `compare` does with OUT/zoo.yaml, and goes on after an
    interruption; several at once share the work. OUT receives study.html, the files of `compare`, and record/ in a
    compact form. About two hours of one processor core.
    """
    from studies.bert.page import BERT
    from studies.bert.study import run_bert_study

    command = f"make study NAME=bert{' ARGS=--fast' if fast else ''}"
    with progress_bars(quiet=quiet) as report:
        found = run_bert_study(out, fast=fast, command=command, progress=report)
    if not quiet:
        print_ranking(BERT, found, out)
    fail_if_troubled(found, out)
