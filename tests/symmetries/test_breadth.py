"""Every model type of the breadth table: its symmetries are found exactly, and each is proved with a control."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from quotient_manifolds.load import example_inputs
from quotient_manifolds.symmetries import (
    Factor,
    ParameterView,
    SymmetricPair,
    Symmetries,
    find_symmetries,
    prove_symmetries,
)
from tests.breadth import REASONS, TABLE, Row, cases, counts, markdown
from tests.small_models import build


@pytest.mark.parametrize(("name", "row"), list(cases()), ids=[name for name, _ in cases()])
def test_a_model_type_has_exactly_these_symmetries(name: str, row: Row) -> None:
    model = build(name)
    found = find_symmetries(model)
    assert Counter(f"{pair.kind} {pair.group}" for pair in found.pairs) == counts(row.pairs)
    assert Counter(shift.kind for shift in found.translations) == counts(row.translations)
    assert tuple(entry.split(":")[0] for entry in found.unrecognised) == row.unrecognised
    assert Counter(refusal.kind for refusal in found.refused) == {
        item.partition(" ")[0]: count for item, count in counts(row.refused).items()
    }
    reasons = {item.partition(" ")[0]: REASONS[item.partition(" ")[2]] for item in counts(row.refused)}
    assert all(reasons[refusal.kind] in refusal.reason for refusal in found.refused)
    proof = prove_symmetries(model, example_inputs(model), found)
    assert proof.all_proved == bool(found.pairs), str(proof)
    assert len(proof.pairs) == len(found.pairs)


def test_the_table_is_broad() -> None:
    types = [name.partition("/")[0] for name, row in cases() if row.pairs]
    assert len(set(types)) >= 200  # README.md says so
    assert len({name for name, _ in cases()}) == len(list(cases()))
    assert {row.domain for row in TABLE} == {
        "encoder",
        "decoder",
        "encoder-decoder",
        "vision",
        "audio",
        "multimodal",
    }


def test_the_documentation_shows_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- breadth -->\n(.*?)\n<!-- /breadth -->", page, re.DOTALL)
    assert shown is not None
    assert shown.group(1).strip() == markdown()


# --- what rotary embeddings leave ------------------------------------------------------------------------------------


def _whole_heads(pair: SymmetricPair, h: int) -> SymmetricPair:
    """The claim of full GL(h): a rotary pair read as heads of width h instead of planes."""

    def whole(part: ParameterView) -> ParameterView:
        left, right = part.pattern.split(" -> ")
        left = re.sub(r"\(two planes\)|\(planes two\)", "h", left)
        right = re.sub(r"^\((\S+) planes\)", r"\1", right).removesuffix("two") + "h"
        heads = part.shape[0] * part.shape[2] // h
        return replace(part, pattern=f"{left} -> {right}", shape=(heads, part.shape[1], h), sizes=_sizes(part, h))

    G, H = (Factor(tuple(whole(part) for part in factor.views)) for factor in (pair.G, pair.H))
    return replace(pair, G=G, H=H, acts="GL(h)")


def _sizes(part: ParameterView, h: int) -> tuple[tuple[str, int], ...]:
    return (*((axis, size) for axis, size in part.sizes if axis not in ("two", "planes", "h")), ("h", h))


@pytest.mark.parametrize(
    ("name", "h"),
    [("llama", 8), ("qwen2", 8), ("gemma", 8), ("gemma2", 8), ("modernbert", 8), ("cohere", 8), ("gpt_neox", 2)],
)
def test_full_gl_on_rotary_queries_and_keys_is_refuted(name: str, h: int) -> None:
    model = build(name)
    found = find_symmetries(model)
    rotary = [pair for pair in found.pairs if pair.acts == "GL(1, C)"]
    claims = tuple(_whole_heads(pair, h) for pair in rotary)
    assert rotary
    assert all(claim.group.startswith(f"GL({h})") for claim in claims)
    if h > 2:
        verdicts = prove_symmetries(model, example_inputs(model), Symmetries(claims)).pairs
        assert [proof.verdict for proof in verdicts] == ["refuted"] * len(claims)
    planes = tuple(replace(pair, acts="GL(h)") for pair in rotary)  # GL(2) in every plane is too much as well
    verdicts = prove_symmetries(model, example_inputs(model), Symmetries(planes)).pairs
    assert [proof.verdict for proof in verdicts] == ["refuted"] * len(planes)


@pytest.mark.parametrize(("name", "other"), [("llama", "interleaved"), ("cohere", "half")])
def test_the_wrong_planes_are_refuted(name: str, other: str) -> None:
    model = build(name)
    planes = {"half": "(two planes)", "interleaved": "(planes two)"}[other]
    pair = find_symmetries(model).pairs[0]
    G, H = (
        Factor(
            tuple(
                replace(part, pattern=re.sub(r"\((two planes|planes two)\)", planes, part.pattern))
                for part in side.views
            )
        )
        for side in (pair.G, pair.H)
    )
    proof = prove_symmetries(model, example_inputs(model), Symmetries((replace(pair, G=G, H=H),)))
    assert [claim.verdict for claim in proof.pairs] == ["refuted"]


def test_grouped_queries_share_their_keys_group_element() -> None:
    pair = find_symmetries(build("mistral")).pairs[-1]
    assert (pair.kind, pair.heads, pair.n, pair.m, pair.h) == ("value/output", 2, 32, 64, 8)
