"""Runs from two points of one orbit are one run; and what a step does is what the manifold says."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import quotient_manifolds as qm
from quotient_manifolds.optim.step import Point
from tests.nets.trained import CASES
from tests.optim.cases import apart, backward, made, moved, same, train, weights

ADAM, SGD = qm.QuotientAdam, qm.QuotientSGD


def making(kind: Any, **settings: Any) -> Any:
    return lambda model, found: kind(model.named_parameters(), found, **settings)


OPTIMIZERS: dict[str, Any] = {
    "sgd": making(SGD, lr=0.05),
    "momentum": making(SGD, lr=0.02, momentum=0.9),
    "momentum inv": making(SGD, lr=0.01, momentum=0.9, weight_decay=0.1, metric="inv"),
    "adam": making(ADAM, lr=0.01, weight_decay=0.1),
    "adam clipped": making(ADAM, lr=0.01, max_norm=0.05),
    "adam inv": making(ADAM, lr=1e-3, metric="inv"),
}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, kind) for name in CASES for kind in ("momentum", "adam")), *(("low rank", kind) for kind in OPTIMIZERS)],
)
def test_two_points_of_one_orbit_train_to_one_function(name: str, optimizer: str) -> None:
    model, inputs, targets, found = made(name)
    twin = moved(model, found)
    start = copy.deepcopy(model)
    make = OPTIMIZERS[optimizer]
    losses = train(model, make(model, found), inputs, targets, 15)
    again = train(twin, make(twin, found), inputs, targets, 15)
    assert apart(model, start, inputs) > 1e-3  # it went somewhere
    assert losses[-1] < losses[0]
    # Adam divides gradients that are rounding, as those of key biases, by their size and 1e-8.
    assert again == pytest.approx(losses, rel=1e-8)
    assert apart(model, twin, inputs) < 1e-8


def test_in_float32_they_part_by_rounding_that_training_amplifies() -> None:
    model, inputs, targets, found = made("low rank", torch.float32)
    ends = {}
    for kind in ("ours", "adamw"):
        one, other = copy.deepcopy(model), moved(model, found)
        for each in (one, other):
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
            if kind == "ours":
                optimizer = qm.QuotientSGD(each.named_parameters(), found, lr=0.05, momentum=0.9)
            train(each, optimizer, inputs, targets, 100)
        ends[kind] = apart(one, other, inputs)
    assert ends["ours"] < 1e-3
    assert ends["adamw"] > 0.1


@pytest.mark.parametrize("metric", ["inv", "mix"])
@pytest.mark.parametrize("name", ["low rank", "rank one", "encoder", "Llama"])
def test_a_small_step_is_the_gradient_of_the_manifold(name: str, metric: str) -> None:
    model, inputs, targets, found = made(name)
    optimizer = qm.QuotientSGD(model.named_parameters(), found, lr=1e-9, metric=metric)
    backward(model, inputs, targets)
    before = weights(model)
    slopes = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.named_parameters()}
    optimizer.step()
    after = weights(model)
    pairs = [pair for pair in found.pairs if model.get_parameter(pair.names[0]).requires_grad]
    assert pairs
    for pair in pairs:
        x, egrad = pair.read(before), pair.read(slopes)
        way = (pair.read(before) - pair.read(after)) / 1e-9
        wanted = pair.manifold(metric).egrad2rgrad(x, egrad)
        assert torch.allclose(way, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()) + 1e-6)


@pytest.mark.parametrize(
    ("kind", "other", "settings"), [(ADAM, torch.optim.AdamW, {}), (SGD, torch.optim.SGD, {"momentum": 0.9})]
)
def test_elements_in_no_pair_go_as_torch_moves_them(kind: Any, other: Any, settings: dict[str, float]) -> None:
    model, inputs, targets, _ = made("low rank")
    twin, settings = copy.deepcopy(model), {"lr": 0.01, "weight_decay": 0.1, **settings}
    train(model, kind(model.named_parameters(), qm.Symmetries(()), **settings), inputs, targets, 5)
    train(twin, other(twin.parameters(), **settings), inputs, targets, 5)
    assert same(weights(model), weights(twin))


def test_momentum_of_a_square_pair_is_that_of_its_product() -> None:
    """Factors of full rank see all of the gradient M of their product: remembered is its running sum, times H."""
    torch.manual_seed(0)

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).double().eval()
    inputs, targets = torch.randn(16, 4).double(), torch.randint(4, (16,))
    found = qm.find_symmetries(model, inputs)
    (pair,) = found.pairs
    optimizer = qm.QuotientSGD(model.named_parameters(), found, lr=0.1, momentum=0.8)
    total = torch.zeros(4, 4).double()
    for _ in range(6):
        params = {name: p.detach() for name, p in model.named_parameters()}
        X = (pair.G.read(params) @ pair.H.read(params).mT)[0].requires_grad_()
        G = pair.G.read(params)[0]
        forward = inputs @ X.T if torch.allclose(G, model[1].weight.detach()) else inputs @ X
        (M,) = torch.autograd.grad(nn.functional.cross_entropy(forward, targets), X)
        total = 0.8 * total + M
        backward(model, inputs, targets)
        optimizer.step()
        H = pair.H.read({name: p.detach() for name, p in model.named_parameters()})[0]
        assert torch.allclose(optimizer.state[pair.name]["gradient"][0, :4], total @ H, rtol=1e-9, atol=1e-12)


def test_momentum_of_a_rotary_plane_is_that_of_its_complex_product() -> None:
    """One number g conj(k) sees all of its gradient M, whose share of g is M k, and of k conj(M) g."""
    torch.manual_seed(0)
    M, g, k, step_g, step_k = torch.randn(5, dtype=torch.complex128)

    def real(*numbers: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.stack(numbers))[None]

    point, z = Point(real(g, k), 1, 1.0, True), real(step_g, step_k)
    end, on = point.stepped(z, 0.1, 0.9)
    g_end, k_end = torch.view_as_complex(end[0])
    assert not torch.allclose(g_end, 0.9 * g)
    carried = point.carried(real(M * k, M.conj() * g), z, on, 0.9)
    assert torch.allclose(carried, real(M * k_end, M.conj() * g_end))


def test_adam_divides_every_row_by_its_own_size() -> None:
    """Without memory a step moves the product along M right right^T, each row of M right of mean square 1."""
    model, inputs, targets, found = made("low rank")
    backward(model, inputs, targets)
    pair = found.pairs[0]
    before = weights(model)
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    G, H, g = pair.G.read(before)[0], pair.H.read(before)[0], pair.G.read(grads)[0]
    right = torch.linalg.qr(H).Q
    seen = torch.linalg.solve(H.mT @ H, g.mT).mT @ H.mT @ right
    rows = seen / seen.square().mean(dim=1, keepdim=True).sqrt()
    optimizer = qm.QuotientAdam(model.named_parameters(), found, lr=1e-6, betas=(0.0, 0.0), eps=0.0)
    optimizer.step()
    after = weights(model)
    way = (G - pair.G.read(after)[0]) @ H.mT / 1e-6
    assert torch.allclose(way, rows @ right.mT, rtol=1e-3, atol=1e-3)


def test_the_start_of_an_adapter_moves_by_the_gradient_in_the_span_of_a() -> None:
    """At B = 0 the step of the product is -lr M P, P the projection on the rows of A; A stays."""
    model, inputs, targets, found = made("B = 0")
    backward(model, inputs, targets)
    B, A = model[0].B.weight.detach().clone(), model[0].A.weight.detach().clone()
    e = model[0].B.weight.grad.clone()
    qm.QuotientSGD(model.named_parameters(), found, lr=0.1).step()
    assert torch.equal(B, torch.zeros_like(B))
    wanted = -0.1 * torch.linalg.solve(A @ A.T, e.T).T
    got = model[0].B.weight.detach() @ model[0].A.weight.detach()
    assert torch.allclose(got, wanted @ A, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_a_run_goes_on_from_a_checkpoint(kind: str) -> None:
    model, inputs, targets, found = made("encoder")
    make = OPTIMIZERS[kind]
    fresh, first, file = copy.deepcopy(model), make(model, found), io.BytesIO()
    train(model, first, inputs, targets, 6)
    torch.save({"model": model.state_dict(), "optimizer": first.state_dict()}, file)
    train(model, first, inputs, targets, 6)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh.load_state_dict(saved["model"])
    second = make(fresh, found)
    second.load_state_dict(saved["optimizer"])
    train(fresh, second, inputs, targets, 6)
    assert same(weights(model), weights(fresh))


def test_a_pair_that_is_late_does_not_change_the_others() -> None:
    """Two pairs of one shape are one batch; one of them gets its first gradient after some steps."""
    torch.manual_seed(1)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)) for _ in range(2))
    layers.double()
    both = qm.find_symmetries(Sum(layers).double().eval(), torch.randn(2, 6).double())
    alone = copy.deepcopy(layers)
    optimizer = qm.QuotientAdam(Sum(layers).named_parameters(), both, lr=0.01)
    other = qm.QuotientAdam(Sum(alone).named_parameters(), both, lr=0.01)
    x = torch.randn(8, 6).double()
    for step in range(8):
        for part, stepper, late in ((layers, optimizer, True), (alone, other, False)):
            stepper.zero_grad()
            loss = part[0](x).square().mean()
            if late and step >= 5:
                loss = loss + part[1](x).square().mean()
            loss.backward()
            stepper.step()
    assert torch.allclose(layers[0][1].weight @ layers[0][0].weight, alone[0][1].weight @ alone[0][0].weight)
    assert [float(optimizer.state[pair.name]["step"]) for pair in both.pairs] == [8, 3]


class Sum(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) + self.layers[1](x)


def test_a_copy_of_an_optimizer_steps_its_own_model() -> None:
    model, inputs, targets, found = made("encoder")
    for make in (OPTIMIZERS["adam"], lambda m, f: qm.SAM(OPTIMIZERS["adam"](m, f), m, radius=0.01)):
        optimizer = make(model, found)
        train(model, optimizer, inputs, targets, 2)
        twin, other = copy.deepcopy((model, optimizer))
        train(model, optimizer, inputs, targets, 2)
        train(twin, other, inputs, targets, 2)
        assert same(weights(model), weights(twin))


def test_factors_that_both_lack_rank_stay_in_bounds() -> None:
    """B and A of rank 2 with 4 columns: what lacks in both stays, the rest is trained."""
    model, inputs, targets, found = made("low rank")
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            P = torch.randn(4, 2).double()
            layer.B.weight.copy_(layer.B.weight[:, :2] @ P.T)
            layer.A.weight.copy_(P @ layer.A.weight[:2])
    before = weights(model)
    losses = train(model, making(ADAM, lr=0.01)(model, found), inputs, targets, 20)
    assert losses[-1] < losses[0]
    assert all(p.abs().max() < 10 * before[name].abs().max() + 1 for name, p in weights(model).items())


@pytest.mark.parametrize("h", [1, 4, 16])
def test_the_product_of_both_steps_is_no_larger_than_the_step_of_h(h: int) -> None:
    """Also where the gradient lies along the one direction whose singular value is small."""
    torch.manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(20, h).double()).Q[None] for _ in range(2))
    s = torch.ones(h).double()
    s[-1] = 1e-5
    G, H = U * s, V
    M = U[0, :, -1:] @ V[0, :, -1:].T
    x = torch.cat([G, H], dim=1)
    point = Point(x, 20, 1.0)
    z = point.coordinates(torch.cat([M @ H, M.T @ G], dim=1))
    way = point.stepped(z, 0.1)[0] - x
    cross = way[:, :20] @ way[:, 20:].mT
    assert float(cross.norm()) <= 0.1 * float(z[:, 20:].norm()) * (1 + 1e-9)
