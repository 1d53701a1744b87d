"""The dimension of the fibre: counts that are known exactly, and inputs and models that do not give one."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.symmetries import (
    FibreDimension,
    fibre_dimension,
    find_symmetries,
    generic_inputs,
    make_generic,
    small_copy,
)
from tests.nets.handwritten import NanoGPT, SelfAttention
from tests.nets.net import Computed
from tests.symmetries.test_verify import counting


def nano_gpt() -> nn.Module:
    model = NanoGPT(8, 2, 11, 6)
    model.h = model.h[:1]
    return model


def words(count: int, *shape: int, vocabulary: int = 11) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary, shape, generator=generator) for _ in range(count)]


def gaussians(count: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def counts(found: FibreDimension) -> tuple[int, int | None, tuple[str, ...]]:
    return found.dimension, found.near, found.doubts


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_a_product_of_two_matrices_has_the_fibre_of_its_rank(n: int, r: int, m: int, seed: int) -> None:
    """W2 W1 of inner width r: the image has the dimension of matrices of rank k = min(n, r, m), k (n + m - k)."""
    model = make_generic(nn.Sequential(nn.Linear(n, r, bias=False), nn.Linear(r, m, bias=False)), seed=seed)
    k = min(n, r, m)
    found = fibre_dimension(model, gaussians(4 * n + 4, 2, n))
    assert found.dimension == n * r + r * m - k * (n + m - k)
    assert found.near == 0
    assert not found.doubts


def test_the_dimension_is_the_same_along_an_orbit() -> None:
    model = make_generic(SelfAttention(4))
    inputs = gaussians(20, 1, 3, 4)
    moved = find_symmetries(model, inputs[0]).transformed(model, seed=1)
    assert counts(fibre_dimension(model, inputs)) == counts(fibre_dimension(moved, inputs)) == (24, 0, ())


def normed(eps: float) -> nn.Module:
    """Return a norm written out, in float32, between two layers without bias: what goes into it can be scaled, nearly.

    The function knows A^T A and B A, 6 + 6 numbers of 12 + 8, and nearly A up to scale only.
    """

    def forward(s: Any, x: Tensor) -> Tensor:
        x = s.first(x).float()
        return s.second(x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps))

    return Computed(forward, first=nn.Linear(3, 4, bias=False), second=nn.Linear(4, 2, bias=False))


class Cube(torch.autograd.Function):
    """A derivative written by hand, without a rule for vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.from_numpy((3 * grad * x**2).numpy())


def masked(s: Any, x: Tensor) -> Tensor:
    lowest = torch.finfo(x.dtype).min
    return torch.maximum(torch.maximum(s.map(x), torch.full((), lowest)), torch.tensor(lowest))


RELUS = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
CUBES = nn.Sequential(nn.Linear(3, 2, bias=False), Computed(lambda s, x: Cube.apply(x)), nn.Linear(2, 2))
COUNTED: dict[str, tuple[nn.Module, list[Tensor], tuple[int, int]]] = {
    # a model, inputs of it, and its dimension, exact and near, as counted by hand
    "nanoGPT": (nano_gpt(), words(35, 1, 6), (239, 1)),
    "a scale of every hidden ReLU neuron": (RELUS, gaussians(40, 10, 2), (4 + 3, 0)),
    "a norm without eps": (normed(0.0), gaussians(30, 1, 3), (9, 0)),
    "a norm with a tiny eps": (normed(1e-12), gaussians(30, 1, 3), (8, 1)),
    "a norm with an eps": (normed(1e-5), gaussians(30, 1, 3), (8, 1)),
    "derivatives that come one at a time": (CUBES, gaussians(20, 1, 3), (2, 0)),
    "masks by the least number of a type": (Computed(masked, map=nn.Linear(3, 2)), gaussians(20, 1, 3), (0, 0)),
    "one batch of many inputs": (nn.Linear(3, 2), gaussians(1, 8, 3), (0, 0)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_fibre_is_the_one_that_was_counted_by_hand(name: str) -> None:
    model, inputs, counted = COUNTED[name]
    assert counts(fibre_dimension(make_generic(model), inputs)) == (*counted, ())


def test_a_tied_parameter_counts_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    found = fibre_dimension(make_generic(model), gaussians(10, 1, 3))
    assert (found.parameters, found.dimension) == (9, 0)


def test_inputs_of_other_names_are_others() -> None:
    model = Computed(
        lambda s, x=None, y=None: s.a(x) if y is None else s.b(y),
        a=nn.Linear(3, 1, bias=False),
        b=nn.Linear(3, 1, bias=False),
    )
    inputs = [{name: x} for x in gaussians(9, 1, 3) for name in "xy"]
    assert counts(fibre_dimension(make_generic(model), inputs))[:1] == (0,)


def test_frozen_parameters_are_held_fixed_and_reported() -> None:
    model = make_generic(nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 4, bias=False)))
    model[0].weight.requires_grad_(False)
    found = fibre_dimension(model, gaussians(10, 1, 3))
    assert (found.parameters, found.frozen, found.dimension) == (8, 6, 0)
    assert "6 frozen parameters are held fixed" in str(found)


