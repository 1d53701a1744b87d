"""A model is its parameters and its buffers: what is said of two takes both into account."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds.orbit import loss_along_path, same_function
from tests.nets.net import Computed

X = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def normed(seed: int) -> nn.Module:
    """A network whose BatchNorm has seen other data for each seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()
    for _ in range(3 + seed):
        model((1 + seed) * X + seed)
    return model.eval()


def test_a_path_ends_at_the_models_as_they_are() -> None:
    """And in between at the means of parameters and of running statistics."""
    a, b, between = (normed(seed) for seed in (0, 1, 0))
    path = loss_along_path(a, b, mean_square, [X, 2 * X], points=5)
    for t, loss in zip(path.t, path.losses, strict=True):
        states = zip(a.state_dict().items(), b.state_dict().values(), strict=True)
        mixed = {name: (1 - t) * w + t * v if w.is_floating_point() else w for (name, w), v in states}
        between.load_state_dict(mixed)
        expected = (mean_square(between, X) + mean_square(between, 2 * X)) / 2
        assert loss == pytest.approx(float(expected), rel=1e-12)
    for end, model in ((path.losses[0], a), (path.losses[-1], b)):
        assert end == float(mean_square(model, X) + mean_square(model, 2 * X)) / 2


def computed(forward: Callable[[nn.Module, Tensor], Tensor], **buffers: Tensor) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(3)
        model = Computed(forward, layer=nn.Linear(4, 3).double())
        for name, value in buffers.items():
            model.register_buffer(name, value.clone())
        return model.eval()

    return make


MASK = torch.tensor([0.0, -math.inf, 0.0], dtype=torch.float64)
ORDER = torch.tensor([2, 0, 1])
SPARSE = torch.eye(3, dtype=torch.float64).to_sparse()
READ: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], Tensor, Tensor]] = {
    "an order": (lambda s, x: s.layer(x)[:, s.held] * torch.arange(3), ORDER, ORDER.flip(0)),
    "a flag": (lambda s, x: s.layer(x) * s.held, torch.tensor(True), torch.tensor(False)),
    "a mask with other infinities": (lambda s, x: (s.layer(x) + s.held).softmax(-1), MASK, MASK.flip(0).roll(1)),
    "a table of another size": (lambda s, x: s.layer(x) * s.held.sum(), torch.ones(3), torch.ones(5)),
    "a sparse matrix": (lambda s, x: s.layer(x) @ s.held.to_dense(), SPARSE, 2 * SPARSE),
}


@pytest.mark.parametrize(("forward", "held", "other"), READ.values(), ids=list(READ))
def test_what_has_no_mean_is_refused_by_name_where_it_matters(
    forward: Callable[[nn.Module, Tensor], Tensor], held: Tensor, other: Tensor
) -> None:
    a, b = computed(forward, held=held)(), computed(forward, held=other)()
    if mean_square(a, X) == mean_square(b, X):
        pytest.fail("the buffer is to matter")
    with pytest.raises(ValueError, match="Found that held differs and changes the loss"):
        loss_along_path(a, b, mean_square, [X])
    own = float(mean_square(a, X))
    assert loss_along_path(a, copy.deepcopy(a), mean_square, [X]).losses == pytest.approx([own] * 11, rel=1e-12)

    def unread(model: nn.Module, x: Tensor) -> Tensor:
        return model.layer(x)  # type: ignore[operator]

    a, b = computed(unread, held=held)(), computed(unread, held=other)()
    own = float(mean_square(a, X))
    assert loss_along_path(a, b, mean_square, [X]).losses == pytest.approx([own] * 11, rel=1e-12)


