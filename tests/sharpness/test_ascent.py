"""Ascents on plain functions: steps against a literal reading of the paper, what it keeps and counts."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from quotient_manifolds.sharpness import AutoPGD
from quotient_manifolds.sharpness.vector import _CHUNK, combine, dot, largest, norm
from quotient_manifolds.symmetries import Params


@dataclass
class Plain:
    """A function of one block, differentiated by autograd; `points` remembers where it was evaluated."""

    function: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    points: list[Tensor] = field(default_factory=list)
    backwards: int = 0
    norm: str = "l2"

    def zero(self) -> Params:
        return {"z": torch.zeros(self.shape, dtype=torch.float64)}

    def sample(self, generator: torch.Generator) -> Params:
        if self.norm == "linf":
            return {"z": 2 * torch.rand(self.shape, generator=generator, dtype=torch.float64) - 1}
        return {"z": torch.randn(self.shape, generator=generator, dtype=torch.float64)}

    def value(self, z: Params) -> float:
        self.points.append(z["z"].clone())
        return float(self.function(z["z"]))

    def value_and_gradient(self, z: Params) -> tuple[float, Params]:
        self.backwards += 1
        leaf = z["z"].clone().requires_grad_()
        self.points.append(leaf.detach().clone())
        value = self.function(leaf)
        return float(value.detach()), {"z": torch.autograd.grad(value, leaf)[0]}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def quadratic(seed: int, dimension: int) -> Callable[[Tensor], Tensor]:
    """g.z + z'Az / 2 with A indefinite."""
    A, g = torch.randn(dimension + 1, dimension, generator=generator(seed), dtype=torch.float64).split([dimension, 1])
    return lambda z: g[0] @ z + z @ (A + A.mT) @ z / 2


@pytest.mark.parametrize("steps", [1, 2, 5, 10, 20, 40, 100])
def test_released_schedule_is_the_counter_of_the_released_code(steps: int) -> None:
    # The rule as a counter: after k steps check, then shorten k.
    k, shrink, least = max(int(0.22 * steps), 1), max(int(0.03 * steps), 1), max(int(0.06 * steps), 1)
    counter, expected = 0, []
    for step in range(steps):
        counter += 1
        if counter == k:
            expected.append(step + 1)
            counter, k = 0, max(k - shrink, least)
    assert AutoPGD(steps=steps).checkpoints == tuple(expected)
    assert AutoPGD(steps=100).checkpoints == (22, 41, 57, 70, 80, 87, 93, 99)  # as in the paper


def literal_auto_pgd(f: Plain, radius: float, steps: int, norm: str = "l2") -> list[Tensor]:
    """Algorithm 1 of Croce & Hein on one flat vector, written with copies and no cleverness: the points visited."""

    def P(v: Tensor) -> Tensor:
        return v.clamp(-radius, radius) if norm == "linf" else v * min(1.0, radius / max(float(v.norm()), 1e-300))

    z = f.zero()["z"]
    loss, g = f.value_and_gradient({"z": z})
    g = g["z"]
    best, best_g, best_loss = z.clone(), g.clone(), loss
    eta, z_old, points, losses = 2 * radius, z.clone(), [z.clone()], [loss]
    checks = AutoPGD(steps=steps).checkpoints
    last, best_at_last, halved = 0, loss, True
    for k in range(steps):
        a = 1.0 if k == 0 else 0.75
        u = P(z + (eta * g.sign() if norm == "linf" else eta * g / g.norm()))
        new = P(z + a * (u - z) + (1 - a) * (z - z_old))
        z_old, z = z, new
        loss, grad = f.value_and_gradient({"z": z})
        g = grad["z"]
        points.append(z.clone())
        losses.append(loss)
        if loss > best_loss:
            best, best_g, best_loss = z.clone(), g.clone(), loss
        if k + 1 in checks:
            rises = sum(losses[i + 1] > losses[i] for i in range(last, k + 1))
            halve = rises <= 0.75 * (k + 1 - last) or (not halved and best_at_last >= best_loss)
            last, best_at_last, halved = k + 1, best_loss, halve
            if halve:
                eta, z, g = eta / 2, best.clone(), best_g.clone()
    return points


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("wave", [0.0, 3.0])
def test_points_visited_are_those_of_the_literal_algorithm(seed: int, wave: float, norm: str) -> None:
    quadratic_part = quadratic(seed, 5)

    def function(z: Tensor) -> Tensor:  # the wave makes it oscillate, so both conditions and restarts occur
        return quadratic_part(z) + wave * torch.cos(7 * z).sum()

    f = Plain(function, (5,))
    steps = 22  # then some have converged, and compare losses that differ in the last digit
    AutoPGD(steps=steps).maximise(f, 0.8, generator(), norm=norm)
    expected = literal_auto_pgd(Plain(function, (5,)), 0.8, steps, norm)
    for k, (found, literal) in enumerate(zip(f.points, expected, strict=True)):
        torch.testing.assert_close(found, literal, rtol=1e-9, atol=1e-9, msg=f"step {k}")


def test_an_inner_maximum_is_found_and_its_norm_reported() -> None:
    centre = torch.tensor([0.3, -0.2], dtype=torch.float64)
    found = AutoPGD(steps=60).maximise(Plain(lambda z: -((z - centre) ** 2).sum(), (2,)), 2.0, generator())
    assert found.loss > -1e-6
    assert found.norm == pytest.approx(float(centre.norm()), rel=1e-2)


