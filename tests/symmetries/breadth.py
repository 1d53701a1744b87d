"""The breadth table: which symmetries the attention of Hugging Face model types has, as the documentation says it.

Types are small models of tests/nets/model_types.py; "type/variant" is a type with settings of its own.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from quotient_manifolds.symmetries import Symmetries
from quotient_manifolds.symmetries.canonical import canonical

TABLE = Path(__file__).parents[2] / "docs" / "models.csv"
"""A line for all types with the same symmetries: the groups of pairs of one small model each, and redundant biases."""

ONCE = ("aya_vision", "convbert", "glm", "glm4", "gpt_neox", "llava", "phi")
"""Types of which not every pair has the redundant bias of its kind, but one."""


def counts(text: str) -> dict[str, int]:
    """Items and how many: "2 x a; b" as {"a": 2, "b": 1}."""
    items = (item.rpartition(" x ") for item in text.split("; ")) if text else ()
    return {name: int(count or 1) for count, _, name in items}


def redundant(model: nn.Module, found: Symmetries) -> Counter[str]:
    """Biases of pairs that others make up for, or a softmax ignores: key biases, and those of values."""
    params = {name: w.detach() for name, w in model.named_parameters()}
    zeros = canonical(found.groups, params).zeros
    less = [pair for pair in found.pairs if pair.without(zeros).views != pair.views]
    return Counter("key bias" if pair.kind == "query/key" else "value/output bias" for pair in less)


def rows() -> Iterator[tuple[str, list[str], dict[str, int], dict[str, int], dict[str, int]]]:
    """Return of each line its domain, its types, how many pairs of each kind and group, and how many biases.

    And how many of these are redundant only without an attention mask.
    """
    with TABLE.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            types, pairs, biases, maskless = line["model types"].split(", "), {}, {}, {}
            known = dict(re.findall(r"([a-z/]+)(?: \((\d+) without a mask\))?(?:, |$)", line["redundant biases"]))
            for kind in ("query/key", "value/output"):
                groups = re.findall(r"(GL\(.+?\)\^\d+)(?: \((\d+)\))?", line[kind])
                of_kind = {f"{kind} {group}": int(count or 1) for group, count in groups}
                bias = "key" if kind == "query/key" else kind
                if bias in known:
                    biases[f"{bias} bias"] = 1 if types[0] in ONCE else sum(of_kind.values())
                    maskless |= {f"{bias} bias": int(known[bias])} if known[bias] else {}
                pairs |= of_kind
            yield line["domain"], types, pairs, biases, maskless


def cases() -> Iterator[tuple[str, dict[str, int], dict[str, int], dict[str, int]]]:
    """Return every type with its pairs, its biases, and those of them that are redundant only without a mask."""
    for _, types, *expected, maskless in rows():
        for name in types:
            unlike = [counts(each) for each in UNLIKE.get(name, ())]
            yield name, *(unlike or expected), maskless


UNLIKE: dict[str, tuple[str, str]] = {
    # angles of a small image
    **dict.fromkeys(("sam_vision_model", "sam_hq_vision_model"), ("value/output GL(8)^4", "value/output bias")),
    # what the last values of the layout make reaches no output: they may take any numbers, and are no pair
    "lilt": (
        "2 x query/key GL(12)^4; 2 x query/key GL(3)^4; 2 x value/output GL(12)^4; value/output GL(3)^4",
        "4 x key bias; 3 x value/output bias",
    ),
}
"""Types of which less is found than they have, and what."""
