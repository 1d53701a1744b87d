"""Factors of pairs are strided views of parameters; what comes between two of them says which group is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quotient_manifolds.symmetries import (
    find_symmetries,
    verify_symmetries,
)
from quotient_manifolds.symmetries.strided_view import StridedView
from tests.nets.net import Computed, linear


@pytest.mark.parametrize("heads", [1, 3])
def test_a_strided_view_writes_what_it_reads(heads: int) -> None:
    stored = torch.arange(60.0).view(12, 5)  # (heads, 4, 5), of which every other output
    first = (torch.arange(heads) * 20)[:, None, None] + torch.tensor([[0, 10]])
    view = StridedView.of("w", (12, 5), first, torch.arange(5))
    assert view is not None
    assert view.shape == (heads, 5, 2)
    params = {"w": stored.clone()}
    read = view.read(params).clone()  # it shares memory
    assert torch.equal(read, stored.view(3, 4, 5)[:heads, ::2].mT)
    view.write(params, -read)
    assert torch.equal(view.read(params), -read)
    assert int((params["w"] != stored).sum()) == heads * 10 - 1  # number 0 is its own negative
    apart = {"w": stored.T.contiguous().T.clone()}  # the same numbers, elsewhere in memory
    view.write(apart, -read)
    assert torch.equal(apart["w"], params["w"])


def test_a_strided_view_reads_numbers_that_lie_apart_in_memory() -> None:
    view = StridedView.of("w", (7, 6), torch.arange(7)[None, None] * 6, torch.arange(6))
    assert view is not None
    stored = torch.arange(84.0).view(7, 12)[:, ::2]  # a row of it, flat, is a view with a step of 2
    assert torch.equal(view.read({"w": stored}), stored.T[None])
    one = torch.ones(()).expand(7, 6)  # as gradients are that are 0 everywhere
    assert torch.equal(view.read({"w": one}), torch.ones(1, 6, 7))
    wide = torch.zeros(7, 12)
    view.write({"w": wide[:, ::2]}, stored.T[None])
    assert torch.equal(wide[:, ::2], stored)
    assert not wide[:, 1::2].any()


def test_numbers_in_no_regular_order_have_no_strided_view() -> None:
    assert StridedView.of("w", (12, 5), torch.tensor([[[0, 1, 5]]]), torch.arange(1)) is None


# --- what makes two pairs of one, and none ----------------------------------------------------------------------------

FACTORS = torch.tensor([2.0, 2.0, 2.0, 5.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("between", "groups"),
    [
        (lambda x: -3 * x, ["GL(4)^1"]),
        (lambda x: x * FACTORS, []),  # all matrices, but no pair: numbers stand between both
        (lambda x: x * torch.arange(1, 6, dtype=x.dtype)[:, None], ["GL(4)^1"]),  # a factor for each token
        (lambda x: torch.cat([x[..., :2].roll(1, 1), x[..., 2:]], -1), ["GL(2)^2"]),  # of the token before
        (lambda x: x[..., [1, 0, 3, 2]].flip(-1).roll(2, -1), ["GL(4)^1"]),  # the order it was in
        (lambda x: x.flip(-1), []),  # two orders that no view can have
        (lambda x: x.relu(), ["GL+(1)^4"]),
        (lambda x: x + 1, []),
        (lambda x: x.tanh(), []),
        (lambda x: x * x.mean(), []),
        (lambda x: x.cumsum(-1), []),
    ],
)
def test_what_comes_between_says_which_group_is_left(between: Callable[[Tensor], Tensor], groups: list[str]) -> None:
    """Scores of two linear maps with something in between."""
    model = Computed(lambda s, x: between(s.q(x)) @ s.k(x).mT, **linear("qk", 6, 4, bias=False)).eval()
    inputs = torch.randn(2, 5, 6, dtype=torch.float64)
    found = find_symmetries(model, inputs)
    assert sorted(pair.group for pair in found.pairs) == sorted(groups)
    assert verify_symmetries(model, inputs, found).all_hold or not groups
