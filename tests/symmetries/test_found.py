"""What charges find is true: by the model itself, and by charges that groups compute from autograd's gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries.charges.find import Found, find
from quotient_manifolds.symmetries.groups import Gauge, Linear, Symmetry
from tests.symmetries import finders
from tests.symmetries import kinds as other
from tests.symmetries.finders import rank, weights
from tests.symmetries.nets import NETS, net
from tests.symmetries.test_nets import shown

CHANGE = 1e-8


def found_in(name: str, bias: bool) -> tuple[nn.Module, Tensor, Found]:
    model, x = net(name, bias)
    return model, x, find(model, shown(name, x)[:4])


def moved(model: nn.Module, symmetries: tuple[Symmetry, ...], seed: int = 3) -> dict[str, Tensor]:
    draw, params = torch.Generator().manual_seed(seed), {name: w.detach() for name, w in model.named_parameters()}
    for symmetry in symmetries:
        params = symmetry.act(params, symmetry.element(draw, 0.3))
    return params


def kinds(found: Found) -> Counter[str]:
    def kind(each: Symmetry) -> str:
        size = each.algebra.n if isinstance(each, Gauge) else "".join(map(str, each.shape))
        return f"{type(each.algebra if isinstance(each, Gauge) else each).__name__}{size}"

    return Counter(map(kind, found.symmetries))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["short slice", *list(NETS)[::13]])
def test_a_move_by_all_that_is_found_changes_nothing_on_other_inputs(name: str, bias: bool) -> None:
    model, x, found = found_in(name, bias)
    with torch.no_grad():
        before = model(x)
        for symmetries in found.together:
            after = torch.func.functional_call(model, moved(model, symmetries), (x,))
            assert float((after - before).abs().max()) < CHANGE * float(before.abs().max())
    assert found.largest < 1e-9 < found.smallest


@pytest.mark.parametrize("name", list(NETS)[5::29])
def test_gradients_at_other_weights_have_no_charge(name: str) -> None:
    """Of groups: an implementation apart from that of the finder."""
    model, x, found = found_in(name, True)
    draw = torch.Generator().manual_seed(1)
    params = {
        key: (w.detach() * (1 + 0.3 * torch.randn(w.shape, generator=draw, dtype=w.dtype))).requires_grad_()
        for key, w in model.named_parameters()
    }
    y = torch.func.functional_call(model, params, (shown(name, x)[4:12],))
    loss = (y * torch.randn(y.shape, generator=draw, dtype=y.dtype)).sum()
    gradient = dict(zip(params, torch.autograd.grad(loss, [*params.values()], materialize_grads=True), strict=True))
    for symmetry in found.symmetries:
        value, size = symmetry.charge(params, gradient)
        assert float(value.detach().abs().max()) <= 1e-9 * float(size.max()), symmetry.names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear", {"GL8": 1}),
        ("relu", {"GL8": 2, "Torus8": 1}),
        ("rot", {"Complex2": 4, "GL8": 2}),
        ("ln std", {"CenteredSO8": 1, "IntoMean8": 1, "FromSum8": 1}),
        ("shared qk", {"SO8": 1, "GL8": 2}),
        ("softmax of tokens", {"GL8": 2, "Torus1": 1}),
    ],
)
def test_groups_are_recognized(name: str, expected: dict[str, int]) -> None:
    assert kinds(found_in(name, True)[2]) == Counter(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("S4", 9),  # a use that reads zeros is none
        ("prefix", 24),  # tokens of several writers are summed
        ("weighed twice", 118),  # of one weight, in two units
        ("two constants, attn", 208),  # columns that are the same
        ("diagonal weight", 80),  # rows with entries in different columns
        ("layer twice", 17),  # directions of a weight that is used twice
        ("Mamba 2", 14),
    ],
)
def test_as_many_dimensions_are_found(name: str, expected: int) -> None:
    model, x = net(name, False) if name in NETS else other.net(name)
    found = find(model, (shown(name, x) if name in NETS else x)[:4])
    assert rank(found.every, weights(model)) == expected
    assert found.change < CHANGE


class Positions(nn.Module):
    """Add positions, as many as there are tokens, and remember the shortest that was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.positions = nn.Linear(8, 32), nn.Parameter(torch.randn(1, 6, 32))
        self.norm, self.b, self.c = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.seen = 100

    def forward(self, x: Tensor) -> Tensor:
        self.seen = min(self.seen, x.shape[1])
        x = self.a(x) + self.positions[:, : x.shape[1]]
        return self.c(self.b(self.norm(x)).relu() * self.seen)


@pytest.mark.parametrize("length", [6, 5])
def test_positions_that_other_lengths_have_are_rotated_too(length: int) -> None:
    """Where a part of a table is the whole, there is no operation that takes it."""
    torch.manual_seed(0)
    model = Positions().double().eval()
    found = find(model, torch.randn(4, length, 8, dtype=torch.float64))
    assert kinds(found)["CenteredSO32"] == 1
    assert model.seen == 100


class Fused(nn.Module):
    """Attention by one map without a bias, behind a norm with one: sums of what the map reads are known."""

    def __init__(self, d: int, head: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * head, bias=False), nn.Linear(head, head)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.out((q @ k.mT).softmax(-1) @ v)


