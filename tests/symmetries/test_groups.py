"""Groups act: homomorphisms that keep functions, with charges and tangents that are the derivatives of the action."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import expm
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import expm_multiply
from torch import Tensor

from quotient_manifolds.symmetries.groups import (
    GL,
    SO,
    Algebra,
    CenteredSO,
    Chart,
    Charted,
    Complex,
    Constant,
    Constants,
    DirectSum,
    Draft,
    FromSum,
    Gain,
    Gauge,
    IntoMean,
    Linear,
    Params,
    Part,
    Pattern,
    Permutation,
    Rows,
    Slices,
    Slot,
    Span,
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

J = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
EYE = torch.eye(4, dtype=torch.float64)
QUATERNIONS = torch.stack(
    [
        EYE,
        torch.block_diag(J, J),
        torch.kron(J, torch.diag(EYE.new_tensor([1.0, -1.0]))),
        torch.kron(J, EYE[:2, :2].flip(0)),
    ]
)
TRIANGLE = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)

ALGEBRAS: dict[str, Algebra] = {
    "gl": GL(4),
    "gl(1)": GL(1),
    "triangle": Pattern(4, TRIANGLE),
    "nilpotent": Pattern(4, TRIANGLE & ~TRIANGLE.mT),
    "blocks": blocks(4, [[0, 3], [2]]),
    "so": SO(4),
    "so fixing 1": CenteredSO(4),
    "into the mean": IntoMean(4),
    "from the sum": FromSum(4),
    "plane": Complex(),
    "planes": planes(5, torch.tensor([[0, 2], [3, 1]])),
    "diagonal": diagonal(4),
    "span": Span(4, QUATERNIONS),
    "sum": DirectSum(7, ((torch.tensor([[6, 1, 3], [0, 2, 4]]), CenteredSO(3)), (torch.tensor([[5]]), GL(1)))),
    "sum of patterns": DirectSum(6, ((torch.tensor([[5, 4, 3, 0]]), Pattern(4, TRIANGLE)),)),
}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def basis(algebra: Algebra) -> Tensor:
    """A basis (k, n, n), from random elements: nothing of the class but `project` is used."""
    n = algebra.n
    X = algebra.project(drawn(3, n * n + 2, n, n)).flatten(1)
    _, s, Vh = torch.linalg.svd(X)
    return Vh[: int((s > 1e-10 * s[0]).sum())].view(-1, n, n) if float(s[0]) else X.new_zeros(0, n, n)


@pytest.mark.parametrize("name", ALGEBRAS)
def test_algebra_is_closed_and_projection_orthogonal(name: str) -> None:
    algebra = ALGEBRAS[name]
    n = algebra.n
    C, D = drawn(1, n, n), drawn(2, n, n)
    X, Y = algebra.project(C), algebra.project(D)
    torch.testing.assert_close(algebra.project(X), X)
    torch.testing.assert_close((X * D).sum(), (C * Y).sum())
    bracket = X @ Y - Y @ X
    torch.testing.assert_close(algebra.project(bracket), bracket)
    assert len(basis(algebra)) == algebra.dimension
    parts = drawn(4, 6, n, n)
    assert bool((algebra.bound(parts.abs().sum(0)) >= algebra.project(parts.sum(0)).abs() - 1e-12).all())
    # summands: every element is the sum of those on the sets of channels, which vanishes elsewhere
    rest = X.clone()
    for channels, part in algebra.summands:
        for c in channels:
            torch.testing.assert_close(part.project(X[c[:, None], c]), X[c[:, None], c])
            rest[c[:, None], c] = 0.0
    assert not bool(rest.any())
    assert algebra.dimension == sum(len(channels) * part.dimension for channels, part in algebra.summands)


@pytest.mark.parametrize("name", ALGEBRAS)
def test_the_skew_matrices_of_an_algebra_are_all_of_them(name: str) -> None:
    algebra = ALGEBRAS[name]
    n = algebra.n
    skew = algebra.skew()
    Q = skew.flatten(1)
    torch.testing.assert_close(Q @ Q.mT, torch.eye(len(skew), dtype=torch.float64))
    torch.testing.assert_close(algebra.project(skew), skew)
    torch.testing.assert_close(skew, -skew.mT)
    # dense: matrices X with X - P X = 0 and X + X^T = 0
    E = torch.eye(n * n, dtype=torch.float64).view(-1, n, n)
    equations = torch.cat([(E - algebra.project(E)).flatten(1), (E + E.mT).flatten(1)], 1)
    assert len(skew) == n * n - int(torch.linalg.matrix_rank(equations, atol=1e-9))


@pytest.mark.parametrize("name", ALGEBRAS)
def test_exp_leads_into_the_group(name: str) -> None:
    algebra, generator = ALGEBRAS[name], torch.Generator().manual_seed(0)
    X = algebra.random(generator)
    assert 0.8 < float(torch.linalg.matrix_norm(X, 2)) < 1.5 or not algebra.dimension
    A, B = algebra.exp(X), algebra.exp(algebra.random(generator))
    torch.testing.assert_close(A, torch.matrix_exp(X))
    near = algebra.exp(0.1 * X)
    assert algebra.contains(near)
    if not isinstance(algebra, Span):  # whose elements are told by their principal logarithm
        assert algebra.contains(A @ B)
        assert algebra.contains(torch.linalg.inv(A))
    assert algebra.contains(A + drawn(5, algebra.n, algebra.n)) == isinstance(algebra, GL)
    assert not algebra.contains(torch.zeros(algebra.n, algebra.n, dtype=torch.float64))
    for k in range(algebra.components):
        flips = torch.zeros(algebra.components, dtype=torch.bool)
        assert torch.equal(algebra.reflect(flips), torch.eye(algebra.n, dtype=torch.float64))
        flips[k] = True
        R = algebra.reflect(flips)
        assert algebra.contains(R)
        assert float(torch.linalg.det(R)) < 0  # no exponential
        torch.testing.assert_close(algebra.project(R @ X @ torch.linalg.inv(R)), R @ X @ torch.linalg.inv(R))


def test_groups_keep_what_they_are_defined_by() -> None:
    generator = torch.Generator().manual_seed(0)
    one = torch.ones(4, dtype=torch.float64)
    A = SO(4).exp(SO(4).random(generator))
    torch.testing.assert_close(A.mT @ A, EYE)
    A = CenteredSO(4).exp(CenteredSO(4).random(generator))
    torch.testing.assert_close(A.mT @ A, EYE)
    torch.testing.assert_close(A @ one, one)
    A = IntoMean(4).exp(IntoMean(4).random(generator))
    t = drawn(0, 4)
    torch.testing.assert_close(A @ t - (A @ t).mean(), t - t.mean())
    A = FromSum(4).exp(FromSum(4).random(generator))
    torch.testing.assert_close(A @ (t - t.mean()), t - t.mean())
    A = Complex().exp(Complex().random(generator))
    torch.testing.assert_close(A @ J, J @ A)
    A = diagonal(4).exp(diagonal(4).random(generator))
    assert torch.equal(A, A.diagonal().diag())
    assert bool((A.diagonal() > 0).all())
    A = ALGEBRAS["triangle"].exp(ALGEBRAS["triangle"].random(generator))
    assert not bool(A[~TRIANGLE & ~EYE.bool()].any())
    assert A[3, 3] == 1


# Random wires: slots of all kinds, units of gains, affine readings, two-sided and partial ones.


@dataclass(frozen=True)
class Case:
    wire: Wire
    params: Params
    seed: int

    @property
    def algebra(self) -> Algebra:
        return Pattern(self.wire.channels, self.wire.possible)

    def elements(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return tuple(self.algebra.exp(self.algebra.random(generator)) for _ in range(2))  # type: ignore[return-value]


@st.composite
def wires(draw: st.DrawFn) -> Case:
    n, seed = draw(st.integers(1, 4)), draw(st.integers(0, 1000))
    params: Params = {"gain": drawn(seed, n) + 3.0, "other gain": drawn(seed + 1, 2).abs() + 0.5}
    slots = []
    for k in range(draw(st.integers(1, 3))):
        name, rest, axis = f"p{k}", draw(st.integers(1, 3)), draw(st.integers(0, 1))
        channels = torch.tensor(draw(st.permutations(range(n)))[: draw(st.integers(1, n))])
        m = len(channels)
        shape = (m, rest) if axis == 0 else (rest, m)
        affine = draw(
            st.sampled_from([(1.0, 0.0), (0.3, 0.7), (drawn(seed + 2, m, 1).exp(), drawn(seed + 3, m, rest))])
        )
        params[name] = drawn(seed + 4 + k, *shape)
        gains, constant = (), None
        if draw(st.booleans()):
            gains = (
                Gain.of("gain", (n,), channels, draw(st.sampled_from([-1.0, 1.0, 2.0])), offset=1.0),
                Gain.of("other gain", (2,), torch.arange(m) % 2),
            )
            constant = drawn(seed + 5, m).exp()
        rows = Rows.along(name, shape, axis, scale=affine[0], offset=affine[1])
        slots.append(Slot(rows, channels, draw(st.booleans()), draw(st.booleans()), constant, gains))
    if draw(st.booleans()):  # a recurrent weight, on both sides
        params["recurrent"] = drawn(seed + 9, n, n)
        for axis in (0, 1):
            rows = Rows.along("recurrent", (n, n), axis)
            slots.append(Slot(rows, torch.arange(n), writes=axis == 0))
    if draw(st.booleans()):
        idle = draw(st.integers(0, n - 1))
        for slot in slots:
            place = (slot.channels == idle).nonzero()[:, 0]
            if isinstance(slot.rows.scale, float) and slot.rows.offset == 0.0 and len(place):
                params[slot.name].view(-1)[slot.places[place].flatten()] = 0.0
    return Case(Wire(tuple(slots), n), params, seed)


def assert_same(x: Params, y: Params, tolerance: float = 1e-9) -> None:
    assert list(x) == list(y)
    for name in x:
        torch.testing.assert_close(x[name], y[name], rtol=tolerance, atol=tolerance)


@given(wires())
def test_act_is_a_homomorphism(case: Case) -> None:
    A, B = case.elements()
    wire, x = case.wire, case.params
    before = copy.deepcopy(x)
    assert_same(wire.act(wire.act(x, A), B), wire.act(x, B @ A))
    assert_same(wire.act(wire.act(x, A), torch.linalg.inv(A)), x)
    assert_same(wire.act(x, torch.eye(wire.channels)), x)
    assert_same(x, before, 0.0)
    assert all(wire.act(x, A)[name] is x[name] for name in x if "gain" in name)


@given(wires())
def test_charge_is_the_derivative_of_act(case: Case) -> None:
    wire, x, algebra = case.wire, case.params, case.algebra
    y = {name: drawn(k, *w.shape) for k, (name, w) in enumerate(x.items())}
    t = torch.zeros(wire.channels, wire.channels, dtype=torch.float64, requires_grad=True)
    moved = wire.act(x, torch.eye(wire.channels, dtype=torch.float64) + algebra.project(t))  # exp to first order
    (expected,) = torch.autograd.grad(sum((y[name] * moved[name]).sum() for name in wire.names), t)
    value, size = wire.charge(x, y)
    torch.testing.assert_close(algebra.project(value), expected, rtol=1e-9, atol=1e-9)
    assert bool((size >= value.abs() * (1 - 1e-12)).all())
    flipped = {name: -w for name, w in y.items()}
    torch.testing.assert_close(wire.charge(x, flipped).size, size)
    component, bound = Gauge(wire, algebra).charge(x, y)
    assert torch.equal(component, algebra.project(value))
    assert torch.equal(bound, algebra.project(size))


@given(wires())
def test_tangent_is_the_derivative_of_act_and_dimension_its_rank(case: Case) -> None:
    x, gauge = case.params, Gauge(case.wire, case.algebra)
    X = basis(gauge.algebra)
    tangents, h = gauge.tangent(x, X), 1e-5
    for k in range(min(2, len(X))):
        up, down = gauge.flow(x, h * X[k]), gauge.flow(x, -h * X[k])
        for name, tangent in tangents.items():
            torch.testing.assert_close(tangent[k], (up[name] - down[name]) / (2 * h), rtol=1e-6, atol=1e-6)
    jacobian = torch.cat([each.flatten(1) for each in tangents.values()], 1)
    assert gauge.dimension(x) == int(torch.linalg.matrix_rank(jacobian, rtol=1e-9))


@given(wires())
def test_overlap_pairs_orthogonal_matrices_and_its_skew_part_is_the_charge(case: Case) -> None:
    wire, x = case.wire, case.params
    slots = tuple(slot for slot in wire.slots if slot.name != "recurrent")
    n = wire.channels
    # of the constant of an affine reading no A has a part
    whole = Wire(
        tuple(s for s in slots if len(s.rows) == n) or (Slot(Rows.along("gain", (n,), 0), torch.arange(n), True),), n
    )
    y = {name: drawn(k, *w.shape) for k, (name, w) in enumerate(x.items())}
    M, C = whole.overlap(x, y), whole.charge(x, y).value
    torch.testing.assert_close(M - M.mT, C - C.mT)
    (A, B) = (torch.linalg.qr(drawn(case.seed + k, n, n))[0] for k in range(2))
    pair = [sum((y[name] * whole.act(x, Q)[name]).sum() for name in whole.names) for Q in (A, B)]
    torch.testing.assert_close((M * (A - B)).sum(), torch.as_tensor(pair[0] - pair[1]))


@given(wires())
def test_slots_survive_pickle_and_deepcopy(case: Case) -> None:
    gauge = Gauge(case.wire, case.algebra)
    A, _ = case.elements()
    for other in (pickle.loads(pickle.dumps(gauge)), copy.deepcopy(gauge)):
        assert other == gauge
        assert_same(other.act(case.params, A), gauge.act(case.params, A), 0.0)
    unlike = replace(case.wire.slots[0], writes=not case.wire.slots[0].writes)
    assert case.wire != Wire((unlike,), case.wire.channels)


# Functions of small networks, written out, and the wires in them.


def linear(name: str, shape: tuple[int, int], writes: bool, **options: object) -> Slot:
    """A weight (out, in) that writes its outputs, or reads its inputs."""
    rows = Rows.along(name, shape, 0 if writes else 1)
    return Slot(rows, torch.arange(len(rows)), writes, **options)  # type: ignore[arg-type]


N, D = 4, 3


def rms(t: Tensor) -> Tensor:
    return t / (t.square().mean(-1, keepdim=True) + 0.1).sqrt()


def bottleneck(p: Params, x: Tensor) -> Tensor:
    """Units: a gain (1 + g) before the reader, a constant 2; an adapter's scale 0.5 on the writer; a bias."""
    t = x @ (0.5 * p["W"]).mT + p["b"]
    return (2.0 * (1 + p["g"]) * t) @ p["V"].mT


