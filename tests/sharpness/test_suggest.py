"""A suggested radius obeys the rule that its docstring states, and is one number for a whole orbit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds.geometry import Geometry, KnownSymmetries
from quotient_manifolds.sharpness import PreparedModel
from quotient_manifolds.sharpness.objective import BatchObjective
from quotient_manifolds.symmetries import Params, random_representative
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


def two_steps(objective: BatchObjective, radius: float, norm: str) -> tuple[float, Params]:
    """The increase of the loss by two steps of Auto-PGD, by their formula, and the best point."""

    def onto(z: Tensor) -> Tensor:
        return z.clamp(-radius, radius) if norm == "linf" else z * min(1.0, radius / max(float(z.norm()), 1e-300))

    def unflat(z: Tensor) -> Params:
        parts = z.split([block.numel() for block in zero.values()])
        return {key: part.reshape(zero[key].shape) for key, part in zip(zero, parts, strict=True)}

    def flat(z: Params) -> Tensor:
        return torch.cat([z[key].flatten() for key in zero])

    def beyond(z: Tensor, g: Tensor) -> Tensor:
        return onto(z + 2 * radius * (g.sign() if norm == "linf" else g / g.norm()))

    zero = objective.zero()
    base, g = objective.value_and_gradient(zero)
    first = beyond(flat(zero), flat(g))
    loss, g = objective.value_and_gradient(unflat(first))
    second = onto(first + 0.75 * (beyond(first, flat(g)) - first) + 0.25 * first)
    best = max((loss, first), (objective.value(unflat(second)), second), key=lambda each: each[0])
    return best[0] - base, unflat(best[1])


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_it_obeys_the_rule_and_the_next_one_does_not(geometry: Geometry) -> None:
    here, known = Subject.of("gpt2 with a head"), KnownSymmetries()
    radius = qm.suggest_radius(here.model, loss, [here.batch], geometry, known)
    digit = f"{radius:e}"[0]
    following = radius * (2.5 if digit == "2" else 2)
    prepared = PreparedModel.of(here.model, loss, [here.batch], geometry, known=known)
    space = prepared.space
    found = [two_steps(prepared.objective(0), each, space.norm) for each in (radius, following)]
    assert digit in "125"
    assert [increase <= 1 and (space.reach(z) or 0) <= 0.25 for increase, z in found] == [True, False]


def test_for_several_geometries_it_is_the_smallest_of_theirs() -> None:
    here, known = Subject.of("gpt2 with a head"), KnownSymmetries()
    each = [qm.suggest_radius(here.model, loss, [here.batch], geometry, known) for geometry in GEOMETRIES]
    assert len(set(each)) > 1
    assert qm.suggest_radius(here.model, loss, iter([here.batch]), GEOMETRIES, known) == min(each)
    with pytest.raises(ValueError, match="geometry must be one, or a list"):
        qm.suggest_radius(here.model, loss, [here.batch], [])


@pytest.mark.parametrize("geometry", GEOMETRIES[:4], ids=str)
def test_one_gradient_and_ascents_of_two_steps_at_three_or_four_radii_decide(
    geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, counts = Subject.of("gpt2 with a head"), Counter[str]()
    for name in ("value", "value_and_gradient"):
        counted_calls(monkeypatch, name, counts)
    qm.suggest_radius(here.model, loss, [here.batch], geometry)
    assert counts["value_and_gradient"] <= 5
    assert counts["value"] <= 4


def counted_calls(monkeypatch: pytest.MonkeyPatch, name: str, counts: Counter[str]) -> None:
    original = getattr(BatchObjective, name)

    def counted(self: BatchObjective, z: Params) -> Any:
        counts[name] += 1
        return original(self, z)

    monkeypatch.setattr(BatchObjective, name, counted)


def test_a_loss_that_hardly_changes_is_refused_in_a_sentence() -> None:
    def constant(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(model(x)).sum() * 1e-3

    with pytest.raises(ValueError, match="No radius could be suggested in the geometry euclidean"):
        qm.suggest_radius(nn.Linear(2, 2).eval(), constant, [torch.ones(1, 2)], "euclidean")
