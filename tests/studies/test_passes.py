"""The study of passes: what it counts, a record that lasts, and the page against the record."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from studies.passes.study import FAST, NEVER, Case, Climbed, Passes, run

CASE = Case(
    model="m",
    geometry="inv",
    radius=0.1,
    loss=1.0,
    maximum=2.0,
    auto_pgd={str(steps): Climbed((0.0, *[1.0] * (steps - 1), 1.98)) for steps in (5, 10, 20, 40)},
    quasi_newton=Climbed((0.0, 1.5, 1.99)),
    released=Climbed((0.0, 1.0, 2.0)),
    stopped={"auto_pgd": Climbed((0.0, 1.979)), "quasi_newton": Climbed((0.0, 1.5, 1.99))},
)


def test_passes_ratios_and_misses_are_counted() -> None:
    assert CASE.passes("20") == 21
    assert CASE.passes("quasi_newton") == 3
    assert CASE.passes("released") == 3  # two iterations of two forward passes and a backward one
    assert CASE.ratio(5) == 1.99 / 1.98
    assert (CASE.misses("auto_pgd"), CASE.misses("quasi_newton")) == (True, False)
    far = dataclasses.replace(CASE, maximum=3.0)
    assert far.passes("quasi_newton") == far.passes("released") == NEVER
    found = Passes((CASE,) * 8 + (far,) * 2, "", "")
    assert found.quantile("20", 0.5)[0] == 21
    assert found.quantile("20", 0.9)[0] == NEVER
    count, low, high = found.missed("auto_pgd")
    assert count == 10
    assert (low, high) == (pytest.approx(0.6915, abs=1e-4), 1.0)  # Clopper and Pearson, 10 of 10


def test_a_run_goes_on_and_its_record_lasts(tmp_path: Path) -> None:
    found = run(tmp_path, fast=True, command="study", progress=lambda what, done, total: None)
    assert len(found.cases) == sum(len(radii) for model in FAST.values() for radii in model.radii.values())
    for case in found.cases:
        assert (
            case.maximum >= max(case.quasi_newton.rises[-1], *(each.rises[-1] for each in case.auto_pgd.values())) > 0
        )
        assert [len(each.rises) for each in case.auto_pgd.values()] == [6, 11, 21, 41]
        assert (case.released is not None) == (case.geometry in ("euclidean", "adaptive"))
    found.save(tmp_path / "passes.json")
    assert Passes.load(tmp_path / "passes.json") == found
    (tmp_path / "cases" / "diagonal_network_adaptive_0.1.json").unlink()
    assert run(tmp_path, fast=True, command="study", progress=lambda what, done, total: None) == found
