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
from tests.nets.handwritten import SelfAttention
from tests.nets.net import Computed
from tests.symmetries.test_fibre import gaussians

NARROW: dict[str, Any] = {"hidden_size": 6, "intermediate_size": 7, "vocab_size": 9}
ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}
# Model, settings of the copy, and its fibre as counted by hand: exact and near.
COUNTED: dict[str, tuple[Callable[[], nn.Module], dict[str, int], tuple[int, int]]] = {
    "GPT-2": (lambda: GPT2Model(GPT2Config(n_layer=3)), {"vocab_size": 11}, (194, 1)),
    "Llama": (lambda: LlamaModel(LlamaConfig(num_key_value_heads=8)), {"vocab_size": 11}, (48, 1)),
    "Llama with a head": (lambda: LlamaForCausalLM(LlamaConfig()), {**NARROW, **ONE_HEAD}, (60, 1)),
    "BERT": (
        lambda: BertModel(BertConfig(), add_pooling_layer=False),
        {**NARROW, "max_position_embeddings": 5, "type_vocab_size": 1},
        (125, 3),
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_all_there_is_is_found(name: str) -> None:
    make, settings, counted = COUNTED[name]
    seen: list[tuple[str, int, int]] = []
    with torch.device("meta"):
        large = make()
    certificate = certify(large, **settings, progress=lambda *what: seen.append(what))
    fibre = certificate.fibre
    assert ((fibre.dimension, fibre.near), fibre.doubts, certificate.missing) == (counted, (), 0)
    assert fibre.gap > 1e8
    assert fibre.above[-1] > 1e-7 > 1e-14 > fibre.below[0]
    said = f"{counted[0]} of {counted[0]} dimensions found in {type(large).__name__}, a copy"
    assert str(certificate).startswith(said)
    assert "not found: 0" in str(certificate)
    assert json.loads(json.dumps(certificate.to_dict()))["fibre"]["dimension"] == counted[0]
    assert seen
    assert all(0 < finished <= total for _, finished, total in seen)


def test_inputs_are_added_until_the_rank_stands_still() -> None:
    """With a head of its own a model has many outputs a word, and few words make three times P of them."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=300, tie_word_embeddings=False))
    certificate = certify(model, **ONE_HEAD, hidden_size=4, intermediate_size=5)
    assert (certificate.fibre.doubts, certificate.missing) == ((), 0)
    assert certificate.fibre.outputs > 3 * certificate.fibre.parameters


def test_rows_of_a_table_that_no_input_reaches_are_told_apart() -> None:
    """Two rows of 4: that the mean of either is free is a symmetry that is found, which leaves 6."""
    sizes = {"hidden_size": 4, "word_embed_proj_dim": 4, "num_attention_heads": 1, "ffn_dim": 3}
    certificate = certify(OPTModel(OPTConfig(num_hidden_layers=1)), vocab_size=9, **sizes)
    assert certificate.fibre.unreached == {"decoder.embed_positions.weight": 8}
    assert (certificate.unreached, certificate.missing) == (6, 0)
    whole = certificate.fibre.dimension
    assert str(certificate).startswith(f"{whole - 6} of {whole} dimensions found, 6 more are reached by no input, in")


def test_what_two_families_share_counts_once() -> None:
    """With a head as wide as the model, keys without mean have a direction that query/key moves and no query sees."""
    certificate = certify(GPT2Model(GPT2Config(n_layer=1)), vocab_size=11, n_embd=6, n_head=1)
    assert (certificate.shared, certificate.missing) == (0, 0)
    assert certificate.found.dimension == certificate.fibre.dimension
    assert sum(certificate.found.families.values()) == certificate.fibre.dimension


def test_a_model_of_the_users_own_is_certified_as_it_is() -> None:
    model = make_generic(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)))
    certificate = certify(model, gaussians(12, 10, 3))
    assert certificate.found.families == {"relu neuron": 5}
    assert "\nrelu neuron  5           positive factors of single neurons, undone in the next layer\n" in str(
        certificate
    )
    assert (certificate.blocks, certificate.missing, certificate.places) == (None, 0, {})
    with pytest.raises(ValueError, match="with batches none is made"):
        certify(model, gaussians(1, 10, 3), hidden_size=4)


@pytest.mark.parametrize("times", [1, 20])
def test_nothing_is_missing_under_a_doubt(times: int) -> None:
    """Inputs that are repeated are no more inputs."""
    model = make_generic(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)))
    certificate = certify(model, gaussians(3, 1, 3) * times)
    assert (certificate.fibre.outputs, bool(certificate.fibre.doubts)) == (6, True)
    assert (certificate.missing, certificate.places) == (None, {})
    assert certificate.to_dict()["missing"] is None
    assert str(certificate).startswith("inconclusive: inputs are too few")
    assert "not found: inconclusive" in str(certificate)


def experts() -> nn.Module:
    """Return a norm, and three experts behind it that tokens choose by their sum, the last one beyond 50."""

    def forward(s: Any, x: Tensor) -> Tensor:
        chosen = torch.bucketize(x.sum(-1), torch.tensor([0.0, 50.0]))
        y, out = s.norm(x), torch.zeros_like(x)
        for index, expert in enumerate(s.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(y[rows]))
        return out

    three = nn.ModuleList(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4)) for _ in range(3))
    return make_generic(Computed(forward, norm=nn.RMSNorm(4, eps=1e-5), experts=three))


def test_an_expert_that_stays_idle_is_unreached() -> None:
    """The norm's gain goes into it, too: inputs are made for it where symmetries are sought."""
    inputs = gaussians(30, 6, 4)
    certificate = certify(experts(), inputs)
    assert (certificate.unreached, certificate.missing) == (3 * 4 + 3 + 4 * 3 + 4, 0)
    everywhere = certify(experts(), [*inputs, *(100 * x for x in inputs)])
    assert (everywhere.unreached, everywhere.missing) == (0, 0)


def test_what_the_first_inputs_do_not_show_all_of_them_decide() -> None:
    """A single token attends to itself, zeros stay zeros, and inputs of different shapes cannot be joined."""
    bottleneck = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 4, bias=False))
    certificate = certify(make_generic(bottleneck), [torch.zeros(2, 5, 3), *gaussians(20, 1, 3)])
    assert (certificate.found.families, certificate.missing) == ({"bottleneck in/out": 4}, 0)
    certificate = certify(make_generic(SelfAttention(4)), [*gaussians(1, 1, 1, 4), *gaussians(30, 1, 5, 4)])
    assert (certificate.fibre.dimension, certificate.missing) == (24, 0)


