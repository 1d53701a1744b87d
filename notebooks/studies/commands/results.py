"""Redo study `results`: the paper's results beside ours, from the records of all studies."""

from __future__ import annotations

from pathlib import Path

import click

from quotient_manifolds.cli.options import EXIT_CODES, console, one_sentence_errors, out_option, quiet_option, table
from quotient_manifolds.files import write_text


@click.command(epilog=EXIT_CODES)
@click.option(
    "--records",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("notebooks/records"),
    show_default=True,
    help="Directory of what the studies found.",
)
@out_option("notebooks")
@click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A file with the lines <!-- results --> and <!-- /results -->, between which the short table goes.",
)
@quiet_option
@one_sentence_errors
def results(folder: Path, out: Path, page: Path | None, quiet: bool) -> None:
    """The paper's results and claims beside ours, each number from a record.

    OUT receives results.md, in results/ its figures, and full_scale.md, of the zoos that were not run. A study without
    a record is shown as not run. Half a minute.
    """
    from studies.full_scale.page import PAGE as FULL_SCALE
    from studies.full_scale.page import full_scale_page
    from studies.results.claims import claims
    from studies.results.estimates import RULES
    from studies.results.page import PAGE, into_page, write_results
    from studies.results.records import Records

    records = Records.load(folder)
    write_results(records, out)
    write_text(out / FULL_SCALE, full_scale_page())
    if page is not None:
        into_page(page, records)
    if not quiet:
        rows = [[each.about, RULES[each.rule].words, str(each.found or ""), each.verdict] for each in claims(records)]
        terminal = console(quiet=False)
        terminal.print(table("The paper’s claims", ["Number", "Claim", "Here", "Verdict"], rows))
        terminal.print(f"Page: {out / PAGE}")
