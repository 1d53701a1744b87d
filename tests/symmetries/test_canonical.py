"""Gains and biases of norms taken into the layers that read them: found by recording the computation, for any class."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.geometry import Quotient
from quotient_manifolds.sharpness import cross_entropy, gradient_norm, worst_case_sharpness
from quotient_manifolds.symmetries import NormScale, canonical, find_symmetries, make_generic
from quotient_manifolds.symmetries.trace import Trace

D = 8


class Handwritten(nn.Module):
    """A block of a transformer as people write it: fused projections, cut apart; a norm written out; einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))
        self.scale = nn.Parameter(torch.ones(D))
        self.to_qkv, self.to_out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up = nn.Parameter(torch.randn(2, D, D))
        self.down = nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        n = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)
        q, k, v = (part.unflatten(-1, (2, 4)).mT for part in self.to_qkv(n * self.gain + self.shift).chunk(3, dim=-1))
        mixed = torch.einsum("...dih,...djh->...dij", q, k).softmax(-1) @ v
        x = x + self.to_out(mixed.mT.flatten(-2))
        r = self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        first, second = (r @ part for part in self.up)
        return x + self.down(torch.cat([F.gelu(first), second], -1))


class Twice(nn.Module):
    """One norm in two places, both read by linear layers, one of which is a part of the other's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(self.norm(x)).tanh()))


class Repeated(nn.Module):
    """One linear layer that reads one norm of two things."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.norm(x)) * self.a(self.norm(x.roll(1, -1) ** 2))


def pre_norm() -> nn.Module:
    return nn.TransformerEncoderLayer(D, 2, 12, norm_first=True, batch_first=True)


def decoder() -> nn.Module:
    return nn.TransformerDecoderLayer(D, 2, 12, norm_first=True, batch_first=True)


def hugging_face(name: str, **settings: Any) -> Callable[[], nn.Module]:
    config = re.split("Encoder|Model|For", name)[0] + "Config"

    def make() -> nn.Module:
        return getattr(transformers, name)(getattr(transformers, config)(**settings))

    return make


X = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0))
WORDS = {"input_ids": torch.arange(12).view(2, 6) % 11}
PIXELS = {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
SIZES = {"hidden_size": D, "num_attention_heads": 2, "intermediate_size": 12, "num_hidden_layers": 1}
TEXT = {**SIZES, "vocab_size": 11, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {
    "n_embd": D,
    "n_head": 2,
    "n_layer": 1,
    "vocab_size": 11,
    "n_positions": 6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# How a model is made, its inputs, the names that are constant afterwards.
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, set[str]]] = {
    "torch, norms first": (pre_norm, X, {f"norm{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")}),
    "torch, norms last": (lambda: nn.TransformerEncoderLayer(D, 2, 12, batch_first=True), X, {"norm1.bias"}),
    "torch decoder": (decoder, (X, X), {f"norm{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")}),
    "handwritten": (Handwritten, X, {"gain", "shift", "scale"}),
    "a norm in two places": (Twice, X, {"norm.weight", "norm.bias"}),
    "a layer that reads twice": (Repeated, X, {"norm.weight", "norm.bias"}),
    "GPT-2": (
        hugging_face("GPT2Model", **GPT2),
        WORDS,
        {f"h.0.ln_{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")},
    ),
    "Llama": (
        hugging_face("LlamaModel", **TEXT, num_key_value_heads=1),
        WORDS,
        {"layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"},
    ),
    "BERT": (
        hugging_face("BertModel", **TEXT),
        WORDS,
        {"embeddings.LayerNorm.bias", "encoder.layer.0.attention.output.LayerNorm.bias"},
    ),
    "ViT": (
        hugging_face("ViTModel", **SIZES, image_size=8, patch_size=4),
        PIXELS,
        {
            *(f"layers.0.layernorm_{place}.{kind}" for place in ("before", "after") for kind in ("weight", "bias")),
            *("embeddings.cls_token", "embeddings.patch_embeddings.projection.bias"),  # their positions hold them
        },
    ),
}


