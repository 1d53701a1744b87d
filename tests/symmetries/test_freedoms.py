"""Freedoms move without changing the function, and folding gives the same numbers from wherever they were moved."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.symmetries import (
    Exchange,
    Freedom,
    GainProducts,
    LogitShift,
    Params,
    ScoreShift,
    Symmetries,
    fibre_dimension,
    find_freedoms,
    spanned_dimension,
)
from quotient_manifolds.symmetries.double_precision import DoublePrecision
from quotient_manifolds.symmetries.outputs import ModelOutputs, floating
from quotient_manifolds.symmetries.trace import Trace

from .test_canonical import IDS, MODELS, PIXELS, SIZES, TEXT, WORDS, D, Embedded, X, doubled, generic, hugging_face
from .test_fibre import NanoGPT


class Plain(nn.Module):
    """Norms without gain and bias, one of which goes into the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D, elementwise_affine=False)
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return self.b(self.norm(n + self.a(n).tanh()))


class Parallel(nn.Module):
    """Two layers beside each other, whose biases are added, and a vector that is added three times over."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(D), nn.LayerNorm(D)
        self.a, self.b, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.start, self.places = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(6, D))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([3 * self.start.expand(len(x), 1, D), x], 1) + self.places
        x = x + x.mean(1, keepdim=True)
        n = self.norm(x)
        return self.head(self.last(x**3 + (self.a(n.tanh()) + self.b(n**4))))


class Unfinished(nn.Module):
    """Layers before which norms stand, and none at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = (nn.Linear(D, D) for _ in range(3))
        self.norm_a, self.norm_b = nn.LayerNorm(D), nn.LayerNorm(D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x - 2 * self.a(self.norm_a(x).tanh())
        return x + self.b(self.norm_b(x).sin())


class Pooled(nn.Module):
    """Norms of the mean of two tokens each, and of all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(D, D), nn.Linear(D, 3), nn.Linear(D, 3)
        self.norm_a, self.norm_b = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        pairs = F.avg_pool1d(x.mT, 2).mT
        return self.a(self.norm_a(pairs).sin()) + self.b(self.norm_b(x.mean(1, keepdim=True))).tanh()


class Squares(nn.Module):
    """Neurons with a squared ReLU behind a norm, and such with another power; one linear map without a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(D, D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, 9, bias=False), nn.Linear(9, D)
        self.a, self.b = nn.Linear(D, 4), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.down(self.up(self.norm(x)).relu().square())
        return self.b(F.leaky_relu(self.a(self.last(x).sin()), 0.1) ** 3).sin()


class Placed(nn.Module):
    """Attention with biases for distances that are added in place, and with one for every two positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.table, self.places = nn.Embedding(5, 2), nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x).tanh() @ self.k(x).tanh().mT
        first = (scores + self.places).softmax(-1) @ x
        scores = scores[:, None].repeat(1, 2, 1, 1)
        scores += self.table((torch.arange(5)[:, None] - torch.arange(5)).abs()).permute(2, 0, 1)
        near, far = (scores.softmax(-1) @ x[:, None]).unbind(1)
        return self.head(first).sin() + self.head(near).exp() + self.head(far).tanh()


class NormedHeads(nn.Module):
    """Attention with norms on queries and keys, which have biases; a rotary embedding on the first half of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.norm_q, self.norm_k = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1], dtype=x.dtype)
        q, k = (self.turned(norm(one(x).unflatten(-1, (2, 4))).transpose(1, 2), angle) for norm, one in self.sides())
        v = self.v(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return (torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1) @ v).transpose(1, 2).flatten(-2)

    def sides(self) -> tuple[tuple[nn.Module, nn.Module], ...]:
        return (self.norm_q, self.q), (self.norm_k, self.k)

    def turned(self, x: Tensor, angle: Tensor) -> Tensor:
        first, second, rest = x[..., :1], x[..., 1:2], x[..., 2:]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], -1)


