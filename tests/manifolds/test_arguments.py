"""Bad tensors, for every manifold and every public method: a ValueError or TypeError of one sentence, nothing else."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quotient_manifolds.manifolds import FixedRankQuotient, QuotientManifold, Recipe, RotaryQuotient
from tests.cases import CASES, VECTORS, Case


def recipe() -> Case:
    """Vectors up to positive scaling, from two functions."""
    plain = VECTORS[0]
    manifold = Recipe(
        lambda a, x: a * x,
        lambda x, eta, zeta: (eta * zeta).sum() / (x * x).sum(),
        shape=plain.shape,
        identity=torch.ones(()),
        balance=lambda x: x / x.norm(),
    )
    return Case(**{**vars(plain), "name": "recipe", "manifold": manifold})


EVERY = [*CASES, *VECTORS, recipe()]
every_case = pytest.mark.parametrize("case", EVERY, ids=str)

BAD: dict[str, Callable[[Tensor], object]] = {
    "a list": lambda x: x.tolist(),
    "a number": lambda _: 1.5,
    "None": lambda _: None,
    "text": lambda _: "x",
    "an array": lambda x: x.numpy(),
    "complex": lambda x: x.to(torch.complex128),
    "integer": lambda x: x.to(torch.int64),
    "boolean": lambda x: x > 0,
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "float8": lambda x: x.to(torch.float8_e5m2),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "on meta": lambda x: x.to("meta"),
    "a scalar": lambda x: x.sum(),
    "one row more": lambda x: torch.cat([x, x[:1]]),
    "one column more": lambda x: torch.cat([x, x[..., :1]], dim=-1),
    "no column": lambda x: x[..., :0],
    "of a batch": lambda x: torch.stack([x] * 3),
    "in single precision": lambda x: x.float(),
    "NaN": lambda x: x * torch.nan,
    "infinite": lambda x: x * torch.inf,
    "zero": lambda x: 0 * x,
}
PASSES = {
    "of a batch",
    "one row more",
    "in single precision",
    "NaN",
    "infinite",
    "zero",
    "one column more",
    "no column",
}
"""What some methods can work with: alone it is a point of another shape or precision, or a vector."""

TENSORS = ("x", "y", "u", "v", "egrad", "ehess", "xi", "A")
SKIPPED = {"random", "extra_repr", "component_inner"}


def methods(manifold: QuotientManifold) -> list[str]:
    """Public methods that take tensors, geoopt's among them."""
    names = []
    for name, _ in inspect.getmembers(type(manifold), inspect.isfunction):
        ours = any(name in vars(base) for base in type(manifold).__mro__ if "Module" not in base.__name__)
        if ours and not name.startswith("_") and name not in SKIPPED and "check" not in name:
            names.append(name)
    return [n for n in names if set(inspect.signature(getattr(manifold, n)).parameters) & set(TENSORS)]


def good(case: Case, name: str) -> dict[str, Tensor]:
    """Arguments that a method takes."""
    parameters = inspect.signature(getattr(case.manifold, name)).parameters
    found = {}
    for argument in parameters:
        if argument == "A":
            found[argument] = case.group(torch.Generator().manual_seed(1), 3.0)
        elif argument in TENSORS:
            found[argument] = case.point(1) if argument in "xy" else 0.01 * case.vector(2)
    if name.endswith("mean"):
        found["x"] = torch.stack([case.point(1), case.point(1)])
    if name in ("logmap", "dist", "dist2"):
        found["y"] = 1.01 * found["x"]
    return found


def made(kind: str, x: Tensor) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes and deprecated kinds of tensors
        return BAD[kind](x)


def call(case: Case, name: str, arguments: dict[str, Any]) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(case.manifold, name)(**arguments)


@every_case
def test_good_arguments_are_taken(case: Case) -> None:
    """The control. What has no logarithm says so."""
    for name in methods(case.manifold):
        try:
            call(case, name, good(case, name))
        except NotImplementedError:
            assert name in ("dist", "dist2", "logmap", "mean")
        except ValueError:
            assert name in ("dist", "dist2", "logmap", "mean")
            assert case.manifold.eps > 0


@every_case
@settings(max_examples=25)
@given(data=st.data())
def test_bad_arguments_are_told_in_one_sentence(case: Case, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(methods(case.manifold)), "method")
    arguments = good(case, name)
    which = data.draw(st.sampled_from(sorted(arguments)), "argument")
    kind = data.draw(st.sampled_from(sorted(BAD)), "kind")
    assume(arguments[which].ndim or kind not in ("a scalar", "one row more", "one column more", "no column"))
    bad = made(kind, arguments[which])
    try:
        call(case, name, {**arguments, which: bad})
    except (ValueError, TypeError) as error:
        sentence = str(error)
    except NotImplementedError:
        assert name in ("dist", "dist2", "logmap", "mean")
        return
    else:
        sentence = None
    if sentence is not None:
        assert re.search("must|fails|[Ff]ound", sentence)
        assert "\n" not in sentence
        assert len(sentence) < 400
        return
    norm = (name, which, kind) == ("inner", "v", "None")
    assert norm or kind in PASSES, f"{name} takes {which} = {kind}"


@pytest.mark.parametrize("kind", [FixedRankQuotient, RotaryQuotient])
@pytest.mark.parametrize("bad", [{"n": 6.5}, {"n": "6"}, {"m": True}, {"eps": "a"}, {"eps": None}])
def test_sizes_and_relaxations_of_the_wrong_type(kind: type, bad: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=r"must be an? (integer|number). Found"):
        kind(**{"n": 6, "m": 5, **bad})
