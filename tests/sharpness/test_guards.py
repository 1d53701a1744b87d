"""A measure belongs to the model it is given, on every batch: what holds on some rows alone is no symmetry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds.geometry import TangentSpace
from quotient_manifolds.sharpness.curvature import Hessian
from quotient_manifolds.symmetries import declare_pair, propose_symmetries, structure
from quotient_manifolds.symmetries.canonical import NoPlaceError
from tests.counters import recorded_runs
from tests.nets.net import shaken

Batch = tuple[Tensor, Tensor, Tensor]
D = 6


def loss(model: nn.Module, batch: Batch) -> Tensor:
    x, mask, y = batch
    return nn.functional.cross_entropy(model(x, mask), y)


def batch_of(rows: int, seed: int, masked: int = 0, tokens: int = 4) -> Batch:
    """Rows of which the last `masked` have two padded tokens."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, tokens, D, generator=generator, dtype=torch.float64)
    mask = torch.ones(rows, tokens, dtype=torch.float64)
    if masked:
        mask[-masked:, -2:] = 0
    return x, mask, torch.arange(rows) % 3


LATER_ROWS = [batch_of(6, 0, masked=3)]  # 1 on the first two rows
LATER_BATCHES = [batch_of(4, 0), batch_of(4, 1), batch_of(4, 2, masked=4)]


