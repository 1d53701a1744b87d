"""What charges find is true: by the model itself, and by charges that groups compute from autograd's gradients."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries.charges.find import Found, find
from quotient_manifolds.symmetries.charges.finder import _atoms
from quotient_manifolds.symmetries.charges.points import Points
from quotient_manifolds.symmetries.charges.wide import Wide
from quotient_manifolds.symmetries.groups import Charted, DirectSum, Gauge, Linear, Symmetry, Translation
from tests.nets import kinds as other
from tests.nets.net import shaken
from tests.nets.sets import SETS
from tests.nets.small import NETS, net, shown
from tests.symmetries import finders
from tests.symmetries.finders import rank, weights

CHANGE = 1e-8


def found_in(name: str, bias: bool) -> tuple[nn.Module, Tensor, Found]:
    model, x = net(name, bias)
    return model, x, find(model, shown(name, x)[:4])


def moved(model: nn.Module, symmetries: Sequence[Symmetry], seed: int = 3) -> dict[str, Tensor]:
    draw, params = torch.Generator().manual_seed(seed), {name: w.detach() for name, w in model.named_parameters()}
    for symmetry in symmetries:
        params = symmetry.act(params, symmetry.element(draw, 0.3))
    return params


def kinds(found: Found) -> Counter[str]:
    def kind(each: Symmetry) -> str:
        size = each.algebra.n if isinstance(each, Gauge) else "".join(map(str, each.shape))
        return f"{type(each.algebra if isinstance(each, Gauge) else each).__name__}{size}"

    return Counter(kind(each) for each in found.symmetries if not isinstance(each, Translation))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["short slice", *list(NETS)[::13]])
def test_a_move_by_all_that_is_found_changes_nothing_on_other_inputs(name: str, bias: bool) -> None:
    model, x, found = found_in(name, bias)
    check_moves(model, x, found.symmetries)
    assert found.largest < 1e-9 < found.smallest


ORDINARY = {
    "nets": ("half ln", "attn ln", "short attn", "max1", "lora", "ln std", "two"),
    "types": ("bert", "gpt2", "vit", "t5", "low-rank adapters and a bottleneck"),
    "breadth": ("bert", "gpt2", "vit", "t5", "beit", "codegen", "dinov2_with_registers"),  # of more than SMALL
}


@pytest.mark.parametrize(("each", "name"), [(each, name) for each, names in ORDINARY.items() for name in names])
def test_what_is_found_holds_at_other_weights(each: str, name: str) -> None:
    example = SETS[each].make(name)
    found = find(example.model, example.shown, example.evaluate)
    twin, draw = copy.deepcopy(example.model).double(), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for w in twin.parameters():
            w *= 1 + 0.3 * torch.randn(w.shape, generator=draw, dtype=w.dtype)
            w += 0.1 * w.std(correction=0).clamp(min=0.1) * torch.randn(w.shape, generator=draw, dtype=w.dtype)
    moved = finders.moved_by(found.symmetries, weights(twin))
    assert finders.falsity(replace(example, model=twin), moved)["false"] < 1e-9


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
        ("ln std", {"CenteredSO8": 1, "IntoMean8": 1}),  # what reads a sum of 0 takes constants, a translation
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
        ("diagonal weight", 136),  # rows with entries in different columns, and entries that are multiplied by 0
        ("layer twice", 17),  # 8 of the mean that a weight used twice writes, before a norm
        ("Mamba 2", 14),
    ],
)
def test_as_many_dimensions_are_found(name: str, expected: int) -> None:
    model, x = net(name, False) if name in NETS else other.net(name)
    found = find(model, (shown(name, x) if name in NETS else x)[:4])
    assert rank(found.symmetries, weights(model)) == expected
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
    model = shaken(make().double(), 0.2)
    found = find(model, torch.randn(5, 6, d, dtype=torch.float64))
    assert rank(found.symmetries, weights(model)) == expected
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
    shifts = [each for each in found.symmetries if isinstance(each, Translation)]
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
    assert rank(found.symmetries, weights(model)) == 4 + 4  # scales, and shifts that a bias takes back


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
        ("gate of numbers", False, 136),  # scales beside one that no group acts on
        ("max1", True, 144),  # neurons that are off here take part in shifts
        ("max pool", True, 96),
        ("wide scores of halves", True, 207),  # shifts beside moves that hold to first order
        ("bn lin", True, 232),  # matrices move the mean that a norm subtracts, and a bias takes that up
        ("bn narrow", False, 214),  # as much as the gain between says
        ("bn twice", True, 160),  # two means, two biases
        ("dead", True, 186),  # directions that five rows of a map do not read, and what five columns do not reach
    ],
)
def test_all_that_the_jacobian_leaves_free_is_found(name: str, bias: bool, rank: int) -> None:
    model, x = net(name, bias)
    found = find(model, shown(name, x))
    assert finders.rank(found.symmetries, finders.weights(model)) == rank


def check_moves(model: nn.Module, x: Tensor, symmetries: Sequence[Symmetry]) -> None:
    """Move a model by a random element of each symmetry: outputs stay."""
    with torch.no_grad():
        before = model(x)
        after = torch.func.functional_call(model, moved(model, symmetries), (x,))
        assert float((after - before).abs().max()) < CHANGE * float(before.abs().max())


LINEAR = {
    "complex layers": 18,
    "FiLM": 10,  # a multiple of one bias is added to another
    "S4 of planes": 9,
}


@pytest.mark.parametrize("name", LINEAR)
def test_fields_that_no_wire_has_are_found(name: str) -> None:
    model, x = other.net(name)
    found = find(model, x[:4])
    assert any(isinstance(each, Linear) for each in found.symmetries)
    assert finders.rank(found.symmetries, finders.weights(model)) == LINEAR[name] == other.KINDS[name].kernel
    assert not any("dimensions" in each for each in found.refused)
    check_moves(model, x, found.symmetries)


CHARTED = {
    "DoRA, two maps": 44,  # a weight that is normed by hand, between two maps
    "hypernetwork": 35,
    "hypernetwork of two layers": 31,  # any two codes make any weights of two layers
    "prefix of a network, heads": 53,
}


@pytest.mark.parametrize("name", CHARTED)
def test_functions_of_parameters_are_as_good_as_parameters(name: str) -> None:
    model, x = other.net(name)
    found = find(model, x[:4])
    assert finders.rank(found.symmetries, finders.weights(model)) == CHARTED[name] == other.KINDS[name].kernel
    assert not any("dimensions" in each for each in found.refused)
    assert any(isinstance(each, Charted) for each in found.symmetries)
    check_moves(model, x, pickle.loads(pickle.dumps(found.symmetries)))


@pytest.mark.parametrize("name", other.MISSING)
def test_what_no_group_has_is_counted(name: str) -> None:
    model, x = other.net(name)
    assert any(f"{other.MISSING[name][0]} dimensions: of no group" in each for each in find(model, x[:4]).refused)


class Halved(nn.Module):
    """Use the positive entries of a weight, or those under a mask."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.w, self.masked = nn.Parameter(torch.randn(3, 4)), masked
        self.register_buffer("mask", torch.tensor([1.0, 0, 0, 1]))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (self.w * (self.mask if self.masked else (self.w > 0).to(x)))).tanh()


