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
from tests.handwritten_models import SelfAttention


class NanoGPT(nn.Module):
    """Written by hand, as nanoGPT is: packed projection, GELU, an untied head without bias."""

    def __init__(self, d: int = 8, heads: int = 2, ff: int = 12, words: int = 11, positions: int = 6) -> None:
        super().__init__()
        self.heads = heads
        self.wte, self.wpe = nn.Embedding(words, d), nn.Embedding(positions, d)
        self.ln_1, self.ln_2, self.ln_f = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.attn_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.c_fc, self.mlp_proj = nn.Linear(d, ff), nn.Linear(ff, d)
        self.lm_head = nn.Linear(d, words, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        packed = self.c_attn(self.ln_1(x)).unflatten(-1, (3, self.heads, -1))  # (batch, position, 3, head, h)
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.attn_proj(mixed)
        x = x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))
        return self.lm_head(self.ln_f(x))


def words(count: int, *shape: int, vocabulary: int = 11) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary, shape, generator=generator) for _ in range(count)]


def gaussians(count: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def counts(found: FibreDimension) -> tuple[int, int | None, tuple[str, ...]]:
    return found.dimension, found.near, found.doubts


def test_a_model_written_by_hand_has_the_fibre_that_was_counted_by_hand() -> None:
    assert counts(fibre_dimension(make_generic(NanoGPT()), words(35, 1, 6))) == (231, 1, ())


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_a_product_of_two_matrices_has_the_fibre_of_its_rank(n: int, r: int, m: int, seed: int) -> None:
    """W2 W1 of inner width r: the image has the dimension of matrices of rank k = min(n, r, m), k (n + m - k)."""
    model = make_generic(nn.Sequential(nn.Linear(n, r, bias=False), nn.Linear(r, m, bias=False)), seed=seed)
    k = min(n, r, m)
    found = fibre_dimension(model, gaussians(4 * n + 4, 2, n))
    assert found.dimension == n * r + r * m - k * (n + m - k)
    assert found.near == 0
    assert found.certain


def test_every_hidden_relu_neuron_has_a_scale() -> None:
    model = make_generic(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    assert counts(fibre_dimension(model, gaussians(40, 10, 2))) == (4 + 3, 0, ())


def test_the_dimension_is_the_same_along_an_orbit() -> None:
    model = make_generic(SelfAttention(4))
    inputs = gaussians(20, 1, 3, 4)
    moved = find_symmetries(model, inputs[0]).transformed(model, seed=1)
    assert counts(fibre_dimension(model, inputs)) == counts(fibre_dimension(moved, inputs)) == (24, 0, ())


class WrittenOut(nn.Module):
    """A norm written out, in float32, between two layers without bias: what goes into it can be scaled, nearly."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.first, self.second = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).float()
        return self.second(x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.eps))


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5])
def test_what_only_an_eps_breaks_is_near_whatever_the_eps(eps: float) -> None:
    """The function knows A^T A and B A, 6 + 6 numbers of 12 + 8, and nearly A up to scale only."""
    found = fibre_dimension(make_generic(WrittenOut(eps)), gaussians(30, 1, 3))
    assert counts(found) == ((9, 0, ()) if eps == 0 else (8, 1, ()))


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


class Cubes(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[1](Cube.apply(self[0](x)))


def test_derivatives_that_come_one_at_a_time_only_do_as_well() -> None:
    model = make_generic(Cubes(nn.Linear(3, 2, bias=False), nn.Linear(2, 2)))
    assert counts(fibre_dimension(model, gaussians(20, 1, 3))) == (2, 0, ())


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        lowest = torch.finfo(x.dtype).min
        return torch.maximum(torch.maximum(super().forward(x), torch.full((), lowest)), torch.tensor(lowest))


def test_masks_by_the_least_number_of_a_type_are_no_obstacle() -> None:
    assert counts(fibre_dimension(make_generic(Masked(3, 2)), gaussians(20, 1, 3))) == (0, 0, ())


def test_a_tied_parameter_counts_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    found = fibre_dimension(make_generic(model), gaussians(10, 1, 3))
    assert (found.parameters, found.dimension) == (9, 0)


def test_frozen_parameters_are_held_fixed_and_reported() -> None:
    model = make_generic(nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 4, bias=False)))
    model[0].weight.requires_grad_(False)
    found = fibre_dimension(model, gaussians(10, 1, 3))
    assert (found.parameters, found.frozen, found.dimension) == (8, 6, 0)
    assert "6 frozen parameters are held fixed" in str(found)


def test_the_model_is_not_changed() -> None:
    model = make_generic(NanoGPT())
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


class CutOff(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.hidden = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.seen(x) + self.hidden(x).detach()


def gpt_neox(**settings: int) -> nn.Module:
    with torch.device("meta"):
        large = transformers.GPTNeoXModel(transformers.GPTNeoXConfig())
    return small_copy(large, **settings)


# A model, inputs of it, and the doubt that they leave.
DOUBTFUL: dict[str, tuple[Callable[[], nn.Module], list[Tensor], str]] = {
    **{f"{count} texts": (NanoGPT, words(count, 1, 6), "inputs are too few") for count in (1, 5, 9)},
    "one batch": (lambda: nn.Linear(3, 2), gaussians(1, 3, 3), "inputs are too few"),
    "inputs of all sizes": (
        lambda: nn.Linear(25, 1, bias=False),
        [x * torch.logspace(0, -24, 25) for x in gaussians(50, 1, 25)],
        "the singular values have no gap",
    ),
    "gradients cut off": (CutOff, gaussians(20, 1, 3), "the outputs move where"),
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
    assert not found.certain
    assert [each for each in found.doubts if each.startswith(doubt)]
    assert f"inconclusive: {doubt}" in str(found)


def test_one_batch_of_many_inputs_is_enough() -> None:
    assert counts(fibre_dimension(make_generic(nn.Linear(3, 2)), gaussians(1, 8, 3))) == (0, 0, ())


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


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


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
        (lambda: Counting().eval(), "changes its buffer 'calls'"),
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


class Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


@pytest.mark.parametrize(
    ("model", "batches", "error"),
    [
        (Detached(3, 2).eval(), gaussians(3, 1, 3), ValueError),
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
        small_copy(NanoGPT())
    with pytest.raises(ValueError, match="GPTNeoXModel makes no small copy"):
        gpt_neox(hidden_size=7)