def generic(make: Callable[[], nn.Module]) -> nn.Module:
    return make_generic(make()).double()


def answer(model: nn.Module, inputs: Any) -> Tensor:
    if isinstance(inputs, dict):
        return model(**inputs).last_hidden_state.detach()
    out: Tensor = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return out.detach()


def doubled(inputs: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, inputs)


@pytest.mark.parametrize("name", MODELS)
def test_the_function_stays_and_gains_are_one(name: str) -> None:
    make, inputs, constant = MODELS[name]
    model, inputs = generic(make), doubled(inputs)
    before = {name: w.detach().clone() for name, w in model.named_parameters()}
    folded = canonical(model, inputs)
    assert set(folded.constant) == constant
    assert all(torch.equal(w, before[name]) for name, w in model.named_parameters())  # nothing is done to the model
    expected = answer(model, inputs)
    model.load_state_dict(folded.params, strict=False)
    torch.testing.assert_close(answer(model, inputs), expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
    for scale in (each for each in folded.freedoms if isinstance(each, NormScale)):
        assert bool((folded.params[scale.gain] == 1).all())
        if scale.bias:  # 1 where a reader without a bias holds it in the mean of its rows
            assert bool((folded.params[scale.bias] == (0 if all(each.bias for each in scale.readers) else 1)).all())


def rescaled(model: nn.Module, readers: dict[tuple[str, str], tuple[str, ...]], size: float, seed: int) -> nn.Module:
    """The same function: gain a g, bias a b + c; each reader's W / a + u / (a g), and its bias less what these add."""
    moved = copy.deepcopy(model)
    params = dict(moved.named_parameters())
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for (gain, bias), all_of_them in readers.items():
            a = (size * torch.randn(D, generator=draw, dtype=torch.float64)).exp()
            c = torch.randn(D, generator=draw, dtype=torch.float64) if bias else torch.zeros(D, dtype=torch.float64)
            params[gain].mul_(a)
            if bias:
                params[bias].mul_(a).add_(c)
            for weight in all_of_them:
                params[weight].div_(a)
                if bias:
                    other = params[weight.replace("in_proj_weight", "in_proj_bias").replace(".weight", ".bias")]
                    other.sub_(params[weight] @ c)
                    u = size * torch.randn(len(other), generator=draw, dtype=torch.float64)
                    params[weight].add_(torch.outer(u, 1 / params[gain]))  # n has mean 0
                    other.sub_(u * (params[bias] / params[gain]).sum())
    return moved


NORM_FIRST = {
    ("norm1.weight", "norm1.bias"): ("self_attn.in_proj_weight",),
    ("norm2.weight", "norm2.bias"): ("linear1.weight",),
}
ATTENTION, MLP = "layers.0.self_attn", "layers.0.mlp"
LLAMA = {
    ("layers.0.input_layernorm.weight", ""): tuple(f"{ATTENTION}.{x}_proj.weight" for x in "qkv"),
    ("layers.0.post_attention_layernorm.weight", ""): (f"{MLP}.gate_proj.weight", f"{MLP}.up_proj.weight"),
}


@pytest.mark.parametrize(("name", "readers"), [("torch, norms first", NORM_FIRST), ("Llama", LLAMA)])
@given(size=st.floats(0.0, 3.0), seed=st.integers(0, 2**31))
def test_every_model_of_the_function_has_the_same(
    name: str, readers: dict[tuple[str, str], tuple[str, ...]], size: float, seed: int
) -> None:
    make, inputs, _ = MODELS[name]
    model, inputs = generic(make), doubled(inputs)
    moved = rescaled(model, readers, size, seed)
    torch.testing.assert_close(answer(moved, inputs), answer(model, inputs), rtol=1e-7, atol=1e-7)
    here, there = (canonical(each, inputs).params for each in (model, moved))
    for key, w in here.items():
        torch.testing.assert_close(there[key], w, rtol=1e-9, atol=1e-9 * float(w.abs().max()))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = pre_norm(), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x).mean(1))
        return out


