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
import torch

from tests import pretended
from tests.devices import DEVICE

pytestmark = pytest.mark.skipif(not pretended.POSSIBLE, reason="this torch takes no devices that are written in Python")

SOME = (
    "refuses or symmetries and float64 or mix-torch.float64 or trace or random or QuotientAdam or tall or 4-3-2-inv "
    "or rotary-3 or diagonal-4 or scale-5 or orbit"
)
"""The tests of tests/test_accelerator.py that reach each place once; all of them take a minute."""


@pytest.mark.skipif(DEVICE is None or DEVICE.type != pretended.NAME, reason="the next test runs it on that device")
def test_it_refuses_what_cuda_refuses() -> None:
    x, here = torch.arange(6.0, device=DEVICE).view(2, 3), torch.ones(2, 3)
    current = torch.accelerator.current_accelerator()
    assert current is not None
    assert current.type == x.device.type == (x + 1).mT.device.type == "pretended"
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
        lambda: here[torch.zeros(1, dtype=torch.long, device=DEVICE)],
        lambda: x.index_select(0, torch.tensor([1])),
        lambda: torch.linalg.solve(x @ x.mT, here @ here.mT),
        lambda: torch.randn(2, device=DEVICE, generator=torch.Generator()),
        lambda: torch.empty(2, device=DEVICE).normal_(generator=torch.Generator()),
        lambda: x.numpy(),
    ):
        with pytest.raises((RuntimeError, TypeError)):
            refused()


def test_tensors_are_on_the_device_they_are_for() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", SOME]
    done = subprocess.run(
        [*command, "tests/test_accelerator.py", "tests/test_devices.py"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "QUOTIENT_MANIFOLDS_DEVICE": pretended.NAME},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 15, done.stdout
