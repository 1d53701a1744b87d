"""Each orbit has one canonical point: gains are 1, constants are 0, |w| is least, along principal axes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quotient_manifolds.manifolds import FixedRankQuotient
from quotient_manifolds.orbit import GroupElement
from quotient_manifolds.symmetries import find_symmetries
from quotient_manifolds.symmetries.canonical import canonical
from quotient_manifolds.symmetries.charges.find import find
from quotient_manifolds.symmetries.groups import (
    GL,
    Algebra,
    CenteredSO,
    Complex,
    FromSum,
    Gauge,
    IntoMean,
    Matrix,
    Part,
    Rows,
    Slices,
    Slot,
    Sparse,
    Symmetry,
    Terms,
    Torus,
    Translation,
    Wire,
    blocks,
    diagonal,
    planes,
)
from quotient_manifolds.symmetries.least_norm import moving
from studies.fibres import small_model
from tests.nets.small import found_in, net, shown

PLACE, SAME = 1e-6, 1e-9
NAMES = ["cumsum", "glu", "ln res"]


@cache
def found(name: str) -> tuple[nn.Module, Tensor, tuple[Symmetry, ...], dict[str, Tensor]]:
    model, x = net(name, False)
    params = {key: w.detach() for key, w in model.named_parameters()}
    return model, x, find(model, shown(name, x)[:4]).symmetries, params


def moved(symmetries: tuple[Symmetry, ...], params: dict[str, Tensor], seed: int, scale: float) -> dict[str, Tensor]:
    """Return parameters after a random element of each symmetry."""
    generator = torch.Generator().manual_seed(seed)
    for symmetry in symmetries:
        params = symmetry.act(params, symmetry.element(generator, scale))
    return params


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((other[key] - w).abs().max() / w.abs().max()) for key, w in one.items())


@torch.no_grad()
def change(model: nn.Module, x: Tensor, params: dict[str, Tensor]) -> float:
    answer = model(x)
    return float((torch.func.functional_call(model, params, (x,)) - answer).abs().max() / answer.abs().max())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("seed", "scale"), [(0, 0.1), (1, 0.7)])
def test_all_points_of_an_orbit_have_one_canonical_point(name: str, seed: int, scale: float) -> None:
    model, x, groups, params = found(name)
    here = canonical(groups, params)
    there = canonical(groups, moved(groups, params, seed, scale))
    assert not here.doubts
    assert apart(here.params, there.params) < PLACE
    assert change(model, x, there.params) < SAME


@pytest.mark.parametrize("name", NAMES)
def test_the_element_leads_there_and_back(name: str) -> None:
    model, x, symmetries, params = found(name)
    point = canonical(symmetries, params)
    assert apart(point.params, GroupElement(point.element).apply(params)) < 1e-12
    assert apart(params, GroupElement(point.element).inverse.apply(point.params)) < SAME
    assert change(model, x, point.params) < SAME


def test_constants_that_a_later_map_can_take_are_zero() -> None:
    model, x = net("linear", True)
    params = {key: w.detach() for key, w in model.named_parameters()}
    point = canonical(find(model, x[:4]).symmetries, params)
    assert "embed.bias" in point.zeros
    assert "z_8_12.bias" not in point.zeros
    for key, at in point.zeros.items():
        assert float(point.params[key].reshape(-1)[at].abs().max()) < 1e-12
    assert change(model, x, point.params) < SAME


@pytest.mark.parametrize("name", ["glu"])
def test_the_gradient_norm_there_is_that_of_the_orbit(name: str) -> None:
    model, x, groups, params = found(name)

    def gradient(at: dict[str, Tensor]) -> float:
        at = {key: w.clone().requires_grad_() for key, w in canonical(groups, at).params.items()}
        loss = torch.func.functional_call(model, at, (x,)).square().mean()
        return float(sum(g.square().sum() for g in torch.autograd.grad(loss, list(at.values()))))

    first = gradient(params)
    assert abs(gradient(moved(groups, params, 5, 0.5)) - first) < SAME * first


def pair(heads: int, n: int, h: int, m: int, algebra: object = None) -> tuple[Gauge, dict[str, Tensor]]:
    """Return y = R W x of several heads side by side."""
    size = heads * h
    slots = (
        Slot(Rows.along("W", (size, n), 0), torch.arange(size), writes=True),
        Slot(Rows.along("R", (m, size), 1), torch.arange(size), writes=False),
    )
    algebra = algebra or blocks(size, torch.arange(size).view(heads, h))
    generator = torch.Generator().manual_seed(0)
    params = {
        key: torch.randn(shape, generator=generator).double() for key, shape in (("W", (size, n)), ("R", (m, size)))
    }
    return Gauge(Wire(slots, size), algebra), params  # type: ignore[arg-type]


def test_a_pair_alone_is_balanced() -> None:
    gauge, params = pair(1, 6, 3, 5)
    point = canonical([gauge], params).params
    G, H = params["R"], params["W"].mT
    balanced = FixedRankQuotient(5, 6).balance(torch.cat([G, H]))
    R, W = point["R"], point["W"].mT
    turn = torch.linalg.lstsq(balanced, torch.cat([R, W])).solution
    torch.testing.assert_close(turn.mT @ turn, torch.eye(3).double())
    torch.testing.assert_close(balanced @ turn, torch.cat([R, W]))
    moment = R.mT @ R + W.mT @ W
    torch.testing.assert_close(moment, moment.diagonal().sort(descending=True)[0].diag())


def test_several_heads_are_each_balanced_whatever_the_width() -> None:
    gauge, params = pair(4, 300, 8, 200)
    point = canonical([gauge], params)
    assert not point.doubts
    W, R = point.params["W"].view(4, 8, -1), point.params["R"].mT.reshape(4, 8, -1)
    torch.testing.assert_close(W @ W.mT, R @ R.mT)
    assert apart(point.params, canonical([gauge], moved((gauge,), params, 1, 0.5)).params) < SAME
    torch.testing.assert_close(
        R.mT.reshape(4, -1, 8) @ W, params["R"].mT.reshape(4, 8, -1).mT @ params["W"].view(4, 8, -1)
    )


class Largest(TorchDispatchMode):
    """Note the number of entries of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            self.numel = max(self.numel, each.numel()) if isinstance(each, Tensor) else self.numel
        return made