@pytest.mark.parametrize("masked", [True, False])
def test_entries_under_a_mask_are_free_and_those_that_are_negative_are_not(masked: bool) -> None:
    torch.manual_seed(0)
    model = Halved(masked).double().eval()
    found = find(model, torch.randn(4, 3, dtype=torch.float64))
    free = [each for each in found.symmetries if isinstance(each, Translation)]
    assert rank(free, weights(model)) == 6 * masked
    assert all(each.kind == "unread" for each in free)


class Convolved(nn.Module):
    """Convolutions without biases, each in front of a norm; the first two in a residual block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, width, 3, padding=1, bias=False), nn.Linear(width, 3)
        self.second, self.third = (nn.Conv2d(width, width, size, padding=size // 2, bias=False) for size in (3, 1))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.first(x)).relu()
        x = (x + self.norms[1](self.second(x))).relu()
        return self.last(self.norms[2](self.third(x)).tanh().mean((2, 3)))


def with_statistics(model: nn.Module) -> nn.Module:
    draw = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.5, generator=draw)
            module.running_var.uniform_(0.5, 1.5, generator=draw)
            module.weight.data.uniform_(0.5, 1.5, generator=draw)
            module.bias.data.normal_(0, 0.5, generator=draw)
    return model.double().eval()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Convolved, {"Torus64": 1}),  # of three convolutions, and of the stream
        (  # linear, but for the gains between
            lambda: nn.Sequential(
                nn.Conv2d(2, 20, 3, bias=False), nn.BatchNorm2d(20), nn.Conv2d(20, 20, 2, padding=1), nn.Tanh()
            ),
            {"GL20": 1, "Torus20": 1},
        ),
    ],
)
def test_biases_of_wide_nets_take_up_what_norms_subtract(
    model: Callable[[], nn.Module], expected: dict[str, int]
) -> None:
    torch.manual_seed(0)
    net = with_statistics(model())
    found = find(net, torch.randn(4, 2, 9, 9, dtype=torch.float64))
    assert kinds(found) == Counter(expected)
    assert sum(each.dimension(weights(net)) for each in found.symmetries) == (64 if "Torus64" in expected else 420)
    x = torch.randn(6, 2, 11, 8, dtype=torch.float64)
    with torch.no_grad():
        before = net(x)
        after = torch.func.functional_call(net, moved(net, found.symmetries), (x,))
        assert float((after - before).abs().max()) < CHANGE * float(before.abs().max())


class Biased(nn.Module):
    """Attention by one weight that reads a norm."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.fused, self.last = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.fused(self.norm(self.first(x))).chunk(3, -1)
        return self.last((a @ b.mT).softmax(-1) @ c)


