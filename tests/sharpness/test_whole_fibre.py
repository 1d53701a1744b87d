"""Measures are functions of the fibre: the same at every point that the symmetries of a model reach."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quotient_manifolds.geometry import Quotient
from quotient_manifolds.load import example_inputs, make_generic
from quotient_manifolds.sharpness import (
    average_case_sharpness,
    gradient_norm,
    hessian_trace,
    top_eigenvalue,
    worst_case_sharpness,
)
from quotient_manifolds.symmetries import find_symmetries, random_move
from quotient_manifolds.symmetries.move import act, group_element
from studies.fibres import names
from studies.invariance import Subject
from studies.invariance import loss as table_loss
from tests.handwritten_models import Einsum

SMALL = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
TEXT = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 1}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "torch, norms first": lambda: nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 12, norm_first=True, batch_first=True), nn.Flatten(), nn.Linear(40, 3)
    ),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=11, n_embd=8, n_head=2, n_inner=12, n_layer=1, n_positions=6, tie_word_embeddings=False, **TEXT
        )
    ),
    "Llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_hidden_layers=1, num_key_value_heads=1, head_dim=4, **TEXT)
    ),
    "BERT": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**SMALL, num_hidden_layers=1, max_position_embeddings=6, num_labels=3)
    ),
    "ViT": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, image_size=8, patch_size=4
        )
    ),
}
MEASURES: dict[str, Callable[..., Any]] = {
    "worst case": lambda *of: worst_case_sharpness(*of[:3], geometry=of[3], radius=0.05, steps=5, restarts=1),
    "average case": lambda *of: average_case_sharpness(*of[:3], geometry=of[3], sigma=0.05, samples=2),
    "gradient norm": lambda *of: gradient_norm(*of[:3], geometry=of[3]),
    "trace": lambda *of: hessian_trace(*of[:3], geometry=of[3], samples=2),
    "top eigenvalue": lambda *of: top_eigenvalue(*of[:3], geometry=of[3]),
}


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the distance of the output from fixed targets."""
    out = model(batch) if isinstance(batch, Tensor) else model(**batch).logits
    return (out - torch.linspace(-1, 1, out.numel()).to(out).view_as(out)).square().mean()


def built(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any]:
    model = make_generic(MODELS[name](), seed=1).to(dtype)
    if not hasattr(model, "config"):
        return model, torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    inputs = example_inputs(model, seed=0, length=5)
    return model, {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}


def moved(model: nn.Module, batch: Any, seed: int, log_scale: float) -> nn.Module:
    found = find_symmetries(model, batch)
    elsewhere = copy.deepcopy(model)
    elsewhere.load_state_dict(random_move(model, found, seed=seed, log_scale=log_scale), strict=False)
    return elsewhere


ALONG = [
    *((name, metric, torch.float64, 1e-9) for name, metric in zip(MODELS, ("inv", "mix") * 3, strict=False)),
    ("torch, norms first", "mix", torch.float32, 1e-3),
]


@pytest.mark.parametrize(("name", "metric", "dtype", "tolerance"), ALONG)
@given(seed=st.integers(0, 2**31), log_scale=st.floats(0.1, 3))
@settings(max_examples=1, deadline=None)
def test_measures_do_not_change_along_the_whole_orbit(
    name: str, metric: str, dtype: torch.dtype, tolerance: float, seed: int, log_scale: float
) -> None:
    model, batch = built(name, dtype)
    elsewhere = moved(model, batch, seed, log_scale)
    for what, measure in MEASURES.items():
        if dtype == torch.float32 and what in ("average case", "trace"):
            continue  # means over signs, of which rounding leaves few digits
        here, there = (measure(each, loss, [batch], Quotient(metric)).mean for each in (model, elsewhere))
        iterated = 100 if what == "top eigenvalue" else 1  # its iteration ends at a tolerance of its own
        assert there == pytest.approx(here, rel=iterated * tolerance), what


@given(
    name=st.sampled_from(names()),
    metric=st.sampled_from(["inv", "mix"]),
    what=st.sampled_from(list(MEASURES)),
    seed=st.integers(0, 2**31),
    log_scale=st.floats(0.1, 3),
)
@example("modernbert", "mix", "average case", 0, 0.3)  # it casts to float32 inside, where factors round as they are
@example("gptj", "inv", "trace", 0, 1.0)
@example("convolutions with BatchNorm", "inv", "worst case", 0, 3.0)  # without a pair
@example("ViT with to_qkv and to_out", "inv", "worst case", 1, 3.0)  # the most ill-conditioned moves of the table
@settings(max_examples=2, deadline=None)
def test_measures_of_the_models_of_the_table_are_the_same_along_their_orbits(
    name: str, metric: str, what: str, seed: int, log_scale: float
) -> None:
    here = Subject.of(name)
    there = here.at(random_move(here.model, here.symmetries(), seed=seed, log_scale=log_scale))
    values = [
        MEASURES[what](each.model, table_loss, [each.batch], Quotient(metric, symmetries=each.symmetries())).mean
        for each in (here, there)
    ]
    iterated = 100 if what == "top eigenvalue" else 1  # its iteration ends at a tolerance of its own
    assert values[1] == pytest.approx(values[0], rel=iterated * 1e-9)