def test_passes_are_one_forward_and_backward_a_step_and_a_last_forward() -> None:
    function = quadratic(3, 9)
    f = Plain(lambda z: function(z) + torch.cos(5 * z).sum(), (9,))
    found = AutoPGD(steps=7, restarts=2).maximise(f, 1.0, generator())
    assert len(f.points) == found.forward_passes == 3 * 8
    assert f.backwards == found.backward_passes == 3 * 7
    assert len(found.losses) == 8
    assert found.loss >= AutoPGD(steps=7).maximise(f, 1.0, generator()).loss
    assert all(float(z.norm()) <= 1 + 1e-12 for z in f.points)


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_climb_keeps_three_points_and_the_best_ones_gradient(restarts: int) -> None:
    function = quadratic(4, 6)
    points: list[weakref.ref[Tensor]] = []
    gradients: list[weakref.ref[Tensor]] = []
    most = [0, 0]

    class Counting(Plain):
        def value_and_gradient(self, z: Params) -> tuple[float, Params]:
            if all(z["z"] is not ref() for ref in points):
                points.append(weakref.ref(z["z"]))
            most[:] = map(max, most, (sum(ref() is not None for ref in refs) for refs in (points, gradients)))
            value, gradient = super().value_and_gradient(z)
            gradients.append(weakref.ref(gradient["z"]))
            return value, gradient

    f = Counting(lambda z: function(z) + torch.cos(9 * z).sum(), (6,))
    AutoPGD(steps=40, restarts=restarts).maximise(f, 2.0, generator())
    # The best point of the climb before goes on beside the three of this one, without its gradient.
    assert most == [3 + (restarts > 0), 1]


def test_an_exact_critical_point_is_left_in_a_random_direction() -> None:
    function = lambda z: (z**2 * torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)).sum()  # noqa: E731
    found, again = (AutoPGD(steps=50).maximise(Plain(function, (3,)), 0.5, generator()) for _ in range(2))
    assert found.critical_start
    assert found.loss == pytest.approx(2 * 0.5**2, rel=1e-2)
    assert torch.equal(found.z["z"], again.z["z"])
    assert not AutoPGD(steps=2).maximise(Plain(lambda z: z.sum(), (3,)), 0.5, generator()).critical_start
    constant = AutoPGD(steps=5).maximise(Plain(lambda z: (0 * z).sum() + 3.0, (2,)), 1.0, generator())
    assert (constant.loss, constant.base, constant.norm) == (3.0, 3.0, 0.0)


def test_restarts_find_what_the_first_climb_misses() -> None:
    # A low hill where the gradient at 0 points, a high and narrow one aside.
    def hills(z: Tensor) -> Tensor:
        left, right = torch.tensor([0.0, 0.8], dtype=torch.float64), torch.tensor([0.7, 0.0], dtype=torch.float64)
        return 2 * torch.exp(-40 * ((z - left) ** 2).sum()) + torch.exp(-4 * ((z - right) ** 2).sum())

    alone = AutoPGD(steps=40).maximise(Plain(hills, (2,)), 0.9, generator())
    several = AutoPGD(steps=40, restarts=12).maximise(Plain(hills, (2,)), 0.9, generator())
    assert alone.loss < 1.1
    assert several.loss > 1.9
    assert several.base == alone.base


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_a_start_is_scaled_into_the_ball_left_as_it_is_and_never_lost(norm: str) -> None:
    start = torch.tensor([0.0, 3.0, -4.0], dtype=torch.float64)
    scaled = start / (5 if norm == "l2" else 4)

    def peak(z: Tensor) -> Tensor:  # so narrow that the first step leaves it
        return 10 * torch.exp(-1e3 * ((z - scaled) ** 2).sum()) + z[0]

    f = Plain(peak, (3,), norm=norm)
    found = AutoPGD(steps=6).maximise(f, 1.0, generator(), norm=norm, start={"z": start})
    assert start.tolist() == [0.0, 3.0, -4.0]
    assert not f.points[0].any()  # the base
    torch.testing.assert_close(f.points[1], scaled)
    assert found.loss >= found.losses[0] == pytest.approx(10)
    assert found.base == pytest.approx(10 * math.exp(-1e3 * float((scaled**2).sum())))
    assert (len(f.points), f.backwards) == (found.forward_passes, found.backward_passes) == (8, 6)
    again = AutoPGD(steps=6, restarts=1).maximise(Plain(peak, (3,)), 1.0, generator(), start={"z": start})
    assert (again.base, again.forward_passes) == (pytest.approx(found.base), 1 + 2 * 7)
    inside = Plain(peak, (3,))
    AutoPGD(steps=1).maximise(inside, 9.0, generator(), norm=norm, start={"z": start})
    assert torch.equal(inside.points[1], start)


def test_sums_over_many_float32_numbers_are_accurate() -> None:
    x = {"a": torch.randn(5 * _CHUNK + 17), "b": torch.randn(3, 5).double(), "c": torch.randn(4).bfloat16()}
    exact = sum(float((t.double() ** 2).sum()) for t in x.values())
    assert dot(x, x) == pytest.approx(exact, rel=1e-6)
    assert norm(x) == pytest.approx(math.sqrt(exact), rel=1e-6)
    assert largest({**x, "empty": torch.zeros(0)}) == max(float(t.abs().max()) for t in x.values())


@pytest.mark.parametrize("size", [3, _CHUNK + 5])
def test_combine_writes_over_one_of_its_terms(size: int) -> None:
    x, y, z = ({"a": torch.randn(size, dtype=torch.float64)} for _ in range(3))
    expected = 0.5 * x["a"] - 2 * y["a"] + 3 * z["a"]
    combine(((0.5, x), (-2, y), (3, z)), y)
    torch.testing.assert_close(y["a"], expected)
