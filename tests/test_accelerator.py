"""On an accelerator the package computes what it computes on the processor, and leaves everything where it was.

Skipped where there is none. `QUOTIENT_MANIFOLDS_DEVICE=cpu python -m pytest -n 0 tests/test_accelerator.py` runs it all
the same, and so does tests/test_devices.py, on a pretended device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds.geometry import as_geometry
from quotient_manifolds.symmetries import prove_symmetries
from tests.cases import EVERY_BUILT_IN, Case
from tests.devices import DEVICE, NONE
from tests.models import IDS, llama

pytestmark = pytest.mark.skipif(DEVICE is None, reason=NONE)

GEOMETRIES = ["euclidean", "adaptive", "inv", "mix"]
BATCH = {**IDS, "labels": IDS["input_ids"]}
STEPS = 3
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative. Kernels add in other orders; the rise is a small difference of losses, and the ascent decides by it."""
Batch = dict[str, Tensor]


def there(value: Any) -> Any:
    """Return a model, a tensor or a batch on the device, as a copy."""
    if isinstance(value, dict):
        return {name: there(each) for name, each in value.items()}
    return copy.deepcopy(value).to(DEVICE)


def model_of(dtype: torch.dtype = torch.float64, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return llama(**settings).to(dtype)


def sharpness(model: nn.Module, batch: Batch, loss: Any = qm.next_token_cross_entropy, **options: Any) -> float:
    chosen: dict[str, Any] = {"geometry": "mix", "radius": 0.05, "steps": STEPS, **options}
    return qm.worst_case_sharpness(model, loss, [batch], **chosen).mean


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_worst_case_sharpness(geometry: str, dtype: torch.dtype) -> None:
    model = model_of(dtype)
    moved = there(model)
    before = {name: (value.device, value.cpu().clone()) for name, value in moved.state_dict().items()}
    found = sharpness(moved, there(BATCH), geometry=geometry)
    assert found == pytest.approx(sharpness(model, BATCH, geometry=geometry), rel=CLOSE[dtype])
    assert found > 0
    for name, value in moved.state_dict().items():
        device, numbers = before[name]
        assert value.device == device
        assert torch.equal(value.cpu(), numbers), name
    assert all(w.grad is None for w in moved.parameters())


MEASURES: dict[str, Callable[..., qm.Result]] = {
    "restarted": lambda *given: qm.worst_case_sharpness(*given, geometry="inv", radius=0.05, steps=STEPS, restarts=2),
    "exact": lambda *given: qm.worst_case_sharpness(
        *given, geometry=qm.Quotient("mix", "exact"), radius=0.05, steps=STEPS
    ),
    "t": lambda *given: qm.worst_case_sharpness(*given, geometry=0.5, radius=0.05, steps=STEPS),
    "biases as rows": lambda *given: qm.worst_case_sharpness(
        *given, geometry=qm.Quotient("inv", symmetries="paper"), radius=0.05, steps=STEPS
    ),
    "linf": lambda *given: qm.worst_case_sharpness(*given, geometry=qm.Adaptive(norm="linf"), radius=1e-3, steps=STEPS),
    "profile": lambda *given: qm.worst_case_profile(*given, geometry="inv", radii=[0.02, 0.05], steps=3)[-1],
    "average": lambda *given: qm.average_case_sharpness(*given, geometry="adaptive", sigma=0.05, samples=3),
    "gradient": lambda *given: qm.gradient_norm(*given, geometry="mix"),
    "trace": lambda *given: qm.hessian_trace(*given, geometry="adaptive", samples=2),
    "eigenvalue": lambda *given: qm.top_eigenvalue(*given, geometry="inv"),
}


@pytest.mark.parametrize("name", MEASURES)
def test_other_measures(name: str) -> None:
    """What is drawn at random is drawn by the processor, so that a seed says the same everywhere."""
    model = model_of(attention_bias=True, attn_implementation="eager")
    values = [
        MEASURES[name](m, qm.next_token_cross_entropy, [b]) for m, b in ((model, BATCH), (there(model), there(BATCH)))
    ]
    # Of eigenvalues and of small differences of small differences fewer digits are asked for.
    assert values[1].mean == pytest.approx(values[0].mean, rel=1e-6)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_weights_in_bfloat16_as_they_are(geometry: str) -> None:
    model = model_of(torch.bfloat16)
    moved = there(model)
    found = sharpness(moved, there(BATCH), geometry=geometry)
    assert found == pytest.approx(sharpness(model, BATCH, geometry=geometry), rel=CLOSE[torch.float32])
    assert {w.dtype for w in moved.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_symmetries(dtype: torch.dtype) -> None:
    model = model_of(dtype)
    moved = there(model)
    symmetries = [
        qm.find_symmetries(m, b, evaluate=qm.next_token_cross_entropy)
        for m, b in ((model, BATCH), (moved, there(BATCH)))
    ]
    assert symmetries[0].pairs == symmetries[1].pairs
    assert symmetries[0].names == symmetries[1].names
    assert symmetries[1].pairs
    proof = prove_symmetries(moved, there(BATCH), symmetries[1], evaluate=qm.next_token_cross_entropy)
    assert proof.all_proved, str(proof)
    digits = 100 * CLOSE[dtype] ** 1.5  # of weights, with factors of condition 10 between them
    for change in (
        lambda m, b, s: qm.random_move(m, s, seed=3),
        lambda m, b, s: qm.balance(m, s),
        lambda m, b, s: qm.canonical(m, b, evaluate=qm.next_token_cross_entropy).params,
    ):
        here, other = change(model, BATCH, symmetries[0]), change(moved, there(BATCH), symmetries[1])
        for name, value in here.items():
            assert other[name].device.type == DEVICE.type
            torch.testing.assert_close(other[name].cpu(), value, rtol=digits, atol=digits)


@pytest.mark.parametrize("geometry", [*GEOMETRIES, qm.Euclidean("linf")], ids=str)
def test_random_starts(geometry: Any) -> None:
    """One seed, one start, drawn by the processor; a generator of the device draws too."""
    model = model_of()
    spaces = []
    for m, b in ((model, BATCH), (there(model), there(BATCH))):
        spaces.append(as_geometry(geometry).verified(m, qm.next_token_cross_entropy, [b]).at(m))
    here, other = (space.sample(torch.Generator().manual_seed(5)) for space in spaces)
    assert here.keys() == other.keys()
    for name, block in here.items():
        assert other[name].device.type == DEVICE.type
        torch.testing.assert_close(other[name].cpu(), block, rtol=1e-9, atol=1e-9)
    if DEVICE.type != "pretended":
        own = spaces[1].sample(torch.Generator(DEVICE).manual_seed(5))
        assert {block.device.type for block in own.values()} == {DEVICE.type}


@pytest.mark.parametrize("case", EVERY_BUILT_IN, ids=str)
def test_manifolds(case: Case) -> None:
    x, eta, zeta = case.point(1, 3), 0.03 * case.vector(2, 3), case.vector(3, 3)
    A = torch.stack([case.group(torch.Generator().manual_seed(seed), 3.0) for seed in range(3)])
    manifold = case.manifold

    def computed(x: Tensor, eta: Tensor, zeta: Tensor, A: Tensor) -> list[Tensor]:
        xi = manifold.proju(x, eta)
        space = manifold.at(x)
        return [
            xi,
            manifold.inner(x, eta, zeta),
            manifold.retr(x, xi),
            manifold.expmap(x, xi),
            manifold.egrad2rgrad(x, eta),
            manifold.action(A, x),
            space.geodesic(xi, order="exact"),
            space.relative_speed(space.coordinates(xi)),
            *space.follow(space.coordinates(xi), "second"),
            torch.func.grad(lambda eta: space.vector(space.project(eta)).square().sum())(eta),
        ]

    for here, other in zip(computed(x, eta, zeta, A), computed(*map(there, (x, eta, zeta, A))), strict=True):
        assert other.device.type == DEVICE.type
        torch.testing.assert_close(other.cpu(), here, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_tall_pairs_in_single_precision(metric: str) -> None:
    """Factored by Gram matrices, in pieces."""
    random = torch.Generator().manual_seed(1)
    x, eta = (size * torch.randn(3, 700, 4, generator=random) for size in (1.0, 0.1))

    def computed(x: Tensor, eta: Tensor) -> list[Tensor]:
        space = qm.FixedRankQuotient(400, 300, metric).at(x)
        z = space.project(space.covector(eta))
        return [z, *space.follow(z, "second"), *space.follow(z, "exact")]

    for here, other in zip(computed(x, eta), computed(there(x), there(eta)), strict=True):
        assert other.device.type == DEVICE.type
        torch.testing.assert_close(other.cpu(), here, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", [qm.QuotientSGD, qm.QuotientAdam])
def test_optimizers_of_models(optimizer: Any) -> None:
    ends = []
    for model, batch in ((model_of(), BATCH), (there(model_of()), there(BATCH))):
        symmetries = qm.find_symmetries(model, batch, evaluate=qm.next_token_cross_entropy)
        step = optimizer(model.named_parameters(), symmetries, lr=1e-2)
        for _ in range(3):
            step.zero_grad()
            qm.next_token_cross_entropy(model, batch).backward()
            step.step()
        ends.append({name: w.detach() for name, w in model.named_parameters()})
    for name, w in ends[0].items():
        assert ends[1][name].device.type == DEVICE.type
        torch.testing.assert_close(ends[1][name].cpu(), w, rtol=1e-8, atol=1e-8)
