"""How much of the fibre of a small copy is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    OPTConfig,
    OPTModel,
)

from quotient_manifolds.symmetries import certify, make_generic
from tests.handwritten_models import SelfAttention

GROUPED: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 30}
NARROW = {"hidden_size": 6, "intermediate_size": 7}

# Model, settings of the copy, the families that are found, the dimension of the fibre.
FOUND: dict[str, tuple[Callable[[], nn.Module], dict[str, int], dict[str, int], int]] = {
    "GPT-2": (
        lambda: GPT2Model(GPT2Config(n_embd=16, n_layer=3, n_head=4)),
        {"vocab_size": 11},
        {
            "query/key": 32,
            "value/output": 32,
            "key bias": 8,
            "value/output bias": 8,
            "gain of a norm": 16,
            "bias of a norm": 16,
            "direction no reader of a norm sees": 36,
            "mean that no norm reads": 39,
            "vector between tables": 7,
        },
        194,
    ),
    "Llama": (
        lambda: LlamaModel(LlamaConfig(**GROUPED, hidden_size=16, num_hidden_layers=2, intermediate_size=24)),
        {"vocab_size": 11},
        {"query/key": 4, "value/output": 16, "gated neuron": 12, "gain of a norm": 16},
        48,
    ),
    "BERT": (
        lambda: BertModel(BertConfig(num_hidden_layers=1), add_pooling_layer=False),
        {**NARROW, "vocab_size": 9, "max_position_embeddings": 5, "type_vocab_size": 1},
        {
            "query/key": 18,
            "value/output": 18,
            "key bias": 6,
            "value/output bias": 6,
            "bias of a norm": 12,
            "direction no reader of a norm sees": 25,
            "mean that no norm reads": 30,
            "vector between tables": 10,
        },
        125,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_all_there_is_is_found(name: str) -> None:
    make, settings, families, dimension = FOUND[name]
    seen: list[tuple[str, int, int]] = []
    certificate = certify(make(), **settings, progress=lambda *what: seen.append(what))
    assert certificate.found.families == families
    assert (certificate.fibre.dimension, certificate.missing) == (dimension, 0)
    assert certificate.fibre.certain
    assert "not found: 0" in str(certificate)
    assert json.loads(json.dumps(certificate.to_dict()))["found"]["dimension"] == dimension
    assert all(0 < finished <= total for _, finished, total in seen)


def test_all_there_is_in_a_llama_with_a_head_of_its_own_is_found() -> None:
    sizes = {**NARROW, "num_attention_heads": 1, "num_key_value_heads": 1}
    certificate = certify(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)), **sizes, vocab_size=9)
    assert certificate.found.families["rotation of the residual stream"] == 6 * 5 // 2
    assert (certificate.fibre.dimension, certificate.fibre.near, certificate.missing) == (60, 1, 0)


def test_inputs_are_added_until_the_rank_stands_still() -> None:
    """With a head of its own a model has many outputs a word, and few words make three times P of them."""
    config = LlamaConfig(vocab_size=300, num_hidden_layers=1, tie_word_embeddings=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    sizes = {"hidden_size": 4, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 5}
    certificate = certify(model, **sizes)
    assert certificate.fibre.certain
    assert certificate.missing == 0
    assert certificate.fibre.outputs >= 2 * certificate.fibre.rank


def test_rows_of_a_table_that_no_input_reaches_are_named() -> None:
    sizes = {"hidden_size": 4, "word_embed_proj_dim": 4, "num_attention_heads": 1, "ffn_dim": 3}
    certificate = certify(OPTModel(OPTConfig(num_hidden_layers=1)), vocab_size=9, **sizes)
    assert certificate.fibre.unreached == {"decoder.embed_positions.weight": 8}
    assert certificate.unreached == 6  # of 8: that the mean of either row is free is a symmetry that is found
    found = sum(certificate.found.families.values()) - certificate.shared
    assert (certificate.fibre.dimension, certificate.missing) == (found + 6, 0)
    assert "reached by no input: 6\nnot found: 0" in str(certificate)


def test_what_two_families_share_counts_once() -> None:
    """With a head as wide as the model, keys without mean have a direction that query/key moves and no query sees."""
    certificate = certify(GPT2Model(GPT2Config(n_layer=1)), vocab_size=11, n_embd=6, n_head=1)
    assert (certificate.shared, certificate.missing) == (1, 0)
    assert "counted twice: 1" in str(certificate)


def gaussians(count: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def test_a_model_of_the_users_own_is_certified_as_it_is() -> None:
    model = make_generic(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)))
    certificate = certify(model, gaussians(12, 10, 3))
    assert certificate.found.families == {"relu neuron": 5}
    assert (certificate.blocks, certificate.missing, certificate.places) == (None, 0, {})
    with pytest.raises(ValueError, match="with batches none is made"):
        certify(model, gaussians(1, 10, 3), hidden_size=4)


@pytest.mark.parametrize("times", [1, 20])
def test_nothing_is_missing_under_a_doubt(times: int) -> None:
    """Inputs that are repeated are no more inputs."""
    model = make_generic(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)))
    certificate = certify(model, gaussians(3, 1, 3) * times)
    assert (certificate.fibre.outputs, certificate.fibre.certain) == (6, False)
    assert (certificate.missing, certificate.places) == (None, {})
    assert certificate.to_dict()["missing"] is None
    assert str(certificate).startswith("inconclusive: inputs are too few")
    assert "not found: inconclusive" in str(certificate)


class Experts(nn.Module):
    """A norm, and three experts behind it that tokens choose by their sum, the last one beyond 50."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(4, eps=1e-5)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.bucketize(x.sum(-1), torch.tensor([0.0, 50.0]))
        y, out = self.norm(x), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(y[rows]))
        return out


