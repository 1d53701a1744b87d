"""A stored number is that of a model that computes the same, whatever decides that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import zoos
from tests.zoos import compare, found, write_images, write_spec

HEAD = "checkpoints: {paths: models/*, loader: tests.zoos:LOADER}\ndata: {path: train.npz, batch_size: 8}"
SLOPE = "measure: gradient-norm, geometry: euclidean"
INV = "measure: gradient-norm, geometry: inv"
FACTORS = (1, 2, 5)


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    write_images(tmp_path / "train.npz", 16, seed=0)
    return tmp_path


def test_models_that_compute_different_things_do_not_share_a_number(zoo: Path) -> None:
    for kind in zoos.SCALED:
        for factor in FACTORS:
            (zoo / "models" / f"{kind}-{factor}").write_text("")
    spec = write_spec(zoo, SLOPE, head=HEAD.replace("LOADER", "scaled"))
    assert compare(spec).exit_code == 0
    values = {row.checkpoint: value.mean for row in found(spec).rows for value in row.values.values() if value}
    shared = [kind for kind in zoos.SCALED if len({values[f"{kind}-{factor}"] for factor in FACTORS}) < len(FACTORS)]
    assert shared == []
    assert "Nothing was left" in compare(spec).stdout


def test_a_twin_finds_its_numbers_with_any_number_of_threads(zoo: Path) -> None:
    (zoo / "models" / "lambda-2").write_text("")
    spec = write_spec(zoo, SLOPE, head=HEAD.replace("LOADER", "scaled"))
    assert compare(spec).exit_code == 0
    (zoo / "models" / "lambda-2.0").write_text("")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - threads if threads < 3 else 1)
        assert "Nothing was left" in compare(spec).stdout
    finally:
        torch.set_num_threads(threads)


def test_numbers_of_another_meaning_are_measured_again(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (zoo / "models" / "lambda-2").write_text("")
    spec = write_spec(zoo, SLOPE, head=HEAD.replace("LOADER", "scaled"))
    assert compare(spec).exit_code == 0
    assert "Nothing was left" in compare(spec).stdout
    monkeypatch.setattr("quotient_manifolds.compare.worker.MEANING", 10**6)
    assert "Measured now: 4," in compare(spec).stdout


@pytest.mark.filterwarnings("ignore:symmetries that do not hold")
def test_checkpoints_of_another_group_are_named(zoo: Path) -> None:
    for number in range(3):
        (zoo / "models" / f"m_{number}").write_text("")
    spec = write_spec(zoo, INV, SLOPE, head=HEAD.replace("LOADER", "masked"))
    assert compare(spec).exit_code == 0
    (note,) = (each for each in found(spec).notes if "group" in each)
    assert note.startswith("m_2, inv")
    assert "without" in note
    assert "m_2, inv" in (zoo / "results" / "zoo" / "report.html").read_text()
