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
from quotient_manifolds.orbit import quotient_distance
from quotient_manifolds.symmetries import certify, find_permutations, verify_symmetries
from quotient_manifolds.symmetries.groups import Gauge, Permutation, Symmetry
from tests.cases import EVERY_BUILT_IN, Case
from tests.devices import DEVICE, NONE
from tests.nets.attention import IDS, llama
from tests.symmetries.test_groups import CONTINUOUS, NETWORKS, NEURON_PARAMS, NEURONS, made

pytestmark = pytest.mark.skipif(DEVICE is None, reason=NONE)

GEOMETRIES = ["euclidean", "adaptive", "inv", "mix"]
BATCH = {**IDS, "labels": IDS["input_ids"]}
STEPS = 3
CLOSE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 1e-3}
"""Relative. Kernels add in other orders; the rise is a small difference of losses, and the ascent decides by it. Llama
computes its norms and angles in float32, whatever its weights."""


SYMMETRIES: dict[str, tuple[Symmetry, dict[str, Tensor]]] = {
    f"{name}, {type(algebra).__name__}": (Gauge(wire, algebra), made(shapes))
    for name, (_, wire, shapes, algebras) in NETWORKS.items()
    for algebra in algebras
} | {name: (symmetry_at(made(shapes)), made(shapes)) for name, (_, shapes, symmetry_at) in CONTINUOUS.items()}
"""Groups as tests/symmetries/test_groups.py has them."""


def there(value: Any) -> Any:
    """Return a model, a tensor or a batch on the device, as a copy."""
    if isinstance(value, dict):
        return {name: there(each) for name, each in value.items()}
    return copy.deepcopy(value).to(DEVICE)


def model_of(dtype: torch.dtype = torch.float64, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return llama(**settings).to(dtype)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_worst_case_sharpness(geometry: str, dtype: torch.dtype) -> None:
    """Weights in bfloat16 are taken as they are."""
    model = model_of(dtype)
    moved = there(model)
    before = {name: (value.device, value.cpu().clone()) for name, value in moved.state_dict().items()}
    asked: dict[str, Any] = {"geometry": geometry, "radius": 0.05, "steps": STEPS}
    expected, found = (
        qm.worst_case_sharpness(m, qm.next_token_cross_entropy, [b], **asked).mean
        for m, b in ((model, BATCH), (moved, there(BATCH)))
    )
    assert found == pytest.approx(expected, rel=CLOSE[dtype])
    assert found > 0
    for name, value in moved.state_dict().items():
        device, numbers = before[name]
        assert (value.device, value.dtype) == (device, dtype)
        assert torch.equal(value.cpu(), numbers), name
    assert all(w.grad is None for w in moved.parameters())


ASCENT: dict[str, Any] = {"radius": 0.05, "steps": STEPS}
MEASURES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "restarted": (qm.worst_case_sharpness, {**ASCENT, "geometry": "inv", "restarts": 2}),
    "exact": (qm.worst_case_sharpness, {**ASCENT, "geometry": qm.Quotient("mix", "exact")}),
    "t": (qm.worst_case_sharpness, {**ASCENT, "geometry": 0.5}),
    "biases as rows": (qm.worst_case_sharpness, {**ASCENT, "geometry": qm.Quotient("inv", symmetries="paper")}),
    "linf": (qm.worst_case_sharpness, {**ASCENT, "geometry": qm.Adaptive(norm="linf"), "radius": 1e-3}),
    "profile": (qm.worst_case_profile, {"geometry": "inv", "radii": [0.02, 0.05], "steps": 3}),
    "average": (qm.average_case_sharpness, {"geometry": "adaptive", "sigma": 0.05, "samples": 3}),
    "gradient": (qm.gradient_norm, {"geometry": "mix"}),
    "trace": (qm.hessian_trace, {"geometry": "adaptive", "samples": 2}),
    "eigenvalue": (qm.top_eigenvalue, {"geometry": "inv"}),
}


@pytest.mark.parametrize("name", MEASURES)
def test_other_measures(name: str) -> None:
    """What is drawn at random is drawn by the processor, so that a seed says the same everywhere."""
    model = model_of(attention_bias=True, attn_implementation="eager")
    measure, asked = MEASURES[name]
    expected, found = (
        measure(m, qm.next_token_cross_entropy, [b], **asked) for m, b in ((model, BATCH), (there(model), there(BATCH)))
    )
    last, other = (each[-1] if name == "profile" else each for each in (expected, found))
    assert other.mean == pytest.approx(last.mean, rel=CLOSE[torch.float64])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
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
    verification = verify_symmetries(moved, there(BATCH), symmetries[1], evaluate=qm.next_token_cross_entropy)
    assert verification.all_hold, str(verification)
    digits = {torch.float64: 3e-12, torch.float32: 3e-3}[dtype]  # of weights, with factors of condition 10 between them
    for change in (
        lambda m, b, s: qm.random_representative(m, s, seed=3),
        lambda m, b, s: qm.balance(m, s),
    ):
        here, other = change(model, BATCH, symmetries[0]), change(moved, there(BATCH), symmetries[1])
        for name, value in here.items():
            assert other[name].device.type == DEVICE.type
            torch.testing.assert_close(other[name].cpu(), value, rtol=digits, atol=digits)


