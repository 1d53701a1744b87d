"""How deep the package is: frames of its own from the public function to the loss inside the ascent."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import quotient_manifolds as qm

HERE = str(Path(qm.__file__).parent)


def test_at_most_9_frames_from_the_call_to_the_loss() -> None:
    model, batch = nn.Linear(3, 2).eval(), (torch.ones(4, 3), torch.tensor([0, 1, 1, 0]))
    deepest: list[str] = []

    def profile(frame: FrameType | None, event: str, _: object) -> None:
        if event == "call" and frame is not None and frame.f_code is qm.cross_entropy.__code__:
            own = []
            while frame is not None:
                own += [frame.f_code.co_name] if frame.f_code.co_filename.startswith(HERE) else []
                frame = frame.f_back
            if "maximise" in own:
                deepest[:] = max(deepest, own, key=len)

    sys.setprofile(profile)
    try:
        qm.worst_case_sharpness(model, qm.cross_entropy, [batch], "adaptive", radius=0.1, steps=2)
    finally:
        sys.setprofile(None)
    assert 1 < len(deepest) <= 9, deepest
