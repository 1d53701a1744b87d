"""A suggested radius obeys the rule that its docstring states, and is one number for a whole orbit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import quotient_manifolds as qm
from quotient_manifolds.geometry import Geometry, KnownSymmetries
from quotient_manifolds.sharpness import WorstCase
from quotient_manifolds.symmetries import random_representative
from studies.invariance import Subject, loss


@pytest.mark.parametrize(("name", "metric"), [("gpt2 with a head", "inv"), ("ViT with to_qkv and to_out", "mix")])
@given(seed=st.integers(0, 2**31), log_scale=st.floats(0.1, 2))
@settings(max_examples=1, deadline=None)
@pytest.mark.filterwarnings("ignore:measures of this model are not constant")
def test_one_radius_for_the_orbit(name: str, metric: str, seed: int, log_scale: float) -> None:
    here = Subject.of(name)
    there = here.at(random_representative(here.model, here.symmetries(), seed=seed, log_scale=log_scale))
    radii = {qm.suggest_radius(each.model, loss, [each.batch], metric) for each in (here, there)}
    assert len(radii) == 1


GEOMETRIES = [qm.Euclidean(), qm.Adaptive(), qm.Quotient("inv"), qm.Quotient("mix"), qm.Euclidean(norm="linf")]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_it_obeys_the_rule_and_the_next_one_does_not(geometry: Geometry) -> None:
    here, known = Subject.of("gpt2 with a head"), KnownSymmetries()
    radius = qm.suggest_radius(here.model, loss, [here.batch], geometry)
    digit = f"{radius:e}"[0]
    following = radius * (2.5 if digit == "2" else 2)
    found = [
        WorstCase(geometry, radius=each, steps=10).of(here.model, loss, [here.batch], known)
        for each in (radius, following)
    ]
    assert digit in "125"
    assert [each.mean <= 1 and (each.reach or 0) <= 0.25 for each in found] == [True, False]


def test_a_loss_that_hardly_changes_is_refused_in_a_sentence() -> None:
    def constant(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(model(x)).sum() * 1e-3

    with pytest.raises(ValueError, match="No radius could be suggested in the geometry euclidean"):
        qm.suggest_radius(nn.Linear(2, 2).eval(), constant, [torch.ones(1, 2)], "euclidean")
