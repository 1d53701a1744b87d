"""Symmetries of the small nets, and models moved by a random element of all of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from quotient_manifolds.orbit.group import GroupElement, Steps
from quotient_manifolds.orbit.path import state
from quotient_manifolds.symmetries import Symmetries
from quotient_manifolds.symmetries.discovery import find_permutations, find_symmetries


def elsewhere(found: Symmetries, draw: torch.Generator, log_scale: float = 0.4) -> Steps:
    """Random elements of all symmetries."""
    return tuple((each, each.element(draw, log_scale)) for each in found.groups)


def planted(
    model: nn.Module, inputs: Any, seed: int = 5, log_scale: float = 0.4, permutations: bool = True
) -> nn.Module:
    """A copy of a model, moved by a random element of its whole group, permutations too."""
    draw = torch.Generator().manual_seed(seed)
    steps = elsewhere(find_symmetries(model, inputs), draw, log_scale)
    held = {*dict(model.named_parameters()), *model.state_dict()}
    units = find_permutations(model, inputs) if permutations else ()
    steps += tuple((each, each.element(draw)) for each in units if held.issuperset(each.names))
    moved, twin = GroupElement(steps).apply(state(model)), copy.deepcopy(model)
    with torch.no_grad():
        for name, w in (*twin.named_parameters(), *twin.named_buffers()):
            w.copy_(moved.get(name, w))
    return twin
