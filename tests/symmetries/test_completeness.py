"""Find misses nothing that all affine fields have, which know of no graph, except what is listed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries.charges.find import find
from tests.symmetries.graph_free import GraphFree, compared, independent, outside, tangents
from tests.symmetries.kinds import KINDS
from tests.symmetries.kinds import net as kind
from tests.symmetries.nets import Computed, generic

MISSING: dict[str, tuple[int, int, int]] = {
    "DoRA, neurons": (0, 0, 0),
    "prefix": (0, 0, 0),
    "adaptive norm": (0, 0, 0),
    "adaptive norm of tokens": (0, 0, 0),
    "Fourier features, phases": (0, 0, 0),
    "weight norm": (0, 0, 0),
    "weight norm, convolution": (0, 0, 0),
    "weight norm by hand": (0, 0, 0),
    "weight norm by hand, two maps": (0, 0, 0),
    "weight standardization": (0, 0, 0),
    "GATv2": (0, 0, 0),
    "Mamba 2": (0, 0, 0),
    "S4": (0, 0, 0),
    "S4 of planes": (0, 0, 0),
    "bumps about prototypes": (0, 0, 0),
    "maxout of two maps": (0, 0, 0),
    "softmax over channels": (0, 0, 0),
    "capsules by length": (0, 0, 0),
    "capsules, read": (0, 0, 0),
    "weight standardization, convolution": (0, 0, 0),
}
"""How many dimensions `find` misses: along lines at the model's weights; fields without constants; with constants."""


@pytest.mark.parametrize("name", MISSING)
def test_find_has_what_affine_fields_have(name: str) -> None:
    model, x = kind(name)
    made = compared(model, x[:4], most=300)
    assert independent(made.oracle.tangents).shape[1] <= KINDS[name].kernel
    assert made.more.shape[1] == 0
    assert (made.here.shape[1], made.linear.shape[1], made.affine.shape[1]) == MISSING[name]


def test_a_gain_between_writer_and_reader_is_beyond_affine_fields() -> None:
    """Rotations have rational coefficients in the gains that they pass: `find` has so(4), and the oracle has not."""
    torch.manual_seed(0)
    parts = {"a": nn.Linear(3, 4), "norm": nn.RMSNorm(4), "b": nn.Linear(4, 3), "c": nn.Linear(3, 2)}
    model = generic(Computed(lambda s, x: s.c(torch.tanh(s.b(s.norm(s.a(x))))), **parts).eval(), torch.randn(4, 3))
    made = compared(model, torch.randn(4, 3).double())
    assert made.more.shape[1] == 6
    assert [part.shape[1] for part in (made.here, made.linear, made.affine)] == [0, 0, 0]


def test_what_is_left_out_is_missing() -> None:
    model, x = kind("capsules, read")
    oracle, symmetries = GraphFree(model, x[:4], most=300), find(model, x[:4]).every
    for k, each in enumerate(symmetries):
        rest = tangents([*symmetries[:k], *symmetries[k + 1 :]], oracle.own)
        lost = outside(oracle.linear, rest)
        assert lost.shape[1] == independent(tangents([each], oracle.own)).shape[1] > 0
