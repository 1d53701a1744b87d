"""Redo study `full-scale`: the paper's own zoos, as specs for compare."""

from __future__ import annotations

from pathlib import Path

import click

from quotient_manifolds.cli.options import EXIT_CODES, console, one_sentence_errors, out_option, quiet_option


@click.command("full-scale", epilog=EXIT_CODES)
@out_option("full_scale")
@quiet_option
@one_sentence_errors
def full_scale(out: Path, quiet: bool) -> None:
    """Write the specs of the paper's own zoos, CLIP on ImageNet and BERT on MNLI, for `compare` on GPUs.

    OUT receives clip_soups.yaml, bert_mnli.yaml and full_scale.md, which says what to put beside them, what to type
    and what it would cost. Nothing is downloaded or measured.
    """
    from quotient_manifolds.files import write_text
    from studies.full_scale.experiments import write_specs
    from studies.full_scale.page import PAGE, full_scale_page

    written = write_specs(out)
    write_text(out / PAGE, full_scale_page())
    if not quiet:
        for file in (*written, out / PAGE):
            console(quiet=False).print(str(file))
