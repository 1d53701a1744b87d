"""Alignment: an element of the whole group that was planted is found, by weights and by activations."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quotient_manifolds.manifolds import FixedRankQuotient
from quotient_manifolds.orbit import (
    Alignment,
    Group,
    PathLosses,
    align,
    closest,
    loss_along_path,
    quotient_distance,
    same_function,
)
from quotient_manifolds.orbit.group import Walk
from quotient_manifolds.orbit.units import Units
from quotient_manifolds.symmetries.discovery import find_permutations, find_symmetries
from tests.nets.attention import BY_NAME, GPT2, IDS, TEXT, hugging_face, llama, noise
from tests.nets.handwritten import HeadByHead
from tests.nets.net import Computed, shaken
from tests.nets.small import found_in, shown
from tests.orbit.found import planted

RECOVERED = 1e-6
WIDTH, HEADS, WORDS = 16, 4, 60
WITH_BIASES = ["encoder", "gelu", "lora", "ln res", "squared relu", "cls, norms and positions", "positions first"]
WITH_BIASES += ["post-norm", "idle expert"]
WITHOUT = ["two", "gain lin", "ln final", "fewer classes", "post-norm"]


class PreNorm(nn.Module):
    """Two layers of attention and ReLU neurons, each after an RMSNorm."""

    def __init__(self, bias: bool) -> None:
        super().__init__()

        def twice(a: int, b: int) -> nn.ModuleList:
            return nn.ModuleList(nn.Linear(a, b, bias=bias) for _ in range(2))

        self.embed, self.norms = nn.Embedding(WORDS, WIDTH), nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(5))
        self.q, self.k, self.v, self.o = (twice(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down, self.head = twice(WIDTH, 2 * WIDTH), twice(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for i in range(2):
            n = self.norms[2 * i](x)
            q, k, v = (each[i](n).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
            x = x + self.o[i](((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + self.down[i](self.up[i](self.norms[2 * i + 1](x)).relu())
        return self.head(self.norms[4](x))


def pre_norm(bias: bool = True, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return shaken(PreNorm(bias).double(), 0.15)


def without_biases(model: nn.Module) -> nn.Module:
    """As after initialization."""
    with torch.no_grad():
        for name, w in model.named_parameters():
            w *= not name.endswith("bias")
    return model


class GroupedQueries(nn.Module):
    """Four query heads to two key and value heads, and a convolution in groups: units that are some of a pair's."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, n) for n in (WIDTH, WIDTH // 2, WIDTH // 2, WIDTH))
        self.first, self.last = nn.Conv1d(WIDTH, 12, 3, groups=2), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        x = x + self.o(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.last(self.first(x.mT).relu().mT)


def grouped_queries() -> nn.Module:
    torch.manual_seed(0)
    return GroupedQueries().double().eval()


TOKENS = torch.randint(WORDS, (4, 10), generator=torch.Generator().manual_seed(3))
ONE_LAYER = {
    "BERT": hugging_face("BertModel", "BertConfig", **{**TEXT, "num_hidden_layers": 1}),
    "GPT-2": hugging_face("GPT2LMHeadModel", "GPT2Config", **{**GPT2, "n_layer": 1}),
}
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "pre-norm": (pre_norm, TOKENS),
    "pre-norm without biases": (lambda: pre_norm(bias=False), TOKENS),
    "rotary, grouped queries": (lambda: llama().double(), IDS),
    "BERT, biases 0": (lambda: without_biases(ONE_LAYER["BERT"]().eval()), BY_NAME["BERT"].inputs),
    "units in groups": (grouped_queries, torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(0)).double()),
    "head by head": (lambda: HeadByHead().eval(), noise(2, 5, 8)),
    **{name: (replace(BY_NAME[name], make=make).build, BY_NAME[name].inputs) for name, make in ONE_LAYER.items()},
}