def test_measures_of_all_symmetries_do_not_see_how_a_norm_shares_its_size() -> None:
    model = generic(Classifier)
    readers = {
        tuple(f"layer.{name}" for name in norm): tuple(f"layer.{name}" for name in all_of_them)
        for norm, all_of_them in NORM_FIRST.items()
    }
    moved = rescaled(model, readers, 1.0, seed=0)  # type: ignore[arg-type]
    batch = X.double(), torch.tensor([0, 2])

    def measured(model: nn.Module, geometry: Quotient) -> list[float]:
        rise = worst_case_sharpness(model, cross_entropy, [batch], geometry=geometry, radius=0.05, steps=5)
        return [rise.mean, gradient_norm(model, cross_entropy, [batch], geometry=geometry).mean]

    for metric in ("inv", "mix"):
        here, there = (measured(each, Quotient(metric)) for each in (model, moved))
        assert there == pytest.approx(here, rel=1e-9)
        plain, changed = (measured(each, Quotient(metric, symmetries="pairs")) for each in (model, moved))
        assert changed[0] > 1.2 * plain[0]  # which pairs alone do see


class Experts(nn.Module):
    """A norm that is read by one of two experts, by the sign of an example's first number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(D), nn.ModuleList([nn.Linear(D, 3) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 3)
        for index, expert in enumerate(self.experts):
            rows = (x[:, 0] > 0) == bool(index)
            if rows.any():
                out[rows] = expert(self.norm(x[rows]))
        return out


class Branches(nn.Module):
    """A norm that is read by one of two layers, by the sum of all inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rising, self.falling = nn.LayerNorm(D), nn.Linear(D, 3), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.rising if x.sum() > 0 else self.falling)(self.norm(x))
        return out


def test_what_an_idle_branch_may_read_is_refused() -> None:
    found = find_symmetries(generic(Branches), torch.rand(2, D).double())
    assert not found.freedoms
    assert "falling.bias did not run" in str(found.refused[0])


def test_what_an_idle_expert_may_read_is_refused() -> None:
    model, x = generic(Experts), torch.randn(6, D).double()
    x[:, 0] = torch.tensor([1, -1, 1, -1, 1, -1])
    assert [freedom.name for freedom in find_symmetries(model, x).freedoms] == ["norm.weight norm"]
    found = find_symmetries(model, x[::2])
    assert not found.freedoms
    assert "did not run, and may be part of it" in str(found.refused[0])


class Embedded(nn.Module):
    """Two tables, a vector for all and a block that writes, of which LayerNorms alone read the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(7, D), nn.Parameter(torch.randn(1, 5, D))
        self.first, self.norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.up, self.down, self.head = nn.Linear(D, 6), nn.Linear(6, D), nn.Linear(D, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places
        x = x + self.down(F.gelu(self.up(self.first(x))))
        return self.head(self.norm(x))


IDS = torch.arange(10).view(2, 5) % 7


def test_a_stream_that_norms_alone_read_tells_no_means_and_no_exchange() -> None:
    model = generic(Embedded)
    expected, found = answer(model, IDS), canonical(model, IDS)
    means = {"mean that no norm reads": 7 + 5 + 6 + 1, "vector between tables": D - 1}
    norms = {"gain of a norm": 2 * D, "bias of a norm": 2 * D, "direction no reader of a norm sees": 6 + 3}
    assert found.families == {**norms, **means, "rotation of the residual stream": (D - 1) * (D - 2) // 2}
    moved = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        vector = torch.randn(D, generator=draw, dtype=torch.float64)
        moved.words.weight += vector + torch.randn(7, 1, generator=draw, dtype=torch.float64)
        moved.places -= vector - torch.randn(1, 5, 1, generator=draw, dtype=torch.float64)
        moved.down.weight += torch.randn(6, generator=draw, dtype=torch.float64)
        moved.down.bias += 3.0
    torch.testing.assert_close(answer(moved, IDS), expected)
    there = canonical(moved, IDS).params
    for name, w in found.params.items():
        torch.testing.assert_close(there[name], w, rtol=1e-10, atol=1e-10)
    model.load_state_dict(found.params)
    torch.testing.assert_close(answer(model, IDS), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.places.mean(dim=(0, 1)), torch.zeros(D).double(), rtol=0, atol=1e-12)


class Scaled(Embedded):
    """What is read besides, by a product."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + (self.words(ids) + self.places).sum(-1, keepdim=True)


