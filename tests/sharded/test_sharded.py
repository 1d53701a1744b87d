"""Two processes that share a model measure what one process does, and leave it as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quotient_manifolds import find_symmetries
from quotient_manifolds.geometry import Quotient
from quotient_manifolds.sharpness import next_token_cross_entropy, worst_case_sharpness
from quotient_manifolds.symmetries import Symmetries
from tests.sharded.made import batch, frozen, gpt2, half, llama, measured

ROOT = Path(__file__).parents[2]


def torchrun(kind: str, folder: Path) -> list[dict[str, Any]]:
    """What the processes found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.sharded.worker", kind, str(folder)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def symmetries() -> Symmetries:
    return find_symmetries(llama(torch.float64), batch(), evaluate=next_token_cross_entropy)


@pytest.fixture(scope="module")
def alone(symmetries: Symmetries) -> dict[str, list[float | None]]:
    return measured(llama(torch.float64), batch(), symmetries)


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return torchrun("fsdp", tmp_path_factory.mktemp("fsdp"))


def assert_close(found: dict[str, list[float | None]], expected: dict[str, list[float | None]], rtol: float) -> None:
    """Numbers agree to a part of themselves, and rises of the loss to that part of the loss."""
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        base = numbers[-1]
        assert base is not None
        for place, (own, other) in enumerate(zip(found[name], numbers, strict=True)):
            if other is None or own is None:
                assert own is other
                continue
            assert own == pytest.approx(other, rel=rtol, abs=rtol * base if place in (0, 4) else 0), (name, place)


def test_parts_of_a_model_give_the_value_of_the_whole(
    fsdp: list[dict[str, Any]], alone: dict[str, list[float | None]]
) -> None:
    assert fsdp[0]["values"] == fsdp[1]["values"]  # to the last digit: all processes decide alike
    assert_close(fsdp[0]["values"], alone, 1e-12)
    assert all(numbers[0] is not None and numbers[0] > 0 for numbers in alone.values())


def test_frozen_layers_stay_and_other_streams_are_folded(fsdp: list[dict[str, Any]], symmetries: Symmetries) -> None:
    assert_close(fsdp[0]["frozen"], measured(frozen(llama(torch.float64)), batch(), symmetries), 1e-12)
    assert all(found["same frozen"] for found in fsdp)
    others = find_symmetries(gpt2(), batch(), evaluate=next_token_cross_entropy)
    assert others.translations
    assert_close(fsdp[0]["gpt2"], measured(gpt2(), batch(), others), 1e-10)


def test_the_model_its_gradients_and_its_next_value_are_what_they_were(
    fsdp: list[dict[str, Any]], alone: dict[str, list[float | None]]
) -> None:
    for found in fsdp:
        assert found["same"]
        assert found["gradients kept"]
        assert found["interrupted after"] == 21
        assert found["same after an interrupt"]
        assert found["same after errors"]
        assert found["value after an interrupt"] == pytest.approx(alone["euclidean "][0], rel=1e-12)
        assert found["counted"] == [1.0, 1.0]
        halfway = found["halfway"]
        whole = halfway.pop("whole")
        assert halfway == dict.fromkeys(("forward", "backward", "before", "accumulated"), whole)


def test_single_precision_and_autocast(fsdp: list[dict[str, Any]], symmetries: Symmetries) -> None:
    single = llama(torch.float32)
    expected = measured(single, batch(), symmetries)
    for name, numbers in fsdp[0]["single"].items():
        rise, base = expected[name][0], expected[name][-1]
        assert rise is not None
        assert base is not None
        assert base + rise == pytest.approx(numbers[0] + numbers[-1], rel=1e-6)
        if name != "quasi-Newton":
            assert numbers[3] == pytest.approx(expected[name][3], rel=1e-5)
    geometry = Quotient("mix", symmetries=symmetries, complete=False)
    alone = worst_case_sharpness(single, half, [batch()], geometry=geometry, radius=0.1, steps=3)
    value, base = fsdp[0]["half"]
    assert base == pytest.approx(alone.batches[0].base_loss, rel=1e-3)
    assert value == pytest.approx(alone.mean, rel=2e-2)


def test_what_cannot_be_measured_is_said_by_all_processes(fsdp: list[dict[str, Any]]) -> None:
    sentences = {
        "scope": "find them before it is sharded",
        "wrong": "must not change along the orbit of a symmetry that is given. Found wrong",
        "hessian": "must be of the first order",
        "legacy": "takes whole models",
        "nan": "holds NaN or infinity",
        "moved": "prepare it again",
        "elsewhere": "has a gradient in no measured parameter",
        "half": "must be float32 or float64 to be moved in place",
        "unsynchronised": "must be averaged over the processes",
        "batches": "must measure the same. Found number of batches",
        "no batch": "at least one batch",
        "settings": "must measure the same. Found steps",
        "geometries": "must measure the same. Found geometry",
        "symmetries": "must divide by the same symmetries",
        "no rows": "must have rows of every batch",
        "train mode": "must be in eval mode",
        "frozen apart": "must measure the same parameters",
        "callback": "The model must be whole",
    }
    for found in fsdp:
        for name, sentence in sentences.items():
            assert sentence in found["said"][name], name
            assert "\n" not in found["said"][name], name
        assert "call fully_shard(model) first" in found["not sharded"]
        wrong, damaged = found["refused loads"]
        assert "must have shape" in wrong
        assert "does not load" in damaged


def test_what_makes_a_value_another_one_is_warned_of(fsdp: list[dict[str, Any]]) -> None:
    for found in fsdp:
        (said,) = found["warned"]["rows"][1]
        assert "mean over processes" in said
        (said,) = found["warned"]["mixed from bfloat16"][1]
        assert "are lost in rounding" in said
        assert found["warned"]["mixed"][1] == found["warned"]["from bfloat16"][1] == []
    rises = {name: value for name, (value, _) in fsdp[0]["warned"].items()}
    assert rises["mixed"] == pytest.approx(rises["from bfloat16"], rel=0.1)  # of logits in bfloat16 no digit was right


def test_processes_read_their_parts_of_a_saved_model(
    fsdp: list[dict[str, Any]], alone: dict[str, list[float | None]]
) -> None:
    for found in fsdp:
        assert found["files"] > 2
        assert found["loaded"]
        assert found["buffer"] == [7.0] * 4
        assert found["loaded value"] == pytest.approx(alone["adaptive "][0], rel=1e-12)
        refused, tied, value, whole = found["tied"]
        assert "Found none for lm_head.weight; if it is tied to another one" in refused
        assert tied
        assert value == pytest.approx(whole, rel=1e-12)


def test_tensor_parallel_processes_give_the_value_of_the_whole(
    tmp_path: Path, alone: dict[str, list[float | None]]
) -> None:
    found = torchrun("tensor", tmp_path)
    assert found[0]["values"] == found[1]["values"]
    assert_close(found[0]["values"], alone, 1e-12)
    assert all(each["same"] for each in found)
    assert all("must have the same batches" in said for each in found for said in each["other rows"])
    assert all(each["in sequence"] == pytest.approx(each["alone"], rel=1e-12) for each in found)
