"""quotient-manifolds export: what a store holds, as a table for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from quotient_manifolds.cli.options import EXIT_CODES, check_writable, one_sentence_errors


@click.command(epilog=EXIT_CODES)
@click.argument("store", type=click.Path(path_type=Path, exists=True))
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@one_sentence_errors
def export(store: Path, file: Path) -> None:
    """Write all that STORE holds to FILE, a .csv, .parquet or .json.

    STORE is the store.sqlite of a comparison, or the directory that has it. A row is one measure of one checkpoint on
    one batch.
    """
    from quotient_manifolds.compare import Store

    place = store / "store.sqlite" if store.is_dir() else store
    check_writable(file, place)
    with Store(place, make=False) as opened:
        opened.export(file)
