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
from tests.sharded.made import ELSEWHERE, FEW, Numbers, batch, frozen, half, llama, measured

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes found, started once: the same for both, to the last digit, for all decide alike."""
    folder = tmp_path_factory.mktemp("shared")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, "-m", "tests.sharded.worker", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    return first  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def symmetries() -> Symmetries:
    found = find_symmetries(llama(torch.float64), batch(), evaluate=next_token_cross_entropy)
    assert found.pairs
    assert found.reparameterizations
    return found


@pytest.fixture(scope="module")
def alone(symmetries: Symmetries) -> dict[str, Numbers]:
    return measured(llama(torch.float64), batch(), symmetries)


def assert_close(found: dict[str, Numbers], expected: dict[str, Numbers], rtol: float) -> None:
    """Numbers agree to a part of themselves, and rises of the loss to that part of the loss."""
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        for place, (own, other) in enumerate(zip(found[name], numbers, strict=True)):
            risen = rtol * (numbers[-1] or 0.0) if place in (0, 4) else 0.0
            assert own == (other and pytest.approx(other, rel=rtol, abs=risen)), (name, place)


def test_parts_of_a_model_give_the_value_of_the_whole(found: dict[str, Any], alone: dict[str, Numbers]) -> None:
    own = found["fsdp"]
    assert_close(own["values"], alone, 1e-12)
    assert all(numbers[0] is not None and numbers[0] > 0 for numbers in alone.values())
    assert_close({"": own["again"]}, {"": alone["euclidean"]}, 1e-12)


def test_tensor_parallel_processes_give_the_value_of_the_whole(
    found: dict[str, Any], alone: dict[str, Numbers]
) -> None:
    assert_close(found["tensor"]["values"], {name: alone[name] for name in ELSEWHERE}, 1e-12)


def test_other_models_and_precisions_too(found: dict[str, Any], symmetries: Symmetries) -> None:
    own = found["fsdp"]
    assert_close(own["frozen"], measured(frozen(llama(torch.float64)), batch(), symmetries, *FEW), 1e-12)
    rises = own["rises"]
    assert rises["mixed"] == pytest.approx(rises["from bfloat16"], rel=0.1)  # of logits in bfloat16 no digit was right

    single = llama(torch.float32)
    for name, (rise, *_, base) in measured(single, batch(), symmetries, *FEW).items():
        numbers = own["single"][name]
        assert numbers[0] + numbers[-1] == pytest.approx((rise or 0.0) + (base or 0.0), rel=1e-6)
    mix = Quotient("mix", symmetries=symmetries)
    autocast = worst_case_sharpness(single, half, [batch()], geometry=mix, radius=0.1, steps=3)
    assert own["half"][1] == pytest.approx(autocast.batches[0].base_loss, rel=1e-3)
    assert own["half"][0] == pytest.approx(autocast.mean, rel=2e-2)
