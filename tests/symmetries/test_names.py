"""What is found by charges is named by what it is used for, and pairs are views of groups."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import SymmetricPair, Symmetries, declare_pair
from quotient_manifolds.symmetries.discovery import find_symmetries, propose_symmetries
from quotient_manifolds.symmetries.groups import Translation
from quotient_manifolds.symmetries.names import meaning
from studies.common import load
from tests.nets.sets import SETS
from tests.symmetries.finders import rank, weights

RECORDED = {row["name"]: row["found"] for row in load("fibres")["rows"]}
PAIRS = ("query/key", "value/output", "lora B/A", "bottleneck in/out", "relu neuron", "gated neuron")


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("attention by einsum", {"query/key": "GL(3)^2", "value/output": "GL(3)^2"}),
        ("a module for every head", {"heads.0 query/key": "GL(3)^1", "heads.1 query/key": "GL(3)^1"}),
        ("half of each head rotated", {"query/key rotary": "GL(1, C)^4", "value/output": "GL(6)^2"}),
        ("network with ReLUs", {"relu neuron": "GL+(1)^9"}),
        ("learned temperature", {"query/key": "GL(4)^2", "value/output": "GL(4)^2"}),
        ("llama", {"layers.0.self_attn query/key rotary": "GL(1, C)^4", "layers.0.mlp gated neuron": "GL(1)^12"}),
    ],
)
def test_pairs_are_called_what_they_were(name: str, pairs: dict[str, str]) -> None:
    example = SETS["types"].make(name)
    found = find_symmetries(example.model, example.shown, evaluate=example.evaluate)
    groups = {pair.name: pair.group for pair in found.pairs}
    assert {each: groups.get(each) for each in pairs} == pairs
    assert {kind: size for kind, size in found.families.items() if kind in PAIRS} == {
        kind: size for kind, size in RECORDED[name].items() if kind in PAIRS
    }
    assert all(map(meaning, found.families))
    assert len({each.name for each in found.every}) == len(found.every)
    params = weights(example.model)
    every = (*found.groups, *(pair.gauge for pair in found.pairs))
    assert sum(found.families.values()) == rank(every, params)


@pytest.mark.parametrize("acts", ["GL(h)", "GL+(1)", "GL(1, C)"])
def test_a_pair_is_a_view_of_a_gauge(acts: str) -> None:
    model = nn.ModuleDict({"a": nn.Linear(5, 12), "b": nn.Linear(12, 4)}).double()
    h = {"GL(h)": 3, "GL+(1)": 1, "GL(1, C)": 2}[acts]

    def write(w: dict[str, Tensor]) -> Tensor:
        return torch.cat([w["a.weight"].view(-1, h, 5).mT, w["a.bias"].view(-1, 1, h)], 1)

    def read(w: dict[str, Tensor]) -> Tensor:
        return w["b.weight"].view(4, -1, h).transpose(0, 1)

    pair = declare_pair(model, "both", "bottleneck", G=write, H=read, acts=acts)  # type: ignore[arg-type]
    params = {name: w.detach() for name, w in model.named_parameters()}
    A = pair.gauge.element(torch.Generator().manual_seed(0))
    blocks = torch.stack([A[k : k + h, k : k + h] for k in range(0, 12, h)])
    moved = pair.gauge.act(params, A)
    x, y = pair.read(params), pair.read(moved)
    n = pair.n
    torch.testing.assert_close(y[:, :n], x[:, :n] @ torch.linalg.inv(blocks), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y[:, n:], x[:, n:] @ blocks.mT, rtol=1e-12, atol=1e-12)
    if acts != "GL(1, C)":
        torch.testing.assert_close(pair.act(blocks, x), y, rtol=1e-12, atol=1e-12)
    assert pair.gauge.dimension(params) == pair.group_dimension
    assert pair.gauge.algebra.contains(A)


def test_an_update_of_a_weight_is_an_adapter() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.down, self.up = (nn.Linear(*s, bias=False) for s in ((5, 4), (5, 2), (2, 4)))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.base(x) + 0.5 * self.up(self.down(x)))

    found = find_symmetries(Adapted().double().eval(), torch.randn(6, 5, dtype=torch.float64))
    assert [(pair.kind, pair.group, pair.G.views[0].name) for pair in found.pairs] == [
        ("lora B/A", "GL(2)^1", "up.weight")
    ]
    assert found.families["redundant weight"] > 0


def test_names_of_peft_are_those_of_an_adapter() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    config = peft.LoraConfig(r=2, target_modules=["0"], use_dora=True, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).double().eval()
    found = find_symmetries(adapted, torch.randn(6, 6, dtype=torch.float64))
    assert [(pair.kind, pair.group) for pair in found.pairs] == [("lora B/A", "GL(2)^1")]


def test_shifts_come_in_parts_each_named_by_the_first_parameter_that_it_moves() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double().eval()
    found = find_symmetries(model, torch.randn(6, 4, dtype=torch.float64))
    shifts = {each.name: each for each in found.reparameterizations if each.kind == "redundant bias"}
    assert [(name, each.group) for name, each in shifts.items()] == [("0.bias redundant bias", "R^3")]
    assert all(isinstance(each.symmetry, Translation) for each in shifts.values())


def test_what_an_idle_expert_may_see_is_refused() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 4)
            self.experts = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

        def forward(self, x: Tensor) -> Tensor:
            return self.experts[0](torch.tanh(self.last(self.first(x))))

    model, x = Experts().double().eval(), torch.randn(6, 4, dtype=torch.float64)
    found = find_symmetries(model, x)
    assert any("experts.1" in each.reason for each in found.refused) or not found.pairs
    assert propose_symmetries(model, x).pairs != ()


def test_declared_pairs_take_the_place_of_those_found() -> None:
    model = nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 4)).double().eval()
    cuts: dict[str, Callable[..., Tensor]] = {
        "G": lambda w: w["0.weight"].mT[None],
        "H": lambda w: w["1.weight"][None],
    }
    pair = declare_pair(model, "mine", "own", **cuts)
    found = find_symmetries(model, torch.randn(6, 5, dtype=torch.float64), declared=Symmetries((pair,)))
    assert [each.name for each in found.pairs] == ["mine own"]
    assert isinstance(found.pairs[0], SymmetricPair)


def test_a_random_element_of_everything_leaves_outputs_as_they_are() -> None:
    example = SETS["types"].make("half of each head rotated")
    found = find_symmetries(example.model, example.shown)
    model = example.model.double()
    x = tuple(each.double() for each in example.unseen["rows"])
    for seed in range(2):
        there = found.transformed(model, log_scale=0.3, seed=seed)
        assert not torch.equal(there.q.weight, model.q.weight)
        torch.testing.assert_close(there(*x), model(*x), rtol=1e-7, atol=1e-9)
