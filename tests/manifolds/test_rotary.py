"""The quotient of a rotary frequency plane: its action is what a real rotary model does not notice."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn

from quotient_manifolds.manifolds import FixedRankQuotient, RotaryQuotient
from quotient_manifolds.symmetries import (
    SymmetricPair,
    Symmetries,
    declare_pair,
    prove_symmetries,
    random_move,
)
from quotient_manifolds.symmetries.pair import Group

PREFIX = "model.layers.0.self_attn"


def point(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def number(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.complex128)


# --- on real models --------------------------------------------------------------------------------------------------


def llama() -> nn.Module:
    """Six query heads of eight, which share two key heads, with biases; weights of order one, so that scores matter."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=48,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=2,
        attention_bias=True,
        max_position_embeddings=32,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for w in model.parameters():
            w += 0.2 * torch.randn_like(w)
    return model


def pair_of(model: nn.Module, weight: str, bias: str, sizes: dict[str, int], acts: Group = "GL(1, C)") -> SymmetricPair:
    """The query/key pair whose coordinates are split into planes by the patterns given."""

    def factor(projection: str, g: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        stored, known = f"{PREFIX}.{projection}_proj", {**sizes, "g": g, "two": 2}

        def part(stored: Tensor, how: str) -> Tensor:
            used = {
                axis: size for axis, size in known.items() if axis in how.replace("(", " ").replace(")", " ").split()
            }
            return rearrange(stored, how, **used)

        return lambda w: torch.cat([part(w[f"{stored}.weight"], weight), part(w[f"{stored}.bias"], bias)], dim=1)

    return declare_pair(model, "", "query/key", G=factor("q", 3), H=factor("k", 1), acts=acts)


HALVES = (
    "(heads g two planes) rows -> (heads planes) (g rows) two",
    "(heads g two planes) -> (heads planes) g two",
)
NEIGHBOURS = (
    "(heads g planes two) rows -> (heads planes) (g rows) two",
    "(heads g planes two) -> (heads planes) g two",
)
IDS = {"input_ids": torch.arange(3, 15)[None]}


def test_a_llama_does_not_notice_complex_numbers() -> None:
    model = llama()
    pair = pair_of(model, *HALVES, {"heads": 2})
    assert (pair.heads, pair.n, pair.m, pair.h, pair.group) == (8, 3 * 48 + 3, 48 + 1, 2, "GL(1, C)^8")
    assert pair.group_dimension == 16
    proof = prove_symmetries(model, IDS, Symmetries((pair,)))
    assert proof.all_proved, str(proof)
    assert proof.pairs[0].control > 1e-2


def test_planes_of_the_other_convention_are_refuted() -> None:
    model = llama()
    claims = [
        pair_of(model, *NEIGHBOURS, {"heads": 2}),  # rows 2 i and 2 i + 1 instead of i and i + 4
        pair_of(model, *(pattern.replace("heads g two", "g heads two") for pattern in HALVES), {"heads": 2}),
    ]
    for claim in claims:
        verdicts = [pair.verdict for pair in prove_symmetries(model, IDS, Symmetries((claim,))).pairs]
        assert verdicts == ["refuted"]


def test_the_whole_linear_group_is_refuted() -> None:
    """One number per plane and nothing more: GL(2) on a plane, or GL(8) on a head, change the output."""
    model = llama()
    pair = pair_of(model, *HALVES, {"heads": 2})
    plane = SymmetricPair("plane", "query/key", pair.G, pair.H, "GL(h)")
    whole = pair_of(model, "(heads g h) rows -> heads (g rows) h", "(heads g h) -> heads g h", {"heads": 2}, "GL(h)")
    head = SymmetricPair("head", "query/key", whole.G, whole.H, "GL(h)")
    proof = prove_symmetries(model, IDS, Symmetries((plane, head)))
    assert [claim.verdict for claim in proof.pairs] == ["refuted", "refuted"]


def test_neighbouring_rows_are_the_planes_where_a_model_rotates_them() -> None:
    """Cohere's rotary embedding turns coordinates 2 i and 2 i + 1 into each other."""
    transformers = pytest.importorskip("transformers")
    config = transformers.CohereConfig(
        vocab_size=40,
        hidden_size=48,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=2,
        attention_bias=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.CohereForCausalLM(config).eval()
    right, wrong = (pair_of(model, *patterns, {"heads": 2}) for patterns in (NEIGHBOURS, HALVES))
    with torch.no_grad():
        for w in model.parameters():
            w += 0.2 * torch.randn_like(w)
    proofs = [prove_symmetries(model, IDS, Symmetries((pair,))).pairs[0].verdict for pair in (right, wrong)]
    assert proofs == ["proved", "refuted"]


def test_a_random_move_of_planes_keeps_the_function() -> None:
    model = llama().double()
    pair = pair_of(model, *HALVES, {"heads": 2})
    moved = random_move(model, Symmetries((pair,)), scale=3.0)
    other = copy.deepcopy(model)
    other.load_state_dict(moved, strict=False)
    torch.testing.assert_close(other(**IDS).logits, model(**IDS).logits, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(moved[f"{PREFIX}.k_proj.weight"], model.get_parameter(f"{PREFIX}.k_proj.weight"))


# --- by itself -------------------------------------------------------------------------------------------------------


def test_the_balanced_point_does_not_depend_on_the_representative() -> None:
    manifold = RotaryQuotient(3, 2)
    x = point(4, 5)
    balanced = manifold.balance(x)
    torch.testing.assert_close(manifold.balance(manifold.action(number(4), x)), balanced, rtol=1e-12, atol=1e-12)
    g, k = manifold.split(balanced)
    torch.testing.assert_close(g.norm(dim=-1), k.norm(dim=-1))
    peak = g.gather(-1, g.abs().argmax(-1, keepdim=True))
    assert bool((peak.real > 0).all())
    torch.testing.assert_close(peak.imag, torch.zeros_like(peak.imag), rtol=0, atol=1e-12)


def test_orbits_are_larger_than_those_of_real_numbers() -> None:
    manifold = RotaryQuotient(3, 2)
    x = point(5)
    turned = manifold.action(torch.tensor(1j), x)
    column = FixedRankQuotient(6, 4)
    assert bool(manifold.same_orbit(x, turned))
    assert not bool(column.same_orbit(x.reshape(-1, 1), turned.reshape(-1, 1)))
    conjugated = x * torch.tensor([1.0, -1.0])  # g k^H becomes its conjugate
    assert not bool(manifold.same_orbit(x, conjugated))


def test_the_singular_value_is_that_of_the_complex_product() -> None:
    manifold = RotaryQuotient(3, 2)
    x = point(4, 5)
    g, k = manifold.split(x)
    expected = torch.linalg.svdvals(g[..., :, None] * k[..., None, :].conj())[..., :1]
    torch.testing.assert_close(manifold.at(x).singular_values, expected)


def test_the_relaxed_metric_stays_invariant_under_phases() -> None:
    manifold = RotaryQuotient(3, 2, "mix", eps=0.4)
    x, eta = point(5), point(5, seed=1)
    phase = torch.polar(torch.tensor(1.0).double(), torch.tensor(0.7).double())
    there = manifold.at(manifold.action(phase, x))
    torch.testing.assert_close(there.norm(manifold.action(phase, eta)), manifold.at(x).norm(eta))
    double = manifold.at(manifold.action(torch.tensor(2.0), x))
    assert abs(double.norm(manifold.action(torch.tensor(2.0), eta)) - manifold.at(x).norm(eta)) > 1e-3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RotaryQuotient(0, 2), "at least 1. Found n = 0"),
        (lambda: RotaryQuotient(2, 1, "riemann"), "metric must be"),
        (lambda: RotaryQuotient(2, 1).at(torch.ones(3, 3)), r"shape \(..., 3, 2\), real and imaginary.*Found \(3, 3\)"),
        (lambda: RotaryQuotient(2, 1).at(torch.zeros(3, 2)), "g is 0 in every entry"),
        (lambda: RotaryQuotient(1, 1).at(torch.tensor([[1.0, 0.0], [0.0, 0.0]])), "k is 0 in every entry"),
        (lambda: RotaryQuotient(1, 1).at(torch.full((2, 2), math.nan)), "Found NaN or infinity"),
    ],
)
def test_bad_input_gets_one_sentence(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()
