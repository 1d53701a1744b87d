"""Find misses nothing that all affine fields have, which know of no graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries.charges.find import find
from tests.nets.kinds import KINDS
from tests.nets.kinds import net as kind
from tests.nets.net import Computed, generic
from tests.symmetries.graph_free import GraphFree, compared, independent, outside, tangents

NAMES = (
    "DoRA, neurons",
    "prefix",
    "adaptive norm",
    "adaptive norm of tokens",
    "Fourier features, phases",
    "weight norm",
    "weight norm, convolution",
    "weight norm by hand",
    "weight norm by hand, two maps",
    "weight standardization",
    "GATv2",
    "Mamba 2",
    "S4",
    "S4 of planes",
    "bumps about prototypes",
    "maxout of two maps",
    "softmax over channels",
    "capsules by length",
    "capsules, read",
    "weight standardization, convolution",
)
BEYOND = {"GATv2": 3}
"""Dimensions of what a narrow map does not reach: fields that are no affine functions of its weights."""


@pytest.mark.parametrize("name", NAMES)
def test_find_has_what_affine_fields_have(name: str) -> None:
    model, x = kind(name)
    made = compared(model, x[:4], most=300)
    assert independent(made.oracle.affine).shape[1] <= KINDS[name].kernel
    assert made.more.shape[1] == BEYOND.get(name, 0)
    assert made.found.shape[1] <= KINDS[name].kernel
    assert (made.linear.shape[1], made.affine.shape[1]) == (0, 0)


def test_a_gain_between_writer_and_reader_is_beyond_affine_fields() -> None:
    """Rotations have rational coefficients in the gains that they pass: `find` has so(4), and the oracle has not."""
    torch.manual_seed(0)
    parts = {"a": nn.Linear(3, 4), "norm": nn.RMSNorm(4), "b": nn.Linear(4, 3), "c": nn.Linear(3, 2)}
    model = generic(Computed(lambda s, x: s.c(torch.tanh(s.b(s.norm(s.a(x))))), **parts).eval(), torch.randn(4, 3))
    made = compared(model, torch.randn(4, 3).double())
    assert made.more.shape[1] == 6
    assert [part.shape[1] for part in (made.linear, made.affine)] == [0, 0]


def test_what_is_left_out_is_missing() -> None:
    model, x = kind("capsules, read")
    oracle, symmetries = GraphFree(model, x[:4], most=300), find(model, x[:4]).symmetries
    for k, each in enumerate(symmetries):
        rest = tangents([*symmetries[:k], *symmetries[k + 1 :]], oracle.own)
        lost = outside(oracle.linear, rest)
        assert lost.shape[1] == independent(tangents([each], oracle.own)).shape[1] > 0
