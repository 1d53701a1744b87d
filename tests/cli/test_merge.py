"""The command `merge`: adapters on disk become one, or nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quotient_manifolds as qm
from tests.command_line import call, digest, refused
from tests.lora_files import random_lora


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    return [random_lora(tmp_path / str(seed), {"a": 2, "b": 3 * seed + 1}, seed) for seed in range(2)]


def test_adapters_are_merged(pair: list[Path], tmp_path: Path) -> None:
    before = [digest(path) for path in pair]
    shown = call("merge", *pair, tmp_path / "out", "--weights", "0.7, -0.3", "--rank", 3)
    assert shown.exit_code == 0, shown.output
    printed = " ".join(shown.stdout.split())
    assert "2 adapters merged with the weights 0.7, -0.3; of all updates together" in printed
    assert "12 x 14" in printed
    expected = qm.merge_adapters(pair, [0.7, -0.3], rank=3)
    assert f"{expected.relative_error:.2%} is lost" in printed
    for name, value in load_file(tmp_path / "out" / "adapter_model.safetensors").items():
        assert torch.equal(value, expected.tensors[name])
    assert before == [digest(path) for path in pair]


def test_quiet_prints_nothing(pair: list[Path], tmp_path: Path) -> None:
    shown = call("merge", pair[0], tmp_path / "out", "--quiet")
    assert (shown.exit_code, shown.output) == (0, "")
    assert (tmp_path / "out" / "adapter_config.json").is_file()


def test_nothing_is_written_when_something_is_wrong(pair: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arguments, sentence in (
        ((*pair, pair[0]), "is there already"),
        ((*pair, tmp_path / "a" / "b"), "is no directory to write"),
        ((tmp_path / "nowhere", out), "No adapter at"),
        ((*pair, out, "--weights", "1"), "a number for each of 2 adapters"),
        ((*pair, out, "--weights", "1,x"), "expected numbers with commas between them"),
        ((*pair, out, "--weights", "1,nan"), "must be finite"),
        ((*pair, out, "--rank", 0), "rank must be an integer from 1 to 12"),
        ((out,), "Missing argument 'ADAPTER...'"),
    ):
        refused(call("merge", *arguments), sentence)
        assert sorted(tmp_path.iterdir()) == pair