def test_ill_conditioned_factors_cost_no_digits() -> None:
    """In float32, a change of basis of condition 1e4: what is left is that moved weights were rounded when stored."""
    model = make_generic(Einsum(), seed=0).double()
    batch = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = find_symmetries(model, batch)
    generator = torch.Generator().manual_seed(1)
    params = {name: w.detach().clone() for name, w in model.named_parameters()}
    for pair in found.pairs:
        pair.write(params, act(pair, group_element(pair, 1e4, generator), pair.read(params)))
    elsewhere = copy.deepcopy(model)
    elsewhere.load_state_dict(params)
    for what in ("worst case", "average case"):
        here, there = (
            MEASURES[what](each.float(), loss, [batch.float()], Quotient("inv")).mean
            for each in (copy.deepcopy(model), copy.deepcopy(elsewhere))
        )
        assert there == pytest.approx(here, rel=1e-3), what


def test_frozen_parameters_stay_and_what_is_free_beside_them_is_not_seen() -> None:
    model, batch = built("GPT-2")
    frozen = model.get_parameter("transformer.wpe.weight").requires_grad_(False)
    found = find_symmetries(model, batch)
    beside = found.beside(["transformer.wpe.weight"])
    lost = {freedom.kind for freedom in found.freedoms} - {freedom.kind for freedom in beside.freedoms}
    assert lost == {"tables", "rotation"}
    elsewhere = copy.deepcopy(model)
    elsewhere.load_state_dict(random_move(model, beside, seed=1), strict=False)
    assert not torch.equal(
        elsewhere.get_parameter("transformer.wte.weight"), model.get_parameter("transformer.wte.weight")
    )
    here, there = (gradient_norm(each, loss, [batch], geometry="inv").mean for each in (model, elsewhere))
    assert there == pytest.approx(here, rel=1e-9)
    assert Quotient().verified(model, loss, [batch]).at(model).point.keys().isdisjoint(["transformer.wpe.weight"])
    assert not frozen.requires_grad


class OneHead(nn.Module):
    """A head as wide as the stream, and a bottleneck as wide as the logits: both lose a rank at the canonical place."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 1, 8, norm_first=norm_first, batch_first=True)
        self.norm, self.down, self.up = nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(self.norm(self.layer(x)).mean(1)))


@pytest.mark.parametrize(
    ("metric", "norm_first", "dtype"),
    [("inv", True, torch.float64), ("mix", False, torch.float64), ("mix", True, torch.float32)],
)
def test_a_pair_that_loses_rank_is_measured_with_the_columns_it_has(
    metric: str, norm_first: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = OneHead(norm_first).to(dtype).eval()
    with torch.no_grad():
        for w in model.parameters():
            w += 0.1 * torch.randn_like(w)
    batch = (torch.randn(4, 5, 6, dtype=dtype), torch.tensor([0, 1, 2, 3]))

    def entropy(module: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    found = find_symmetries(model, batch, evaluate=entropy)
    space = Quotient(metric, symmetries=found).at(model)
    widths = {pair.name: pair.h for pair in found.pairs}
    assert any(pair.h == widths[pair.name] - 1 for block in space.pairs for pair in block.pairs)
    elsewhere = copy.deepcopy(model)
    elsewhere.load_state_dict(random_move(model, found, seed=1, log_scale=0.5), strict=False)
    rel = 1e-9 if dtype == torch.float64 else 1e-3
    for measure in (
        lambda m: gradient_norm(m, entropy, [batch], geometry=Quotient(metric)),
        lambda m: worst_case_sharpness(m, entropy, [batch], geometry=Quotient(metric), radius=0.1, steps=4),
    ):
        assert measure(elsewhere).mean == pytest.approx(measure(model).mean, rel=rel)


class Pruned(nn.Module):
    """Neurons, or a bottleneck beside a stream, of which one unit does nothing."""

    def __init__(self, kind: str, out: float, inn: float) -> None:
        super().__init__()
        bottleneck = kind == "bottleneck"
        self.down, self.up, self.head = nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 7)
        self.norm, self.between = nn.LayerNorm(6), nn.Identity() if bottleneck else nn.ReLU()
        with torch.no_grad():
            (self.up if bottleneck else self.head).weight[:, 2] *= out
            (self.down if bottleneck else self.up).weight[2] *= inn
            (self.down if bottleneck else self.up).bias[2] *= inn

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.between, nn.Identity):
            return self.head(torch.tanh(x + self.up(self.down(self.norm(x)))))
        return self.head(self.between(self.up(torch.tanh(self.down(x)))))


@pytest.mark.parametrize(("metric", "dtype"), [("inv", torch.float64), ("mix", torch.float32)])
@pytest.mark.parametrize("kind", ["bottleneck", "relu neuron"])
@pytest.mark.parametrize(("out", "inn"), [(0, 1), (1, 0), (0, 0), (1e-9, 1e-9)])
def test_a_unit_that_does_nothing_is_none_anywhere_on_the_orbit(
    out: float, inn: float, kind: str, metric: str, dtype: torch.dtype
) -> None:
    """Rounding of moved weights, and of what folding them leaves, makes it a unit of size 1e-16 or 1e-8."""
    torch.manual_seed(0)
    model = Pruned(kind, out, inn).to(dtype).eval()
    batch = (torch.randn(8, 6, dtype=dtype), torch.arange(8) % 7)

    def entropy(module: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    def trace(module: nn.Module) -> float:
        layers_without = pytest.warns(UserWarning, match="Pair relu neuron.* is measured elementwise")
        with nullcontext() if kind == "bottleneck" else layers_without:
            return hessian_trace(module, entropy, [batch], geometry=Quotient(metric), samples=4).mean

    found = find_symmetries(model, batch, evaluate=entropy)
    here = trace(model)
    for seed in range(2):
        elsewhere = copy.deepcopy(model)
        elsewhere.load_state_dict(random_move(model, found, seed=seed, log_scale=0.5), strict=False)
        assert trace(elsewhere) == pytest.approx(here, rel=1e-8 if dtype == torch.float64 else 1e-3)
