"""The new finder: nothing false on nets that deceive, and one sentence for a model that it cannot take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries.charges.find import find
from tests.nets.deceptive import BRANCHES, Counter, Dropped, deceptive
from tests.nets.net import Computed
from tests.nets.sets import varied
from tests.refusals import one_sentence
from tests.symmetries.test_found import moved

X = torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def unseen() -> list[Tensor]:
    """Return inputs of other sizes and scales, some of them far from those that are shown."""
    draw = torch.Generator().manual_seed(5)
    shapes = [(6, 4, 4), (6, 2, 4), (6, 5, 4), (13, 4, 4), (3, 3, 4), (6, 9, 4)]
    return [
        scale * torch.randn(shape, generator=draw, dtype=torch.float64) + shift
        for shape in shapes
        for scale, shift in ((1, 0), (1, 1), (1, -1), (60, 0))
    ] + [*varied(X).values()]


@pytest.mark.parametrize("name", BRANCHES)
def test_nothing_false_is_found_in_nets_that_compute_something_else_on_rare_inputs(name: str) -> None:
    model = deceptive(name)
    found = find(model, X)
    with torch.no_grad():
        params = moved(model, found.symmetries)
        for x in unseen():
            if x.shape[-1] != 4:
                continue
            before, after = model(x), torch.func.functional_call(model, params, (x,))
            assert float((after - before).abs().max()) < 1e-8 * float(before.abs().max().clamp(1e-6)), x.shape


def test_what_a_model_counts_in_a_buffer_is_named() -> None:
    assert any("calls" in sentence for sentence in find(Counter().double().eval(), X).held)


class Written(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.9)
        return super().forward(x)


class Never(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.idle = nn.Linear(4, 3)


class Raising(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ x[:, 1:]


class Integers(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


def wrapped(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), module).double().eval()


def spoilt(value: float) -> nn.Module:
    model = wrapped(nn.ReLU())
    nn.init.constant_(model.get_parameter("0.weight"), value)
    return model


REFUSED: dict[str, tuple[Callable[[], Any], Any, tuple[str, ...]]] = {
    "train mode": (lambda: wrapped(nn.Dropout()).train(), X, ("eval mode",)),
    "a part in train mode": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout()), X, ("eval mode",)),
    "random": (lambda: wrapped(Dropped()), X, ("random", "1")),
    "writes to its weights": (lambda: wrapped(Written(4, 4)), X, ("write", "weights")),
    "raises": (lambda: wrapped(Raising(4, 4)), X, ("module '1' (Raising)", "bmm")),
    "another width": (lambda: wrapped(nn.Linear(5, 4)), X, ("module '1' (Linear)", "addmm")),
    "no tensor": (lambda: wrapped(Computed(lambda s, x: None, a=nn.Linear(4, 4))), X, ("output",)),
    "no real output": (lambda: wrapped(Integers(4, 4)), X, ("output",)),
    "output of NaN": (lambda: wrapped(Computed(lambda s, x: s.a(x) * torch.nan, a=nn.Linear(4, 4))), X, ("NaN",)),
    "weights of NaN": (lambda: spoilt(torch.nan), X, ("'0.weight'", "finite")),
    "infinite weights": (lambda: spoilt(torch.inf), X, ("'0.weight'", "finite")),
    "weights without values": (lambda: wrapped(nn.ReLU()).to("meta"), X, ("'0.weight'", "values")),
    "no model": (lambda: torch.relu, X, ("torch.nn.Module",)),
    "sparse inputs": (lambda: wrapped(nn.ReLU()), X[0].to_sparse(), ("dense",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_taken_is_refused_in_one_sentence(name: str) -> None:
    make, x, words = REFUSED[name]
    with pytest.raises((ValueError, TypeError)) as raised:
        find(make(), x)
    assert one_sentence(str(raised.value)), str(raised.value)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def _with_gain_of_0() -> nn.Module:
    parts = {"a": nn.Linear(4, 3, bias=False), "b": nn.Linear(3, 2, bias=False)}
    return Computed(lambda s, x: s.b(s.g * s.a(x)), **parts, g=nn.Parameter(torch.zeros(3)))


NOTHING: dict[str, Callable[[], nn.Module]] = {
    "no parameter": lambda: nn.Sequential(nn.ReLU()),
    "a gain that is 0": _with_gain_of_0,
    "all outputs equal": lambda: Computed(lambda s, x: 0 * s.a(x), a=nn.Linear(4, 4)),
    "a constant": lambda: Computed(lambda s, x: x.sum(), a=nn.Linear(4, 4)),
    "infinite": lambda: Computed(lambda s, x: s.a(x) - torch.inf, a=nn.Linear(4, 4)),
    "NaN at other weights": lambda: Computed(lambda s, x: (s.g - 1).sqrt() * x, g=nn.Parameter(torch.ones(4))),
    "detached": lambda: Computed(lambda s, x: s.a(x).detach(), a=nn.Linear(4, 4)),
    "parameters that never run": lambda: Never(),
    "a parameter without elements": lambda: Computed(
        lambda s, x: s.a(x), a=nn.Linear(4, 4), b=nn.Parameter(torch.zeros(4, 0))
    ),
    "one number": lambda: Computed(lambda s, x: x * s.g, g=nn.Parameter(torch.ones(()))),
    "frozen": lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)),
}
"""Models that run, but of which little can be learned."""


def test_a_model_keeps_what_it_sets_while_it_runs() -> None:
    class Setting(nn.Linear):
        size = 0

        def forward(self, x: Tensor) -> Tensor:
            self.size = x.shape[1]  # as a window that a picture is smaller than
            return super().forward(x)

    model = Setting(4, 4).double().eval()
    find(model, X)
    assert not model.size


@pytest.mark.parametrize("name", NOTHING)
def test_a_model_that_runs_has_an_answer(name: str) -> None:
    model = NOTHING[name]().double().eval()
    found = find(model, X)
    with torch.no_grad():
        before, after = model(X), torch.func.functional_call(model, moved(model, found.symmetries), (X,))
        assert torch.allclose(before, after, rtol=1e-9, atol=1e-12)
