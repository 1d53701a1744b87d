"""Translations hold at all weights, and each says how it was read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quotient_manifolds.symmetries.charges.find import find
from quotient_manifolds.symmetries.charges.points import Points
from quotient_manifolds.symmetries.charges.shifts import _parts_of
from quotient_manifolds.symmetries.charges.spans import _pairs
from quotient_manifolds.symmetries.charges.wide import Wide
from quotient_manifolds.symmetries.groups import Symmetry, Translation
from quotient_manifolds.symmetries.trace.replay import Replay
from tests.nets.net import WORDS, Computed, generic
from tests.nets.small import net, shown
from tests.symmetries.finders import rank, weights


def added(model: nn.Module, x: Tensor) -> int:
    """Return how many dimensions translations have."""
    found = find(model.double().eval(), x.double() if x.is_floating_point() else x)
    return rank([each for each in found.symmetries if isinstance(each, Translation)], weights(model))


def test_an_adapter_beside_its_base_gives_back_what_the_base_takes() -> None:
    """W + 2 B A, with W (8, 6), A (2, 6) and B (8, 2): r (i + o) dimensions, both by gradients and by tokens."""
    torch.manual_seed(0)
    parts = {"w": nn.Linear(6, 8, bias=False), "a": nn.Linear(6, 2, bias=False), "b": nn.Linear(2, 8, bias=False)}
    model = Computed(lambda s, x: torch.tanh(s.w(x) + 2 * s.b(s.a(x))), **parts)
    assert added(model, torch.randn(12, 6)) == 2 * (6 + 8)


def test_a_bias_that_two_maps_share_takes_nothing_back_alone() -> None:
    """tanh(u + t + b) + tanh(u A + t A' + b): shifts of t need one bias each."""
    torch.manual_seed(0)

    def shared(s: Computed, x: Tensor) -> Tensor:
        y = s.e(x)
        return torch.tanh(F.linear(y, s.v) + s.p) + torch.tanh(F.linear(y, s.w) + s.p)

    parts: dict[str, Any] = {"e": nn.Linear(6, 3), "p": nn.Parameter(torch.randn(4))}
    parts |= {name: nn.Parameter(torch.randn(4, 3)) for name in "vw"}
    assert added(Computed(shared, **parts), torch.randn(12, 6)) == 0


def test_a_map_that_is_used_twice_takes_back_by_its_own_bias() -> None:
    """A bias on the same stream, added between, is not the one that gives back what o reads."""
    torch.manual_seed(0)

    def twice(s: Computed, x: Tensor) -> Tensor:
        h, a = s.e(x), s.v(x)
        return torch.tanh(h + s.o(a)) * torch.sigmoid(h + s.o(a.roll(1, 1))) + torch.sin(h)

    model = Computed(twice, e=nn.Linear(6, 5), v=nn.Linear(6, 4), o=nn.Linear(4, 5)).double().eval()
    shifts = Wide(Points(model, torch.randn(3, 4, 6).double()), torch.Generator().manual_seed(0)).shifts()
    assert rank([each for each in shifts.symmetries if "v.bias" in each.names], weights(model)) == 4


def test_a_table_that_is_tied_to_the_head_has_no_direction_of_its_own() -> None:
    torch.manual_seed(0)

    def tied(s: Computed, x: Tensor) -> Tensor:
        y = s.t(x)
        return F.linear(torch.tanh(y - y.mean(-1, keepdim=True)), s.t.weight)

    def alone(s: Computed, x: Tensor) -> Tensor:
        y = s.t(x)
        return torch.tanh(y - y.mean(-1, keepdim=True))

    words = torch.randint(WORDS, (40, 3))
    for function, expected in ((tied, 0), (alone, WORDS)):
        assert added(Computed(function, t=nn.Embedding(WORDS, 6)), words) == expected


def test_a_unit_that_is_off_here_but_not_elsewhere_is_not_free() -> None:
    torch.manual_seed(0)
    model = Computed(lambda s, x: s.b(torch.relu(s.a(x))), a=nn.Linear(6, 5), b=nn.Linear(5, 3)).double()
    with torch.no_grad():
        model.a.weight[0] *= 1e-3  # type: ignore[union-attr,operator,index]
        model.a.bias[0] = -0.1  # type: ignore[union-attr,operator,index]
    assert added(model, torch.randn(12, 6)) == 0


def test_of_a_maximum_over_many_units_none_is_free() -> None:
    """At its own weights a third of the units are never the largest."""
    torch.manual_seed(0)
    model = Computed(
        lambda s, x: s.b(s.c(x)) + s.a(s.c(x)).amax((1, 2))[:, None, None],
        a=nn.Linear(6, 40),
        b=nn.Linear(6, 3),
        c=nn.Linear(6, 6),
    )
    found = find(model.double().eval(), torch.randn(4, 5, 6).double())
    assert not found.refused
    assert rank([each for each in found.symmetries if isinstance(each, Translation)], weights(model)) == 6


def test_means_of_positions_are_free_where_no_other_token_is_read() -> None:
    """Norms take all means away, but the first token is an output."""
    torch.manual_seed(0)

    def first(s: Computed, x: Tensor) -> Tensor:
        y = s.e(x) + s.p
        return s.z(y[:, 0] + s.a(s.norm(y)).tanh().mean(1))

    parts = {"e": nn.Linear(6, 8), "norm": nn.LayerNorm(8), "a": nn.Linear(8, 8), "z": nn.Linear(8, 3)}
    model = Computed(first, p=nn.Parameter(torch.randn(4, 8)), **parts)
    found = find(model.double().eval(), torch.randn(6, 4, 6).double()).symmetries
    means = [each for each in found if isinstance(each, Translation) and each.kind == "mean"]
    assert means
    assert all(each.names == ("p",) for each in means)
    assert rank(means, weights(model)) == 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dead", {"unread": 3 * 8 + 3 + 3 * 9, "unreached": 3 * 12, "shift": 8 + 8}),
        ("fewer classes", {"unread": 5 * 8, "constant": 4 * 8, "shift": 5 * 8}),
        ("ln", {"mean": 10, "constant": 8, "shift": 2 * 8}),
        ("lora", {"beside": 3 * 8, "shift": 8 + 8 + 3}),
        ("attn ln", {"constant": 3 * 8, "shift": 4 * 8}),
        ("bn relu", {"shift": 3 * 8}),
    ],
)
def test_translations_say_how_they_were_read(name: str, expected: dict[str, int]) -> None:
    model, x = net(name, True)
    kinds: dict[str, list[Symmetry]] = {}
    for each in find(model, shown(name, x)[:4]).symmetries:
        if isinstance(each, Translation):
            kinds.setdefault(each.kind, []).append(each)
    assert {kind: rank(some, weights(model)) for kind, some in kinds.items()} == expected