@pytest.mark.parametrize(
    ("name", "by"),
    [
        *((name, by) for name in [*MODELS][:3] for by in ("weights", "activations")),
        *(("BERT", "activations"), ("GPT-2", "weights"), ("BERT, biases 0", "weights")),
        ("head by head", "weights"),
        ("units in groups", "weights"),
    ],
)
def test_an_element_of_the_whole_group_is_recovered(name: str, by: Any) -> None:
    make, inputs = MODELS[name]
    model = make().double()
    inputs = inputs() if callable(inputs) else inputs
    twin = planted(model, inputs)
    found = align(twin, model, inputs, by=by, condition=1e9)
    assert found.before > 0.5
    assert found.distance < RECOVERED
    applied = found.element.apply({key: w.detach() for key, w in twin.named_parameters()})
    for key, w in ((key, w.detach()) for key, w in model.named_parameters()):
        torch.testing.assert_close(found.params[key], w, rtol=0, atol=RECOVERED * float(w.abs().max() or 1.0))
        size = float(w.abs().max() or 1.0)
        torch.testing.assert_close(found.params[key], applied[key], rtol=1e-12, atol=1e-12 * size)


@pytest.mark.parametrize(
    ("name", "bias"),
    [*((name, True) for name in WITH_BIASES), *((name, False) for name in WITHOUT)],
)
def test_elements_are_recovered_in_small_nets(name: str, bias: bool) -> None:
    model, x, _ = found_in(name, bias)
    x = shown(name, x)
    found = align(planted(model, x), model, x, by="weights", condition=1e9)
    assert found.distance < RECOVERED < found.before


def test_wide_models_are_fitted_without_a_jacobian(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closest, "DENSE", 0)
    found = align(planted(model := pre_norm(), TOKENS), model, TOKENS, by="weights", condition=1e9)
    assert found.distance < RECOVERED < found.before


def test_slopes_along_generators_are_those_where_their_symmetry_acts() -> None:
    """Between those before and those after it, which need not commute with it."""
    model, _, symmetries = found_in("encoder", True)
    own = {name: w.detach() for name, w in model.named_parameters()}
    group, draw = Group(symmetries, own), torch.Generator().manual_seed(0)
    walk = Walk(group, own)
    walk.go([0.1 * torch.randn(each.shape, generator=draw) for each in group.symmetries])
    y = {name: torch.randn(walk.params[name].shape, generator=draw) for name in group.names}
    for k, slope in enumerate(walk.charges(y)):
        X = group.symmetries[k].project(torch.randn(slope.shape, generator=draw))
        ends = []
        for t in (1e-6, -1e-6):
            there = Walk(group, own)
            there.values = [*walk.values]
            there.go([t * X if n == k else torch.zeros(each.shape) for n, each in enumerate(group.symmetries)])
            ends.append(sum(float((there.params[name] * v).sum()) for name, v in y.items()))
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(float((slope * X).sum()), rel=1e-5, abs=1e-6)