def test_a_buffer_that_one_model_lacks() -> None:
    a, b = normed(0), normed(0)
    b[1] = nn.BatchNorm1d(6, track_running_stats=False).double().eval()
    for pair in ((a, b), (b, a)):
        with pytest.raises(ValueError, match=r"Found that 1\.running_mean, 1\.running_var, 1\.num_batches_tracked"):
            loss_along_path(*pair, mean_square, [X])
    b = copy.deepcopy(a)
    b.register_buffer("cache", torch.ones(3))
    assert loss_along_path(a, b, mean_square, [X]).barrier == 0


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_two_precisions_and_a_counter(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """What is rounded is no difference."""
    a, b = (normed(seed).to(dtype) for seed, dtype in enumerate(dtypes))
    end = loss_along_path(a, b, lambda m, x: mean_square(m, x.to(next(m.parameters()))), [X]).losses[-1]
    assert end == pytest.approx(float(mean_square(b, X.to(dtypes[1]))), rel=1e-5)


def test_no_buffer_is_changed() -> None:
    a, b = normed(0), normed(1)
    before = [copy.deepcopy(each.state_dict()) for each in (a, b)]

    def writes(model: nn.Module, x: Tensor) -> Tensor:
        for buffer in model.buffers():
            buffer.zero_()
        return mean_square(model, x)

    loss_along_path(a, b, writes, [X])
    for each, tensors in zip((a, b), before, strict=True):
        assert all(torch.equal(w, tensors[name]) for name, w in each.state_dict().items())


def test_models_of_one_function_have_one_set_of_buffers() -> None:
    """The inputs show no shift of the third unit, which is below 0; a counter means nothing."""
    a = normed(0)
    with torch.no_grad():
        a.get_parameter("1.bias")[2] = -1e3
    b = copy.deepcopy(a)
    assert same_function(a, b, X)[0] == "same"
    b.get_buffer("1.num_batches_tracked").add_(1)
    with pytest.warns(UserWarning, match=r"buffers.* 1\.num_batches_tracked$"):
        assert same_function(a, b, X)[0] == "same"
    b.get_buffer("1.running_mean")[2] += 1.0
    with pytest.warns(UserWarning, match=r"buffers.* 1\.running_mean, 1\.num_batches_tracked$"):
        verdict, left = same_function(a, b, X)
    assert verdict == "same outputs here, no element found"
    means = (each.get_buffer("1.running_mean") for each in (b, a))
    assert left == pytest.approx(float(torch.dist(*means) / a.get_buffer("1.running_mean").norm()))


def test_an_audit_says_which_buffers_ended_elsewhere() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    model = nn.Sequential(encoder, nn.Flatten(), nn.BatchNorm1d(40), nn.Linear(40, 3)).double()
    model.register_buffer("unused", torch.ones(3))
    batches = [(torch.randn(6, 5, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])) for _ in range(2)]
    found = qm.find_symmetries(copy.deepcopy(model).eval(), batches[0][0])

    def audit(make: Callable[[nn.Module], torch.optim.Optimizer]) -> qm.optim.OrbitAudit:
        return qm.orbit_audit(make, model, qm.cross_entropy, batches, symmetries=found, moves=2)

    plain = audit(lambda model: torch.optim.Adam(model.parameters(), lr=1e-2))
    invariant = audit(lambda model: qm.QuotientSGD(model.named_parameters(), found, lr=1e-2))
    for one, least, most in ((plain, 1e-6, 1.0), (invariant, 0.0, 1e-9)):
        assert set(one.buffers) <= {"2.running_mean", "2.running_var"}
        assert least <= max(one.buffers.values(), default=0.0) <= most
    assert "2.running_mean" in str(plain)


def test_statistics_of_units_that_change_places_go_with_them() -> None:
    model, twin = normed(0), normed(0)
    order = torch.tensor([3, 5, 0, 1, 4, 2])
    with torch.no_grad():
        for name, w in (*twin.named_parameters(), *twin.named_buffers()):
            if name[0] in "01" and w.ndim:
                w.copy_(w[order])
        twin.get_parameter("3.weight").copy_(twin.get_parameter("3.weight")[:, order])
    assert torch.allclose(twin(X), model(X), rtol=1e-12)
    found = qm.align(twin, model, X, by="weights")
    assert found.before > 0.5
    assert found.distance < 1e-10
    for name, buffer in found.model.named_buffers():
        torch.testing.assert_close(buffer, model.get_buffer(name), rtol=1e-12, atol=1e-12)
    assert same_function(model, twin, X)[0] == "same"