def unit(power: float = 1.0) -> dict[str, object]:
    gain = Gain.of("g", (N,), torch.arange(N), power, offset=1.0)
    return {"constant": torch.full((N,), 2.0), "gains": (gain,)}


BOTTLENECK = Wire(
    (
        Slot(Rows.along("W", (N, D), 0, scale=0.5), torch.arange(N), writes=True),
        Slot(Rows.along("b", (N,), 0), torch.arange(N), writes=True),
        linear("V", (2, N), writes=False, **unit()),
    ),
    N,
)
BOTTLENECK_PARAMS = {"W": (N, D), "b": (N,), "g": (N,), "V": (2, N)}
NORMED = Wire((linear("W", (N, D), writes=True), linear("V", (2, N), writes=False, **unit())), N)


def normed(p: Params, x: Tensor) -> Tensor:
    return (2.0 * (1 + p["g"]) * rms(x @ p["W"].mT)) @ p["V"].mT


def layer_normed(p: Params, x: Tensor) -> Tensor:
    t = x @ p["W"].mT
    return (2.0 * (1 + p["g"]) * rms(t - t.mean(-1, keepdim=True))) @ p["V"].mT


MEAN = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)


def standardized(p: Params, x: Tensor) -> Tensor:
    """A norm with a mean and a deviation that are no parameters: of t - m, b takes up what becomes of m."""
    return (2.0 * (1 + p["g"]) * (x @ p["W"].mT - MEAN) + p["b"]) @ p["V"].mT