def test_the_model_is_not_changed() -> None:
    model = make_generic(nano_gpt())
    model.wte.padding_idx = 3
    before = copy.deepcopy(model.state_dict())
    fibre_dimension(model, words(3, 1, 6))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(w.grad is None and w.dtype == torch.float32 for w in model.parameters())
    assert model.wte.padding_idx == 3


def test_it_is_plain_data_and_a_report() -> None:
    found = fibre_dimension(make_generic(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))), gaussians(20, 1, 3))
    assert json.loads(json.dumps(found.to_dict()))["dimension"] == found.dimension == 6
    assert str(found).startswith("dimension of the fibre: 6\n17 parameters, less the rank 11")


def cut_off() -> nn.Module:
    return Computed(lambda s, x: s.seen(x) + s.hidden(x).detach(), seen=nn.Linear(3, 2), hidden=nn.Linear(3, 2))


def cut_off_scale() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.first(x).tanh()
        return s.second(h / h.detach().norm(dim=-1, keepdim=True))

    return Computed(forward, first=nn.Linear(3, 4), second=nn.Linear(4, 2))


def rounded_weights() -> nn.Module:
    """Return a map by rounded weights, with derivatives as if they were not."""

    def forward(s: Any, x: Tensor) -> Tensor:
        w = s.first.weight
        return s.second(F.linear(x, w + ((8 * w).round() / 8 - w).detach()).tanh())

    return Computed(forward, first=nn.Linear(3, 4, bias=False), second=nn.Linear(4, 2))


