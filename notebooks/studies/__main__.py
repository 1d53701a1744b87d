"""Redo one of the studies: `make study NAME=...`, or `python -m studies NAME` with `notebooks` on Python's path.

A study is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quotient_manifolds.cli.errors import Commands
from quotient_manifolds.cli.exits import NEGATIVE_FINDING
from quotient_manifolds.cli.options import EXIT_CODES, out_option, quiet_option
from quotient_manifolds.cli.terminal import Terminal, progress_bars
from quotient_manifolds.demo import cores
from quotient_manifolds.files import write_text
from quotient_manifolds.report import Table, render

if TYPE_CHECKING:
    pass


@click.group(cls=Commands, epilog=EXIT_CODES)
def study() -> None:
    """Redo one of the studies that stand behind the notebooks."""


def _with_options(name: str, trial: str) -> Callable[[Callable[..., None]], click.Command]:
    """Return a decorator: a study is a function of `out`, `fast`, `quiet` and the `command` that redoes it."""

    def made(function: Callable[..., None]) -> click.Command:
        def run(out: Path, fast: bool, quiet: bool) -> None:
            out.mkdir(parents=True, exist_ok=True)
            command = f"make study NAME={name}{' ARGS=--fast' if fast else ''}"
            function(out=out, fast=fast, quiet=quiet, command=command)

        fast_option = click.option("--fast", is_flag=True, help=f"{trial}: to try the command.")
        options = (quiet_option, fast_option, out_option(f"results/{name}"))
        for option in options:
            run = option(run)
        return study.command(name, help=function.__doc__, epilog=EXIT_CODES)(run)

    return made


def _show(quiet: bool, tables: list[Table], **files: Path) -> None:
    """Print tables, and where files are."""
    if not quiet:
        Terminal().show(*tables, *(f"{what}: {file}" for what, file in files.items()))


@_with_options("toy", "Two orbits and few balls")
def toy(out: Path, fast: bool, quiet: bool, command: str) -> None:
    """Study what is constant along the orbit of the scalar network f(x) = G H x, and which claims about it hold.

    OUT receives toy.json, which Toy.load reads, and report.html. About half a minute.
    """
    from studies.toy import claim_table, spread_table, study_toy, toy_page

    with progress_bars(quiet=quiet) as progress:
        found = study_toy(fast=fast, command=command, progress=progress)
    found.save(out / "toy.json")
    write_text(out / "report.html", render(toy_page(found)))
    _show(quiet, [spread_table(found), claim_table(found)], Report=out / "report.html", Record=out / "toy.json")


@_with_options("ascents", "Two networks, hardly trained")
def ascents(out: Path, fast: bool, quiet: bool, command: str) -> None:
    """Study how much of the loss's rise the matched and the released ascent find at equal passes.

    OUT receives ascents.json, which Ascents.load reads. About half a minute.
    """
    from studies.ascents import case_table, compare_ascents, ratio_table

    with progress_bars(quiet=quiet) as progress:
        found = compare_ascents(fast=fast, command=command, progress=progress)
    found.save(out / "ascents.json")
    _show(quiet, [case_table(found), ratio_table(found)], Record=out / "ascents.json")


@_with_options("passes", "Two small models")
def passes(out: Path, fast: bool, quiet: bool, command: str) -> None:
    """Study how many passes each ascent needs for 99 % of the maximum, and how well a tolerance is kept.

    OUT receives passes.json, which Passes.load reads, and cases/, by which an interrupted run goes on. About a quarter
    of an hour of one processor core.
    """
    from studies.passes.study import study_passes
    from studies.passes.tables import budgets_table, passes_table, stops_table

    with progress_bars(quiet=quiet) as progress:
        found = study_passes(out, fast=fast, command=command, progress=progress)
    found.save(out / "passes.json")
    _show(quiet, [passes_table(found), budgets_table(found), stops_table(found)], Record=out / "passes.json")


@_with_options("audit", "Two steps and one move")
def audit(out: Path, fast: bool, quiet: bool, command: str) -> None:
    """Study how far runs of optimizers from different points of one orbit drift apart.

    OUT receives audit.json, which AuditStudy.load reads, and optimizers.md, the page of the documentation. About two
    minutes of one processor core.
    """
    from studies.audit import audit_page, drift_table, study_audit

    with progress_bars(quiet=quiet) as progress:
        found = study_audit(fast=fast, command=command, progress=progress)
    found.save(out / "audit.json")
    write_text(out / "optimizers.md", audit_page(found))
    _show(quiet, [drift_table(found)], Page=out / "optimizers.md", Record=out / "audit.json")


@_with_options("training", "Two steps of everything")
def training(out: Path, fast: bool, quiet: bool, command: str) -> None:
    """Study whether optimizers on the quotient and geodesic SAM train better than others.

    OUT receives training.json, which Training.load reads, usefulness.md, the page of the documentation, its figure, and
    runs/, by which an interrupted run goes on. About three and a half hours of one processor core.
    """
    from studies.sentiment.sentences import fetched
    from studies.training.page import FIGURE, PAGE, training_page
    from studies.training.pictures import rates_figure
    from studies.training.study import Plan, study_training
    from studies.training.tables import losses_table, sam_table

    plan, workers = (Plan.fast(), 1) if fast else (Plan(), cores())
    with progress_bars(quiet=quiet) as progress:
        found = study_training(out, fetched(), plan, command=command, workers=workers, progress=progress)
    found.save(out / "training.json")
    (out / FIGURE).parent.mkdir(exist_ok=True)
    rates_figure(found).save(out / FIGURE)
    write_text(out / PAGE, training_page(found))
    _show(quiet, [losses_table(found), sam_table(found)], Page=out / PAGE, Record=out / "training.json")


@_with_options("fibres", "Three small models")
def fibres(out: Path, fast: bool, quiet: bool, command: str) -> None:
    """Study how many of the directions that leave the function alone are found, in models of many kinds.

    OUT receives fibres.json, which Fibres.load reads, fibres.md, the page of the documentation, and rows/, by which an
    interrupted run goes on. About 20 minutes of one processor core.
    """
    from studies.fibres import fibre_table, fibres_page, study_fibres
    from studies.fibres.cases import FAST, names

    with progress_bars(quiet=quiet) as progress:
        found = study_fibres(out, FAST if fast else names(), command=command, progress=progress)
    found.save(out / "fibres.json")
    write_text(out / "fibres.md", fibres_page(found))
    _show(quiet, [fibre_table(found)], Page=out / "fibres.md", Record=out / "fibres.json")


@_with_options("invariance", "Three small models, one move each")
def invariance(out: Path, fast: bool, quiet: bool, command: str) -> None:
    """Study how far measures agree along the whole orbit of models of many kinds.

    OUT receives invariance.json, which Invariance.load reads, invariance.md, the page of the documentation, and rows/,
    by which an interrupted run goes on. About half an hour of one processor core.
    """
    from studies.fibres.cases import FAST, names
    from studies.invariance import changes_table, invariance_page, study_invariance

    with progress_bars(quiet=quiet) as progress:
        found = study_invariance(out, FAST if fast else names(), fast=fast, command=command, progress=progress)
    found.save(out / "invariance.json")
    write_text(out / "invariance.md", invariance_page(found))
    _show(quiet, [changes_table(found)], Page=out / "invariance.md", Record=out / "invariance.json")


@_with_options("diagonal", "Six small cells, seconds")
def diagonal(out: Path, fast: bool, quiet: bool, command: str) -> None:
    """Study how sharpness ranks diagonal networks, along geodesics of each order.

    OUT receives diagonal.json, which DiagonalStudy.load reads, report.html, and cells/, by which an interrupted run
    goes on. About an hour on one thread.
    """
    from studies.diagonal import Plan, run_diagonal
    from studies.diagonal.page import write_page
    from studies.diagonal.tables import short_table

    with progress_bars(quiet=quiet) as progress:
        found = run_diagonal(out, Plan.fast() if fast else Plan(), command=command, progress=progress)
    found.save(out / "diagonal.json")
    write_page(found, out / "report.html")
    tables = [short_table(found, radius) for radius in found.plan.radii]
    _show(quiet, tables, Record=out / "diagonal.json", Report=out / "report.html")


@_with_options("families", "A vision transformer, hardly trained")
def families(out: Path, fast: bool, quiet: bool, command: str) -> None:
    """Study how much each family of symmetries alone changes each measure of real models.

    OUT receives families.json, which Families.load reads, and families.md, the table. About ten minutes.
    """
    from studies.families import families_page, ratio_table, study_families

    with progress_bars(quiet=quiet) as progress:
        found = study_families(fast=fast, command=command, progress=progress)
    found.save(out / "families.json")
    write_text(out / "families.md", families_page(found))
    _show(quiet, [ratio_table(found)], Record=out / "families.json")


@_with_options("mnist", "Four models, hardly trained, and two measures")
def mnist(out: Path, fast: bool, quiet: bool, command: str) -> None:
    """Study how measures rank 216 vision transformers on MNIST, a full factorial design.

    Trains each model once and measures it once, and goes on after an interruption. OUT receives a folder for each
    training set, with the files of `compare`, and record/, which goes to notebooks/records/mnist. About three hours of
    one processor core.
    """
    from studies.mnist.zoo import FAST, FULL, prepare

    _measure("mnist", partial(prepare, size=FAST if fast else FULL), out=out, fast=fast, quiet=quiet, command=command)


@_with_options("sentiment", "Four models, hardly trained, and two measures")
def sentiment(out: Path, fast: bool, quiet: bool, command: str) -> None:
    """Study how measures rank 62 BERTs fine-tuned on film reviews.

    30 of them differ by their seed alone. Fine-tunes all-MiniLM-L6-v2, measures each model once, and goes on after an
    interruption. OUT receives a folder for each group of models, with the files of `compare`, and record/, which goes
    to notebooks/records/sentiment. About four hours of one processor core.
    """
    from studies.sentiment.sentences import fetched
    from studies.sentiment.zoo import FAST, FULL, prepare

    made = partial(prepare, size=FAST if fast else FULL, archive=fetched())
    _measure("sentiment", made, out=out, fast=fast, quiet=quiet, command=command)


def _measure(
    name: str, prepare: Callable[..., list[Path]], *, out: Path, fast: bool, quiet: bool, command: str
) -> None:
    from studies.records import save_record
    from studies.zoos.convergence import check_convergence
    from studies.zoos.study import measure_zoo

    workers, models = (1, 1) if fast else (cores(), 12 if name == "mnist" else 3)
    with progress_bars(quiet=quiet) as progress:
        specs = prepare(out, progress=progress, workers=workers)
        record = out / "record"
        found = measure_zoo(specs, record, name=name, command=command, workers=workers, progress=progress)
        converged = check_convergence(specs, zoo=name, models=models, command=command, progress=progress)
    save_record(record / "convergence.json", converged)
    _show(quiet, [], Record=record)
    if found.failures:
        click.echo(f"Failed: {len(found.failures)} measurements, see report.html of the parts in {out}", err=True)
        raise click.exceptions.Exit(NEGATIVE_FINDING)


@_with_options("pilots", "One model of each zoo, and ascents of two steps")
def pilots(out: Path, fast: bool, quiet: bool, command: str) -> None:
    """Measure the pilots whose rises of the loss chose the radii of the zoos.

    OUT receives mnist/pilots.json and sentiment/pilots.json, which go to notebooks/records. About ten minutes of one
    processor core.
    """
    from studies.mnist.zoo import pilot_models as vision
    from studies.records import save_record
    from studies.sentiment.sentences import fetched
    from studies.sentiment.zoo import pilot_models as language
    from studies.zoos.pilots import Pilots, measure_pilots

    models = {"mnist": (vision(out / "mnist", 100), 20), "sentiment": (language(out / "sentiment", fetched()), 10)}
    with progress_bars(quiet=quiet) as progress:
        for zoo, (made, steps) in models.items():
            chosen = dict(list(made.items())[: 1 if fast else None])
            found: Pilots = measure_pilots(
                chosen, zoo=zoo, command=command, steps=2 if fast else steps, progress=progress
            )
            save_record(out / zoo / "pilots.json", found)
    _show(quiet, [], Records=out)


@study.command(epilog=EXIT_CODES)
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
def results(folder: Path, out: Path, page: Path | None, quiet: bool) -> None:
    """Put the paper's results and claims beside ours, each number from a record.

    OUT receives results.md, in results/ its figures, and full_scale.md, of the zoos that were not run. A study without
    a record is shown as not run. Half a minute.
    """
    from studies.full_scale.page import PAGE as FULL_SCALE
    from studies.full_scale.page import full_scale_page
    from studies.results.page import PAGE, into_page, write_results
    from studies.results.records import Records

    records = Records.load(folder)
    write_results(records, out)
    write_text(out / FULL_SCALE, full_scale_page())
    if page is not None:
        into_page(page, records)
    _show(quiet, [], Page=out / PAGE)


@study.command("full-scale", epilog=EXIT_CODES)
@out_option("full_scale")
@quiet_option
def full_scale(out: Path, quiet: bool) -> None:
    """Write the specs of the paper's own zoos, CLIP on ImageNet and BERT on MNLI, for `compare` on GPUs.

    OUT receives clip_soups.yaml, bert_mnli.yaml and full_scale.md, which says what to put beside them, what to type
    and what it would cost. Nothing is downloaded or measured.
    """
    from studies.full_scale.experiments import write_specs
    from studies.full_scale.page import PAGE, full_scale_page

    written = write_specs(out)
    write_text(out / PAGE, full_scale_page())
    if not quiet:
        Terminal().show(*map(str, (*written, out / PAGE)))


@study.command("appendix-g", epilog=EXIT_CODES)
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
@out_option("results/appendix_g")
@quiet_option
def appendix_g(zoo: Path, layer: str, radius: float, steps: int, out: Path, quiet: bool) -> None:
    """Redo the ablations of the paper's Appendix G: quotients in the ball of adaptive sharpness, relative flatness.

    OUT receives appendix_g.csv, a row for each model. About a minute for ten vision transformers of the MNIST zoo.
    """
    from studies.appendix_g import measure_zoo

    with progress_bars(quiet=quiet) as progress:
        file = measure_zoo(out, zoo, layer=layer, radius=radius, steps=steps, progress=progress)
    _show(quiet, [], Table=file)


if __name__ == "__main__":
    study(prog_name="python -m studies")