class Residual(nn.Module):
    """Read what a norm gives, without a bias, and add to it."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, hidden, bias=False), nn.Linear(hidden, d)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.b(self.a(x).tanh())


@pytest.mark.parametrize(
    ("make", "d", "expected"),
    [
        # two GL(3), gains; keys, values with a bias, and shifts of the norm's that leave the sum
        (lambda: Fused(20, 3), 20, 9 + 9 + 20 + 3 + 3 + 19),
        (lambda: Fused(64, 12), 64, 144 + 144 + 64 + 12 + 12 + 63),
        (lambda: Residual(14, 10), 14, 13),
        (lambda: Residual(48, 30), 48, 47),
    ],
)
def test_weights_whose_inputs_have_a_known_sum_take_constants(
    make: Callable[[], nn.Module], d: int, expected: int
) -> None:
    torch.manual_seed(0)
    model = make().double().eval()
    with torch.no_grad():
        for w in model.parameters():
            w += 0.2 * torch.randn_like(w)
    found = find(model, torch.randn(5, 6, d, dtype=torch.float64))
    assert rank(found.every, weights(model)) == expected
    assert found.change < CHANGE


class Relative(nn.Module):
    """Add a number for each distance to the scores of attention without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.distances, self.out = (
            nn.Linear(40, 9, bias=False),
            nn.Embedding(3, 1),
            nn.Linear(3, 5, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT + self.distances((place[:, None] - place) % 3)[..., 0]
        return self.out(scores.softmax(-1) @ v)


class Classified(nn.Module):
    """Put a token before the others, and add positions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.cls, self.positions = (
            nn.Linear(8, 32),
            nn.Parameter(torch.randn(1, 1, 32)),
            nn.Embedding(9, 32),
        )
        self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls.expand(len(x), -1, -1), self.a(x)], 1) + self.positions(torch.arange(1 + x.shape[1]))
        return self.c(self.b(x).relu())


@pytest.mark.parametrize(
    ("make", "d", "expected"),
    [
        (Relative, 40, 1),
        (Classified, 8, 3 * 32),  # the token with the first position, maps with the others, and all with the reader
    ],
)
def test_shifts_of_single_positions_and_of_all(make: Callable[[], nn.Module], d: int, expected: int) -> None:
    torch.manual_seed(0)
    model = make().double().eval()
    found = find(model, torch.randn(5, 6, d, dtype=torch.float64))
    shifts = [stack.translation for stack in found.stacks if stack.family == "shift"]
    assert rank(shifts, weights(model)) == expected
    assert found.change < CHANGE


class Unread(nn.Module):
    """Take a maximum over tokens, and indices of it that lead nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        values, indices = self.a(x).max(1)
        indices.squeeze()
        return self.b(values)


def test_indices_that_lead_to_no_output_may_change() -> None:
    torch.manual_seed(0)
    model = Unread().double().eval()
    found = find(model, torch.randn(4, 5, 3, dtype=torch.float64))
    assert rank(found.every, weights(model)) == 4 + 4  # scales, and shifts that a bias takes back


def test_a_scale_of_attention_may_change_sign_and_one_of_a_relu_may_not() -> None:
    _, _, found = found_in("relu", True)
    gauges = [each for each in found.symmetries if isinstance(each, Gauge)]
    assert all(each.reflections is not None and bool(each.reflections.all()) for each in gauges)


@pytest.mark.parametrize(
    ("name", "bias", "rank"),
    [
        ("most of three", True, 88),  # an order is blind to shifts
        ("most of tokens, and where", True, 96),
        ("ln of tokens", False, 72),  # of two tokens outputs are 0 but for rounding
        ("tied table and head, norms alone", True, 162),  # one channel of a wire is no wire
        ("two writers of tokens by half", True, 204),  # mixed tokens of two maps are one wire
    ],
)
def test_all_that_the_jacobian_leaves_free_is_found(name: str, bias: bool, rank: int) -> None:
    model, x = net(name, bias)
    found = find(model, shown(name, x))
    assert finders.rank(found.every, finders.weights(model)) == rank


LINEAR = {
    "complex layers": 18,
    "S4 of planes": 9,
    "hypernetwork": 35,  # half of them are sums of rows that may be moved at these weights
}


@pytest.mark.parametrize("name", LINEAR)
def test_fields_that_no_wire_has_are_found(name: str) -> None:
    model, x = other.net(name)
    found = find(model, x[:4])
    assert any(isinstance(each, Linear) for each in found.symmetries)
    assert finders.rank(found.every, finders.weights(model)) == LINEAR[name] == other.KINDS[name].kernel
    assert not any("dimensions" in each for each in found.refused)
    with torch.no_grad():
        before = model(x)
        for symmetries in found.together:
            after = torch.func.functional_call(model, moved(model, symmetries), (x,))
            assert float((after - before).abs().max()) < CHANGE * float(before.abs().max())


def test_what_no_group_has_is_counted() -> None:
    model, x = other.net("DoRA, two maps")
    assert any("21 dimensions: of no group" in each for each in find(model, x[:4]).refused)