def test_a_symmetry_of_the_first_inputs_alone_is_none() -> None:
    """Two linear maps, with a ReLU between them for large inputs alone."""
    branching = Computed(
        lambda s, x: s.second(s.first(x).relu() if x.square().mean() > 100 else s.first(x)),
        first=nn.Linear(3, 2, bias=False),
        second=nn.Linear(2, 3),
    )
    model = make_generic(branching)
    certificate = certify(model, [*gaussians(20, 4, 3), *(100 * x for x in gaussians(20, 4, 3))])
    assert certificate.found.families == {"relu neuron": 2}
    assert (certificate.fibre.dimension, certificate.missing, certificate.outside) == (2, 0, ())


def test_what_is_missing_is_placed_in_the_parameters_it_moves() -> None:
    """Constants that go through a gather, in an order that the numbers have, are not all found."""
    gathered = Computed(
        lambda s, x: ((s.w[s.w.detach().argsort()] + s.u) * x).sin() + s.v,
        **{name: nn.Parameter(torch.zeros(4)) for name in "wuv"},
    )
    certificate = certify(make_generic(gathered.eval()), gaussians(20, 2, 4))
    assert (certificate.fibre.dimension, certificate.missing) == (4, 3)
    assert certificate.places == {"w": 1.5, "u": 1.5}
    assert str(certificate).startswith("1 of 4 dimensions found in Computed\n")
    assert "not found: 3, in w (1.5), u (1.5)" in str(certificate)


def test_what_moves_frozen_parameters_is_no_part_of_the_fibre() -> None:
    model = make_generic(nn.Sequential(nn.Embedding(9, 5), nn.LayerNorm(5), nn.Linear(5, 3), nn.Tanh()))
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randint(9, (2, 4), generator=draw) for _ in range(40)]
    free = certify(model, batches)
    model[0].requires_grad_(False)
    certificate = certify(model, batches)
    assert (certificate.missing, certificate.shared, certificate.outside) == (0, 0, ())
    assert certificate.found.dimension == certificate.fibre.dimension < free.found.dimension
