"""Export what a store holds as a table for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from quotient_manifolds.cli.options import check_writable, command


@command
@click.argument("store", type=click.Path(path_type=Path, exists=True))
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
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
