"""Redo one of the studies: `make study NAME=...`, or `python -m studies NAME` with `notebooks` on Python's path.

A study is a module with `run(out, *, fast, progress)`, which returns its record and may keep what it takes to continue
in `out`, and `tables(record)`. The record is written to OUT/NAME.json. A zoo has a file of values besides, and `load`.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import click

from quotient_manifolds.files import write_text
from quotient_manifolds.version import VERSION
from studies.common import RECORDS, Tables, csv_files, fill_page, load, markdown, save_figure, write_record
from studies.convert import convert

STUDIES: Final = {
    "alignment": "Study how far symmetries lower the barrier between networks of different seeds. Forty minutes.",
    "ascents": "Compare the matched and the released ascent at equal passes. Half a minute.",
    "audit": "Study how far optimizers started at different points of one orbit drift apart. Two minutes.",
    "diagonal": "Study how sharpness ranks diagonal networks, along geodesics of each order. An hour.",
    "fibres": "Count how many of the directions that preserve the function are found, in 99 models. 20 minutes.",
    "invariance": "Study how much measures change along the orbit, in 99 models. A few hours.",
    "mnist": "Study how measures rank 216 vision transformers on MNIST, a full factorial design. Three hours.",
    "peers": "Compare with libraries that rotate, equalize, permute or quantise. Half an hour.",
    "pilots": "Measure the pilots whose increase in loss chose the radii of the zoos. Ten minutes.",
    "rounding": "Study how much less rounding and pruning cost at another point of the orbit. 20 minutes.",
    "sentiment": "Study how measures rank 62 BERTs fine-tuned on film reviews. Four hours.",
    "toy": "Compare expansions with the closed forms of the scalar network f(x) = G H x. A second.",
    "training": "Study whether optimizers on the quotient train better than others. Two hours.",
}
"""By name what a study does, and how long it takes on one core."""

FIGURES: Final = {
    "docs/images/learning_rates.svg": lambda: module_of("training").figure(load_study("training")),
    "docs/images/charges.svg": lambda: module_of("charges").figure(),
}
"""By file what draws a figure of the pages."""

out_option = click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Directory of the record.")
quiet_option = click.option("--quiet", is_flag=True, help="Print nothing but errors.")


def module_of(name: str) -> ModuleType:
    """Return the module of a study, imported when it is asked for."""
    return importlib.import_module(f"studies.{name}")


def load_study(name: str, folder: Path = RECORDS) -> Any:
    """Return the record of a study, of a zoo with its values."""
    own = getattr(module_of(name), "load", None)
    return load(name, folder) if own is None else own(folder)


@cache
def recorded(name: str) -> Tables:
    """Return the tables of a study by name as they are printed, from its committed record."""
    return {title: shown.map(str) for title, shown in module_of(name).tables(load_study(name)).items()}


def said(what: str, done: int, total: int) -> None:
    """Print how far a study is, to standard error."""
    click.echo(f"{what}: {done} of {total}", err=True)


@click.group()
def study() -> None:
    """Redo one of the studies that stand behind the notebooks."""


def _add(name: str, words: str) -> None:
    @study.command(name, help=f"{words}\n\nOUT receives the record. An interrupted study continues where it stopped.")
    @out_option
    @click.option("--fast", is_flag=True, help="A few small cases, to try the command.")
    @quiet_option
    def run(out: Path | None, fast: bool, quiet: bool) -> None:
        out, module = out or Path("results", name), module_of(name)
        record = module.run(out, fast=fast, progress=(lambda *done: None) if quiet else said)
        command = f"make study NAME={name}{' ARGS=--fast' if fast else ''}"
        write_record(out / f"{name}.json", {**record, "command": command, "version": VERSION})
        if not quiet:
            for title, table in module.tables(load_study(name, out)).items():
                click.echo(f"{title}\n\n{markdown(table)}")
            click.echo(f"Record: {out}")


for _name, _words in STUDIES.items():
    _add(_name, _words)


@study.command()
def pages() -> None:
    """Fill the tables of all pages of docs and notebooks from the committed records, and draw the figures.

    A table stands between the lines `<!-- table STUDY NAME -->` and `<!-- end -->`.
    """
    for page in (*sorted(Path("docs").glob("*.md")), *sorted(Path("notebooks").glob("*.md"))):
        for file, text in {page: fill_page(page, recorded), **csv_files(page, recorded)}.items():
            if not file.exists() or text != file.read_text(encoding="utf-8"):
                write_text(file, text)
                click.echo(f"Changed: {file}")
    for path, draw in FIGURES.items():
        save_figure(draw(), Path(path))


@study.command("appendix-g")
@click.option(
    "--zoo",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path("results/mnist"),
    show_default=True,
    help="Directory in which the study of a zoo wrote models and zoo.yaml.",
)
@click.option("--layer", default="classifier", show_default=True, help="The layer whose relative flatness is computed.")
@click.option("--radius", default=0.36, show_default=True, help="Of the ball of adaptive sharpness.")
@click.option("--steps", default=15, show_default=True, help="Of each ascent.")
@out_option
@quiet_option
def appendix_g(zoo: Path, layer: str, radius: float, steps: int, out: Path | None, quiet: bool) -> None:
    """Redo the ablations of the paper's Appendix G: quotients in the ball of adaptive sharpness, relative flatness.

    OUT receives appendix_g.csv, a row for each model. About a minute for ten vision transformers of the MNIST zoo.
    """
    from studies.appendix_g import measure_zoo

    progress = None if quiet else said
    out = out or Path("results/appendix_g")
    file = measure_zoo(out, zoo, layer=layer, radius=radius, steps=steps, progress=progress)
    if not quiet:
        click.echo(f"Table: {file}")


study.add_command(convert)


if __name__ == "__main__":
    study(prog_name="python -m studies")