def trained(seed: int, steps: int = 150) -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor], list[Any]]:
    """A net that was trained on a small task, another one for each seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)).double()
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(256, 6, generator=draw, dtype=torch.float64)
    y = (x @ torch.randn(6, 4, generator=draw, dtype=torch.float64)).sin().argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]), [(x, y)]


def test_the_barrier_between_two_seeds_falls_and_falls_again_where_the_path_is_refined() -> None:
    a, loss, batches = trained(0)
    b, _, _ = trained(1)
    x = batches[0][0]
    closed: Alignment = align(b, a, x)
    learned: Alignment = align(b, a, x, loss=loss, batches=batches, steps=60)
    barriers = [loss_along_path(a, each, loss, batches).barrier for each in (b, closed.model, learned.model)]
    assert closed.distance < 0.9 * closed.before
    assert barriers[1] < 0.9 * barriers[0]
    assert barriers[2] < barriers[1]
    assert learned.path[-1] < learned.path[0]
    assert max(closed.change, learned.change) < 1e-10


def test_a_path_begins_and_ends_at_the_models() -> None:
    a, loss, batches = trained(0, 20)
    b, _, _ = trained(1, 20)
    path = loss_along_path(a, b, loss, batches, points=5)
    assert path.t == (0, 0.25, 0.5, 0.75, 1)
    assert path.losses[0] == pytest.approx(loss(a, batches[0]).item())
    assert path.losses[-1] == pytest.approx(loss(b, batches[0]).item())
    assert loss_along_path(a, a, loss, batches).barrier == pytest.approx(0, abs=1e-12)


def test_whether_two_models_are_one_function() -> None:
    model = pre_norm()
    same, how_far = same_function(model, planted(model, TOKENS), TOKENS, condition=1e9)
    assert (same, how_far < RECOVERED) == ("same", True)
    assert same_function(model, pre_norm(seed=1), TOKENS)[0] == "different"
    a, x, _ = found_in("relu", True)
    b = copy.deepcopy(a)
    with torch.no_grad():  # on these inputs neuron 0 is dead, whatever it would write
        for each in (a, b):
            each.get_parameter("a.bias")[0] = -1e4
        b.get_parameter("b.weight")[:, 0] += 1
    verdict, left = same_function(a, b, x)
    assert verdict == "same outputs here, no element found"
    assert left > 1e-5


def test_statistics_of_a_norm_are_part_of_a_function() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double().eval()
    other, x = copy.deepcopy(model), torch.randn(5, 4, dtype=torch.float64)
    other[1].get_buffer("running_mean").add_(1.0)
    with pytest.warns(UserWarning, match=r"buffers.* 1\.running_mean$"):
        verdict, _ = same_function(model, other, (x, 0), evaluate=lambda model, batch: model(batch[0]))
    assert verdict == "different"


def test_a_path_takes_models_of_two_precisions() -> None:
    model, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    wide = copy.deepcopy(model).double()
    path = loss_along_path(model, wide, lambda model, x: model(x).square().mean(), [x])
    assert path.barrier < 1e-6


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_the_distance_on_the_quotient_is_that_of_the_orbits(metric: Any) -> None:
    model, near = pre_norm(), shaken(pre_norm(), 1e-3)
    found = find_symmetries(model, TOKENS)
    far = quotient_distance(model, near, TOKENS, metric=metric, symmetries=found)
    moved = [planted(each, TOKENS, seed, permutations=False) for seed, each in enumerate((model, near))]
    assert quotient_distance(*moved, TOKENS, metric=metric) == pytest.approx(far, rel=1e-6)
    assert quotient_distance(model, moved[0], TOKENS, metric=metric, symmetries=found) < RECOVERED < far
    assert quotient_distance(near, model, TOKENS, metric=metric) == pytest.approx(far, rel=1e-6)


def test_the_distance_of_one_pair_is_that_of_its_manifold() -> None:
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(5, 2, bias=False), nn.Linear(2, 4, bias=False)).double().eval()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b[0].weight += 0.1 * torch.randn_like(b[0].weight)
    x, y = (torch.cat([each[0].weight.T, each[1].weight])[None].detach() for each in (a, b))
    far = quotient_distance(a, b, torch.randn(3, 5).double())
    assert far == pytest.approx(float(FixedRankQuotient(5, 4, "inv").dist(x, y)), rel=1e-9)


def test_models_of_different_architectures_are_refused() -> None:
    a, b = (nn.Sequential(nn.Linear(3, n), nn.Linear(n, 2)).eval() for n in (4, 5))
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"one architecture. Found that '0.weight' has \(4, 3\) and \(5, 3\)"):
        align(a, b, x)
    with pytest.raises(ValueError, match=r"'1.weight' has \(2, 4\) and no such parameter"):
        loss_along_path(a, nn.Sequential(nn.Linear(3, 4)), lambda model, batch: model(batch).sum(), [x])
    with pytest.raises(ValueError, match=r"by must be one of activations, weights. Found 'both'"):
        align(a, a, x, by="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="points must be an integer of at least 3"):
        loss_along_path(a, a, lambda model, batch: model(batch).sum(), [x], points=2)
    with pytest.raises(ValueError, match="at least one batch"):
        loss_along_path(a, a, lambda model, batch: model(batch).sum(), [])


def test_labels_of_units_stand_where_their_numbers_do() -> None:
    """Whatever the model multiplies a weight by."""
    model = Computed(lambda s, x: F.linear(s.a(x).tanh(), 2 * s.b.weight), a=nn.Linear(5, 8), b=nn.Linear(8, 3)).eval()
    (units,) = find_permutations(model, torch.randn(4, 5))
    found = Units(units, (), {name: w.ndim for name, w in model.named_parameters()})
    order = torch.randperm(8)
    here = {name: w.detach() for name, w in model.named_parameters()}
    assert torch.equal(found.order(here, units.act(here, order)), order)
    assert not found.exchanged


A, X = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double().eval(), torch.randn(2, 3).double()
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"steps": 0}, "steps must be an integer of at least 1. Found 0"),
    ({"learning_rate": -1.0}, "learning_rate must be a positive finite number. Found -1.0"),
    ({"condition": "much"}, "bound on the condition number must be a number above 1. Found 'much'"),
    ({"loss": nn.MSELoss()}, "must be called as loss.model, batch.. Found torch's MSELoss"),
    ({"loss": lambda model, x: A(x).sum(), "batches": [X]}, "Found that it depends on none: use 0.weight"),
    ({"loss": lambda model, x: model(x).sum()}, "at least one batch"),
    ({"batches": [X]}, "batches must come with a loss"),
    ({"held_out": X}, "held_out must be a list of inputs. Found one Tensor"),
    ({"held_out": [X[:, :2]]}, "on inputs number 2: Sequential must run on the inputs .* raises RuntimeError"),
    ({"to": {}}, "model must be a torch.nn.Module. Found an object of type dict"),
    ({"to": copy.deepcopy(A).train()}, "eval mode"),
    ({"to": copy.deepcopy(A).to("meta")}, "'0.weight' must have values"),
]


@pytest.mark.parametrize(("given", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_bad_input_gets_one_sentence(given: dict[str, Any], why: str) -> None:
    with pytest.raises((ValueError, TypeError), match=why):
        align(A, **{"to": copy.deepcopy(A), "inputs": X, **given})


@pytest.mark.parametrize("other", [3, copy.deepcopy(A).train(), copy.deepcopy(A).to("meta")])
def test_every_comparison_refuses_what_cannot_run(other: Any) -> None:
    for compare in (same_function, quotient_distance):
        with pytest.raises((ValueError, TypeError), match=r"Module\. Found|eval mode|must have values"):
            compare(A, other, X)
    with pytest.raises((ValueError, TypeError), match=r"Module\. Found|eval mode|must have values"):
        loss_along_path(A, other, lambda model, x: model(x).sum(), [X])
    with pytest.raises(ValueError, match="tolerance must be a finite number of at least 0"):
        same_function(A, A, X, tolerance=-1.0)


def test_a_loss_that_is_no_number_somewhere_is_no_barrier_of_0() -> None:
    assert math.isnan(PathLosses((0, 0.5, 1), (1.0, math.nan, 1.0)).barrier)


def test_no_model_is_changed() -> None:
    (a, loss, batches), b = trained(0, 1), trained(1, 1)[0]
    b.get_parameter("0.weight").requires_grad_(False)
    handle = b.register_forward_hook(lambda module, args, output: None)
    before = [(copy.deepcopy(each.state_dict()), [w.requires_grad for w in each.parameters()]) for each in (a, b)]
    state = torch.get_rng_state()
    align(b, a, batches[0][0], loss=loss, batches=iter(batches), steps=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert [*b._forward_hooks] == [handle.id]
    for each, (tensors, wanted) in zip((a, b), before, strict=True):
        assert all(torch.equal(w, tensors[name]) for name, w in each.state_dict().items())
        assert [w.requires_grad for w in each.parameters()] == wanted


def test_a_model_that_runs_in_single_precision_alone_is_aligned() -> None:
    """As grouped products of experts do."""

    def single(s: Any, x: Tensor) -> Tensor:
        assert s.a.weight.dtype == torch.float32, "no kernel"
        return s.b(s.a(x).relu())

    model = Computed(single, a=nn.Linear(4, 5), b=nn.Linear(5, 3)).eval()
    x = torch.randn(6, 4, dtype=torch.float32)
    moved = planted(model.float(), x)
    assert align(moved, model, x, condition=1e6).distance < 1e-5