def scores(p: Params, x: Tensor) -> Tensor:
    """q . k with a gain on queries: keys are duals of queries."""
    q, k = (1 + p["g"]) * (x @ p["W"].mT), x @ p["K"].mT
    return q @ k.mT


def rotated(p: Params, x: Tensor) -> Tensor:
    """Planes (0, 2) and (3, 1) turn with the token before queries meet keys."""
    place = torch.arange(len(x), dtype=torch.float64)

    def turn(t: Tensor) -> Tensor:
        t = t.clone()
        for speed, (a, b) in ((0.5, (0, 2)), (1.7, (3, 1))):
            c, s = (speed * place).cos(), (speed * place).sin()
            t[:, a], t[:, b] = c * t[:, a] - s * t[:, b], s * t[:, a] + c * t[:, b]
        return t

    return turn(x @ p["W"].mT) @ turn(x @ p["K"].mT).mT


def gated(p: Params, x: Tensor) -> Tensor:
    return (x @ p["W"].mT + p["b"]).relu() @ p["V"].mT


def centered_and_biased(p: Params, x: Tensor) -> Tensor:
    t = x @ p["U"].mT
    return (t - t.mean(-1, keepdim=True) + p["b"]) @ p["V"].mT


def recurrence(p: Params, x: Tensor) -> Tensor:
    h = torch.zeros(N, dtype=torch.float64)
    for row in x:
        h = p["M"] @ h + p["W"] @ row
    return p["V"] @ h


def tied(p: Params, x: Tensor) -> Tensor:
    return rms(x @ p["E"]) @ p["E"].mT


def partial(p: Params, x: Tensor) -> Tensor:
    """The first writer reaches channels 0 and 2 only, the second all; a reader reads 0 to 2."""
    t = x @ p["W"].mT
    t = t.index_add(1, torch.tensor([0, 2]), x @ p["U"].mT)
    return torch.cat([t @ p["V"].mT, t[:, :3] @ p["R"].mT], 1)


LESS_MEAN = Constants((Constant(Rows.along("b", (N,), 0), -2 * MEAN, unit()["gains"]),))
STANDARDIZED = Wire(
    (
        linear("W", (N, D), writes=True),
        Slot(Rows.along("b", (N,), 0), torch.arange(N), writes=True, **unit()),
        linear("V", (2, N), writes=False, **unit()),
    ),
    N,
    LESS_MEAN,
)
QK = Wire((linear("W", (N, D), writes=True), linear("K", (N, D), writes=True, dual=True)), N)
PARTIAL = Wire(
    (
        linear("W", (N, D), writes=True),
        Slot(Rows.along("U", (2, D), 0), torch.tensor([0, 2]), writes=True),
        linear("V", (2, N), writes=False),
        linear("R", (5, 3), writes=False),
    ),
    N,
)
RELU = Wire((*BOTTLENECK.slots[1:2], linear("W", (N, D), writes=True), linear("V", (2, N), writes=False)), N)
GAINED_QK = Wire(
    (linear("W", (N, D), writes=True, gains=(Gain.of("g", (N,), torch.arange(N), -1.0, offset=1.0),)), QK.slots[1]), N
)
WRITERS = Wire(NORMED.slots[:1], N)
CENTRED = Wire((BOTTLENECK.slots[1], linear("V", (2, N), writes=False)), N)
RECURRENT = Wire(
    (
        linear("M", (N, N), writes=True),
        linear("M", (N, N), writes=False),
        linear("W", (N, D), writes=True),
        linear("V", (2, N), writes=False),
    ),
    N,
)
TIED = Wire(
    (linear("E", (D, N), writes=False, use=1), Slot(Rows.along("E", (D, N), 1), torch.arange(N), writes=True)), N
)