def test_an_expert_that_stays_idle_leaves_open_what_is_missing() -> None:
    """The norm's gain goes into it, too, so nothing is found that the rank of the others has."""
    inputs = gaussians(30, 6, 4)
    certificate = certify(make_generic(Experts()), inputs)
    assert (certificate.unreached, certificate.missing) == (3 * 4 + 3 + 4 * 3 + 4, None)
    assert str(certificate).startswith("inconclusive: ")
    assert "experts.2.0.bias did not run" in str(certificate).splitlines()[0]
    everywhere = certify(make_generic(Experts()), [*inputs, *(100 * x for x in inputs)])
    assert (everywhere.unreached, everywhere.missing) == (0, 0)


def test_what_the_first_inputs_do_not_decide_is_not_missing() -> None:
    """A single token attends to itself, zeros stay zeros, and inputs of different shapes cannot be joined."""
    bottleneck = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 4, bias=False))
    certificate = certify(make_generic(bottleneck), [torch.zeros(2, 5, 3), *gaussians(20, 1, 3)])
    assert (certificate.fibre.dimension, certificate.missing) == (4, None)
    assert "bottleneck in/out is inconclusive" in str(certificate).splitlines()[0]
    certificate = certify(make_generic(SelfAttention(4)), [*gaussians(1, 1, 1, 4), *gaussians(30, 1, 5, 4)])
    assert certificate.missing is None
    assert "give several tokens each" in str(certificate).splitlines()[0]
    assert certify(make_generic(SelfAttention(4)), gaussians(30, 1, 5, 4)).missing == 0


class Curved(nn.Module):
    """(w u) x: a scale that no family names, between two vectors that are multiplied elementwise."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u, self.v = (nn.Parameter(torch.randn(4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * self.u * x).sin() + self.v


def test_what_is_missing_is_placed_in_the_parameters_it_moves() -> None:
    model = Curved()
    with torch.no_grad():
        model.w.fill_(1.0)
        model.u.fill_(1.0)
    certificate = certify(model.eval(), gaussians(20, 2, 4))
    assert (certificate.fibre.dimension, certificate.missing) == (4, 4)
    assert certificate.places == {"w": 2.0, "u": 2.0}
    assert "not found: 4, in w (2.0), u (2.0)" in str(certificate)


class Branching(nn.Module):
    """Two linear maps, with a ReLU between them for large inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.both
        return second(first(x).relu() if x.square().mean() > 100 else first(x))


def test_a_symmetry_of_the_first_inputs_alone_is_named() -> None:
    model = make_generic(Branching())
    certificate = certify(model, [*gaussians(20, 4, 3), *(100 * x for x in gaussians(20, 4, 3))])
    assert (certificate.fibre.dimension, certificate.found.families, certificate.missing) == (2, {}, 2)
    assert certificate.outside == ("both bottleneck in/out",)


def test_what_moves_frozen_parameters_alone_is_no_part_of_the_fibre() -> None:
    model = make_generic(nn.Sequential(nn.Embedding(9, 5), nn.LayerNorm(5), nn.Linear(5, 3), nn.Tanh()))
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randint(9, (2, 4), generator=draw) for _ in range(40)]
    assert certify(model, batches).found.families["mean that no norm reads"] == 9
    model[0].requires_grad_(False)
    certificate = certify(model, batches)
    assert (certificate.missing, certificate.shared) == (0, 0)
    assert "mean that no norm reads" not in certificate.found.families
