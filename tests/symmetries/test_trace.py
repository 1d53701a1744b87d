"""A recorded run computes in float64 with the model's own weights: no copies, nothing written, the same found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from quotient_manifolds.symmetries import Symmetries, find_symmetries, recorder
from quotient_manifolds.symmetries.double_precision import DoublePrecision
from quotient_manifolds.symmetries.outputs import answer, floating
from quotient_manifolds.symmetries.trace import Trace
from quotient_manifolds.symmetries.traced_pairs import find_pairs
from tests.handwritten_models import handwritten

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    """Weights that C++ code checks the types of, and one that is computed from others."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.head = parametrizations.weight_norm(nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        answers: Tensor = self.head(self.lstm(x)[0])
        return answers


class Typed(nn.Module):
    """Code that asks for types, makes numbers of its own, and casts to float32 in between."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(8, 8), nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        kind = self.linear.weight.dtype
        scores = self.linear(x.to(kind)) @ x.to(kind).mT
        mask = torch.full((5, 5), torch.finfo(kind).min, dtype=kind).triu(1)
        weights = (scores + mask).float().softmax(-1, dtype=torch.float32).to(kind)
        y = (weights @ x.to(kind)).to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.gain * y.to(kind) + torch.arange(8) / 3


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=30, num_key_value_heads=1, tie_word_embeddings=False)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "Llama": (llama, {"input_ids": torch.arange(10).view(2, 5), "use_cache": False}),
    "torch layer": (lambda: nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True), X),
    "recurrent": (Recurrent, X),
    "convolutions": (lambda: nn.Sequential(nn.Conv1d(5, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 2, 1)), X),
    "types": (Typed, X),
    **{name: (lambda name=name: handwritten()[name][0], handwritten()[name][1]) for name in ("NanoGPT", "Adapted")},
}


def made(name: str, kind: torch.dtype) -> tuple[nn.Module, Any]:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    return make().to(kind).eval(), inputs


@torch.no_grad()
def in_float64(model: nn.Module, inputs: Any) -> list[Tensor]:
    """What a copy of the model in float64 answers, which computes nothing in another type."""
    wide = torch.utils._pytree.tree_map_only(
        Tensor, lambda each: each.double() if each.is_floating_point() else each, inputs
    )
    with DoublePrecision():
        return floating(answer(copy.deepcopy(model).double(), wide))


def found(symmetries: Symmetries) -> list[Any]:
    return [
        symmetries.pairs,
        symmetries.translations,
        [(each.name, each.families, each.constant) for each in symmetries.freedoms],
        symmetries.refused,
    ]


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_run_is_in_float64_on_the_weights_themselves(name: str, kind: torch.dtype) -> None:
    model, inputs = made(name, kind)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trace = Trace(model, inputs)
    own = {key: w.data_ptr() for key, w in model.named_parameters()}
    assert {key: w.data_ptr() for key, w in trace.params.items()} == own
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    weights = {w.untyped_storage().data_ptr() for w in trace.params.values()}
    computed = [
        each
        for operation in trace.operations
        for each in operation.outputs
        if each.is_floating_point() and each.untyped_storage().data_ptr() not in weights
    ]
    assert {each.dtype for each in computed} == {torch.float64}
    for ours, reference in zip(trace.outputs, in_float64(model, inputs), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", TYPES[:2], ids=str)
@pytest.mark.parametrize("name", ["Llama", "torch layer", "convolutions", "NanoGPT", "Adapted"])
def test_the_same_is_found_as_in_a_float64_model(name: str, kind: torch.dtype) -> None:
    model, inputs = made(name, kind)
    wide = copy.deepcopy(model).double()
    assert found(find_symmetries(model, inputs)) == found(find_symmetries(wide, inputs))


class Writing(nn.Module):
    """Writes to weights when it runs: to one as a whole, a part of another by a view, to a bias as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.mul_(2.0)
            self.second.weight.data[1:3].t().clamp_(-0.1, 0.1)
            torch.add(self.second.bias, 1.0, out=self.second.bias)
        answers: Tensor = self.third(self.second(self.first(x)))
        return answers


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_a_model_that_writes_to_its_weights_writes_to_copies(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Writing().to(kind).eval()
    before = copy.deepcopy(model.state_dict())
    trace = Trace(model, X)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    shared = {key for key, w in model.named_parameters() if trace.params[key].data_ptr() == w.data_ptr()}
    assert shared == {"first.bias", "third.weight", "third.bias"}
    torch.testing.assert_close(trace.outputs, in_float64(model, X), rtol=1e-12, atol=1e-12)


class Tolerant(nn.Module):
    """Writes to a weight, and goes on if that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.linear.weight.zero_()
        except RuntimeError:
            return x
        answers: Tensor = self.linear(x)
        return answers


class Numpy(nn.Module):
    """Takes a weight out of torch, which only its memory can give."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        answers: Tensor = self.linear(x) + float(np.sum(self.linear.bias.detach().numpy()))
        return answers


@pytest.mark.parametrize("make", [Tolerant, Numpy])
def test_what_needs_more_than_the_numbers_of_a_weight_gets_a_copy(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().eval()
    torch.testing.assert_close(Trace(model, X).outputs, in_float64(model, X), rtol=1e-12, atol=1e-12)


def test_weights_that_lie_in_one_memory_or_out_of_order_are_told_apart() -> None:
    torch.manual_seed(0)
    two = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)]
    model = nn.Sequential(*two, nn.Tanh(), *copy.deepcopy(two)).eval()
    ordered = copy.deepcopy(model)
    flat = torch.stack([model[2].weight.detach(), model[0].weight.detach()])
    model[0].weight, model[2].weight = nn.Parameter(flat[1]), nn.Parameter(flat[0])
    model[6].weight = nn.Parameter(model[6].weight.detach().T.contiguous().T)
    pairs = find_pairs(Trace(model, X)).pairs
    assert len(pairs) == 2
    assert pairs == find_pairs(Trace(ordered, X)).pairs
    torch.testing.assert_close(Trace(model, X).outputs, in_float64(ordered, X), rtol=1e-12, atol=1e-12)


