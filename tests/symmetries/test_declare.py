"""Pairs declared by hand: the same as those that are found, and one sentence for what is no pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import Symmetries, declare_pair, find_symmetries, verify_symmetries
from tests.nets.attention import ViTAttention, claimed, noise
from tests.nets.net import Computed


@pytest.mark.parametrize("heads", [1, 3, 12])
def test_what_is_declared_is_what_is_found(heads: int) -> None:
    model, x = nn.Sequential(ViTAttention()).eval(), noise(2, 5, 12)
    by_hand = claimed(model, "0", heads)
    assert by_hand.pairs[0].group == f"GL({12 // heads})^{heads}"
    params = {name: w.detach() for name, w in model.named_parameters()}
    if heads == 3:
        for one, other in zip(by_hand.pairs, find_symmetries(model, x).pairs, strict=True):
            assert (one.name, one.kind, one.group) == (other.name, other.kind, other.group)
            for side in ("G", "H"):
                assert torch.equal(getattr(one, side).read(params), getattr(other, side).read(params))
    verdicts = {check.verdict for check in verify_symmetries(model, x, by_hand).checks}
    assert verdicts == ({"fails"} if heads == 1 else {"holds"})  # of several heads GL(h) is a part of GL(2 h)


def fused() -> nn.Module:
    """Return queries of two heads that share a key head, unit by unit: q q k v for each key head."""

    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = s.into(x).unflatten(-1, (2, 4, 3)).split([2, 1, 1], dim=-2)
        weights = torch.einsum("bikgh,bjkuh->bkgij", q, k).softmax(-1)
        return s.out(torch.einsum("bkgij,bjkuh->bikgh", weights, v).flatten(-3))

    return Computed(forward, into=nn.Linear(5, 2 * 4 * 3), out=nn.Linear(12, 5)).eval()


def test_slices_of_fused_and_grouped_projections_can_be_declared() -> None:
    model, x = fused(), noise(2, 6, 5)

    def opened(w: Mapping[str, Tensor]) -> Tensor:  # (key heads, units, rows, h)
        return torch.cat([w["into.weight"], w["into.bias"][:, None]], dim=1).unflatten(0, (2, 4, 3)).mT

    qk = declare_pair(model, "", "query/key", G=lambda w: opened(w)[:, :2].flatten(1, 2), H=lambda w: opened(w)[:, 2])
    vo = declare_pair(
        model,
        "",
        "value/output",
        G=lambda w: opened(w)[:, 3],
        H=lambda w: w["out.weight"].unflatten(1, (2, 2, 3)).permute(1, 2, 0, 3).flatten(1, 2),
    )
    assert [(pair.n, pair.m) for pair in (qk, vo)] == [(12, 6), (6, 10)]
    assert verify_symmetries(model, x, Symmetries((qk, vo))).all_hold
    assert [pair.group for pair in find_symmetries(model, x).pairs] == [qk.group, vo.group]


def cut(name: str, how: Callable[[Tensor], Any]) -> Callable[[Mapping[str, Tensor]], Any]:
    return lambda w: how(w[name])


W = cut("0.weight", lambda w: w.T[None])
WRONG: dict[str, tuple[Any, Any, Any, str]] = {
    "no such parameter": (cut("2.weight", lambda w: w), W, "GL(h)", "no parameter '2.weight'"),
    "two axes": (cut("1.weight", lambda w: w), W, "GL(h)", r"as \(heads, rows, h\). Found \(4, 3\)"),
    "changed": (cut("1.weight", lambda w: w[None] * 0.5), W, "GL(h)", "unchanged.*torch.float32"),
    "no tensor": (cut("1.weight", lambda w: "all"), W, "GL(h)", "Found str"),
    "other widths": (cut("1.weight", lambda w: w.T[None]), W, "GL(h)", r"Found \(heads, h\) = \(1, 3\), \(1, 4\)"),
    "twice": (W, W, "GL(h)", "stands twice"),
    "another group": (cut("1.weight", lambda w: w[None]), W, "GL(1, C)", r"2 for GL\(1, C\)"),
    "no such group": (cut("1.weight", lambda w: w[None]), W, "GL(3)", r"acts must be one of .* Found 'GL\(3\)'"),
    "beyond all": (cut("1.weight", lambda w: w[None] + 1000), W, "GL(h)", "no entry's place"),
    "negative": (cut("1.weight", lambda w: -w[None]), W, "GL(h)", "no entry's place"),
    "no order": (cut("1.weight", lambda w: w[[0, 1, 3]][None]), W, "GL(h)", "no offset and strides"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_pair_is_one_sentence(case: str) -> None:
    G, H, acts, match = WRONG[case]
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 4))
    with pytest.raises(ValueError, match=match) as caught:
        declare_pair(model, "both", "own", G=G, H=H, acts=acts)
    assert "\n" not in str(caught.value)


def test_a_model_without_values_can_have_declared_pairs() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 4)).to("meta")
    assert declare_pair(model, "both", "own", G=W, H=cut("1.weight", lambda w: w[None])).group == "GL(3)^1"


def test_declared_pairs_stand_beside_what_is_found() -> None:
    """In the place of pairs of the same parameters; the rest of the model is found as if they had been found."""
    block = nn.TransformerEncoderLayer(12, 3, 16, norm_first=True, batch_first=True).eval()
    x = noise(2, 5, 12)
    found = find_symmetries(block, x)
    first = next(pair for pair in found.pairs if pair.kind == "query/key")
    mine = declare_pair(block, "mine", "own", G=first.G.read, H=first.H.read)
    again = find_symmetries(block, x, declared=Symmetries((mine,)))
    kept = [pair.name for pair in found.pairs if set(first.names).isdisjoint(pair.names)]
    assert [pair.name for pair in again.pairs] == ["mine own", *kept]
    assert [each.name for each in again.reparameterizations] == [each.name for each in found.reparameterizations]
    assert verify_symmetries(block, x, again).all_hold