def test_weights_that_act_as_biases_rely_on_inputs_that_shifts_change() -> None:
    torch.manual_seed(0)
    model = Biased().double().eval()
    model.norm.bias.data.normal_()
    found = find(model, torch.randn(4, 5, 24, dtype=torch.float64))
    added = [each for each in found.symmetries if isinstance(each, Translation)]
    # Of queries, keys and values; of the norm, of values, and of keys, which no score sees; means of what it reads
    assert sum(each.dimension(weights(model)) for each in added) == 6 * 24 + 24 + 1
    assert not any("changed outputs" in why for why in found.refused)


def test_heads_are_blocks_of_one_group_and_stand_or_fall_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net("attn", True)
    finder = Wide(Points(model, x[:4]), torch.Generator().manual_seed(1))
    gauges = [each for each in finder.everywhere().symmetries if isinstance(each, Gauge)]
    heads = {each.names[0]: each for each in gauges if isinstance(each.algebra, DirectSum)}
    assert {name: each.algebra.dimension for name, each in heads.items()} == {"q.weight": 32, "v.weight": 32}
    q = finder.own["q.weight"]

    def change(_: object, after: dict[str, Tensor], __: object) -> tuple[float, list[int]]:
        return float(not torch.equal(after["q.weight"][4:], q[4:])), []

    monkeypatch.setattr(finder.answers, "change", change)
    (kept,), refused = finder._invariant([heads["q.weight"]], finder.change, _atoms)
    assert isinstance(kept, Gauge)
    assert kept.algebra.dimension == 16
    assert len(refused) == 1
    after = kept.act(finder.own, kept.element(torch.Generator().manual_seed(0)))
    assert torch.equal(after["q.weight"][4:], q[4:])
    assert not torch.equal(after["q.weight"], q)


def test_a_norm_of_torch_has_an_eps_that_a_scale_changes() -> None:
    """It adds its eps in place, in float64 one that rounding hides."""
    model = nn.Sequential(nn.Linear(5, 6, bias=False), nn.RMSNorm(6), nn.Linear(6, 3)).double().eval()
    dimensions = [each.dimension(weights(model)) for each in find(model, torch.randn(8, 5).double()).symmetries]
    assert sum(dimensions) == 6 + 15  # gains of the norm, and rotations before it


def test_the_mean_of_logits_is_free_under_a_loss() -> None:
    """All 1 w^T on more classes than there are columns: at any weights some of these move nothing."""
    torch.manual_seed(0)
    model, classes = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 10)).double().eval(), torch.arange(12) % 10
    loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    found = find(model, (torch.randn(12, 3).double(), classes), loss)
    assert rank([each for each in found.symmetries if {*each.names} <= {"2.weight", "2.bias"}], weights(model)) == 3
    assert not any(isinstance(each, Gauge) and type(each.algebra).__name__ == "Span" for each in found.symmetries)