class Net(nn.Module):
    """Have two linear layers with a norm between them, and a head for three classes."""

    def __init__(self, fresh: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.next = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)
        self.head = nn.Linear(D, 3)
        self.double().eval()
        if not fresh:
            shaken(self, 0.3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(torch.tanh(self.next(self.norm(torch.tanh(self.first(x))))).sum(1))


class Branch(Net):
    """Where tokens are padded, something else stands between two linear layers."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        z = self.norm(torch.tanh(self.first(x)))
        z = self.next(z if bool(mask.all()) else torch.tanh(z))
        return self.head(torch.tanh(z).sum(1))


class Expert(Net):
    """An expert that takes what the norm gives, where there is padding only."""

    def __init__(self, fresh: bool = False) -> None:
        super().__init__(fresh)
        self.more = nn.ModuleDict({"expert": nn.Linear(D, D)}).double().eval()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        z = self.norm(torch.tanh(self.first(x)))
        z = self.next(z) if bool(mask.all()) else self.next(z) + self.more["expert"](z)
        return self.head(torch.tanh(z).sum(1))


def without_padding(model: nn.Module, batch: Any, *, evaluate: Any) -> qm.Symmetries:
    """Return what holds where there is no padding, which is all that a finder may know that tries no other inputs."""
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(model, Net):
            patch.setattr(type(model), "forward", Net.forward)
        return propose_symmetries(model, batch, evaluate=evaluate)


@pytest.fixture
def short_sighted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "propose_symmetries", without_padding)


@pytest.mark.usefixtures("short_sighted")
@pytest.mark.parametrize(
    ("made", "batches", "where", "fresh"),
    [(Branch, LATER_ROWS, 0, True), (Branch, LATER_BATCHES, 2, False), (Expert, LATER_BATCHES, 2, True)],
)
def test_symmetries_that_fail_on_a_later_row_or_batch_are_left_out_with_a_warning(
    made: Callable[[bool], nn.Module], batches: list[Batch], where: int, fresh: bool
) -> None:
    """Also where the model is canonical already, and moves nowhere at the start of a measure."""
    model = made(fresh)
    with pytest.warns(UserWarning, match=f"not quotiented out: .*batch {where}"):
        found = qm.gradient_norm(model, loss, batches, geometry="inv")
    assert [each.base_loss for each in found.batches] == pytest.approx(
        [float(loss(model, batch).detach()) for batch in batches], rel=1e-12
    )
    assert len({each.group for each in found.batches}) == 1
    geometry = qm.Quotient("inv", symmetries=without_padding(model, batches[0], evaluate=loss))
    with pytest.raises(ValueError, match=f"batch {where}"):
        qm.gradient_norm(model, loss, batches, geometry=geometry)


@pytest.mark.usefixtures("short_sighted")
def test_false_symmetries_that_lead_nowhere_are_left_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tangent_space = qm.Quotient.tangent_space

    def nowhere(self: qm.Quotient, *given: Any) -> TangentSpace:
        if any(pair.kind == "bottleneck in/out" for pair in self._known().pairs):
            raise NoPlaceError("the constants must not vanish")
        return tangent_space(self, *given)

    monkeypatch.setattr(qm.Quotient, "tangent_space", nowhere)
    with pytest.warns(UserWarning, match=r"not quotiented out: .*batch 0"):
        qm.gradient_norm(Branch(), loss, LATER_ROWS, geometry="inv")
    model = nn.Sequential(nn.Linear(D, 2), nn.Linear(2, D), nn.Tanh(), nn.Linear(D, 3)).double().eval()
    _, batches = two_layers()
    with pytest.raises(ValueError, match="must not vanish"):
        qm.gradient_norm(model, qm.cross_entropy, batches, geometry="inv")


# --- structure, not values -------------------------------------------------------------------------------------------


class Gained(nn.Module):
    """Queries and keys with a gain between them that begins as ones, and a head that may begin as zeros."""

    def __init__(self, gain: float = 1.0, head: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.gain, self.head = nn.Parameter(torch.full((D,), gain)), nn.Linear(D, 3)
        self.double().eval()
        with torch.no_grad():
            self.head.weight *= head

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.q(x) @ (self.gain * self.k(x)).mT
        return self.head(torch.tanh(scores.softmax(-1) @ self.v(x)).sum(1))


def whole_head(model: nn.Module) -> qm.Symmetries:
    """A claim that all of GL(6) acts on queries and keys, which the gain between them does not allow."""
    stacked = {side: (lambda params, side=side: params[f"{side}.weight"].mT[None]) for side in "qk"}
    return qm.Symmetries((declare_pair(model, "attention", "query/key", G=stacked["q"], H=stacked["k"]),))


@pytest.mark.parametrize(("gain", "head"), [(0.0, 1.0), (1.0, 0.0), (1 + 1e-5, 1.0)])
def test_a_claim_that_holds_by_initialisation_alone_is_refused(gain: float, head: float) -> None:
    model = Gained(gain, head)
    if gain == 1 + 1e-5:
        with torch.no_grad():
            model.gain[:3] = 1.0
    with pytest.raises(ValueError, match="attention query/key"):
        qm.gradient_norm(model, loss, [batch_of(4, 0)], geometry=qm.Quotient("inv", symmetries=whole_head(model)))


# --- what a geometry is given ----------------------------------------------------------------------------------------


def two_layers() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 5), nn.ReLU(), nn.Linear(5, 3)).double().eval()
    return model, [(torch.randn(8, D, dtype=torch.float64), torch.arange(8) % 3)]


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_given_symmetries_are_quotiented_out_and_no_others(shift: float) -> None:
    """A shift of all logits changes outputs, but not cross-entropy."""
    model, batches = two_layers()
    with torch.no_grad():
        model[2].weight += shift * torch.arange(5)
        model[2].bias += shift
    of_outputs = qm.find_symmetries(model, batches[0][0])
    of_loss = qm.find_symmetries(model, batches[0], evaluate=qm.cross_entropy)
    named, whole, part = (
        qm.worst_case_sharpness(model, qm.cross_entropy, batches, geometry=each, radius=0.05, steps=5).mean
        for each in ("inv", qm.Quotient("inv", symmetries=of_loss), qm.Quotient("inv", symmetries=of_outputs))
    )
    assert whole == pytest.approx(named, rel=1e-12)
    assert part != pytest.approx(named, rel=1e-3)


def test_declared_pairs_are_completed_by_what_the_loss_does_not_see() -> None:
    model, batches = two_layers()
    found = qm.find_symmetries(model, batches[0], evaluate=qm.cross_entropy)
    declared = qm.Quotient("inv", symmetries=qm.Symmetries(found.pairs))
    values = (qm.gradient_norm(model, qm.cross_entropy, batches, geometry=each).mean for each in ("inv", declared))
    assert next(values) == pytest.approx(next(values), rel=1e-12)


@pytest.mark.usefixtures("short_sighted")
def test_a_result_says_how_symmetries_were_verified() -> None:
    model, batches = Branch(), LATER_BATCHES
    for verify, said in (("full", "verified in float64"), ("none", "not verified"), ("gradient", "")):
        result = qm.gradient_norm(model, loss, batches[:2], geometry=qm.Quotient("inv", verify=verify))
        assert said in str(result)
        assert bool(said) == ("verified" in str(result))
    with pytest.raises(ValueError, match="must begin at the loss of the model"):
        qm.gradient_norm(Expert(), loss, batches, geometry=qm.Quotient("inv", verify="none"))


# --- what a measure costs --------------------------------------------------------------------------------------------


def counted(calls: list[int]) -> Callable[[nn.Module, Batch], Tensor]:
    def counting(model: nn.Module, batch: Batch) -> Tensor:
        calls.append(1)
        return loss(model, batch)

    return counting


COSTS: dict[str, tuple[Callable[..., qm.Result], dict[str, float], int]] = {
    "gradient": (qm.gradient_norm, {}, 3 * 2),
    "worst case": (qm.worst_case_sharpness, {"radius": 0.05, "steps": 4}, 3 * 6),
    "average case": (qm.average_case_sharpness, {"sigma": 0.05, "samples": 2}, 3 * 6 + 1),
}


@pytest.mark.parametrize("name", COSTS)
def test_given_symmetries_cost_a_forward_pass_a_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the measure itself verifies them, and nothing is found again."""
    measure, settings, passes = COSTS[name]
    batches, calls = [batch_of(4, seed) for seed in range(3)], list[int]()
    symmetries = qm.find_symmetries(Branch(), batches[0], evaluate=loss)
    runs = recorded_runs(monkeypatch)
    measure(Branch(), counted(calls), batches, geometry=qm.Quotient("inv", symmetries=symmetries), **settings)
    assert (len(calls), len(runs)) == (passes, 0)


# --- second derivatives ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", ["euclidean", "adaptive"])
def test_a_wrong_second_derivative_of_torch_is_noticed(geometry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of weight_norm is wrong: products of differences of gradients are taken, and a warning says so."""
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 8))
    model = nn.Sequential(normed, nn.Tanh(), nn.Linear(8, 3)).double().eval()
    batches = [(torch.randn(16, 5).double(), torch.randint(0, 3, (16,)))]
    for measure in (qm.hessian_trace, qm.top_eigenvalue):
        with monkeypatch.context() as patch:
            patch.setattr(Hessian, "_fault", lambda self: "is not asked for")
            with pytest.warns(UserWarning, match="is not asked for"):
                right = measure(model, qm.cross_entropy, batches, geometry=geometry).mean
        with pytest.warns(UserWarning, match=r"second derivative by autograd of the loss on batch 0 is off by \d+%"):
            assert measure(model, qm.cross_entropy, batches, geometry=geometry).mean == pytest.approx(right, rel=1e-5)


def test_right_second_derivatives_are_taken_as_they_are(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 3)).eval()
    batches = [(torch.randn(64, 5), torch.randint(0, 3, (64,)))]
    qm.hessian_trace(model, qm.cross_entropy, batches, geometry="euclidean", samples=2)
    assert not recwarn


@pytest.mark.parametrize("measure", [qm.gradient_norm, qm.hessian_trace, qm.top_eigenvalue])
def test_the_derivative_of_a_padding_token_is_that_of_the_loss(measure: Callable[..., qm.Result]) -> None:
    """Torch hides it from training: without it a Hessian is not even symmetric."""
    torch.manual_seed(0)
    hidden, shown = nn.Embedding(5, 3, padding_idx=1), nn.Embedding(5, 3)
    shown.weight = nn.Parameter(hidden.weight.detach().normal_())
    after = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
    batches = [(torch.randint(0, 5, (16, 4)), torch.randint(0, 3, (16,)))]
    values = [
        measure(nn.Sequential(table, after).double().eval(), qm.cross_entropy, batches, geometry="adaptive").mean
        for table in (hidden, shown)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-9)


class FusedGatedReLU(torch.autograd.Function):
    """Compute relu(gate) up with a right derivative, whose own derivative takes gate and up for constants."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.kept = gate.detach(), up.detach()
        return gate.relu() * up

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.kept
        return slopes[0] * up * (gate > 0), slopes[0] * gate.relu()


class Gated(nn.Module):
    def __init__(self, fused: bool, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(8, width), nn.Linear(8, width), nn.Linear(width, 4)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        return self.down(FusedGatedReLU.apply(gate, up) if self.fused else gate.relu() * up)


class Normed(nn.Module):
    """Two ReLU layers with normed weights, by torch's function, whose second derivative is wrong, or by its formula."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.v, self.g = nn.Parameter(torch.randn(64, 8)), nn.Parameter(torch.rand(64, 1))
        self.down, self.fused = nn.Linear(64, 4), fused

    def forward(self, x: Tensor) -> Tensor:
        formula = self.g * self.v / self.v.norm(dim=1, keepdim=True)
        return self.down((x @ (torch._weight_norm(self.v, self.g, 0) if self.fused else formula).mT).relu())


def points() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(64, 8, generator=generator), torch.randint(0, 4, (64,), generator=generator)


WRONG = pytest.mark.parametrize("network", [Gated, Normed])


@WRONG
@pytest.mark.parametrize("geometry", ["euclidean", "adaptive", "mix"])
@pytest.mark.filterwarnings("ignore:The second derivative by autograd")
def test_kinks_hide_no_wrong_second_derivative(network: Callable[[bool], nn.Module], geometry: str) -> None:
    """In float32 differences of gradients that are long enough for rounding cross kinks; the oracle crosses none."""
    x, y = points()
    plain, wide = network(False).double().eval(), [(x.double(), y)]
    right = qm.hessian_trace(plain, qm.cross_entropy, wide, geometry=geometry, samples=4).mean
    wrong = network(True).eval()
    assert qm.hessian_trace(wrong, qm.cross_entropy, [(x, y)], geometry=geometry, samples=4).mean == pytest.approx(
        right, rel=1e-3
    )


EVEN = torch.ones(4)  # in float32


def narrow_only(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss with a float32 tensor of its own, which takes no other logits."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], weight=EVEN)


def test_a_second_derivative_that_nothing_confirms_is_refused() -> None:
    """Rounding within the model is more than any step of the differences."""

    def rounding(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return narrow_only(lambda x: model(x).bfloat16().float(), batch)

    with pytest.raises(ValueError, match=r"two computations that agree.*batch 0") as refused:
        qm.hessian_trace(Gated(True).eval(), rounding, [points()], geometry="euclidean", samples=2)
    assert str(refused.value).count(". Found") == 1


def test_where_a_loss_takes_no_float64_a_right_one_is_confirmed_in_float32() -> None:
    x, y = points()
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)).eval()
    values = [
        qm.hessian_trace(model, loss, [(x, y)], geometry="euclidean", samples=2).mean
        for loss in (narrow_only, qm.cross_entropy)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-4)