NETWORKS: dict[str, tuple[Callable[[Params, Tensor], Tensor], Wire, dict[str, tuple[int, ...]], list[Algebra]]] = {
    "bottleneck": (
        bottleneck,
        BOTTLENECK,
        BOTTLENECK_PARAMS,
        [a for a in ALGEBRAS.values() if a.n == N],
    ),
    "rms norm": (normed, NORMED, {"W": (N, D), "g": (N,), "V": (2, N)}, [SO(N)]),
    "layer norm": (layer_normed, NORMED, {"W": (N, D), "g": (N,), "V": (2, N)}, [CenteredSO(N)]),
    "mean of a layer norm": (layer_normed, WRITERS, {"W": (N, D), "g": (N,), "V": (2, N)}, [IntoMean(N)]),
    "statistics": (standardized, STANDARDIZED, BOTTLENECK_PARAMS, [GL(N), SO(N), diagonal(N)]),
    "scores": (scores, GAINED_QK, {"W": (N, D), "g": (N,), "K": (N, D)}, [GL(N), SO(N), diagonal(N)]),
    "rotary": (rotated, QK, {"W": (N, D), "K": (N, D)}, [planes(N, torch.tensor([[0, 2], [3, 1]]))]),
    "relu": (gated, RELU, {"W": (N, D), "b": (N,), "V": (2, N)}, [diagonal(N)]),
    "bias of a norm": (centered_and_biased, CENTRED, {"U": (N, D), "b": (N,), "V": (2, N)}, [FromSum(N)]),
    "recurrence": (recurrence, RECURRENT, {"M": (N, N), "W": (N, D), "V": (2, N)}, [GL(N), Span(4, QUATERNIONS)]),
    "tied": (tied, TIED, {"E": (D, N)}, [SO(N)]),
    "partial": (
        partial,
        PARTIAL,
        {"W": (N, D), "U": (2, D), "V": (2, N), "R": (5, 3)},
        [Pattern(N, PARTIAL.possible), blocks(N, [[0, 2], [1], [3]])],
    ),
}