@pytest.mark.parametrize("size", [0.0, 1.0])
def test_a_bias_that_no_output_depends_on_is_shifted_at_whatever_value(size: float) -> None:
    """A key bias: its log-scale moves it, too, but not from 0, and never past it."""
    torch.manual_seed(0)

    def attention(s: Computed, x: Tensor) -> Tensor:
        return (s.q(x) @ s.k(x).mT).softmax(-1) @ s.v(x).tanh()

    model = Computed(attention, **{name: nn.Linear(6, 4) for name in "qkv"})
    with torch.no_grad():
        model.k.bias *= size  # type: ignore[union-attr,operator]
    assert added(model, torch.randn(4, 5, 6)) == 4


def test_shifts_are_read_at_the_points_of_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two points and two fresh ones, each with weights of its own, are replayed once."""
    model, x = net("attn ln", True)
    finder = Wide(Points(model, shown("attn ln", x)[:4]), torch.Generator().manual_seed(1))
    drawn, run = list[object](), Replay.run
    monkeypatch.setattr(Replay, "run", lambda *given, **named: drawn.append(given[1]) or run(*given, **named))
    found = finder.everywhere().symmetries
    assert len(drawn) == 4
    assert rank([each for each in found if isinstance(each, Translation)], weights(model)) == 7 * 8


@pytest.mark.parametrize(("make", "gates"), [(nn.RNN, 1), (nn.LSTM, 4), (nn.GRU, 2)])
def test_two_biases_of_one_sum_are_one(make: type[nn.RNNBase], gates: int) -> None:
    """Those of the new state of a GRU are apart: one of them is multiplied."""
    torch.manual_seed(0)
    model = Computed(lambda s, x: s.h(s.r(x)[0]), r=make(3, 4, batch_first=True), h=nn.Linear(4, 2))  # type: ignore[call-arg]
    assert added(model, torch.randn(6, 5, 3)) == 4 * gates


def test_gradients_that_one_sample_alone_has_are_no_multiples() -> None:
    G = torch.tensor([[1.0, 2.0, 3.0, 6.0], [0.0, 0.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0]]).double()
    assert [(e.tolist(), f.tolist()) for e, f in _pairs(G, torch.zeros(4, dtype=torch.long))] == [([2], [3])]


def test_a_token_of_zeros_is_normed_at_points() -> None:
    torch.manual_seed(0)

    def normed(s: Computed, x: Tensor) -> Tensor:
        return torch.tanh(s.b(F.normalize(s.a(F.pad(x, (0, 0, 0, 1))), dim=-1)))

    model = Computed(normed, a=nn.Linear(3, 4, bias=False), b=nn.Linear(4, 2)).double().eval()
    _, (drawn,) = Points(model, torch.randn(3, 4, 3).double()).samples(1, vectors=["a.weight"])
    assert float(drawn.gradients["a.weight"].norm()) > 0


def test_biases_of_one_sum_may_have_factors() -> None:
    torch.manual_seed(0)
    parts = {name: nn.Parameter(torch.randn(4)) for name in "pqr"}
    model = Computed(lambda s, x: torch.tanh(s.a(x) + s.p - 0.5 * s.q) + s.r, a=nn.Linear(3, 4), **parts)
    assert added(model, torch.randn(12, 3)) == 2 * 4


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("between", "expected"), [(torch.neg, 4 * 9), (torch.relu, 0)])
def test_what_a_narrow_map_does_not_read_is_free_if_it_reads_that_alone(
    between: Callable[[Tensor], Tensor], expected: int, bias: bool
) -> None:
    """Of A (6, 9), which V (2, 6) reads, 4 directions."""
    torch.manual_seed(0)
    parts = {"a": nn.Linear(9, 6, bias=bias), "v": nn.Linear(6, 2, bias=bias)}
    model = Computed(lambda s, x: torch.tanh(s.v(between(s.a(x)))), **parts).double().eval()
    found = find(model, torch.randn(12, 9).double()).symmetries
    unread = [each for each in found if isinstance(each, Translation) and each.kind == "unread"]
    assert rank(unread, weights(model)) == expected
    params = weights(model)
    for each in unread:
        moved = each.moved(params, torch.Generator().manual_seed(0))
        change = moved["a.weight"] - params["a.weight"]
        assert float(change.norm()) > 0.1
        assert float((params["v.weight"] @ change).norm()) < 1e-12 * float(change.norm())


def test_what_two_narrow_maps_do_not_read_is_free() -> None:
    torch.manual_seed(0)
    parts = {"a": nn.Linear(9, 6), "v": nn.Linear(6, 2), "w": nn.Linear(6, 1)}

    def two(s: Computed, x: Tensor) -> Tensor:
        y = s.a(x)
        return torch.tanh(s.v(y)) * torch.sigmoid(s.w(y))

    model = Computed(two, **parts).double().eval()
    found = find(model, torch.randn(12, 9).double()).symmetries
    unread = [each for each in found if isinstance(each, Translation) and each.kind == "unread"]
    assert rank(unread, weights(model)) == 3 * 9


def test_a_constant_does_not_pass_a_padded_convolution() -> None:
    torch.manual_seed(0)
    counts = []
    for padding in (0, 1):
        parts = {"a": nn.Linear(4, 3), "c": nn.Conv1d(3, 3, 3, padding=padding)}
        model = Computed(lambda s, x: torch.tanh(s.c(s.a(x).mT)), **parts)
        counts.append(added(model, torch.randn(4, 6, 4)))
    assert counts == [3, 0]


def test_columns_that_one_sample_alone_has_are_no_parts_of_their_own() -> None:
    """Of words that occur once it is not known at which other positions they may be."""
    g = torch.ones(2, 3, 6)
    g[0, :, [1, 4]] = g[1, :, [2, 4]] = 0
    assert _parts_of(g).tolist() == [1, 1, 1, 2, 2, 3]


def _run_twice(s: Computed, x: Tensor) -> Tensor:
    h = s.e(x)
    for _ in range(2):
        h = h + s.b(torch.tanh(s.a(s.norm(h))))
    return s.c(s.last(h))


def _read_twice(s: Computed, x: Tensor) -> Tensor:
    """Return what two streams make of one table, each with positions of its own."""
    y, z = s.norm(s.t(x) + s.p), s.norm(s.t(x.flip(1)) + s.q)
    return torch.tanh(y) * torch.sin(z)


def _shared_values(s: Computed, x: Tensor) -> Tensor:
    """Return two heads that attend to the same values."""
    heads = [(s.r(x) @ s.k(x).mT).softmax(-1), (s.q(x) @ s.k(x).mT).softmax(-1)]
    return s.o(torch.cat([head @ s.v(x) for head in heads], -1))


def _attended(s: Computed, x: Tensor) -> Tensor:
    return ((s.q(x) @ s.k(x).mT).tanh() + s.bias).softmax(-1) @ torch.sin(x)


def _table(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


FIBRES: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], Callable[[], Tensor]]] = {
    "a block that is run twice": (
        _run_twice,
        lambda: {
            "e": nn.Linear(4, 6),
            "a": nn.Linear(6, 5),
            "b": nn.Linear(5, 6),
            "c": nn.Linear(6, 3),
            "norm": nn.LayerNorm(6),
            "last": nn.LayerNorm(6),
        },
        lambda: torch.randn(300, 4),
    ),
    "a table that is looked up twice": (
        _read_twice,
        lambda: {"t": nn.Embedding(WORDS, 6), "p": _table(3, 6), "q": _table(3, 6), "norm": nn.LayerNorm(6)},
        lambda: torch.randint(WORDS, (300, 3)),
    ),
    "values that two heads share": (
        _shared_values,
        lambda: {**{name: nn.Linear(5, 3) for name in "qrkv"}, "o": nn.Linear(6, 5)},
        lambda: torch.randn(60, 4, 5),
    ),
    "a bias of pairs of tokens": (
        _attended,
        lambda: {"q": nn.Linear(5, 3, bias=False), "k": nn.Linear(5, 3, bias=False), "bias": _table(4, 4)},
        lambda: torch.randn(60, 4, 5),
    ),
}


@pytest.mark.parametrize("name", FIBRES)
def test_token_vectors_show_all_directions_of_the_fibre(name: str) -> None:
    """The dimension of the fibre is the number of parameters minus the rank of the Jacobian."""
    function, parts, inputs = FIBRES[name]
    torch.manual_seed(0)
    model = generic(Computed(function, **parts()).eval(), inputs()[:4])
    x = inputs()
    x = x.double() if x.is_floating_point() else x
    found = Wide(Points(model, x[:8]), torch.Generator().manual_seed(0)).found()
    jacobian = torch.autograd.functional.jacobian
    names, own = zip(*model.named_parameters(), strict=True)

    def outputs(*tensors: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(model, dict(zip(names, tensors, strict=True)), x)
        return y.flatten()

    J = torch.cat([each.flatten(1) for each in jacobian(outputs, own)], 1)
    singular = torch.linalg.svdvals(J / J.norm(dim=1, keepdim=True))
    missing = J.shape[1] - int((singular > 1e-10 * singular[0]).sum()) - rank(found.symmetries, weights(model))
    assert (missing, found.refused) == (0, ())