class Summed(Embedded):
    """Without the block, which would be idle."""

    def __init__(self) -> None:
        super().__init__()
        del self.first, self.up, self.down


class Weighted(Summed):
    """The places count twice, so twice of what they get leaves the words."""

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.add(self.words(ids), self.places, alpha=2)
        return self.head(self.norm(x))


class Tied(Summed):
    """The table of words reads the answer, too."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.words(ids) + self.places) @ self.words.weight.T


def test_a_table_that_is_tied_keeps_its_mean() -> None:
    found = canonical(generic(Tied), IDS)
    assert found.families == {"mean that no norm reads": 5}
    assert [each.name for each in found.refused] == ["norm.weight"]  # the words are no candidate to begin with


def test_what_something_else_reads_is_not_free() -> None:
    scaled, weighted = (canonical(generic(kind), IDS) for kind in (Scaled, Weighted))
    assert scaled.families["mean that no norm reads"] == 6 + 1  # of the block alone
    assert weighted.families["vector between tables"] == D - 1
    assert scaled.change < 1e-12
    assert weighted.change < 1e-12


class Shared(nn.Module):
    """A linear layer that reads a norm, and something else besides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)) + self.linear(x)


class Residual(Shared):
    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return n + self.linear(n)


class Slowed(Shared):
    """A product with a parameter that is no matrix of the model's own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) @ (self.linear.weight * 2.0)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Shared, "addmm uses linear"),
        (Residual, "add reads what it gives"),
        (Slowed, "something else than a parameter"),
        (lambda: nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)), "the model answers with what it gives"),
        (lambda: nn.Sequential(nn.LayerNorm(D), nn.ReLU(), nn.Linear(D, D)), "relu reads what it gives"),
    ],
)
def test_a_gain_that_something_else_needs_stays(make: Callable[[], nn.Module], why: str) -> None:
    folded = canonical(generic(make), X.double())
    assert not any(name.endswith("weight") for name in folded.constant)
    (refused,) = folded.refused
    assert why in refused.reason


def test_a_gain_of_zero_goes_into_the_reader() -> None:
    model = generic(lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 3)))
    with torch.no_grad():
        model[0].weight[2] = 0.0  # type: ignore[index, union-attr]
    folded = canonical(model, X.double())
    assert set(folded.constant) == {"0.weight", "0.bias"}
    assert folded.change < 1e-12


class RootMeanSquare(nn.Module):
    """A norm that does not take off the mean, with a bias all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift, self.linear = (*map(nn.Parameter, torch.randn(2, D)), nn.Linear(D, 3, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * self.gain + self.shift)


def test_a_bias_that_no_reader_can_hold_stays_with_the_norm() -> None:
    folded = canonical(generic(RootMeanSquare), X.double())
    assert folded.constant == ("gain",)
    assert folded.families == {"gain of a norm": D}
    assert folded.change < 1e-12


def test_the_mean_of_rows_holds_a_bias_where_a_reader_has_none() -> None:
    model = generic(lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 3, bias=False)))
    folded = canonical(model, X.double())
    assert folded.families == {"gain of a norm": D, "bias of a norm": D}
    reached = model[1].weight @ model[0].bias  # type: ignore[index, union-attr, operator]
    torch.testing.assert_close(folded.params["1.weight"].sum(1), reached.detach())
    assert bool((folded.params["0.bias"] == 1).all())
    assert folded.change < 1e-12


def test_float32_parameters_stay_float32() -> None:
    model = make_generic(pre_norm())
    folded = canonical(model, X)
    assert {w.dtype for w in folded.params.values()} == {torch.float32}
    expected = model(X).detach()
    model.load_state_dict(folded.params)
    torch.testing.assert_close(model(X).detach(), expected, rtol=1e-4, atol=1e-5)


class SumOfGain(Shared):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * (1 + self.norm.weight))


