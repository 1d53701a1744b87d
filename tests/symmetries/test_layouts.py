"""Layouts, of one's own attention and of the table: found, proved, refused in one sentence where they do not fit."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import (
    LAYOUTS,
    Layout,
    Place,
    attention_layout,
    find_symmetries,
    prove_symmetries,
    random_move,
)
from tests.models import attend, noise


class Mixed(nn.Module):
    """Softmax attention whose one layer keeps queries, keys and values in either order, keys for groups of queries."""

    def __init__(self, order: str = "blocks", groups: int = 1, heads: int = 4, h: int = 3) -> None:
        super().__init__()
        self.order, self.heads, self.key_heads, self.h = order, heads, heads // groups, h
        self.into = nn.Linear(12, (heads + 2 * self.key_heads) * h)
        self.out = nn.Linear(heads * h, 12)

    def forward(self, x: Tensor) -> Tensor:
        everything = self.into(x)
        if self.order == "heads":
            opened = everything.unflatten(-1, (self.key_heads, -1, self.h))
            q, k, v = opened[..., :-2, :].flatten(-3, -2), opened[..., -2, :], opened[..., -1, :]
        else:
            sizes = [count * self.h for count in (self.heads, self.key_heads, self.key_heads)]
            q, k, v = (part.unflatten(-1, (-1, self.h)) for part in everything.split(sizes, dim=-1))
        k, v = (part.repeat_interleave(self.heads // self.key_heads, dim=-2) for part in (k, v))
        weights = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
        return self.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(-2))


def model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Mixed(**options)).eval()


def layout(**options: Any) -> Layout:
    return attention_layout(Mixed, **{"heads": "heads", "qkv": "into", "output": "out", **options})


@pytest.mark.parametrize("order", ["blocks", "heads"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_fused_projections_are_read_as_the_forward_pass_does(order: str, groups: int) -> None:
    network, x = model(order=order, groups=groups), torch.randn(2, 5, 12)
    mine = layout(order=order, key_heads="key_heads" if groups > 1 else "")
    found = find_symmetries(network, layouts=(mine, *LAYOUTS))
    assert [(pair.group, pair.n, pair.m) for pair in found.pairs] == [
        (f"GL(3)^{4 // groups}", 13 * groups, 13),
        (f"GL(3)^{4 // groups}", 13, 12 * groups),
    ]
    assert [shift.kind for shift in found.translations] == ["key bias", "value/output bias"]
    proof = prove_symmetries(network, x, found)
    assert proof.all_proved, str(proof)
    moved = random_move(network.double(), found, seed=1)
    after = torch.func.functional_call(network, moved, (x.double(),))
    assert torch.allclose(after, network(x.double()), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("true", "claimed"), [("blocks", "heads"), ("heads", "blocks")])
def test_the_wrong_order_is_refuted(true: str, claimed: str) -> None:
    network = model(order=true)
    proof = prove_symmetries(network, torch.randn(2, 5, 12), find_symmetries(network, layouts=(layout(order=claimed),)))
    assert {pair.verdict for pair in proof.pairs} == {"refuted"}


def test_a_layout_is_for_its_own_class_only() -> None:
    namesake = type("Mixed", (nn.Module,), {"__module__": "somebody.elses"})()
    namesake.into, namesake.out = nn.Linear(12, 36), nn.Linear(12, 12)
    assert find_symmetries(namesake, layouts=(layout(),)).pairs == ()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"qkv": "in_to"}, "known to keep them: it has no 'in_to.weight'"),
        ({"output": "into"}, "'into.weight' has shape|heads of width|it has a parameter 'out.weight'"),
        ({"heads": "n_head"}, "no attribute 'n_head'"),
        ({"heads": "order"}, "'order' is 'blocks', expected a positive number"),
        ({"output": Place("out.weight", "rows (heads g h) -> heads (g rows) h")}, "it has a parameter 'out.bias'"),
    ],
)
def test_a_layout_that_does_not_fit_says_why(options: dict[str, Any], reason: str) -> None:
    found = find_symmetries(model(), layouts=(layout(**options),))
    assert found.pairs == ()
    assert len(found.unrecognised) == 1
    assert re.search(reason, found.unrecognised[0]), found.unrecognised


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"qkv": ""}, ValueError, "needs qkv, or else query, key and value"),
        ({"query": "a", "key": "b", "value": "c"}, ValueError, "needs qkv, or else"),
        ({"heads": ""}, ValueError, "needs heads"),
        ({"width": "h"}, ValueError, "needs heads"),
        ({"order": "units"}, ValueError, "'blocks' or 'heads'"),
    ],
)
def test_half_a_layout_is_refused(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        layout(**options)


def test_misuse_is_one_sentence() -> None:
    with pytest.raises(TypeError, match="is a class of modules"):
        attention_layout("Mixed", heads="heads", qkv="into", output="out")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"such as \(mine, \*LAYOUTS\)"):
        find_symmetries(model(), layouts=layout())  # type: ignore[arg-type]


# --- the table of known attention


class Attention(nn.Module):
    """Vision attention with one fused projection, in the manner of timm."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.num_heads = 3
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)
        self.q_norm, self.k_norm, self.norm = (nn.LayerNorm(4) if norm else nn.Identity() for _ in range(3))
        self.attn_drop, self.proj_drop = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).unbind(-3)
        q, k = self.q_norm(q), self.k_norm(k)
        return self.proj_drop(self.proj(attend(q.flatten(-2), k.flatten(-2), v.flatten(-2), 3)))


TimmAttention = type("Attention", (Attention,), {"__module__": "timm.models.vision_transformer"})


def test_the_fused_attention_of_timm() -> None:
    model = nn.Sequential(TimmAttention()).eval()
    found = find_symmetries(model)
    assert [(pair.name, pair.group, pair.n, pair.m) for pair in found.pairs] == [
        ("0 query/key", "GL(4)^3", 13, 13),
        ("0 value/output", "GL(4)^3", 13, 12),
    ]
    assert prove_symmetries(model, noise(2, 5, 12), found).all_proved
    normed = find_symmetries(nn.Sequential(TimmAttention(norm=True)))
    assert [refusal.kind for refusal in normed.refused] == ["query/key", "value/output"]
    assert normed.pairs == ()
    assert "no known layout" in find_symmetries(nn.Sequential(Attention())).unrecognised[0]


OLDER = {"MultiHeadSelfAttention": "DistilBERT's class in transformers 4"}
KERNELS = ("SdpaAttention", "FlashAttention2")  # transformers 4 had a class for each kernel of a family


def test_every_class_of_the_table_exists() -> None:
    transformers = pytest.importorskip("transformers")
    root = Path(transformers.__file__).parent
    defined: dict[str, set[str]] = {}
    for file in (root / "models").rglob("model*.py"):
        module = ".".join((root.name, *file.relative_to(root).with_suffix("").parts))
        for name in re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE):
            defined.setdefault(name, set()).add(module)
    for layout in LAYOUTS:
        if layout.package.startswith("torch."):
            owner = importlib.import_module(layout.package)
            assert all(hasattr(owner, name) for name in layout.classes), layout.classes
        if layout.package and not layout.package.startswith("transformers."):
            continue  # timm is not installed with the tests
        for name in layout.classes:
            known = name in OLDER or (name.endswith(KERNELS) and layout.package == "")
            assert known or any(module.startswith(layout.package) for module in defined.get(name, ())), name
            assert len(name) > 3, f"{name!r} is a letter of a class name"
