"""What `compare --check` says before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from quotient_manifolds.cli.compare import duration
from quotient_manifolds.compare import Forecast, forecast, read_spec
from tests.zoos import compare, write_seeds, write_spec

HEAD = "checkpoints: {paths: models/*, loader: tests.zoos:small}\ndata: {path: train.npz, batch_size: 4}"
WORST = "measure: worst-case, geometry: [euclidean, adaptive], radius: [0.1, 0.2], steps: 3, restarts: 1"


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    return write_seeds(tmp_path, 3)


def planned(spec: Path) -> Forecast:
    return forecast(read_spec(spec), spec.parent / "results" / spec.stem)


def test_units_and_passes_are_counted(zoo: Path) -> None:
    spec = write_spec(
        zoo,
        WORST,
        "measure: worst-case, geometry: mix, radius: 0.1, steps: 3",
        "measure: hessian-trace, geometry: euclidean, samples: 5",
        head=HEAD,
    )
    found = planned(spec)
    assert (found.checkpoints, found.to_load, found.timed) == (3, 3, "m_0")
    assert [each.units for each in found.measures] == [6] * 7
    assert [each.left for each in found.measures] == [6] * 7
    assert [each.passes for each in found.measures] == [1, 8, 8, 8, 8, None, 11]
    (failed,) = found.failures  # there is nothing to divide out
    assert "symmetric pair" in failed.message
    assert found.seconds is not None
    assert found.seconds > 0


def test_a_check_writes_nothing_and_says_what_there_is(zoo: Path) -> None:
    (zoo / "scores.csv").write_text("checkpoint,rate\nm_0,1\nm_1,2\nm_9,2\n")
    spec = write_spec(zoo, WORST, head=HEAD, tail="scores: scores.csv")
    before = sorted(zoo.rglob("*"))
    done = compare(spec, "--check")
    assert done.exit_code == 0, done.output
    assert sorted(zoo.rglob("*")) == before
    said = " ".join(done.stdout.split())
    for words in (
        "3 checkpoints: m_0, m_1, m_2",
        "Without a row of scores, so in no correlation with them: m_2.",
        "name no checkpoint: m_9.",
        "Timed on m_0",
    ):
        assert words in said
    assert compare(spec, "--check", "--quiet").output == ""


def test_what_is_finished_is_not_planned_again(zoo: Path) -> None:
    spec = write_spec(zoo, "measure: gradient-norm, geometry: euclidean", head=HEAD)
    assert compare(spec).exit_code == 0
    (zoo / "models" / "m_3").write_text("3")
    found = planned(write_spec(zoo, "measure: gradient-norm, geometry: [euclidean, adaptive]", head=HEAD))
    assert [(each.units, each.left) for each in found.measures] == [(8, 2), (8, 2), (8, 8)]


def test_checkpoints_that_do_not_load_are_said_and_another_is_timed(zoo: Path) -> None:
    (zoo / "models" / "m_0").write_text("exit load")
    spec = write_spec(zoo, "measure: gradient-norm, geometry: euclidean", head=HEAD)
    done = compare(spec, "--check")
    assert done.exit_code == 1
    assert "Failed: m_0: " in done.stderr
    assert "Timed on m_1" in " ".join(done.stdout.split())
    for seed in (1, 2):
        (zoo / "models" / f"m_{seed}").write_text("exit load")
    done = compare(spec, "--check")
    assert (done.exit_code, done.stderr.count("Failed: ")) == (1, 3)
    (zoo / "models" / "m_0").write_text("raise")
    done = compare(spec, "--check")
    assert done.exit_code == 1
    assert "IndexError: no such row (at zoos.py" in done.stderr


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "unknown"),
        (0.0123, "0.0123 s"),
        (119, "119 s"),
        (150, "2.5 min"),
        (9000, "2.5 h"),
        (900_000, "10.4 days"),
    ],
)
def test_durations_are_in_a_unit_that_suits_them(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words
