"""Numbers of the records that are typed in by hand: README, benchmarks and notebook 4."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from studies.diagonal.networks import Setting
from studies.diagonal.records import MIDDLE
from studies.results.claims import setting_claims
from studies.results.records import Records
from studies.results.settings import DiagonalZoo
from studies.wording import signed

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
WORDS = {0: "none", 1: "one", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 11: "eleven", 12: "twelve"}


@pytest.fixture(scope="module")
def grid() -> DiagonalZoo:
    found = Records.load(NOTEBOOKS / "records").diagonal
    assert found is not None
    return found


def words_of(text: str) -> str:
    """A text without the marks of its form."""
    return " ".join(re.sub(r"[`*$\\]", "", text).split())


def page(name: str) -> str:
    return words_of((ROOT / name).read_text(encoding="utf-8"))


def lesson() -> str:
    (path,) = NOTEBOOKS.glob("4_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return words_of(" ".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"))


def values(grid: DiagonalZoo, name: str, settings: Iterable[Setting]) -> list[float]:
    return [tau.value for each in settings if (tau := grid.tau(each, name)) is not None]


def better(grid: DiagonalZoo, name: str) -> str:
    """In how many settings a measure correlates more strongly than adaptive sharpness, as its interval says."""
    (group,) = (group for group in setting_claims(grid) if group[0].about == f"|tau|, {name} minus adaptive")
    return WORDS[sum(claim.verdict == "for it" for claim in group)]


def test_the_readme_counts_as_the_record_does(grid: DiagonalZoo) -> None:
    text, total = page("README.md"), WORDS[len(grid.settings)]
    inv, mix = (better(grid, f"{metric}, exact geodesics") for metric in ("inv", "mix"))
    said = f"climbed thoroughly, inv ranks them better than adaptive sharpness in {inv} of {total} settings and mix in"
    assert f"{said} {mix}, but with another sign" in text
    taus = zip(*(values(grid, name, grid.settings) for name in ("mix exact", "adaptive")), strict=True)
    other = WORDS[sum(a * b < 0 for a, b in taus)]
    assert f"with another sign in {other}; the paper's closed forms" in text
    inv, mix = (better(grid, f"{metric}, closed form") for metric in ("inv", "mix"))
    ordered = WORDS[sum(grid.ordered(each, "closed") for each in grid.settings)]
    assert f"do better in {inv} and {mix}, and in {ordered} they have the order of the paper's table" in text


@pytest.mark.parametrize("where", ["README.md", "docs/benchmarks.md"])
def test_what_is_said_of_the_zoo_is_in_the_record(where: str) -> None:
    zoo, text = Records.load(NOTEBOOKS / "records").mnist, page(where)
    assert zoo is not None
    taus = {name: zoo.design.tau(zoo.measures[name], "error_gap", zoo.within) for name in ("adaptive", "inv", "mix")}
    assert all(str(tau) in text for tau in taus.values())
    losses = [zoo.design.tau(zoo.measures[name], "loss_gap", zoo.within) for name in taus]
    norm = zoo.design.tau("weight_norm", "loss_gap", zoo.within)
    assert "{}, {} and {}, and {} for the norm of the weights".format(*losses, norm) in text
    found = zoo.difference("inv", "adaptive")
    assert found is not None
    assert found.sign == 0
    assert "is not decided" in text
    if where != "README.md":
        fibre = zoo.plain_difference("inv", "inv, pairs with biases as rows", "error_gap", zoo.within)
        assert f"the difference of their sizes is {found}" in text
        assert f"on the same task by {fibre}" in text


def test_what_is_said_of_the_berts_is_in_the_record() -> None:
    records, text = Records.load(NOTEBOOKS / "records"), page("docs/benchmarks.md")
    assert records.sentiment is not None
    seeds, settings = records.sentiment
    assert (seeds.design.models, settings.design.models) == (30, 32)
    everywhere = seeds.design.everywhere
    assert f"adaptive sharpness, is {seeds.plain_difference('inv', 'adaptive', 'error_gap', everywhere)}: not" in text
    taus = [seeds.design.tau(label, "error_gap", everywhere) for label in seeds.measures.values()]
    assert all(tau is not None and tau.sign == 0 for tau in taus)
    everywhere = settings.design.everywhere
    inv, mix = (settings.design.tau(settings.measures[name], "error_gap", everywhere) for name in ("inv", "mix"))
    loss = settings.design.tau("train_loss", "error_gap", everywhere)
    assert f"as by inv, {inv}, and mix, {mix}; but" in text
    assert f"loss has {loss} by itself" in text
    converged = records.converged["sentiment"]
    least = [
        min(min(shares) for shares in converged.shares(label))
        for label in (
            "euclidean worst-case sharpness, steps 10, radius 0.045",
            "adaptive worst-case sharpness, steps 10, radius 1.1",
        )
    ]
    assert "ascents found {:.2f} and adaptive ones {:.2f} in the worst of the three models".format(*least) in text
    signs = [settings.design.tau(label, "error_gap", everywhere) for label in settings.measures.values()]
    assert sum(tau is not None and tau.sign < 0 for tau in signs) > len(signs) / 2


@pytest.mark.parametrize("where", ["docs/benchmarks.md", "notebook 4"])
def test_ranges_of_the_closed_forms_are_those_of_the_record(where: str, grid: DiagonalZoo) -> None:
    text = page(where) if where.endswith(".md") else lesson()
    ordered = [each for each in grid.settings if each.points >= 100 and grid.ordered(each, "closed")]
    assert len(ordered) == 3
    assert sum(each.scales == (0.01, 0.1) and each.points >= 100 for each in grid.settings) == 4  # three of four
    for name in ("inv closed", "mix closed", "adaptive"):
        nearest, *_, farthest = sorted(values(grid, name, ordered), key=abs)
        assert f"{signed(nearest)} to {signed(farthest)} for {name.split()[0]}" in text
    large = values(grid, "mix closed", [each for each in grid.settings if each.scales == (0.1, 1.0)])
    assert f"the closed form of mix goes from {signed(min(large))} to {signed(max(large))}" in text


def test_signs_along_exact_geodesics_are_those_of_the_record(grid: DiagonalZoo) -> None:
    taus = {name: np.array(values(grid, name, grid.settings)) for name in ("adaptive", "inv exact", "mix exact")}
    below = {name: WORDS[int((each < 0).sum())] for name, each in taus.items()}
    assert below == {"adaptive": "eleven", "inv exact": "eleven", "mix exact": "none"}
    ends = {name: f"from {signed(each.min())} to {signed(each.max())}" for name, each in taus.items()}
    assert f"Exact mix has a positive tau in all twelve settings, {ends['mix exact']}. For adaptive and" in lesson()
    said = f"inv eleven are negative and one is positive, {ends['adaptive']} and {ends['inv exact']}. Truncated"
    assert said in lesson()
    benchmarks = page("docs/benchmarks.md")
    stronger = better(grid, "inv, exact geodesics")
    said = f"both below 0 in eleven settings, and inv the stronger one in {stronger}), and mix is above 0 in all"
    assert said in benchmarks
    plain, best = (
        [tau.value for each in zoo.settings if (tau := zoo.tau(each, "adaptive"))] for zoo in (grid.plain, grid)
    )
    thorough = f"thorough ones give {signed(min(best))} to {signed(max(best))}"
    assert f"{signed(min(plain))} to {signed(max(plain))} for adaptive sharpness where {thorough}" in benchmarks
    rise = np.median(grid.study.column("rises", "mix second", 0.1))
    assert f"with a median of {rise:.1e} at radius 0.1".replace("e+", "e") in benchmarks


def test_what_the_notebook_says_of_convergence_is_in_the_record(grid: DiagonalZoo) -> None:
    text, study = lesson(), grid.study
    changes = {
        name: max(abs(cell.taus[name][cell.radii.index(0.1)] - cell.middle[name].tau) for cell in study.cells)
        for name in MIDDLE
    }
    adaptive, inv, mix = (f"{changes[name]:.2f}" for name in MIDDLE)
    assert f"tau of adaptive changes by up to {adaptive}, that of inv by up to {inv} and that of mix by" in text
    assert f"that of mix by up to {mix}" in text
    apart = {}
    for zoo in (grid.plain, grid):
        assert all(np.array(values(zoo, "mix exact", zoo.settings)) > 0)
        sizes = [np.array(values(zoo, name, zoo.settings)) for name in ("adaptive", "inv exact")]
        assert [int((taus < 0).sum()) for taus in sizes] == [11, 11]  # signs stay
        apart[zoo.thorough] = np.abs(sizes[0]) - np.abs(sizes[1])
    assert (apart[False] > 0).all()
    assert f"adaptive seems to beat inv in every setting, by up to {apart[False].max():.2f}" in text
    assert f"the two are within {np.abs(apart[True]).max():.2f} of each other in all twelve" in text
    orders = (np.array(values(grid.plain, f"inv {order}", grid.settings)) for order in ("second", "exact"))
    assert np.abs(np.subtract(*orders)).max() < 0.01
    assert "by plain ascents the second and the exact one are within 0.01 of each other in all settings" in text


def test_what_the_notebook_says_of_plain_lines_is_in_the_record(grid: DiagonalZoo) -> None:
    text, study = lesson(), grid.study
    for name, words in (("inv", "(t = 0) has"), ("mix", "(t = 1)")):
        thorough, plain = (
            "{}, {} and {}".format(*map(signed, values(zoo, f"{name} exact", study.profiled)))
            for zoo in (grid, grid.plain)
        )
        said = f"exact {name} {words} {thorough} in place of {plain}"
        assert said in text
    higher, lowest = [], []
    for radius in study.plan.radii:
        for setting in study.profiled:
            checked = study.checked(setting, "mix exact", radius)
            before = np.mean([cell.taus["mix exact"][cell.radii.index(radius)] for cell, _ in checked])
            higher.append(float(np.mean([check.tau for _, check in checked]) - before))
        checked = study.checked(study.profiled[-1], "inv exact", radius)
        lowest.append(f"{np.mean([check.tau for _, check in checked]):.1f}")
    assert f"exact mix lies higher than drawn, by {min(higher):.2f} to {max(higher):.2f}" in text
    assert study.profiled[-1].points == 150
    assert set(lowest) == {"-0.3"}
    assert "but stays at −0.3" in text
    for name in ("adaptive", "inv exact", "mix exact"):  # none ranks networks as well as their norm
        found = (np.abs(values(grid, each, study.profiled)) for each in (name, "|beta|_1"))
        assert np.less(*found).all()


def test_what_the_notebook_says_of_radii_is_in_the_record(grid: DiagonalZoo) -> None:
    study, text = grid.study, lesson()

    def median(column: str, key: str, radius: float) -> float:
        return float(np.median(study.column(column, key, radius, study.profiled)))

    left, *_ = study.plan.profile
    assert f"tau is {np.mean(study.column('taus', 'inv exact', left, study.profiled)):+.1f} at the left end" in text
    assert f"its tau with exact mix has a median of {signed(median('agreement', 'mix', 0.1))} by plain ascents" in text
    place = study.plan.profile.index(0.00316)  # where the turn comes
    before, there = (median("truncation", "mix", study.plan.profile[k]) for k in (place - 1, place))
    assert before < 0.01 < 0.9 < there
    assert median("truncation", "inv", 0.316) < 0.1 < median("truncation", "inv", 1.0)
    assert 1e21 < median("rises", "mix second", 1.0) < 1e22
