"""A measure belongs to the model it is given, on every batch: what holds on some rows alone is no symmetry."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds.sharpness.curvature import Hessian
from quotient_manifolds.symmetries import declare_pair, find_symmetries

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
            with torch.no_grad():
                for w in self.parameters():
                    w += 0.3 * torch.randn_like(w)


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
    geometry = qm.Quotient("inv", symmetries=find_symmetries(model, batches[0], evaluate=loss))
    with pytest.raises(ValueError, match=f"batch {where}"):
        qm.gradient_norm(model, loss, batches, geometry=geometry)


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
def test_given_symmetries_are_completed_by_what_the_loss_does_not_see(shift: float) -> None:
    """Outputs see a shift of all logits, cross-entropy does not."""
    model, batches = two_layers()
    with torch.no_grad():
        model[2].weight += shift * torch.arange(5)
        model[2].bias += shift
    given = qm.Quotient("inv", symmetries=qm.find_symmetries(model, batches[0][0]))
    named, completed, alone = (
        qm.worst_case_sharpness(model, qm.cross_entropy, batches, geometry=each, radius=0.05, steps=5).mean
        for each in ("inv", given, qm.Quotient("inv", symmetries=given.symmetries, verify="none"))
    )
    assert completed == pytest.approx(named, rel=1e-12)
    assert alone != pytest.approx(named, rel=1e-3)


def test_the_first_batch_alone_may_verify_and_the_result_says_so() -> None:
    model, batches = Branch(), LATER_BATCHES
    for verify, said in (("first", "verified on the first batch"), ("none", "not verified")):
        geometry = qm.Quotient("inv", verify=verify)
        result = qm.gradient_norm(model, loss, batches[:2], geometry=geometry)
        assert said in str(result)
        with pytest.raises(ValueError, match="must begin at the loss of the model"):
            qm.gradient_norm(Expert(), loss, batches, geometry=geometry)
    assert "verified" not in str(qm.gradient_norm(model, loss, batches[:2], geometry="inv"))


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
