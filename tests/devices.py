"""The device that tests of accelerators run on: that of the machine, or what QUOTIENT_MANIFOLDS_DEVICE names.

"cpu" runs such tests without an accelerator, to see that they pass; "pretended" on one that tests/pretended.py makes
up, to see that no tensor is left on another device.
"""

from __future__ import annotations

import os

import torch

from tests import pretended

NONE = "there is no accelerator with double precision here; QUOTIENT_MANIFOLDS_DEVICE=cpu runs it without one"


def found() -> torch.device | None:
    """Return the device; None where there is none, or one without float64, in which the geometry is factored."""
    named = os.environ.get("QUOTIENT_MANIFOLDS_DEVICE", "")
    if named == pretended.NAME:
        return pretended.start()
    if named:
        return torch.device(named)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None or device.type == "mps" else device


DEVICE = found()
"""Of this process."""
