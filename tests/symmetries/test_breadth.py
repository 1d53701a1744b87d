"""Every model type of the breadth table: its symmetries are found exactly, and each is verified with a control."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from torch import Tensor, nn

pytest.importorskip("transformers")

from quotient_manifolds.symmetries import (
    Factor,
    SymmetricPair,
    Symmetries,
    declare_pair,
    example_inputs,
    find_symmetries,
    propose_symmetries,
    verify_symmetries,
)
from quotient_manifolds.symmetries.pair import Group
from tests.nets.model_types import build
from tests.symmetries.breadth import cases, redundant, rows

KINDS = ("query/key", "value/output")
MASKED = ("dinov2", "dinov2_with_registers", "dinov3_vit", "tipsv2", "tipsv2_vision_model")
"""A mask token does not run, and might see what leads into the stream; it sees nothing of a head."""
REACHED = ("longformer", "xlnet", "udop")  # attention holds what does not run: global, of segments, unused by udop


@pytest.mark.parametrize(("name", "pairs", "biases", "maskless"), list(cases()), ids=[name for name, *_ in cases()])
def test_a_model_type_has_exactly_these_symmetries(
    name: str, pairs: dict[str, int], biases: dict[str, int], maskless: dict[str, int]
) -> None:
    """Biases that are redundant only without a mask are so without one, and not with one."""
    model = build(name)
    inputs = example_inputs(model)
    if name == "prophetnet":  # adds two masks of the least float64, which is minus infinity
        del inputs["attention_mask"]
    kept = find_symmetries(model, inputs).within("pairs")
    found = propose_symmetries(model, inputs).within("pairs") if name in REACHED else kept
    left_out = {pair.name for pair in found.pairs} - {pair.name for pair in kept.pairs}
    assert bool(left_out) == (name in REACHED)
    assert left_out == {each.name for each in kept.refused if "did not run" in each.reason and each.kind in KINDS}
    assert any("mask_token did not run" in each.reason for each in kept.refused) == (name in MASKED)
    _check_exactly(model, inputs, found, pairs, Counter(biases) - Counter(maskless))
    if maskless:
        del inputs["attention_mask"]
        _check_exactly(model, inputs, find_symmetries(model, inputs).within("pairs"), pairs, biases)


def _check_exactly(
    model: nn.Module, inputs: dict[str, Tensor], found: Symmetries, pairs: dict[str, int], biases: dict[str, int]
) -> None:
    assert Counter(f"{pair.kind} {pair.group}" for pair in found.pairs) == pairs
    assert redundant(model, found) == biases
    assert verify_symmetries(model, inputs, found).failed == {}


def test_the_table_is_broad() -> None:
    """README.md says how many types have pairs."""
    types = [name.partition("/")[0] for _, names, pairs, *_ in rows() if pairs for name in names]
    assert len(set(types)) >= 200
    assert len({name for name, *_ in cases()}) == len(list(cases()))
    assert {domain for domain, *_ in rows()} == {
        "encoder",
        "decoder",
        "encoder-decoder",
        "vision",
        "audio",
        "multimodal",
    }


# --- what rotary embeddings leave ------------------------------------------------------------------------------------


def _heads(factor: Factor, params: Mapping[str, Tensor], planes: int) -> Tensor:
    """A factor of planes as (heads, rows, h), units in the order in which they are stored."""
    numbers = factor.read(params).unflatten(0, (-1, planes)).permute(0, 2, 1, 3).flatten(2)
    return numbers.gather(-1, numbers[:, :1].argsort(-1).expand(numbers.shape))


def _claimed(model: nn.Module, pair: SymmetricPair, planes: int, cut: Callable[[Tensor], Tensor], acts: Group) -> str:
    G, H = (lambda w, side=side: cut(_heads(side, w, planes)) for side in (pair.G, pair.H))
    claim = declare_pair(model, "claimed", pair.kind, G=G, H=H, acts=acts)
    (check,) = verify_symmetries(model, example_inputs(model), Symmetries((claim,))).checks
    return f"{check.group} {check.verdict}"


@pytest.mark.parametrize(
    ("name", "h"),
    [("llama", 8), ("qwen2", 8), ("gemma", 8), ("gemma2", 8), ("modernbert", 8), ("cohere", 8), ("gpt_neox", 2)],
)
def test_full_gl_on_rotary_queries_and_keys_fails(name: str, h: int) -> None:
    model = build(name)
    found = find_symmetries(model, example_inputs(model))
    rotary = [pair for pair in found.pairs if pair.acts == "GL(1, C)"]
    assert rotary
    if h > 2:
        said = [_claimed(model, pair, h // 2, lambda whole: whole, "GL(h)") for pair in rotary]
        assert all(re.fullmatch(rf"GL\({h}\)\^\d+ fails", each) for each in said)
    planes = tuple(replace(pair, acts="GL(h)") for pair in rotary)  # GL(2) in every plane is too much as well
    checks = verify_symmetries(model, example_inputs(model), Symmetries(planes)).checks
    assert [check.verdict for check in checks] == ["fails"] * len(planes)


HALVES = lambda whole: whole.unflatten(-1, (2, -1)).permute(0, 3, 1, 2).flatten(0, 1)  # noqa: E731
NEIGHBOURS = lambda whole: whole.unflatten(-1, (-1, 2)).permute(0, 2, 1, 3).flatten(0, 1)  # noqa: E731


@pytest.mark.parametrize(("name", "right", "wrong"), [("llama", HALVES, NEIGHBOURS), ("cohere", NEIGHBOURS, HALVES)])
def test_the_wrong_planes_fail(name: str, right: Callable[[Tensor], Tensor], wrong: Callable[[Tensor], Tensor]) -> None:
    model = build(name)
    (pair,) = (each for each in find_symmetries(model, example_inputs(model)).pairs if each.acts == "GL(1, C)")
    said = [_claimed(model, pair, 4, cut, "GL(1, C)").split()[-1] for cut in (right, wrong)]
    assert said == ["holds", "fails"]


def test_grouped_queries_share_their_keys_group_element() -> None:
    model = build("mistral")
    pair = find_symmetries(model, example_inputs(model)).within("pairs").pairs[-1]
    assert (pair.kind, pair.heads, pair.n, pair.m, pair.h) == ("value/output", 2, 32, 64, 8)