@pytest.mark.parametrize("planar", [False, True])
def test_of_many_small_blocks_no_matrix_of_all_channels_is_made(planar: bool) -> None:
    n, generator = 2000, torch.Generator().manual_seed(0)
    slots = tuple(
        Slot(Rows.along(key, shape, axis), torch.arange(n), writes=key == "W")
        for key, shape, axis in (("W", (n, 3), 0), ("R", (2, n), 1))
    )
    params = {each.name: torch.randn(each.rows.shape, generator=generator).double() for each in slots}
    algebra = planes(n, torch.arange(n).view(-1, 2)) if planar else diagonal(n)
    with Largest() as seen:
        signs = torch.ones(algebra.components, dtype=torch.bool)
        gauge = Gauge(Wire(slots, n), algebra, signs)
        point = canonical([gauge], params)
        undone = GroupElement(point.element).inverse.apply(point.params)
    assert seen.numel < n * n / 100
    squares = (point.params["W"].square().sum(1), point.params["R"].square().sum(0))
    m = 2 if planar else 1
    torch.testing.assert_close(*(each.view(-1, m).sum(1) for each in squares))
    assert apart(params, undone) < SAME
    z = torch.randn(n // m, 2, generator=generator).double()
    turn = torch.stack([z, torch.stack([-z[:, 1], z[:, 0]], 1)], 2) if planar else z[:, :1, None]
    W = (turn @ params["W"].view(-1, m, 3)).reshape(n, 3)
    R = (torch.linalg.inv(turn).mT @ params["R"].mT.reshape(-1, m, 2)).reshape(n, 2).mT
    assert apart(point.params, canonical([gauge], {"W": W, "R": R}).params) < PLACE


def test_each_constant_of_a_chain_is_taken_once() -> None:
    """In whatever order: what is read off earlier parameters is not changed by what later ones take back."""
    n, generator = 900, torch.Generator().manual_seed(0)
    rows = [Rows.along(f"b{k}", (n,), 0) for k in range(6)]
    maps = [torch.randn(n, n, generator=generator).double() / n**0.5 for _ in rows]
    chain = [Translation((Part(rows[k]), Part(rows[k + 1], -maps[k]))) for k in range(5)]
    params = {each.name: torch.randn(n, generator=generator) for each in rows}
    point = canonical(chain[::-1], params)
    assert len(point.element) == len(chain)
    value = torch.zeros(n, dtype=torch.float64)
    for k in range(5):
        value = maps[k] @ (value + params[f"b{k}"])
        assert not point.params[f"b{k}"].any()
    torch.testing.assert_close(point.params["b5"], value + params["b5"])
    assert {*point.zeros} == {f"b{k}" for k in range(5)}


@pytest.mark.parametrize("algebra", [None, GL(4), planes(4, torch.tensor([[0, 2], [1, 3]]))])
def test_the_length_is_the_least_of_the_orbit(algebra: object) -> None:
    gauge, params = pair(2, 3, 2, 5, algebra)

    def length(at: object) -> tuple[float, object]:
        X = torch.tensor(at).double().requires_grad_()
        A = gauge.algebra.exp(gauge.algebra.project(X.view(4, 4)))
        value = torch.stack([w.square().sum() for w in gauge.act(params, A).values()]).sum()
        return float(value.detach()), torch.autograd.grad(value, X)[0].numpy()

    least = minimize(length, torch.zeros(16).numpy(), jac=True, tol=1e-10).fun
    point = canonical([gauge], params).params
    assert float(sum(w.square().sum() for w in point.values())) == pytest.approx(least, rel=1e-6)


def test_a_torus_goes_to_equal_lengths() -> None:
    rows = Rows.along("W", (3, 4), 0), Rows.along("R", (2, 3), 1)
    torus = Torus((Slices.of(rows[0], torch.eye(3)), Slices.of(rows[1], -torch.eye(3))), 3)
    _, params = pair(1, 4, 3, 2)
    point = canonical([torus], params).params
    torch.testing.assert_close(point["W"].norm(dim=1), point["R"].norm(dim=0))


def test_heads_one_by_one_and_all_at_once_have_one_canonical_point() -> None:
    whole, params = pair(4, 6, 3, 5)
    single = []
    for k in range(4):
        at = torch.arange(3 * k, 3 * k + 3)
        slots = (
            Slot(Rows.along("W", (12, 6), 0, at), torch.arange(3), writes=True),
            Slot(Rows.along("R", (5, 12), 1, at), torch.arange(3), writes=False),
        )
        single.append(Gauge(Wire(slots, 3), GL(3)))
    assert apart(canonical([whole], params).params, canonical(single, params).params) < SAME


def test_a_length_that_nothing_depends_on_is_one() -> None:
    rows = Rows.along("W", (3, 4), 0), Rows.along("R", (2, 3), 1)
    torus = Torus((Slices.of(rows[0], torch.eye(4)[:3]), Slices.of(rows[1], torch.eye(4)[1:])), 4)
    _, params = pair(1, 4, 3, 2)
    point = canonical([torus], params)
    assert not point.doubts
    squares = (
        torch.cat([point.params["W"].square(), torch.zeros(1, 4)]),
        torch.cat([torch.zeros(1, 2), point.params["R"].mT.square()]),
    )
    counts = torch.tensor([4.0, 6.0, 6.0, 2.0]).double()
    torch.testing.assert_close((squares[0].sum(1) + squares[1].sum(1)) / counts, torch.ones(4).double())


def test_a_mean_that_anything_may_be_added_to_is_zero() -> None:
    wire = Wire((pair(1, 4, 3, 2)[0].wire.slots[0],), 3)
    _, params = pair(1, 4, 3, 2)
    point = canonical([Gauge(wire, IntoMean(3))], params).params
    torch.testing.assert_close(point["W"], params["W"] - params["W"].mean(0))


def test_translations_that_move_each_others_factors_keep_the_function() -> None:
    """An adapter beside its base, W + B A: both of its factors are 0 once the base has taken them."""
    model, x = net("lora", False)
    params = {key: w.detach() for key, w in model.named_parameters()}
    groups = find(model, shown("lora", x)[:4]).symmetries
    there = params
    for k, each in enumerate(groups):
        there = each.act(there, each.element(torch.Generator().manual_seed(k), 0.3))
    point, other = canonical(groups, params), canonical(groups, there)
    assert change(model, x, point.params) < SAME
    for key in ("embed.weight", "w.weight"):
        assert apart({key: point.params[key]}, other.params) < PLACE
    assert not point.params["a_8_3.weight"].any()
    assert not point.params["b_3_8.weight"].any()


def test_a_factor_that_translations_do_not_move_is_read_all_the_same() -> None:
    bias, taken = Rows.along("b", (3,), 0), Rows.along("c", (2,), 0)
    weight = Matrix(-torch.ones(2), torch.ones(3), Rows.along("W", (2, 3), 0))
    generator = torch.Generator().manual_seed(0)
    params = {"W": torch.randn(2, 3, generator=generator), "b": torch.randn(3, generator=generator), "c": torch.ones(2)}
    point = canonical([Translation((Part(taken, weight), Part(bias)))], params).params
    assert not point["b"].any()
    torch.testing.assert_close(point["c"], (params["c"] + params["W"] @ params["b"]).double())


def test_constants_that_make_up_for_each_other_settle_in_any_order() -> None:
    """A norm's bias is added to a stream that an output bias is added to; values read it, and outputs them."""
    norm, out, value = (Rows.along(name, (4,), 0) for name in ("norm", "out", "value"))
    read, write = (Matrix(-torch.ones(4), torch.ones(4), Rows.along(name, (4, 4), 0)) for name in ("V", "O"))
    minus = Sparse((4, 4), (Terms(torch.arange(4).repeat(2, 1), -torch.ones(4).double()),))
    both = (
        Translation((Part(norm), Part(out, minus), Part(value, read))),
        Translation((Part(value), Part(out, write))),
    )
    generator = torch.Generator().manual_seed(0)
    params = {key: torch.randn(4, generator=generator).double() for key in ("out", "value", "norm")}
    params |= {key: 3 * torch.randn(4, 4, generator=generator).double() for key in ("V", "O")}
    point = canonical(both, params).params
    assert not point["norm"].any()
    assert not point["value"].any()
    assert apart(point, canonical(both, moved(both, params, 0, 0.5)).params) < SAME


def test_without_symmetries_nothing_moves() -> None:
    _, params = pair(1, 6, 3, 5)
    assert apart(canonical([], params).params, params) == 0


def test_what_is_read_and_never_written_is_zero() -> None:
    """It is a limit of the orbit, and every point of the orbit leads to it."""
    gauge, params = pair(1, 6, 3, 5)
    params["W"][2] = params["W"][0] - params["W"][1]
    params["R"][:, 1] = -params["R"][:, 0]
    point = canonical([gauge], params)
    there = canonical([gauge], moved((gauge,), params, 0, 1.5))
    product = point.params["R"] @ point.params["W"]
    torch.testing.assert_close(product, params["R"] @ params["W"])
    rank = int(torch.linalg.matrix_rank(product, rtol=1e-9))
    assert rank < 3
    for own in point.params.values():
        assert int(torch.linalg.matrix_rank(own, rtol=1e-9)) == rank
    assert apart(point.params, there.params) < PLACE
    assert not point.doubts


def test_what_changes_outputs_is_left_out_or_refused() -> None:
    gauge, params = pair(1, 6, 3, 5)
    wrong = Translation((Part(Rows.along("W", (3, 6), 0), torch.ones(3, 1), torch.ones(1, 6)),))

    def changed(at: dict[str, Tensor]) -> float:
        product = params["R"] @ params["W"]
        return float((at["R"] @ at["W"] - product).norm() / product.norm())

    point = canonical([wrong, gauge], params, changed)
    assert any("left them out" in each for each in point.doubts)
    assert apart(point.params, canonical([gauge], params).params) == 0
    torus = Torus((Slices.of(Rows.along("W", (3, 6), 0), torch.ones(3, 1)),), 1)
    with pytest.raises(ValueError, match="must leave outputs as they are"):
        canonical([torus], params, changed)


def test_axes_that_coincide_are_said() -> None:
    gauge = Gauge(pair(1, 4, 4, 4)[0].wire, CenteredSO(4))
    point = canonical([gauge], {"W": torch.eye(4), "R": torch.eye(4)})
    assert any("Principal axes must be distinct" in each for each in point.doubts)


def test_axes_of_few_rotations_do_not_depend_on_a_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    """SO(3)^2 on 3 x 3 channels and on 3 of each factor has half turns, which could lead to other maxima by chance."""
    model, _, found = found_in("outer", True)
    params = dict(model.named_parameters())
    first, skew = canonical(found.groups, params).params, Algebra.skew
    for seed in range(3):

        def turned(self: Algebra, seed: int = seed) -> Tensor:
            basis, draw = skew(self), torch.Generator().manual_seed(seed)
            Q = torch.linalg.qr(torch.randn(len(basis), len(basis), generator=draw, dtype=torch.float64))[0]
            return torch.einsum("ab,bij->aij", Q, basis)

        monkeypatch.setattr(Algebra, "skew", turned)
        for name, w in canonical(found.groups, params).params.items():
            torch.testing.assert_close(w, first[name], rtol=0, atol=1e-8)


def test_an_orbit_that_is_not_closed_is_said() -> None:
    gauge, params = pair(1, 4, 3, 4)
    point = canonical([gauge], params | {"R": torch.zeros(4, 3).double()})
    assert any("must have a least value" in each for each in point.doubts)


@pytest.mark.parametrize(
    ("change_of", "message"),
    [
        ({"R": None}, "Found no 'R'"),
        ({"R": torch.randn(4, 3)}, "must have shape"),
        ({"R": torch.ones(5, 3).int()}, "real"),
    ],
)
def test_parameters_of_another_model_are_refused(change_of: dict[str, Tensor | None], message: str) -> None:
    gauge, params = pair(1, 6, 3, 5)
    given_params = {key: w for key, w in (params | change_of).items() if w is not None}
    with pytest.raises(ValueError, match=message):
        canonical([gauge], given_params)


@pytest.mark.parametrize("algebra", [GL(3), FromSum(3), Complex()], ids=lambda algebra: type(algebra).__name__)
def test_a_basis_is_orthonormal_in_float64_whatever_the_default_type(algebra: Algebra) -> None:
    B = moving(algebra).flatten(1)
    torch.testing.assert_close(B @ B.mT, torch.eye(len(B), dtype=torch.float64), rtol=0, atol=1e-14)


def test_what_is_zero_is_so_at_the_point_itself() -> None:
    """Value biases are settled first, and moved again by translations that are left for the least norm."""
    model, batch = small_model("openai-gpt")
    model = model.double()
    params = {name: w.detach() for name, w in model.named_parameters()}
    found = canonical(find_symmetries(model, batch).groups, params)
    for name, at in found.zeros.items():
        assert float(found.params[name].flatten()[at].abs().max()) < 1e-12
