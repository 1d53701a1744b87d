"""Every tensor that the package makes is on the device of the tensors it is for, and the rules of that are enforced.

No accelerator is needed: the tests of accelerators run in a process of their own, on a pretended one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pretended

pytestmark = pytest.mark.skipif(not pretended.POSSIBLE, reason="this torch takes no devices that are written in Python")

SOME = (
    "symmetries and float64 or mix-torch.float64 or trace or random and not inv or QuotientAdam or tall or 4-3-2-inv "
    "or rotary-3 or diagonal-4 or scale-5"
)
"""The tests of tests/test_accelerator.py that reach each place once; all of them take a minute."""
RULES = """
import pytest, torch
from tests import pretended

device = pretended.start()
x, here = torch.arange(6.0, device=device).view(2, 3), torch.ones(2, 3)
assert torch.accelerator.current_accelerator().type == x.device.type == (x + 1).mT.device.type == "pretended"
assert (x.sum() * torch.tensor(2.0)).item() == 30.0  # one number of the processor is welcome
assert x[torch.tensor([1])].tolist() == [[3.0, 4.0, 5.0]]  # and so are indices
weights = x.clone().requires_grad_()
(gradient,) = torch.autograd.grad(weights.square().sum(), weights)
assert torch.equal(gradient.cpu(), 2 * x.cpu())
for refused in (
    lambda: x + here,
    lambda: x @ here.mT,
    lambda: torch.cat([x, here]),
    lambda: torch.stack([x.sum(), here.sum()]),
    lambda: here[torch.zeros(1, dtype=torch.long, device=device)],
    lambda: x.index_select(0, torch.tensor([1])),
    lambda: torch.linalg.solve(x @ x.mT, here @ here.mT),
    lambda: torch.randn(2, device=device, generator=torch.Generator()),
    lambda: torch.empty(2, device=device).normal_(generator=torch.Generator()),
    lambda: x.numpy(),
):
    with pytest.raises((RuntimeError, TypeError)):
        refused()
print("enforced")
"""


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "QUOTIENT_MANIFOLDS_DEVICE": pretended.NAME},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_pretended_device_refuses_what_cuda_refuses() -> None:
    assert run("-c", RULES) == "enforced\n"


def test_tensors_are_on_the_device_they_are_for() -> None:
    printed = run("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", SOME, "tests/test_accelerator.py")
    passed = re.search(r"(\d+) passed", printed)
    assert passed is not None
    assert int(passed[1]) >= 15, printed
