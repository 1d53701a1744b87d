"""The mistakes people make, each with a sentence that says what must hold and what was found."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from quotient_manifolds import Quotient
from quotient_manifolds.manifolds import (
    DiagonalQuotient,
    FixedRankQuotient,
    GeodesicError,
    RotaryQuotient,
    ScaleQuotient,
    TranslationQuotient,
    runge_kutta,
)
from quotient_manifolds.pymanopt import as_pymanopt
from tests.cases import EVERY, Case
from tests.manifolds.test_recipe import toy
from tests.refusals import one_sentence

every_case = pytest.mark.parametrize("case", EVERY, ids=str)
PAIR, ONES, PLANE = FixedRankQuotient(3, 2), torch.ones(5, 1), RotaryQuotient(2, 1)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "metric": (lambda: FixedRankQuotient(3, 2, "riemann"), "or a finite number. Found 'riemann'"),
    "a metric misspelt": (lambda: FixedRankQuotient(3, 2, "inw"), "number. Found 'inw'; did you mean 'inv'?"),
    "a diagonal one": (lambda: DiagonalQuotient("mixx"), "number. Found 'mixx'; did you mean 'mix'?"),
    "a quotient": (lambda: Quotient("inw"), "number. Found 'inw'; did you mean 'inv'?"),
    "a geodesic": (lambda: Quotient("inv", geodesic="secnd"), "exact. Found 'secnd'; did you mean 'second'?"),
    "no rows": (lambda: FixedRankQuotient(0, 2), "n, a number of rows, must be an integer of at least 1. Found 0"),
    "eps": (lambda: FixedRankQuotient(3, 2, eps=-1.0), "eps must be a finite number of at least 0. Found -1.0"),
    "rows": (lambda: PAIR.at(torch.ones(4, 1)), "must have shape (..., 5, h) with 1 <= h <= 2. Found (4, 1)"),
    "columns": (lambda: PAIR.at(torch.ones(5, 3)), "with 1 <= h <= 2"),
    "rank": (lambda: PAIR.dist(torch.ones(5, 2), torch.ones(5, 2)), "rank(G H^T) = h = 2 fails"),
    "no rank": (lambda: PAIR.dist(ONES, 0 * ONES), "h = 1 fails: G is 0; nothing but training begins there"),
    "no rank, exact": (lambda: PAIR.expmap(0 * ONES, 0 * ONES), "must start where rank(G H^T) = h"),
    "no rank, a graph": (lambda: PAIR.norm((0 * ONES).requires_grad_(), ONES), "Found a lower rank: detach it"),
    "vector": (lambda: PAIR.retr(ONES, torch.ones(4, 1)), "must end in one shape, (5, 1). Found shape (4, 1)"),
    "dtypes": (lambda: PAIR.proju(ONES, ONES.double()), "must have one dtype and one device. Found torch.float64"),
    "order": (lambda: PAIR.geodesic(ONES, ONES, 1.0, "third"), "exact. Found 'third'"),
    "an order misspelt": (lambda: PAIR.geodesic(ONES, ONES, 1.0, "frist"), "Found 'frist'; did you mean 'first'?"),
    "velocity": (lambda: PAIR.retr(ONES, math.nan * ONES), "the velocity of a geodesic must be finite"),
    "element": (lambda: PAIR.action(torch.ones(2, 2), ONES), "A, an element of the group, must have shape (..., 1, 1)"),
    "relaxed": (lambda: FixedRankQuotient(3, 2, eps=0.1).dist(ONES, ONES), "eps must be 0 for logmap and dist"),
    "far": (lambda: FixedRankQuotient(1, 1).logmap(torch.ones(2, 1), torch.tensor([[1.0], [-1.0]])), "near enough"),
    "no logarithm": (lambda: PLANE.dist(torch.ones(3, 2), torch.ones(3, 2)), "RotaryQuotient has no logarithm"),
    "zero": (lambda: DiagonalQuotient().at(torch.tensor([[0.0], [1.0]])), "v_i != 0 fails: 1 entries are 0"),
    "layout": (lambda: DiagonalQuotient().at(torch.ones(3, 2)), "shape (..., 2, d). Found (3, 2)"),
    "signs": (lambda: DiagonalQuotient().dist(torch.ones(2, 1), torch.tensor([[1.0], [-1.0]])), "same signs"),
    "planes": (lambda: PLANE.at(torch.ones(3, 3)), "shape (..., 3, 2), real and imaginary. Found (3, 3)"),
    "no g": (lambda: PLANE.at(torch.zeros(3, 2)), "g is 0 in every entry"),
    "no k": (lambda: PLANE.at(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])), "k is 0 in every entry"),
    "w = 0": (lambda: ScaleQuotient().at(torch.zeros(2, 3)), "w != 0 fails: 2 vectors are 0"),
    "one entry": (lambda: ScaleQuotient().random(3, 1), "ScaleQuotient must have shape (..., d) with d >= 2. Found"),
    "negative": (lambda: ScaleQuotient().action(torch.tensor(-1.0), torch.ones(2)), "A must be positive"),
    "opposite": (lambda: ScaleQuotient().logmap(torch.ones(3), -2 * torch.ones(3)), "in opposite directions"),
    "no vector": (lambda: TranslationQuotient().at(torch.tensor(1.0)), "TranslationQuotient must have shape"),
    "recipe's shape": (lambda: toy().at(torch.ones(3)), "must have shape (..., 2). Found (3,)"),
    "indefinite": (lambda: toy().at(torch.tensor([0.0, 1.0])), "<eta, eta> > 0 fails: the matrix of the metric has"),
    "asymmetric": (lambda: toy(lambda x, e, f: e[0] * f[1]).at(torch.ones(2)), "<eta, zeta> = <zeta, eta> fails"),
    "no balance": (lambda: toy().balance(torch.ones(2)), "balance must be given when the Recipe is built"),
    "jump": (
        lambda: toy(lambda x, e, f: (e * f / x**2).sum() * (1 + (x.prod() > 1.05))).expmap(*torch.ones(2, 2)),
        "the energy of a geodesic must be constant",
    ),
    "view": (lambda: as_pymanopt("inv", (11, 2)), "must be a QuotientManifold. Found 'inv'"),  # type: ignore[arg-type]
    "view of a batch": (lambda: as_pymanopt(PAIR, (8, 5, 2)), "shape must be that of one point, with 2 dimensions"),
    "view of no point": (lambda: as_pymanopt(PAIR, (8, 2)), "must have shape (..., 5, h)"),
}


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        call()
    assert words in str(caught.value)
    assert one_sentence(str(caught.value))


BAD: dict[str, tuple[Callable[[Tensor], object], type[Exception]]] = {
    "a list": (lambda x: x.tolist(), TypeError),
    "an array": (lambda x: x.numpy(), TypeError),
    "None": (lambda x: None, TypeError),
    "integer": (lambda x: x.to(torch.int64), ValueError),
    "complex": (lambda x: x.to(torch.complex128), ValueError),
    "bfloat16": (lambda x: x.bfloat16(), ValueError),
    "NaN": (lambda x: x * torch.nan, ValueError),
    "infinite": (lambda x: x * torch.inf, ValueError),
    "one row more": (lambda x: torch.cat([x, x[:1]]), ValueError),
}


@every_case
@pytest.mark.parametrize("kind", BAD)
def test_no_manifold_takes_what_is_no_point_or_vector(case: Case, kind: str) -> None:
    make, error = BAD[kind]
    manifold, x = case.manifold, case.point(1)
    calls: list[Callable[..., object]] = [manifold.at]
    if kind not in ("NaN", "infinite"):  # which a vector may be, where no geodesic is followed
        calls += [partial(manifold.proju, x), partial(manifold.egrad2rgrad, x)]
    if kind == "one row more" and x.ndim == 1:  # a point of another quotient
        calls = calls[1:]
    for call in calls:
        with pytest.raises(error, match="must") as caught:
            call(make(x))
        assert one_sentence(str(caught.value))


def test_too_many_steps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runge_kutta, "MAX_STEPS", 1)
    pairs = FixedRankQuotient(3, 2, "mix")
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u = pairs.proju(x, torch.eye(5, dtype=torch.float64)[:, 1:3])
    for manifold, point, xi in ((toy(), torch.ones(2), -0.4 * torch.ones(2)), (pairs, x, u / pairs.norm(x, u))):
        with pytest.raises(GeodesicError, match=r"must end within .* steps. Found one that came no further than t = 0"):
            manifold.expmap(point, xi)