class NormedAfterNorm(nn.Module):
    """Queries and keys of one linear map that reads a norm, with norms for every head; and what is no head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_q, self.norm_k = nn.LayerNorm(D), nn.LayerNorm(4), nn.LayerNorm(4)
        self.qkv, self.head = nn.Linear(D, 3 * D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (2, 3, 4)).unbind(-2)
        q, k = self.norm_q(q).sin(), self.norm_k(k).sin()
        weights = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
        return self.head(torch.einsum("bhij,bjhd->bihd", weights, v.sin()).flatten(-2))


class Experts(nn.Module):
    """Two layers in one parameter, each of which reads some of the rows that a norm gives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.layers = nn.LayerNorm(D), nn.Linear(D, 2), nn.Parameter(torch.randn(2, D, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).flatten(0, 1)
        weights = self.router(y).softmax(-1)
        out = torch.zeros_like(y)[:, :3]
        for layer, weight in zip(self.layers, weights.unbind(-1), strict=True):
            (rows,) = torch.where(weight > 0.5)
            out = out.index_add(0, rows, weight[rows, None] * (y[rows] @ layer).tanh())
        return out


class Weighted(nn.Module):
    """A linear map and a convolution with weight norms."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.first, self.second = norm(nn.Linear(D, 4)), norm(nn.Conv1d(4, 3, 2), dim=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).sin().mT).tanh()


class Convolutions(nn.Module):
    """Batch norms after a convolution with a bias and one without, and after a linear map; a layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, D, 2), nn.Conv2d(D, D, 2, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(D), nn.BatchNorm2d(D), nn.BatchNorm1d(3)])
        self.branch, self.scale, self.norm = nn.Linear(D, D), nn.Parameter(torch.randn(D)), nn.LayerNorm(D)
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[1](self.second(self.norms[0](self.first(x)).sin())).sin().mean((-1, -2))
        return self.norms[2](self.head(self.norm(x**3 + self.scale * self.branch(x)))).tanh()


T5 = {"d_model": D, "num_heads": 2, "d_kv": 4, "d_ff": 12, "num_layers": 1, "vocab_size": 11}
NAMES = ("torch, norms first", "torch, norms last", "torch decoder", "handwritten", "a norm in two places", "GPT-2")
CASES = {
    **{name: MODELS[name][:2] for name in (*NAMES, "Llama", "BERT", "ViT")},
    "two tables": (Embedded, IDS),
    "a head without bias": (NanoGPT, torch.arange(12).view(2, 6) % 11),
    "norms without gains": (Plain, X),
    "parallel layers": (Parallel, X),
    "no norm at the end": (Unfinished, X),
    "norms of averages": (Pooled, X),
    "squared ReLUs": (Squares, X),
    "biases of scores": (Placed, X),
    "norms on heads of a map after a norm": (NormedAfterNorm, X),
    "experts": (Experts, X),
    "weight norms": (Weighted, X),
    "batch norms": (Convolutions, torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))),
    "T5": (hugging_face("T5EncoderModel", **T5), WORDS),
    "norms on queries and keys": (NormedHeads, X),
    "Qwen3": (hugging_face("Qwen3Model", **TEXT, num_key_value_heads=1, head_dim=4), WORDS),
    "Gemma": (hugging_face("GemmaModel", **TEXT, num_key_value_heads=1, head_dim=4), WORDS),
    "Llama with a head": (hugging_face("LlamaForCausalLM", **TEXT, tie_word_embeddings=False), WORDS),
    "ViT with a head": (hugging_face("ViTForImageClassification", **SIZES, image_size=8, patch_size=4), PIXELS),
}
sizes, seeds = st.floats(0.01, 3.0), st.integers(0, 2**31)


@cache
def prepared(name: str) -> tuple[nn.Module, Any, tuple[Freedom, ...], Params]:
    make, inputs = CASES[name]
    model, inputs = generic(make), doubled(inputs)
    freedoms, _ = find_freedoms(Trace(model, inputs))
    return model, inputs, freedoms, {key: w.detach().clone() for key, w in model.named_parameters()}


@torch.no_grad()
def change(model: nn.Module, inputs: Any, params: Params) -> float:
    """Return by how much any output changes, relative to the largest."""
    args = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
    kwargs = inputs if isinstance(inputs, dict) else {}
    with DoublePrecision():  # norms of Llama cast to float32
        before, after = (floating(torch.func.functional_call(model, each, args, kwargs)) for each in ({}, params))
    return max(float((new - old).abs().max() / old.abs().max()) for new, old in zip(after, before, strict=True))