def one_expert_each() -> nn.Module:
    """Return two experts, of which a token takes the one with the larger score."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return torch.where(s.scores(x).argmax(-1, keepdim=True) == 0, s.first(x), s.second(x))

    return Computed(forward, scores=nn.Linear(3, 2), first=nn.Linear(3, 2), second=nn.Linear(3, 2))


def gpt_neox(**settings: int) -> nn.Module:
    with torch.device("meta"):
        large = transformers.GPTNeoXModel(transformers.GPTNeoXConfig())
    return small_copy(large, **settings)


# A model, inputs of it, and the doubt that they leave.
DOUBTFUL: dict[str, tuple[Callable[[], nn.Module], list[Tensor], str]] = {
    **{f"{count} texts": (nano_gpt, words(count, 1, 6), "inputs are too few") for count in (1, 5, 9)},
    "one batch": (lambda: nn.Linear(3, 2), gaussians(1, 3, 3), "inputs are too few"),
    "inputs of all sizes": (
        lambda: nn.Linear(25, 1, bias=False),
        [x * torch.logspace(0, -24, 25) for x in gaussians(50, 1, 25)],
        "the singular values have no gap",
    ),
    "gradients cut off": (cut_off, gaussians(20, 1, 3), "the derivatives are not those"),
    "gradients of a scale cut off": (cut_off_scale, gaussians(40, 1, 3), "the derivatives are not those"),
    "rounded weights": (rounded_weights, gaussians(40, 1, 3), "the derivatives are not those"),
    "choices": (one_expert_each, gaussians(40, 1, 3), "the outputs jump"),
    "a norm of zeros": (
        lambda: nn.Sequential(nn.Linear(3, 2, bias=False), nn.LayerNorm(2)),
        [*gaussians(20, 1, 3), torch.zeros(1, 3)],
        "near symmetries are undetermined",
    ),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_speaks_against_a_dimension_is_said(name: str) -> None:
    make, inputs, doubt = DOUBTFUL[name]
    found = fibre_dimension(make_generic(make()), inputs)
    assert found.doubts
    assert [each for each in found.doubts if each.startswith(doubt)]
    assert f"inconclusive: {doubt}" in str(found)


def test_a_batch_is_split_into_examples_where_each_has_outputs_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    (batch,) = gaussians(1, 90, 3)
    found = fibre_dimension(model, [batch])
    assert (found.batches, found.outputs) == (90, 180)
    together = fibre_dimension(model, [batch], evaluate=lambda model, x: model(x - x.mean(0)))
    assert (together.batches, together.outputs) == (1, 180)
    assert found.dimension == together.dimension == 0


def test_words_are_enough_points_for_a_layer_or_it_is_said() -> None:
    """Without positions, what is parallel to attention is asked at 11 points only; else 164 + 29 are free, by hand."""
    few, enough = (fibre_dimension(model, generic_inputs(model)) for model in (gpt_neox(vocab_size=11), gpt_neox()))
    assert counts(enough) == (164 + 29, 1, ())
    assert few.dimension == 330
    assert few.doubts[0].startswith("inputs are not generic: with noise added to the embeddings the rank grows")


def quantised() -> nn.Module:
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(torch.ones(2, 3, dtype=torch.int8), requires_grad=False)
    return model.eval()


def frozen() -> nn.Module:
    return nn.Linear(3, 2).requires_grad_(False).eval()


def not_finite() -> nn.Module:
    model = nn.Linear(3, 2).eval()
    nn.init.constant_(model.bias, float("nan"))
    return model


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout()), "train mode"),
        (lambda: counting(nn.Linear(3, 2)).eval(), "changes its buffer 'calls'"),
        (quantised, "dequantise"),
        (frozen, "Found 0"),
        (not_finite, "NaN"),
        (lambda: nn.Linear(3, 2000).eval(), "small model of the same kind"),
        (lambda: nn.Linear(3, 2, device="meta").eval(), "load the weights"),
    ],
)
def test_a_model_without_a_dimension_is_refused(make: Callable[[], nn.Module], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        fibre_dimension(make(), gaussians(3, 1, 3))


@pytest.mark.parametrize(
    ("model", "batches", "error"),
    [
        (Computed(lambda s, x: s.map(x).detach(), map=nn.Linear(3, 2)).eval(), gaussians(3, 1, 3), ValueError),
        (nn.Linear(3, 2, bias=False).eval(), [torch.zeros(1, 3)], ValueError),
        ("a name", gaussians(1, 1, 3), TypeError),
        (nn.Linear(3, 2).eval(), torch.zeros(1, 3), TypeError),
        (nn.Linear(3, 2).eval(), {"input": torch.zeros(1, 3)}, TypeError),
        (nn.Linear(3, 2).eval(), [], ValueError),
    ],
)
def test_anything_else_is_refused(model: Any, batches: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="Found"):
        fibre_dimension(model, batches)


def test_inputs_use_every_word_and_every_position() -> None:
    inputs = generic_inputs(gpt_neox())
    assert {tuple(each["input_ids"].shape) for each in inputs} == {(1, 6)}
    assert torch.cat([each["input_ids"] for each in inputs[:7]]).unique().tolist() == list(range(40))


def test_more_inputs_are_the_same_and_others() -> None:
    """So each batch is full, of as many examples as the others."""
    model = gpt_neox(hidden_size=4)
    inputs = [[each["input_ids"] for each in generic_inputs(model, enough=enough)] for enough in (1, 1.1, 1.2, 1.3, 2)]
    assert {len(ids) for listed in inputs for ids in listed} == {2}
    for few, more in itertools.pairwise(inputs):
        assert all(torch.equal(a, b) for a, b in zip(few, more, strict=False))
    assert len(inputs[0]) < len(inputs[-1])


def test_a_small_copy_has_nothing_that_the_model_has_not() -> None:
    with torch.device("meta"):
        large = transformers.GraniteMoeSharedModel(transformers.GraniteMoeSharedConfig(num_hidden_layers=1))
    assert large.config.shared_intermediate_size == 0
    assert not [name for name, _ in small_copy(large).named_parameters() if "shared" in name]


def test_a_small_copy_needs_a_configuration() -> None:
    with pytest.raises(ValueError, match="Found none in NanoGPT"):
        small_copy(nano_gpt())
    with pytest.raises(ValueError, match="GPTNeoXModel makes no small copy"):
        gpt_neox(hidden_size=7)


def test_what_the_eps_of_a_norm_breaks_is_said_in_words() -> None:
    found = fibre_dimension(normed(1e-5).eval(), gaussians(30, 1, 3))
    assert "dimension of the fibre: 8, and 9 if no norm had an eps" in str(found)
