"""The study of two ascents: equal passes, a record that lasts, and medians against numpy."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from quotient_manifolds.geometry import Adaptive, Euclidean
from studies.__main__ import study
from studies.ascents import RADII, Ascents, run


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Ascents:
    return run(tmp_path_factory.mktemp("ascents"), fast=True, command="study", progress=lambda what, done, total: None)


def test_both_ascents_have_the_same_passes_and_a_row_a_ball(found: Ascents) -> None:
    assert found.passes == (59, 60)
    assert len(found.cases) == 2 * 2 * len(RADII)
    assert {case.geometry for case in found.cases} == {
        geometry.name for geometry in (Euclidean(), Adaptive(), Euclidean(norm="linf"), Adaptive(norm="linf"))
    }
    assert all(case.matched > 0 and case.released > 0 for case in found.cases)
    assert all(case.released_norm <= 1 + 1e-6 for case in found.cases)


def test_the_record_lasts(found: Ascents, tmp_path: Path) -> None:
    found.save(tmp_path / "ascents.json")
    assert Ascents.load(tmp_path / "ascents.json") == found


def test_the_median_lies_in_its_interval(found: Ascents) -> None:
    spread = [dataclasses.replace(found.cases[0], matched=1.0, released=float(k)) for k in range(1, 22)]
    median, low, high = dataclasses.replace(found, cases=tuple(spread)).median_ratio()
    assert median == np.median(np.arange(1, 22))
    assert 4 < low < median < high < 18  # binomial(21, 1/2) puts about 5 of them outside either bound
    assert found.median_ratio("adaptive")[0] == np.median(
        [case.released / case.matched for case in found.cases if case.geometry == "adaptive"]
    )


def test_the_command_writes_a_record_that_loads(tmp_path: Path) -> None:
    shown = CliRunner().invoke(study, ["ascents", "--fast", "--out", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    found = Ascents.load(tmp_path / "ascents.json")
    assert found.command == "make study NAME=ascents ARGS=--fast"
    assert f"{found.cases[0].ratio:.3f}" in shown.stdout