def copied(params: Params) -> Params:
    return {key: w.clone() for key, w in params.items()}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=4)
@given(size=sizes, seed=seeds)
def test_every_move_leaves_the_function_alone_and_its_control_does_not(name: str, size: float, seed: int) -> None:
    model, inputs, freedoms, own = prepared(name)
    assert len({freedom.name for freedom in freedoms}) == len(freedoms) > 0
    for freedom in freedoms:
        moved, control = ({key: own[key].clone() for key in freedom.names} for _ in range(2))
        freedom.move(moved, torch.Generator().manual_seed(seed), size)
        assert change(model, inputs, moved) < 1e-9, freedom.name
        freedom.move(control, torch.Generator().manual_seed(seed), size, control=True)
        assert change(model, inputs, control) > 1e-5, freedom.name


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=4)
@given(size=sizes, seed=seeds)
def test_folding_gives_the_same_numbers_from_every_point_of_an_orbit(name: str, size: float, seed: int) -> None:
    _, _, freedoms, start = prepared(name)
    own, there, draw = copied(start), copied(start), torch.Generator().manual_seed(seed)
    for index in torch.randperm(len(freedoms), generator=draw):
        freedoms[int(index)].move(there, draw, size)
    for params in (own, there):
        for freedom in freedoms:
            freedom.fold(params)
    for key, w in own.items():
        torch.testing.assert_close(there[key], w, rtol=0, atol=1e-9 * float(w.abs().max()), msg=key)
    constant = {key for freedom in freedoms for key in freedom.constant}
    assert all(bool(((own[key] == 0) | (own[key] == 1)).all()) for key in constant)


@pytest.mark.parametrize("name", CASES)
def test_dimensions_add_up_to_those_of_the_tangent_vectors(name: str) -> None:
    _, _, freedoms, own = prepared(name)
    counted = sum(sum(freedom.families.values()) for freedom in freedoms)
    assert spanned_dimension(Symmetries((), freedoms=freedoms), own) == counted


class ManyWords(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, D)