def made(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Params:
    return {name: drawn(seed + k, *shape) for k, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_the_same_function_after_act(name: str) -> None:
    network, wire, shapes, algebras = NETWORKS[name]
    x, inputs, generator = made(shapes), drawn(99, 6, D), torch.Generator().manual_seed(1)
    outputs, y = network(x, inputs), {}
    for w in x.values():
        w.requires_grad_()
    grads = torch.autograd.grad((network(x, inputs) * drawn(7, *outputs.shape)).sum(), [*x.values()])
    y = dict(zip(x, grads, strict=True))
    x = {key: w.detach() for key, w in x.items()}
    for algebra in algebras:
        gauge = Gauge(wire, algebra)
        element = gauge.element(generator)
        moved = gauge.act(x, element)
        torch.testing.assert_close(network(moved, inputs), outputs, rtol=1e-9, atol=1e-9)
        sets = [each for channels, _ in algebra.summands for each in channels]
        draft = Draft(x)
        for part, c in zip(gauge.parts, sets, strict=True):
            part.move(draft, element[c[:, None], c])
        assert_same(draft.finished(), moved)
        value, size = gauge.charge(x, y)
        assert bool((value.abs() <= 1e-11 * size).all())
        jacobian = torch.cat([each.flatten(1) for each in gauge.tangent(x, basis(algebra)).values()], 1)
        rank = int(torch.linalg.matrix_rank(jacobian, rtol=1e-9))
        assert gauge.dimension(x) == rank
        assert rank > 0


def test_networks_change_by_what_they_do_not_allow() -> None:
    """The charge sees it, so that the tests above can fail."""
    for name, algebra in (("rms norm", GL(N)), ("layer norm", SO(N)), ("rotary", SO(N)), ("relu", GL(N))):
        network, wire, shapes, _ = NETWORKS[name]
        x, inputs = made(shapes), drawn(99, 6, D)
        for w in x.values():
            w.requires_grad_()
        grads = torch.autograd.grad((network(x, inputs) ** 2).sum(), [*x.values()])
        value, size = Gauge(wire, algebra).charge(
            {k: w.detach() for k, w in x.items()}, dict(zip(x, grads, strict=True))
        )
        assert bool((value.abs() > 1e-4 * size).any())


def test_reflections_are_elements_if_they_are_said_to_be() -> None:
    network, wire, shapes, _ = NETWORKS["relu"]
    gauge, inputs, x = Gauge(wire, diagonal(N)), drawn(99, 6, D), made(shapes)
    signed = replace(gauge, reflections=torch.tensor([True, False, False, True]))
    signs = torch.stack([signed.element(torch.Generator().manual_seed(k)).diagonal().sign() for k in range(20)])
    assert bool((signs[:, 1:3] > 0).all())
    assert {*signs[:, 0].tolist()} == {*signs[:, 3].tolist()} == {-1.0, 1.0}
    flipped = wire.act(x, torch.diag(torch.tensor([-1.0, 1.0, 1.0, 1.0])))
    assert float((network(flipped, inputs) - network(x, inputs)).detach().abs().max()) > 1e-3


# Tied entries


def test_tied_uses_must_agree() -> None:
    x = made({"E": (D, N)})
    with pytest.raises(ValueError, match="must agree on tied entries"):
        TIED.act(x, GL(N).exp(GL(N).random(torch.Generator().manual_seed(0))))
    with pytest.raises(ValueError, match="two sides of one matrix"):
        Wire(tuple(replace(slot, use=0) for slot in TIED.slots), N)
    y = {"E": drawn(5, D, N)}
    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    X = SO(N).random(torch.Generator().manual_seed(0))
    moved = TIED.act(x, torch.matrix_exp(t * X))
    (expected,) = torch.autograd.grad((y["E"] * moved["E"]).sum(), t)
    torch.testing.assert_close((TIED.charge(x, y).value * X).sum(), expected)
    torch.testing.assert_close(TIED.overlap(x, y), (x["E"].mT @ y["E"]).mT)


# Tori, translations, permutations


def two_layers(p: Params, x: Tensor) -> Tensor:
    """relu((x W^T) * g) V^T: log-scales of neurons, and of the gains, couple the rows of W, g, and the columns of V."""
    return ((x @ p["W"].mT) * (1 + p["g"])).relu() @ p["V"].mT


TWO_LAYERS = {"W": (N, D), "g": (N,), "V": (2, N)}
SCALES = Torus(
    (
        Slices.of(Rows.along("W", (N, D), 0), torch.cat([EYE, EYE], 1)),
        Slices.of(Rows.along("g", (N,), 0, offset=1.0), torch.cat([-EYE, 0 * EYE], 1)),
        Slices.of(Rows.along("V", (2, N), 1), torch.cat([0 * EYE, -EYE], 1)),
    ),
    2 * N,
)


def normed_neurons(p: Params, x: Tensor) -> Tensor:
    """relu(2 (1 + g) (W x - m) + b) V: log-scales of t and of neurons."""
    return (2.0 * (1 + p["g"]) * (x @ p["W"].mT - MEAN) + p["b"]).relu() @ p["V"].mT


NORMED_SCALES = Torus(
    (
        Slices.of(Rows.along("W", (N, D), 0), torch.cat([EYE, 0 * EYE], 1)),
        Slices.of(Rows.along("g", (N,), 0, offset=1.0), torch.cat([-EYE, EYE], 1)),
        Slices.of(Rows.along("b", (N,), 0), torch.cat([0 * EYE, EYE], 1)),
        Slices.of(Rows.along("V", (2, N), 1), torch.cat([0 * EYE, -EYE], 1)),
    ),
    2 * N,
    LESS_MEAN,
)


def lora(p: Params, x: Tensor) -> Tensor:
    return x @ p["W"].mT + 0.5 * (x @ p["A"].mT) @ p["B"].mT


ADAPTER = {"W": (N, D), "A": (2, D), "B": (N, 2)}


def beside(x: Params) -> Translation:
    """What A takes up its base gives back."""
    return Translation(
        (
            Part(Rows.along("A", (2, D), 0)),
            Part(Rows.along("W", (N, D), 0), left=-0.5 * x["B"]),
        )
    )


def biased(p: Params, x: Tensor) -> Tensor:
    """A shift of b that the reader's bias takes back."""
    t = p["b"] + x[:, :2] @ p["T"]
    return t @ p["V"].mT + p["c"]


def shift(x: Params) -> Translation:
    return Translation(
        (
            Part(Rows.along("b", (N,), 0)),
            Part(Rows.along("c", (2,), 0, scale=2.0, offset=1.0), left=-2.0 * x["V"]),
        )
    )


def at_all_weights() -> Translation:
    """The shift of `biased`: b += z, c -= V z, with V read where it acts."""
    row, column = torch.arange(2).repeat_interleave(N), torch.arange(N).repeat(2)
    V = Gain.of("V", (2, N), torch.arange(2 * N))
    taken = Sparse((2, N), (Terms(torch.stack([row, column]), -torch.ones(2 * N), (V,)),))
    return Translation((Part(Rows.along("b", (N,), 0)), Part(Rows.along("c", (2,), 0), taken)))


def planar(p: Params, x: Tensor) -> Tensor:
    """A complex map by hand, read in squares of absolute values: no parameter has the wire's channels for an axis."""
    a, b = x[:, :2], x[:, :2].flip(1) + 1
    re, im = a @ p["R"].mT - b @ p["I"].mT + p["r"], a @ p["I"].mT + b @ p["R"].mT + p["i"]
    return torch.cat([re.square() + im.square(), (re * p["g"] - im * p["h"]), (re * p["h"] + im * p["g"])], 1)


PLANAR = {"R": (2, 2), "I": (2, 2), "r": (2,), "i": (2,), "g": (2,), "h": (2,)}


def turns(unit: int = 2) -> Linear:
    """Turns of each complex unit: (R, I) and (r, i) one way, (g, h) the other."""
    start = {"R": 0, "I": 4, "r": 8, "i": 10, "g": 12, "h": 14}
    entries = []
    for j in range(unit):
        for one, other, way in (("R", "I", 1.0), ("r", "i", 1.0), ("g", "h", -1.0)):
            for k in range(2 * j, 2 * j + 2) if one == "R" else (j,):
                p, q = start[one] + k, start[other] + k
                entries += [(j, p, q, -way), (j, q, p, way)]
    *index, values = zip(*entries, strict=True)
    return Linear(tuple(PLANAR.items()), torch.tensor(index), torch.tensor(values), unit)


def mixed(p: Params, x: Tensor) -> Tensor:
    """U and V share a reader, whose bias takes constants back: a field with a constant."""
    return (x @ (p["U"] + p["V"]).mT + p["b"] - p["c"]).tanh()


def between() -> Linear:
    """U takes from V what V loses, as much as V is; b and c are shifted alike. They commute."""
    n, at = N * D, torch.arange(N * D)
    b, c = 2 * n + torch.arange(N), 2 * n + N + torch.arange(N)
    one = torch.stack([torch.cat([at, at + n]), torch.cat([at + n, at + n])])
    two = torch.stack([torch.cat([b, c]), torch.full((2 * N,), 2 * (n + N))])
    values = torch.cat([torch.ones(n), -torch.ones(n), torch.ones(2 * N)])
    generators = torch.tensor([0] * 2 * n + [1] * 2 * N)
    index = torch.cat([generators[None], torch.cat([one, two], 1)])
    return Linear((("U", (N, D)), ("V", (N, D)), ("b", (N,)), ("c", (N,))), index, values, 2)


def weight_of(p: Params) -> Tensor:
    """Return rows of lengths g, in a row."""
    return (p["g"][:, None] * p["W"] / p["W"].norm(dim=1, keepdim=True)).flatten()


def normed_by_hand(p: Params, x: Tensor) -> Tensor:
    return x @ weight_of(p).view(N, D).mT @ p["V"].mT


def through_a_norm(x: Params) -> Charted:
    """A matrix on the channels between the weight and V, which W and g take up, and what the weight leaves open."""
    J = torch.autograd.functional.jacobian(lambda W, g: weight_of({"W": W, "g": g}), (x["W"], x["g"]))
    across = torch.linalg.svd(torch.cat([each.flatten(1) for each in J], 1)).Vh[N * D :].mT
    made = {"w": (N, D), "V": (2, N), "rest": (N,)}
    X, size = 0.3 * drawn(4, N, N), N * D + 2 * N + N
    fields = torch.zeros(1 + N, size, size + 1, dtype=torch.float64)
    fields[0, : N * D, : N * D] = torch.kron(X, torch.eye(D, dtype=torch.float64))
    fields[0, N * D : -N, N * D : -N - 1] = -torch.kron(torch.eye(2, dtype=torch.float64), X.mT.contiguous())
    fields[1:, -N:, -1] = 0.1 * torch.eye(N, dtype=torch.float64)
    return Charted(
        Linear.of(made, fields), Chart((("W", (N, D)), ("g", (N,))), (("w", (N, D)),), weight_of, across, "rest")
    )


CONTINUOUS: dict[
    str, tuple[Callable[[Params, Tensor], Tensor], dict[str, tuple[int, ...]], Callable[[Params], Symmetry]]
] = {
    "torus": (two_layers, TWO_LAYERS, lambda x: SCALES),
    "statistics": (normed_neurons, BOTTLENECK_PARAMS, lambda x: NORMED_SCALES),
    "beside": (lora, ADAPTER, beside),
    "shift": (biased, {"b": (N,), "T": (2, N), "V": (2, N), "c": (2,)}, shift),
    "at all weights": (biased, {"b": (N,), "T": (2, N), "V": (2, N), "c": (2,)}, lambda x: at_all_weights()),
    "turns": (planar, PLANAR, lambda x: turns()),
    "through a norm": (normed_by_hand, {"W": (N, D), "g": (N,), "V": (2, N)}, through_a_norm),
    "between": (mixed, {"U": (N, D), "V": (N, D), "b": (N,), "c": (N,)}, lambda x: between()),
    "unread": (
        lambda p, x: (x @ p["W"].mT)[:, :2],
        {"W": (N, D)},
        lambda x: Translation((Part(Rows.along("W", (N, D), 0), left=EYE[:, 2:]),)),
    ),
    "unreached": (
        lambda p, x: (x * torch.tensor([1.0, 0.0, 1.0])) @ p["W"].mT,
        {"W": (N, D)},
        lambda x: Translation((Part(Rows.along("W", (N, D), 0), right=torch.eye(D)[1:2]),)),
    ),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_tori_and_translations(name: str) -> None:
    network, shapes, symmetry_at = CONTINUOUS[name]
    x, inputs, generator = made(shapes), drawn(9, 5, D), torch.Generator().manual_seed(0)
    symmetry, before = symmetry_at(x), copy.deepcopy(x)
    a, b = (symmetry.element(generator, 0.5) for _ in range(2))
    moved = symmetry.act(x, a)
    torch.testing.assert_close(network(moved, inputs), network(x, inputs))
    assert_same(symmetry.act(moved, b), symmetry.act(x, a + b))
    assert_same(x, before, 0.0)
    # charge and tangent are derivatives of act; dimension is the rank
    y = {key: drawn(k + 20, *w.shape) for k, (key, w) in enumerate(x.items())}
    z = torch.zeros(symmetry.shape, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(sum((y[key] * w).sum() for key, w in symmetry.act(x, z).items()), z)
    value, size = symmetry.charge(x, y)
    torch.testing.assert_close(value, expected)
    assert bool((size >= value.abs() * (1 - 1e-12)).all())
    jacobian = torch.autograd.functional.jacobian(
        lambda z: torch.cat([w.flatten() for w in symmetry.act(x, z).values()]), z.detach()
    ).flatten(1)  # (entries, generators)
    X = torch.eye(z.numel(), dtype=torch.float64).view(-1, *symmetry.shape)
    tangents = symmetry.tangent(x, X)
    torch.testing.assert_close(
        torch.cat([tangents.get(key, w.new_zeros(len(X), *w.shape)).flatten(1) for key, w in x.items()], 1),
        jacobian.mT,
    )
    assert symmetry.dimension(x) == int(torch.linalg.matrix_rank(jacobian, rtol=1e-9)) > 0
    for other in (pickle.loads(pickle.dumps(symmetry)), copy.deepcopy(symmetry)):
        assert other == symmetry
        assert_same(other.act(x, a), moved, 0.0)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_what_is_added_grows_with_the_parameters(name: str) -> None:
    network, shapes, symmetry_at = CONTINUOUS[name]
    x, far = ({key: size * w for key, w in made(shapes).items()} for size in (1.0, 1e6))
    inputs, changes = drawn(9, 5, D), list[float]()
    for params in (x, far):
        symmetry = symmetry_at(params)
        moved = symmetry.moved(params, torch.Generator().manual_seed(0), 0.5)
        torch.testing.assert_close(network(moved, inputs), network(params, inputs))
        changes.append(max(float((moved[key] - w).abs().max() / w.abs().max()) for key, w in params.items()))
    assert min(changes) > 1e-2


class Asked(dict[str, Tensor]):
    """Parameters that note which of them are read."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)


def test_only_what_is_acted_on_is_read() -> None:
    x = Asked({**made(NETWORKS["rms norm"][2]), "far": drawn(0, 3)})
    moved = Gauge(NORMED, SO(N)).moved(x, torch.Generator().manual_seed(0))
    assert x.read <= {"W", "V", "g"}
    assert moved["far"] is dict.__getitem__(x, "far")


def random_fields(seed: int, k: int) -> tuple[Linear, Params]:
    """Sparse fields on parameters of three dtypes, of rank two in k coordinates."""
    shapes = {"b": (2,), "W": (2, 3), "unused": (2,), "s": ()}
    fields = torch.einsum("jl,lpq->jpq", drawn(seed, k, 2), drawn(seed + 1, 2, 11, 12))
    fields = fields * (drawn(seed + 2, 11, 12) > 0.5)
    params = made(shapes, seed + 3) | {"other": drawn(seed + 4, 3)}
    return Linear.of(shapes, fields), params


@given(st.integers(0, 500), st.integers(1, 3))
def test_linear_fields_flow_as_exponentials_of_sparse_matrices(seed: int, k: int) -> None:
    linear, x = random_fields(seed, k)
    z = drawn(seed + 5, k)
    moved, theta = linear.act(x, z), torch.cat([x[name].flatten() for name in linear.names])
    A = torch.zeros(12, 12, dtype=torch.float64)
    for j, p, q, value in zip(*linear.index.tolist(), linear.values.tolist(), strict=True):
        A[p, q] += z[j] * value
    expected = expm_multiply(csr_matrix(A.numpy()), torch.cat([theta, torch.ones(1)]).numpy())
    after = torch.cat([moved[name].flatten() for name in linear.names])
    torch.testing.assert_close(after, torch.from_numpy(expected[:-1]), rtol=1e-10, atol=1e-10)
    assert moved["other"] is x["other"]
    s = torch.linalg.svdvals(torch.from_numpy(expm(A[:-1, :-1].numpy())))
    assert math.log(linear.condition(z)) == pytest.approx(float((s[0] / s[-1]).log()), abs=1e-5)
    assert linear.condition(linear.bounded(z, 2.0)) <= 2 * (1 + 1e-9)
    assert torch.equal(linear.bounded(z, 2 * linear.condition(z)), z)
    back = linear.act(moved, -z)
    assert_same({name: back[name] for name in x}, x, 1e-8)
    J = torch.cat([t.reshape(k, -1) for t in linear.tangent(x, torch.eye(k)).values()], 1)
    assert linear.dimension(x) == int(torch.linalg.matrix_rank(J, rtol=1e-9))
    h = 1e-6
    up, down = linear.act(x, h * z), linear.act(x, -h * z)
    for name, tangent in linear.tangent(x, z).items():
        torch.testing.assert_close(tangent, (up[name] - down[name]) / (2 * h), rtol=1e-7, atol=1e-7)
    half = {name: w.bfloat16() if name == "W" else w for name, w in x.items()}
    exact = linear.act({name: w.double() for name, w in half.items()}, z)
    assert all(torch.equal(w, exact[name].to(w.dtype)) for name, w in linear.act(half, z).items())


@given(st.integers(0, 500), st.integers(1, 6), st.booleans())
def test_dimension_of_a_torus_is_its_rank(seed: int, size: int, overlap: bool) -> None:
    """Exponents of low rank, rows and columns of one parameter, entries and parameters that are 0."""
    x = {"W": drawn(seed, 3, 4) * (drawn(seed + 1, 3, 4) > 0), "b": drawn(seed + 2, 2), "zero": torch.zeros(3)}
    exponents = [(drawn(seed + 3 + k, m, 2) @ drawn(seed + 9, 2, size)).round() for k, m in enumerate((3, 4, 2, 3))]
    rows = [
        Rows.along("W", (3, 4), 0),
        Rows.along("W", (3, 4), 1),
        Rows.along("b", (2,), 0),
        Rows.along("zero", (3,), 0),
    ]
    chosen = range(4) if overlap else (0, 2, 3)
    torus = Torus(tuple(Slices.of(rows[k], exponents[k]) for k in chosen), size)
    J = torch.cat([each.flatten(1) for each in torus.tangent(x, torch.eye(size)).values()], 1)
    assert torus.dimension(x) == int(torch.linalg.matrix_rank(J, atol=1e-9))


@given(st.integers(0, 500), st.integers(1, 3), st.integers(1, 3))
def test_dimension_of_a_translation_is_its_rank(seed: int, a: int, b: int) -> None:
    def factor(k: int, rows: int, columns: int) -> Tensor:
        return drawn(seed + k, rows, 1) @ drawn(seed + k + 1, 1, columns)

    x = {"V": drawn(0, 3, 3), "W": drawn(1, 2, 4)}
    parts = (
        Part(Rows.along("V", (3, 3), 0), factor(0, 3, a), drawn(seed, b, 3)),
        Part(Rows.along("W", (2, 4), 0), drawn(seed + 5, 2, a), factor(7, b, 4)),
    )
    for chosen in (parts, parts[:1], parts[1:]):
        translation = Translation(chosen)
        J = translation.tangent(x, torch.eye(a * b).view(-1, a, b))
        rank = torch.linalg.matrix_rank(torch.cat([each.flatten(1) for each in J.values()], 1), rtol=1e-9)
        assert translation.dimension(x) == int(rank)


def normalized(p: Params, x: Tensor) -> Tensor:
    """A neuron each: a row of W, statistics, a gain, a bias, a column of V. The gain is a unit of the bias's wire."""
    t = (x @ p["W"].mT - p["mean"]) / (p["var"].square() + 1e-5).sqrt()
    return (t * p["g"] + p["b"]).tanh() @ p["V"].mT


NEURONS = Wire(
    (
        linear("W", (N, D), writes=True, gains=(Gain.of("g", (N,), torch.arange(N)),)),
        *(Slot(Rows.along(name, (N,), 0), torch.arange(N), writes=True) for name in ("mean", "var", "b")),
        linear("V", (2, N), writes=False),
    ),
    N,
)
NEURON_PARAMS = {"W": (N, D), "mean": (N,), "var": (N,), "g": (N,), "b": (N,), "V": (2, N)}


def test_permutations_exchange_units_with_their_gains() -> None:
    x, inputs = made(NEURON_PARAMS), drawn(9, 5, D)
    p, q = torch.tensor([2, 0, 1, 3]), torch.tensor([1, 3, 0, 2])
    permutation = Permutation.of(NEURONS)
    moved = permutation.act(x, p)
    torch.testing.assert_close(normalized(moved, inputs), normalized(x, inputs))
    for name in NEURON_PARAMS:
        assert torch.equal(moved[name], x[name][:, p] if name == "V" else x[name][p])
    assert_same(permutation.act(moved, q), permutation.act(x, p[q]), 0.0)
    pairs = Permutation.of(NEURONS, torch.tensor([[0, 2], [3, 1]]))
    assert_same(pairs.act(x, torch.tensor([1, 0])), permutation.act(x, torch.tensor([3, 2, 1, 0])), 0.0)
    assert pickle.loads(pickle.dumps(pairs)) == copy.deepcopy(pairs) == pairs != permutation
    assert sorted(permutation.element(torch.Generator().manual_seed(0)).tolist()) == [*range(N)]
    shared = replace(NEURONS.slots[0], gains=(Gain.of("g", (N,), torch.tensor([0, 0, 1, 1])),))
    both = Permutation.of(Wire((shared, *NEURONS.slots[1:]), N))
    with pytest.raises(ValueError, match="gains of their own"):
        both.act(x, p)
    rounding = replace(NEURONS.slots[0], gains=(Gain.of("g", (N,), torch.arange(N), scale=0.3, offset=0.7),))
    assert_same(Permutation.of(Wire((rounding, *NEURONS.slots[1:]), N)).act(x, p), moved)
    swapped = both.act(x, torch.tensor([2, 3, 0, 1]))
    assert torch.equal(swapped["g"], x["g"][torch.tensor([1, 0, 2, 3])])


# Precision, and what is refused


def test_results_are_cast_once_and_gradients_pass() -> None:
    wire, shapes = NORMED, {"W": (N, D), "g": (N,), "V": (2, N)}
    x = {name: w.float() for name, w in made(shapes).items()}
    A = GL(N).exp(GL(N).random(torch.Generator().manual_seed(0)))
    exact = wire.act({name: w.double() for name, w in x.items()}, A)
    for name, w in wire.act(x, A.float().double()).items():
        assert w.dtype == torch.float32
        torch.testing.assert_close(w, exact[name].float(), rtol=1e-6, atol=1e-6)
    for dtype in (torch.bfloat16, torch.float32):
        x = {name: w.to(dtype) for name, w in made(shapes).items()}
        moved, exact = wire.act(x, A), wire.act({name: w.double() for name, w in x.items()}, A)
        assert all(torch.equal(moved[name], exact[name].to(dtype)) for name in x)
        assert wire.charge(x, x).value.dtype == torch.float64


def test_drafts_copy_what_is_written_alone_and_once() -> None:
    x = made({"W": (4, 3), "V": (3, 4), "b": (4,)})
    before, draft = copy.deepcopy(x), Draft(x)
    rows, z = Rows.along("W", (4, 3), 0), drawn(1, 4, 3)
    translation = Translation((Part(rows),))
    translation.move(draft, z)
    first = draft["W"]
    translation.move(draft, z)
    assert draft["W"] is first
    assert draft["V"] is x["V"]
    assert draft["b"] is x["b"]
    torch.testing.assert_close(draft["W"], before["W"] + 2 * z)
    assert_same(x, before, 0.0)


def test_tangents_in_inference_mode() -> None:
    gauge = Gauge(BOTTLENECK, GL(N))
    expected = gauge.tangent(X, EYE)
    with torch.inference_mode():
        assert_same(gauge.tangent({name: w.clone() for name, w in X.items()}, EYE + 0), expected, 0.0)


def test_views_share_nothing_with_slots() -> None:
    places = torch.arange(1000).view(10, 100)
    rows = Rows.at("w", (1000,), places[:, ::50])
    assert rows == Rows.at("w", (1000,), places[:, ::50].clone())
    assert len(pickle.dumps(rows)) < 3000
    stored = rows.places.clone()
    places.zero_()
    assert torch.equal(rows.places, stored)
    big = Rows.along("w", (300, 500), 1)
    assert big.starts.numel() + big.steps.numel() == 800
    assert Rows.at("w", (4,), torch.tensor([[0, 3], [2, 1]])).places.tolist() == [[0, 3], [2, 1]]


X = made(BOTTLENECK_PARAMS)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: BOTTLENECK.act({k: w for k, w in X.items() if k != "V"}, EYE), "Found no 'V'"),
        (lambda: BOTTLENECK.act({k: w for k, w in X.items() if k != "g"}, EYE), "Found no 'g'"),
        (lambda: BOTTLENECK.charge(X, {"W": X["W"]}), "Found no 'b'"),
        (lambda: Gauge(BOTTLENECK, GL(N)).tangent({}, EYE), "Found no 'W'"),
        (lambda: BOTTLENECK.act({**X, "W": X["W"].mT}, EYE), r"'W' must have shape \(4, 3\). Found \(3, 4\)"),
        (lambda: BOTTLENECK.act({**X, "W": X["W"].int()}, EYE), "must hold real floating-point numbers"),
        (lambda: BOTTLENECK.act({**X, "g": X["g"] * 0 - 1}, EYE), "must be finite and not 0"),
        (lambda: BOTTLENECK.act(X, EYE[:3]), r"A must be a real matrix of shape \(4, 4\). Found \(3, 4\)"),
        (lambda: BOTTLENECK.act(X, EYE * 0), "A must be invertible"),
        (lambda: BOTTLENECK.act(X, torch.ones(N, N)), "A must be invertible"),
        (lambda: BOTTLENECK.act(X, EYE * float("nan")), "A must be invertible"),
        (lambda: PARTIAL.act(made({"W": (N, D), "U": (2, D), "V": (2, N), "R": (5, 3)}), EYE + 0.1), r"must not mix"),
        (lambda: Gauge(PARTIAL, GL(N)), "must not mix channels"),
        (lambda: Gauge(BOTTLENECK, GL(3)), "same number of channels"),
        (lambda: Gauge(BOTTLENECK, SO(N)).flow(X, EYE), "must be in the algebra"),
        (lambda: Gauge(BOTTLENECK, GL(N), torch.ones(2)), r"reflections must have shape \(1,\)"),
        (lambda: Wire(BOTTLENECK.slots, 3), "channels must be 0 to 2"),
        (
            lambda: Wire((*BOTTLENECK.slots, Slot(Rows.along("g", (N,), 0), torch.arange(N), True)), N),
            "Found 'g' as both",
        ),
        (lambda: Slot(Rows.along("b", (N,), 0), torch.tensor([0, 0, 1, 2]), True), "must be distinct"),
        (lambda: Slot(Rows.along("b", (N,), 0), torch.arange(3), True), "one number per row"),
        (lambda: Rows.at("b", (N,), torch.tensor([[0], [4]])), "must be numbers of its 4 entries"),
        (lambda: Rows.at("b", (N,), torch.tensor([[0], [0]])), "Found an entry twice"),
        (lambda: Rows.at("b", (N,), torch.tensor([[0.0]])), "must be integers"),
        (lambda: Rows.at("b", (N,), torch.empty(2, 1, dtype=torch.int64, device="meta")), "Found a meta tensor"),
        (lambda: Rows.along("b", (N,), 0, scale=0.0), "must be finite and not 0"),
        (lambda: Pattern(3, torch.tensor([[0, 1, 0], [0, 0, 1], [0, 0, 0]])), "must be transitive"),
        (lambda: Span(2, torch.stack([J, 2 * J])), "must be linearly independent"),
        (lambda: Span(3, SO(3).project(drawn(0, 2, 3, 3))), "commutators"),
        (lambda: DirectSum(3, ((torch.tensor([[0, 1], [1, 2]]), SO(2)),)), "must be distinct"),
        (lambda: Complex(4), "must have two channels"),
        (lambda: Torus(SCALES.slices, 3), "numbers from 0 to 2"),
        (lambda: Linear((("b", (N,)),), torch.zeros(3, 1).long(), torch.ones(2), 1), r"Found \(3, 1\) and \(2,\)"),
        (lambda: Linear((("b", (N,)),), torch.tensor([[1], [0], [0]]), torch.ones(1), 1), "numbers from 0 to 0"),
        (lambda: Linear((("b", (N,)),), torch.tensor([[0], [N], [0]]), torch.ones(1), 1), "numbers from 0 to 3"),
        (lambda: Linear((("b", (N,)), ("b", (N,))), torch.zeros(3, 0).long(), torch.ones(0), 1), "must be distinct"),
        (lambda: between().act(X, torch.zeros(2)), "Found no 'U'"),
        (lambda: turns().act(made(PLANAR), torch.full((2,), 1e5)), "field of norm at most 10000. Found 1e"),
        (lambda: turns().act(made(PLANAR), torch.full((2,), float("nan"))), "field of norm at most 10000. Found nan"),
        (lambda: SCALES.act(X, torch.zeros(3)), r"must be real, of shape \(8,\). Found \(3,\)"),
        (lambda: Translation((Part(Rows.along("b", (N,), 0)), Part(Rows.along("V", (2, N), 0)))), "share one unknown"),
        (
            lambda: Translation((Part(Rows.along("b", (N,), 0)), Part(Rows.along("b", (N,), 0)))),
            "must not share entries",
        ),
        (lambda: Permutation.of(NEURONS).act(made(NEURON_PARAMS), torch.tensor([0, 0, 1, 2])), "must be a permutation"),
        (lambda: Permutation.of(NEURONS, torch.tensor([[0, 1], [1, 2]])), "rows of distinct channels"),
        (lambda: Permutation.of(PARTIAL).act(made(NETWORKS["partial"][2]), torch.tensor([1, 0, 2, 3])), "must not mix"),
    ],
)
def test_bad_input_is_named_in_one_sentence(act: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        act()
    assert str(error.value).count("\n") == 0


@pytest.mark.parametrize("algebra", [GL(9), SO(9), CenteredSO(9)], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize(("shared", "more"), [(3, (1, 2)), (2, (0, 0)), (0, (3, 3)), (5, (0, 1)), (1, (2, 1))])
@pytest.mark.parametrize("ones", [False, True])
def test_matrices_between_subspaces_are_counted_without_being_made(
    algebra: Algebra, shared: int, more: tuple[int, int], ones: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    both = torch.randn(9, shared, generator=draw, dtype=torch.float64)
    if ones and shared:
        both[:, 0] = 1
    N, M = (torch.linalg.qr(torch.cat([both, torch.randn(9, k, generator=draw).double()], 1))[0] for k in more)
    assert algebra.count_within(N, M) == len(algebra.within(N, M))