def test_a_gain_that_is_one_more_than_its_parameter_is_made_one() -> None:
    folded = canonical(generic(SumOfGain), X.double())
    assert folded.constant == ("norm.weight",)
    assert not folded.params["norm.weight"].any()
    assert folded.change < 1e-12


class TwoAxes(Shared):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((5, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (TwoAxes, "does not scale the last axis alone"),
        (lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Linear(D, 3)), "does not scale the last axis alone"),
        (lambda: nn.Sequential(nn.GroupNorm(1, 5), nn.Linear(D, 3)), "does not scale the last axis alone"),
    ],
)
def test_a_norm_of_another_form_is_refused_by_name(make: Callable[[], nn.Module], why: str) -> None:
    folded = canonical(generic(make), X.double())
    assert not any(isinstance(each, NormScale) for each in folded.freedoms)
    (refused,) = folded.refused
    assert why in refused.reason
    assert refused.name.endswith("weight")


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.linear = nn.Parameter(torch.ones(D)), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.gain * x)


def test_zeros_do_not_make_a_norm_one_that_takes_off_means() -> None:
    model, x = generic(Gain), X.double()
    folded = canonical(model, 0 * x)
    assert folded.constant == ("gain",)
    expected = model(x)
    model.load_state_dict(folded.params)
    torch.testing.assert_close(model(x), expected)


def test_a_layer_norm_is_centred_in_any_precision_and_with_gains_of_zero() -> None:
    model = generic(lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 3))).bfloat16()
    with torch.no_grad():
        model[0].weight[2] = 0.0  # type: ignore[index, union-attr]
    (scale,) = canonical(model, X.bfloat16()).freedoms
    assert scale.centred


class Transposed(nn.Module):
    """A weight and an answer that become contiguous on the way, and are viewed in another shape then."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(D), nn.Parameter(torch.randn(2, D, 3))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.transpose(0, 1).contiguous().view(D, 6)
        return self.norm(x).transpose(0, 1).contiguous().view(-1, D) @ weight


def test_what_is_copied_and_then_viewed_is_followed() -> None:
    folded = canonical(generic(Transposed), X.double())
    assert folded.constant == ("norm.weight", "norm.bias")
    assert folded.change < 1e-12


class Reinterpreted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return self.linear(n) + n.view(torch.int64).shape[0]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
        return self.linear(self.norm(rows)).to_padded_tensor(0.0)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.eye(5, dtype=x.dtype).to_sparse() @ self.linear(self.norm(x[0]))


@pytest.mark.parametrize(
    ("make", "constant"), [(Reinterpreted, ()), (Nested, ()), (Sparse, ("norm.weight", "norm.bias"))]
)
def test_tensors_without_a_memory_of_their_own_do_no_harm(
    make: Callable[[], nn.Module], constant: tuple[str, ...]
) -> None:
    folded = canonical(generic(make), X.double())
    assert folded.constant == constant
    assert folded.change < 1e-12


def test_empty_outputs_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        canonical(generic(lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 3))), X[:0].double())


def test_a_model_that_is_training_is_refused() -> None:
    with pytest.raises(ValueError, match="eval"):
        canonical(pre_norm(), X)


class Masked(nn.Module):
    """A norm whose answer is multiplied by a mask, as XLM and DeBERTa do, and by what is learned and 1 by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.reader, self.scale = nn.LayerNorm(4), nn.Linear(4, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm(x) * mask
        y = y.masked_fill(mask == 0, 0.0)
        return self.reader(y) * (1 + self.scale)


def test_a_mask_that_masks_nothing_is_passed_by() -> None:
    model, x, mask = Masked().eval(), torch.randn(2, 5, 4), torch.ones(2, 5, 1)
    names = [operation.name for operation in Trace(model, (x, mask)).operations]
    assert names.count("mul") == 1  # by the scale, which is a parameter
    assert "masked_fill" not in names
    assert canonical(model, (x, mask)).constant == ("norm.weight", "norm.bias")
    mask[0, 4] = 0.0
    assert canonical(model, (x, mask)).constant == ()