class Enlarged(ManyWords):
    """What the tables give is multiplied in place."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        x *= 3
        x = x + self.places
        return self.head(self.norm(x + self.down(F.gelu(self.up(self.first(x))))))


WITHOUT_ATTENTION: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "two tables": (ManyWords, lambda draw: torch.randint(40, (2, 5), generator=draw)),
    "a table multiplied in place": (Enlarged, lambda draw: torch.randint(40, (2, 5), generator=draw)),
    "norms without gains": (Plain, lambda draw: torch.randn(X.shape, generator=draw)),
    "parallel layers": (Parallel, lambda draw: torch.randn(X.shape, generator=draw)),
    "no norm at the end": (Unfinished, lambda draw: torch.randn(X.shape, generator=draw)),
    "norms of averages": (Pooled, lambda draw: torch.randn(X.shape, generator=draw)),
    "squared ReLUs": (Squares, lambda draw: torch.randn(X.shape, generator=draw)),
    "biases of scores": (Placed, lambda draw: torch.randn(X.shape, generator=draw)),
    "norms on heads": (NormedAfterNorm, lambda draw: torch.randn(X.shape, generator=draw)),
    "experts": (Experts, lambda draw: torch.randn(X.shape, generator=draw)),
    "weight norms": (Weighted, lambda draw: torch.randn(X.shape, generator=draw)),
    "batch norms": (Convolutions, lambda draw: torch.randn(3, 2, 4, 4, generator=draw)),
}


@pytest.mark.parametrize("name", WITHOUT_ATTENTION)
def test_nothing_is_missing_where_there_is_no_attention(name: str) -> None:
    make, batch = WITHOUT_ATTENTION[name]
    model, draw = generic(make), torch.Generator().manual_seed(0)
    enough = 120 if name in ("two tables", "a table multiplied in place", "batch norms") else 60
    batches = [doubled(batch(draw)) for _ in range(enough)]
    freedoms, _ = find_freedoms(Trace(model, batches[0]))
    found = fibre_dimension(model, batches)
    assert (found.dimension, found.doubts) == (sum(sum(each.families.values()) for each in freedoms), ())


def test_all_but_attention_of_a_model_written_by_hand_is_found() -> None:
    """The fibre has 231 dimensions, see the test of it, of which GL(4) and needless biases of attention are 64 + 16."""
    _, _, freedoms, _ = prepared("a head without bias")
    assert sum(sum(freedom.families.values()) for freedom in freedoms) == 231 - 64 - 16


def test_gains_of_queries_and_keys_are_free_channel_by_channel_and_plane_by_plane() -> None:
    for name, dimension in (("norms on queries and keys", 1 + 2), ("Qwen3", 2)):
        _, _, freedoms, _ = prepared(name)
        (found,) = (each for each in freedoms if isinstance(each, GainProducts))
        assert found.families == {"gain of a query norm against a key norm": dimension}


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, labels = batch
    return F.cross_entropy(model(x), labels, reduction="none")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_a_loss_does_not_see_what_is_added_to_all_logits(bias: bool, affine: bool) -> None:
    """One more direction than inputs of the head, less one that the norm leaves free and that shifts all logits."""

    def make() -> nn.Module:
        norm = nn.LayerNorm(D, elementwise_affine=affine)
        return nn.Sequential(nn.Linear(D, D), nn.Tanh(), norm, nn.Linear(D, 4, bias=bias))

    model, draw = generic(make), torch.Generator().manual_seed(0)
    inputs = [(torch.randn(20, D, generator=draw).double(), torch.randint(4, (20,), generator=draw)) for _ in range(20)]
    freedoms, _ = find_freedoms(Trace(model, inputs[0], losses))
    counted = sum(sum(each.families.values()) for each in freedoms)
    assert fibre_dimension(model, inputs, evaluate=losses).dimension == counted
    own = {key: w.detach().clone() for key, w in model.named_parameters()}
    assert spanned_dimension(Symmetries((), freedoms=freedoms), own) == counted
    (shift,) = (each for each in freedoms if isinstance(each, LogitShift))
    moved = copied(own)
    shift.move(moved, draw, 3.0)
    outputs = ModelOutputs(model, inputs[0], losses)
    assert outputs.change(moved) < 1e-12
    for params in (own, moved):
        for each in freedoms:
            each.fold(params)
    for key, w in own.items():
        torch.testing.assert_close(moved[key], w, rtol=0, atol=1e-12 * float(w.abs().max()))
    assert not any(isinstance(each, LogitShift) for each in find_freedoms(Trace(model, inputs[0][0]))[0])


class Numbered(nn.Module):
    """A class token before others; a table of positions, asked by numbers of the model's own or by inputs."""

    def __init__(self, positions: int = 4) -> None:
        super().__init__()
        self.start, self.places = nn.Parameter(torch.randn(D)), nn.Embedding(positions, D)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 3)
        self.register_buffer("numbers", torch.arange(4)[None])

    def forward(self, x: Tensor, numbers: Tensor | None = None) -> Tensor:
        x = torch.cat([self.start.expand(len(x), 1, D), x], 1)
        return self.head(self.norm(x + self.places(self.numbers if numbers is None else numbers)).sin())


def test_a_row_of_positions_is_one_token_s_only_if_inputs_do_not_say_which() -> None:
    x = torch.randn(2, 3, D, dtype=torch.float64)
    for positions, numbers, dimension in ((4, (), D - 1), (5, (), 0), (4, (torch.arange(4)[None],), 0)):
        freedoms, _ = find_freedoms(Trace(generic(partial(Numbered, positions)), (x, *numbers)))
        found = [each.families["vector between tables"] for each in freedoms if isinstance(each, Exchange)]
        assert found == [dimension] * bool(dimension)


def test_the_mean_of_biases_for_distances_is_no_matter_to_softmax() -> None:
    _, _, freedoms, _ = prepared("T5")
    (found,) = (each for each in freedoms if isinstance(each, ScoreShift))
    assert found.families == {"shift of all scores": 2}
    assert found.names == ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",)
