"""Tangent spaces over all parameters: coordinates, moves and pull-backs, against autograd and dense formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient, measured_parameters, parameters
from quotient_manifolds.manifolds import FixedRankQuotient, RotaryQuotient, fixed_rank_space
from quotient_manifolds.sharpness.ball import BALLS
from quotient_manifolds.sharpness.vector import norm
from quotient_manifolds.symmetries import Params, Scope, SymmetricPair, Symmetries, declare_pair
from quotient_manifolds.symmetries.canonical import canonical
from studies.appendix_g import AdaptiveNorm
from tests.geometry.cases import (
    ELEMENTWISE,
    NORM_OFF,
    QUOTIENTS,
    by_name,
    encoder,
    generator,
    pull_back,
    space_at,
    symmetries_of,
)
from tests.nets.attention import coverage


def product(pair: SymmetricPair, params: Params) -> Tensor:
    """All that a model sees of a pair: G H^T, head by head, in float64."""
    G, H = pair.read(params).double().split([pair.n, pair.m], dim=-2)
    return G @ H.mT


def probe(params: Params) -> Tensor:
    """A smooth scalar of all parameters, with a gradient that autograd knows."""
    return sum((torch.sin(3 * w).sum() for w in params.values()), torch.zeros((), dtype=torch.float64))


@by_name
def test_the_gradient_at_the_point_is_the_pull_back_at_zero(geometry: Geometry) -> None:
    """Of a loss that symmetries leave alone. A step of it may be written into the parameters themselves."""
    model = encoder(layers=1)
    model(torch.randn(2, 4, 6, dtype=torch.float64, generator=generator())).square().mean().backward()
    grads = {name: w.grad for name, w in model.named_parameters() if w.grad is not None}
    if isinstance(geometry, Quotient):
        geometry = replace(geometry, symmetries=symmetries_of(model))
    if isinstance(geometry, AdaptiveNorm):
        geometry = AdaptiveNorm(replace(geometry.quotient, symmetries=symmetries_of(model)))
    space = geometry.tangent_space_in_place(model)
    gradient, pulled = space.gradient(grads), pull_back(space, space.zero(), grads)
    for key, block in pulled.items():
        torch.testing.assert_close(gradient[key], block, rtol=1e-9, atol=1e-12)
    ahead = space.move({key: 0.01 * block for key, block in gradient.items()})
    space.move(gradient, {name: w.detach() for name, w in model.named_parameters()}, times=0.01)
    for name, w in model.named_parameters():
        torch.testing.assert_close(w.detach(), ahead[name], rtol=1e-12, atol=1e-12)


@by_name
def test_the_pull_back_is_what_autograd_makes_of_the_move(geometry: Geometry) -> None:
    """`move` differentiated through, and the adjoint written by hand."""
    space = space_at(geometry, encoder(layers=1))
    z = {key: (0.05 * block).requires_grad_() for key, block in space.sample(generator()).items()}
    moved = space.move(z)
    slopes = dict(zip(z, torch.autograd.grad(probe(moved), tuple(z.values())), strict=True))
    leaves = {name: w.detach().requires_grad_() for name, w in moved.items()}
    grads = dict(zip(leaves, torch.autograd.grad(probe(leaves), tuple(leaves.values())), strict=True))
    pulled = pull_back(space, {key: block.detach() for key, block in z.items()}, grads)
    for key, slope in space.project(slopes).items():
        torch.testing.assert_close(pulled[key], slope, rtol=1e-9, atol=1e-9)


@by_name
def test_the_move_by_zero_stays(geometry: Geometry) -> None:
    model = encoder()
    space = space_at(geometry, model)
    for name, w in space.move(space.zero()).items():
        torch.testing.assert_close(w, space.point[name], rtol=1e-12, atol=1e-13)
    own = {name: w.detach() for name, w in model.named_parameters()}
    assert all(torch.equal(w, own[name]) for name, w in space.point.items() if "self_attn" not in name)
    if isinstance(geometry, Quotient):
        assert not space.point["layers.0.self_attn.in_proj_bias"][6:].any()  # keys and values
        space = space_at(replace(geometry, symmetries="paper"), model)
    pairs = symmetries_of(model).within("paper").pairs if isinstance(geometry, Quotient) else ()
    point = space.point
    for pair in pairs:  # elsewhere on its orbit
        torch.testing.assert_close(product(pair, point), product(pair, own), rtol=1e-12, atol=1e-13)
        assert not torch.equal(pair.read(point), pair.read(own))
        pair.write(point, pair.read(own))
    assert all(torch.equal(w, own[name]) for name, w in point.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_point_without_needless_biases_is_the_same_function(dtype: torch.dtype) -> None:
    model, x = encoder(dtype), torch.randn(2, 5, 6, dtype=dtype)
    before = {name: w.detach().clone() for name, w in model.named_parameters()}
    point = space_at(Quotient(), model).point
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(functional_call(model, point, (x,)), model(x), rtol=tolerance, atol=tolerance)
    assert all(torch.equal(before[name], w) for name, w in model.named_parameters())


def test_euclidean_and_adaptive_moves_are_elementwise() -> None:
    model = encoder()
    for geometry in ELEMENTWISE:
        space = space_at(geometry, model)
        z = space.sample(generator())
        for name, w in space.move(z).items():
            old = model.get_parameter(name).detach()
            if isinstance(geometry, Adaptive):
                xi = z[name] * (old.abs() + geometry.eta if geometry.eta else old)
            else:
                xi = z[name]
            torch.testing.assert_close(w, old + xi)


def test_the_adaptive_norm_is_that_of_xi_over_w_and_zero_weights_stay() -> None:
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        model.weight[0, 0] = 0.0
        model.bias.zero_()
    space = Adaptive().tangent_space(model)
    z = space.sample(generator())
    moved = space.move(z)
    w = model.weight.detach()
    xi = (moved["weight"] - w)[w != 0] / w[w != 0]
    assert norm(z) == pytest.approx(float(xi.norm()), rel=1e-12)
    assert moved["weight"][0, 0] == 0
    assert not moved["bias"].any()
    everywhere = {name: torch.ones_like(block) for name, block in z.items()}
    assert norm(space.project(everywhere)) == pytest.approx(math.sqrt(5), rel=1e-12)
    assert not pull_back(space, z, {name: torch.ones_like(block) for name, block in z.items()})["bias"].any()


def test_eta_lets_zero_weights_move_and_zero_eta_shares_the_models_memory() -> None:
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        model.weight[0, 0] = 0.0
        model.weight[1] = -2.0
    w = model.weight.detach()
    space = Adaptive(eta=0.25).tangent_space(model)
    moved = space.move({name: torch.ones_like(block) for name, block in space.zero().items()})
    assert moved["weight"][0, 0] == 0.25
    assert moved["weight"][1].tolist() == [0.25] * 3  # -2 + |-2| + 0.25
    assert space.sample(generator())["weight"].all()
    pulled = pull_back(space, space.zero(), {"weight": torch.ones_like(w), "bias": None})
    torch.testing.assert_close(pulled["weight"], w.abs() + 0.25)
    shared = Adaptive().tangent_space(model).scale["weight"]
    assert shared is not None
    assert shared.data_ptr() == model.weight.data_ptr()


def test_samples_for_linf_are_uniform_in_the_box_and_0_where_a_weight_is() -> None:
    model = nn.Linear(100, 100)
    with torch.no_grad():
        model.bias.zero_()
    for geometry in (Euclidean("linf"), Adaptive(norm="linf")):
        z = space_at(geometry, model).sample(generator())
        quantiles = torch.quantile(z["weight"], torch.tensor([0.0, 0.1, 0.5, 0.8, 1.0]))
        torch.testing.assert_close(quantiles, torch.tensor([-1.0, -0.8, 0.0, 0.6, 1.0]), atol=0.02, rtol=0)
        assert bool(z["bias"].any()) == isinstance(geometry, Euclidean)


@pytest.mark.parametrize("geometry", ELEMENTWISE, ids=lambda geometry: geometry.name)
def test_length_is_that_in_the_norm_of_the_ball(geometry: Geometry) -> None:
    space = space_at(geometry, nn.Linear(1, 3))
    assert space.norm == geometry.norm  # type: ignore[attr-defined]
    z = {"weight": torch.tensor([[1.0], [0.0], [-2.0]]), "bias": torch.tensor([-3.0, 1.0, 1.0])}
    ball = BALLS[space.norm](1.0)
    assert ball.length(z) == pytest.approx(4.0 if space.norm == "l2" else 3.0, rel=1e-12)
    assert ball.length(space.zero()) == 0.0


@pytest.mark.parametrize("scope", ["paper", "pairs"])
@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_the_quotient_norm_is_the_sum_of_the_pairs_metrics_and_the_adaptive_rest(metric: str, scope: Scope) -> None:
    """|z|^2 = sum over pairs of tr(W_G xi_G' xi_G) + tr(W_H xi_H' xi_H), plus sum (xi / w)^2 elsewhere."""
    model = encoder()
    symmetries = symmetries_of(model).within(scope)
    space = space_at(Quotient(metric, "first", symmetries=scope), model)
    z = space.sample(generator())
    point = space.point
    if scope == "pairs":  # rows that are zero: they stay, and change no other row's metric
        zeros = canonical(symmetries.groups, {name: w.detach() for name, w in model.named_parameters()}).zeros
        symmetries = replace(symmetries, pairs=tuple(pair.without(zeros) for pair in symmetries.pairs))
    moved = space.move(z)
    xi = {name: moved[name] - w for name, w in point.items()}  # first order: gamma(1) - w
    covered = coverage(symmetries, point)
    square = sum(float(((xi[name] / w)[~covered[name] & (w != 0)] ** 2).sum()) for name, w in point.items())
    assert not any(xi[name][w == 0].any() for name, w in point.items())
    for pair in symmetries.pairs:
        (G, H), (a, b) = pair.read(point).split([pair.n, pair.m], -2), pair.read(xi).split([pair.n, pair.m], -2)
        gram_G, gram_H = G.mT @ G, H.mT @ H
        W_G, W_H = (gram_G.inverse(), gram_H.inverse()) if metric == "inv" else (gram_H, gram_G)
        square += float((W_G * (a.mT @ a)).sum() + (W_H * (b.mT @ b)).sum())
    assert norm(z) == pytest.approx(math.sqrt(square), rel=1e-9)


@pytest.mark.parametrize("geometry", QUOTIENTS, ids=lambda geometry: geometry.name)
def test_samples_and_pull_backs_are_horizontal_and_projection_is_idempotent(geometry: Geometry) -> None:
    space = space_at(geometry, encoder())
    z = space.sample(generator())
    pulled = pull_back(space, z, {name: torch.randn_like(w) for name, w in space.point.items()})
    for vector in (z, pulled):
        for block in space.pairs:
            torch.testing.assert_close(block.space.project(vector[block.key]), vector[block.key])
    raw = {key: torch.randn_like(block) for key, block in z.items()}
    once = space.project(raw)
    twice = space.project(once)
    assert norm({key: twice[key] - once[key] for key in once}) < 1e-6 * norm(once)
    assert norm(once) < norm(raw)


@pytest.mark.parametrize("geometry", NORM_OFF, ids=lambda geometry: geometry.name)
def test_with_the_norm_off_the_ball_is_adaptive_and_the_weights_move_by_the_geodesic(geometry: Geometry) -> None:
    """|z| = |xi / w| over all entries; w moves by the geodesic of the horizontal part of xi = w z."""
    assert isinstance(geometry, AdaptiveNorm)
    model, quotient = encoder(layers=1), geometry.quotient
    space = space_at(geometry, model)
    point = measured_parameters(model)
    assert sum(block.numel() for key, block in space.zero().items() if key.startswith("pairs")) == sum(
        pair.heads * (pair.n + pair.m) * pair.h for pair in symmetries_of(model).within("paper").pairs
    )
    z = {key: 0.05 * block for key, block in space.sample(generator()).items()}
    moved = space.move(z)
    for block in space.pairs:
        at = torch.cat([pair.read(point) for pair in block.pairs])
        manifold = FixedRankQuotient(block.pairs[0].n, block.pairs[0].m, quotient.metric)
        xi = manifold.proju(at, at * z[block.key])
        expected = manifold.at(at).geodesic(xi, order=quotient.geodesic)
        torch.testing.assert_close(torch.cat([pair.read(moved) for pair in block.pairs]), expected)


def test_a_mix_geodesic_is_cut_where_it_leaves_the_manifold() -> None:
    """G = H = 1: mix moves x = G H along x + sqrt(2) z, which ends at x = 0 for z = -1 / sqrt(2)."""
    model = nn.Module()
    model.G, model.H = (nn.Parameter(torch.ones(1, 1, dtype=torch.float64)) for _ in range(2))
    pair = declare_pair(model, "head", "query/key", G=lambda w: w["G"][None], H=lambda w: w["H"][None])
    symmetries = Symmetries((pair,))
    space = space_at(Quotient("mix", "exact", symmetries=symmetries), model)
    (key,) = space.zero()
    along = torch.full((1, 2, 1), -(0.5**0.5), dtype=torch.float64)
    for length, reached in ((0.5, 0.5), (3.0, 0.5**0.5)):
        z = space.reached({key: length * along})
        assert norm(z) == pytest.approx(reached, rel=1e-3)
    moved = space.move({key: 0.5 * along})
    assert float(moved["G"] * moved["H"]) == pytest.approx(1 - 0.5 * 2**0.5, rel=1e-7)


def test_owned_elements_have_no_block_and_pairs_have_one_each_or_one_for_a_shape_where_an_ode_is_solved() -> None:
    model = encoder(layers=3)
    symmetries = symmetries_of(model).within("paper")
    space = space_at(Quotient(symmetries="paper"), model)
    z = space.zero()
    covered = coverage(symmetries, measured_parameters(model))
    assert {name for name, mask in covered.items() if not mask.all()} == set(space.scale)
    shapes = {(pair.n, pair.m, pair.h) for pair in symmetries.pairs}
    assert [pair for block in space.pairs for pair in block.pairs] != list(symmetries.pairs)  # shapes stand together
    assert {pair for block in space.pairs for pair in block.pairs} == set(symmetries.pairs)
    assert all(len(block.pairs) == 1 for block in space.pairs)
    exact = space_at(Quotient(geodesic="exact", symmetries="paper"), model)
    there = exact.sample(generator())
    assert len(exact.pairs) == len(shapes)
    assert sum(there[block.key].shape[0] for block in exact.pairs) == sum(pair.heads for pair in symmetries.pairs)
    assert sum(z[block.key].shape[0] for block in space.pairs) == sum(pair.heads for pair in symmetries.pairs)
    # Elements that pairs own in a parameter they share with others are moved by the pair alone.
    for name, scale in space.scale.items():
        assert scale is not None
        assert not scale[covered[name]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_are_factored_in_float64_whatever_the_models_dtype(dtype: torch.dtype) -> None:
    model = encoder(dtype)
    with torch.no_grad():  # a query weight so ill-conditioned that its Gram matrix is singular in float32
        model.get_parameter("layers.0.self_attn.in_proj_weight")[1:3] *= 1e-6
    for geometry, precision in (
        (Quotient(symmetries="paper"), torch.float32),
        (Quotient("inv", "exact", symmetries="paper"), torch.float64),
    ):
        space = space_at(geometry, model)
        assert {block.space.point.dtype for block in space.pairs} == {precision}
        assert {space.zero()[name].dtype for name in space.scale} == {torch.float32}
        for block in space.pairs:
            n, m, h = block.pairs[0].n, block.pairs[0].m, block.pairs[0].h
            own = measured_parameters(model)
            exact = torch.linalg.svdvals(torch.cat([product(pair, own) for pair in block.pairs]))[:, :h]
            assert (m, n) != (h, h)
            torch.testing.assert_close(block.space._s, exact, rtol=1e-6, atol=1e-15)
        moved = space.move(space.zero())
        for name, w in space.point.items():
            assert moved[name].dtype == torch.float32
            torch.testing.assert_close(moved[name], w.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("geodesic", ["second", "exact"])
def test_a_pair_is_factored_once(geodesic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank, balanced factors and frame are those of one factorization, and the same as of a second one."""
    model = encoder(layers=2)
    quotient = Quotient("mix", geodesic, symmetries=symmetries_of(model))
    with monkeypatch.context() as patch:
        for module, again in ((parameters, "product_svd"), (fixed_rank_space, "pair_frame")):
            patch.delattr(module, again)
        space = quotient.tangent_space(model)
    for block in space.pairs:
        x, other = block.space.point, block.manifold.at(block.space.point)
        G, H = x.split([block.manifold.n, block.manifold.m], dim=-2)
        torch.testing.assert_close(G.mT @ G, H.mT @ H, rtol=1e-12, atol=1e-12)
        xi = torch.randn(x.shape, dtype=x.dtype, generator=generator())
        torch.testing.assert_close(block.space.coordinates(xi), other.coordinates(xi), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(block.space.proju(xi), other.proju(xi), rtol=1e-9, atol=1e-10)


def test_gradients_that_share_memory_or_are_missing_are_pulled_back_right() -> None:
    model = nn.Linear(3, 3).double()
    w, b = model.weight.detach(), model.bias.detach()
    space = Adaptive().tangent_space(model)
    shared = torch.randn(3, 3, dtype=torch.float64)
    pulled = space.linearise(space.zero())[1]({"weight": shared, "bias": shared[0]})
    torch.testing.assert_close(pulled, {"weight": shared * w, "bias": shared[0] * b})
    expanded = torch.ones((), dtype=torch.float64).expand(3, 3)
    pulled = space.linearise(space.zero())[1]({"weight": expanded, "bias": None})
    torch.testing.assert_close(pulled, {"weight": w, "bias": torch.zeros_like(b)})
    # A gradient that is the parameter itself, as a backward pass may return it.
    pulled = space.linearise(space.zero())[1]({"weight": space.point["weight"], "bias": None})
    torch.testing.assert_close(pulled["weight"], w**2)
    assert torch.equal(model.weight, w)


def test_a_parameter_may_belong_to_pairs_in_part() -> None:
    """Rows 0 to 2 of one matrix are G and rows 2 to 4 are H; the last row is in no pair and adaptive."""
    model = nn.Module()
    model.W = nn.Parameter(torch.randn(5, 2, dtype=torch.float64))
    pair = declare_pair(model, "head", "query/key", G=lambda w: w["W"][None, :2], H=lambda w: w["W"][None, 2:4])
    symmetries = Symmetries((pair,))
    space = space_at(Quotient("mix", symmetries=symmetries), model)
    z, grad = space.sample(generator()), torch.randn(5, 2, dtype=torch.float64)
    pulled = pull_back(space, space.zero(), {"W": grad})
    manifold = FixedRankQuotient(2, 2, "mix")
    W = space.point["W"]
    torch.testing.assert_close(W[:2] @ W[2:4].mT, (model.W[:2] @ model.W[2:4].mT).detach())
    assert torch.equal(W[4], model.W[4])
    expected = manifold.at(W[None, :4]).covector(grad[None, :4])
    torch.testing.assert_close(pulled[space.pairs[0].key], manifold.at(W[None, :4]).project(expected))
    torch.testing.assert_close(pulled["W"][4], grad[4] * W[4])
    assert not pulled["W"][:4].any()
    torch.testing.assert_close(space.move(z)["W"][4], W[4] + W[4] * z["W"][4])


@pytest.mark.parametrize("order", ["first", "second", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotary_pairs_are_measured_modulo_their_own_group(dtype: torch.dtype, order: str) -> None:
    model = nn.Module()
    model.G, model.H = (nn.Parameter(torch.randn(2 * rows, 2, dtype=dtype)) for rows in (3, 2))  # two planes
    G, H = (lambda w, name=name: w[name].unflatten(0, (2, -1)) for name in ("G", "H"))
    pair = declare_pair(model, "planes", "query/key", G=G, H=H, acts="GL(1, C)")
    space = Quotient("mix", order, symmetries=Symmetries((pair,))).tangent_space(model)
    (key,) = space.zero()
    grads = {name: torch.randn_like(w) for name, w in model.named_parameters()}
    exact = RotaryQuotient(3, 2, "mix").at(pair.read(space.point).double())
    expected = exact.project(exact.covector(pair.read(grads).double()))
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(pull_back(space, space.zero(), grads)[key].double(), expected, **tolerance)
    z = {key: 0.1 * space.sample(generator())[key]}
    moved = exact.follow(z[key].double(), order)[0]
    torch.testing.assert_close(pair.read(space.move(z)).double(), moved, **tolerance)