class Turned(nn.Module):
    """Two linear maps with a ReLU between them, whose answer is turned in place, there and back."""

    def __init__(self, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.turn = nn.Linear(8, 5), nn.Linear(5, 3), turn

    def forward(self, x: Tensor) -> Tensor:
        answers: Tensor = self.second(self.turn(self.first(x).relu()))
        return answers


TURNS = [
    lambda h: h.transpose_(1, 2).transpose_(1, 2),
    lambda h: h.unsqueeze_(1).squeeze_(1),
    lambda h: h.unsqueeze_(0)[0],
]


@pytest.mark.parametrize("turn", TURNS, ids=["transpose", "squeeze", "unsqueeze"])
def test_what_changes_its_shape_in_place_is_followed(turn: Callable[[Tensor], Tensor]) -> None:
    model = Turned(turn).double().eval()
    assert [pair.group for pair in find_symmetries(model, X.double()).pairs] == ["GL+(1)^5"]


def test_a_transposition_in_place_is_one() -> None:
    model = Turned(lambda h: h.transpose_(1, 2)).double().eval()  # five tokens and five units: the shape tells nothing
    assert not find_symmetries(model, X.double()).pairs


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU])
def test_recurrent_layers_are_understood(kind: type[nn.RNNBase]) -> None:
    found = find_symmetries(kind(8, 6, batch_first=True).eval(), X)  # they turn their outputs in place
    assert not any(each.name == "the model" for each in found.refused)


def test_a_run_that_fails_says_why_and_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[None] = []
    replica = recorder.replica
    monkeypatch.setattr(recorder, "replica", lambda *args: runs.append(None) or replica(*args))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Trace(nn.Linear(3, 4).eval(), X)
    assert len(runs) == 1


@pytest.mark.parametrize("kind", TYPES[:3], ids=str)
def test_a_product_with_a_large_weight_is_the_same_piece_by_piece(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "PIECE", 24)
    for name in ("torch layer", "types", "Adapted"):
        model, inputs = made(name, kind)
        for ours, reference in zip(Trace(model, inputs).outputs, in_float64(model, inputs), strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)