@pytest.mark.parametrize("geometry", ["mix", qm.Euclidean("linf")], ids=str)
def test_random_starts(geometry: Any) -> None:
    """One seed, one start, drawn by the processor; a generator of the device draws too."""
    here, other = (
        as_geometry(geometry).verified(m, qm.next_token_cross_entropy, [b]).tangent_space(m)
        for m, b in ((model_of(), BATCH), (there(model_of()), there(BATCH)))
    )
    seeded = other.sample(torch.Generator().manual_seed(5))
    for name, block in here.sample(torch.Generator().manual_seed(5)).items():
        assert seeded[name].device.type == DEVICE.type
        torch.testing.assert_close(seeded[name].cpu(), block, rtol=1e-9, atol=1e-9)
    if DEVICE.type != "pretended":
        own = other.sample(torch.Generator(DEVICE).manual_seed(5))
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
            torch.func.grad(lambda eta: space.vector(space.project(space.covector(eta))).square().sum())(eta),
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
        z = z / torch.linalg.vector_norm(z, dim=(-2, -1), keepdim=True)
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
        torch.testing.assert_close(ends[1][name].cpu(), w, rtol=1e-6, atol=1e-6)  # float32 in norms, see CLOSE


def test_orbit() -> None:
    """Descend to weights that are easier to round; align a moved model to where it was."""
    model = model_of()
    symmetries = qm.find_symmetries(model, BATCH, evaluate=qm.next_token_cross_entropy)
    other = copy.deepcopy(model)
    other.load_state_dict(qm.random_representative(model, symmetries, log_scale=0.3, seed=1), strict=False)
    asked: dict[str, Any] = {"evaluate": qm.next_token_cross_entropy, "symmetries": symmetries}

    plain = symmetries.without({each.name for each in symmetries.pairs if each.kind == "query/key"})  # rotary
    near = copy.deepcopy(model)
    for w in near.parameters():
        w.data += 1e-3 * torch.randn_like(w)

    def computed(model: nn.Module, other: nn.Module, near: nn.Module, batch: Any) -> dict[str, Any]:
        descent = qm.descend_orbit(model, qm.RoundingError(bits=4), batch, steps=5, **asked)
        aligned = {by: qm.align(other, model, batch, by=by, **asked) for by in ("activations", "weights")}
        permutations = find_permutations(model, batch, evaluate=qm.next_token_cross_entropy)
        for params in (descent.params, aligned["weights"].params):
            assert {w.device.type for w in params.values()} == {next(model.parameters()).device.type}
        return {
            "objective": (descent.before, descent.after),
            "aligned": [each.distance < 1e-4 * each.before for each in aligned.values()],
            "permutations": [(each.names, each.units) for each in permutations],
            "sparse": qm.descend_orbit(model, qm.Sparsity(), batch, steps=5, **asked).after,
            "distance": quotient_distance(model, near, batch, **{**asked, "symmetries": plain}),
            "path": qm.loss_along_path(model, other, qm.next_token_cross_entropy, [batch], points=3).barrier,
        }

    expected, found = (computed(*map(each, (model, other, near, BATCH))) for each in (lambda x: x, there))
    for name in ("objective", "sparse", "distance", "path"):
        assert found.pop(name) == pytest.approx(expected.pop(name), rel=1e-6)
    assert found == expected
    assert all(found["aligned"])


def test_certificate() -> None:
    """Two linear layers in a row have GL(3) between them, and a bias too many."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double().eval()
    batches = list(torch.randn(60, 1, 4, dtype=torch.float64))
    here, other = (certify(m, b) for m, b in ((model, batches), (there(model), [there(b) for b in batches])))
    assert (other.fibre.dimension, other.missing) == (here.fibre.dimension, here.missing) == (3 * 3 + 3, 0)


@pytest.mark.parametrize("name", SYMMETRIES)
def test_groups(name: str) -> None:
    """Parameters stay where they are; slots, algebras and generators are on the processor."""
    symmetry, params = SYMMETRIES[name]
    generator = torch.Generator().manual_seed(0)
    element = symmetry.element(generator, 0.5)
    X = symmetry.algebra.random(generator) if isinstance(symmetry, Gauge) else element
    other = there(params)
    results = [
        (symmetry.act(w, element), symmetry.tangent(w, X), symmetry.charge(w, w)._asdict()) for w in (params, other)
    ]
    for here, moved in zip(*results, strict=True):
        for key, value in moved.items():
            assert value.device.type == there(value).device.type
            torch.testing.assert_close(value.cpu(), here[key])
    assert symmetry.dimension(other) == symmetry.dimension(params)


def test_permutations_of_units() -> None:
    params, order = made(NEURON_PARAMS), torch.tensor([2, 0, 3, 1])
    permutation = Permutation(NEURONS)
    moved = permutation.act(there(params), order)
    assert all(torch.equal(moved[name].cpu(), w) for name, w in permutation.act(params, order).items())
