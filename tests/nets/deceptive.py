"""Nets that compute something else on inputs that are rarely tried: what a finder that looks at few would get wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.nets.net import Computed


def _two(**more: Any) -> dict[str, Any]:
    """Return weights of a net of two layers without a nonlinearity, which has GL(6), and a third layer beside."""
    return {
        "a": nn.Linear(4, 6, bias=False),
        "b": nn.Linear(6, 3, bias=False),
        "c": nn.Linear(6, 3, bias=False),
        **more,
    }


def _by_value(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    return s.b(h.relu()) if float(x.mean()) > 0 else s.b(h)


def _by_length(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    return s.b(h.relu()) if x.shape[1] % 2 else s.b(h)


def _by_examples(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    return s.b(h.relu()) if len(x) > 6 else s.b(h)


def _gate(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    return s.b(h) + s.b(h.relu() * (x.norm(dim=-1, keepdim=True) - 40).clamp(0, 1))


def _leak(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    return s.b(torch.where(h > 0, h, (1 + 1e-6) * h))


def _rounded(s: Any, x: Tensor) -> Tensor:
    return s.b(s.a(x)) + s.table((10 * s.c(s.a(x))).sum(-1).round().long().clamp(0, 4))


def _mask(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    return s.b(h.where((x > -3).all(-1, keepdim=True), h.relu()))


def _straight_through(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    return s.b(h + (h.round() - h).detach())


def _positions(s: Any, x: Tensor) -> Tensor:
    """Move positions so that their means vanish at all lengths but one."""
    return s.b(s.a(x) + s.t[: x.shape[1]]).mean(1)


def _last(s: Any, x: Tensor) -> Tensor:
    """Branch on the largest entry, which is rarely the first."""
    h = s.a(x)
    return torch.where((x.flatten(1).argmax(1) == 0)[:, None, None], s.b(h.relu()), s.b(h))


class Counter(nn.Module):
    """Count calls in a buffer, and compute something else from the third one on."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.a(x)
        return self.b(h) if int(self.calls) < 3 else self.b(h.relu())


class Dropped(nn.Module):
    """Drop at random in eval mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.dropout(self.a(x), 0.1, training=True))


BRANCHES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "by value": _by_value,
    "by length": _by_length,
    "by examples": _by_examples,
    "gate at large inputs": _gate,
    "leak of 1e-6": _leak,
    "rounded": _rounded,
    "mask that is mostly on": _mask,
    "straight through": _straight_through,
    "place of the largest": _last,
    "mean of positions": _positions,
}


def deceptive(name: str) -> nn.Module:
    """Return the net of a branch, in float64 and eval mode; it takes (examples, tokens, 4)."""
    torch.manual_seed(0)
    more: dict[str, Any] = {"table": nn.Embedding(5, 3)} if name == "rounded" else {}
    more |= {"t": nn.Parameter(torch.randn(9, 6))} if name == "mean of positions" else {}
    parts = _two(**more)
    if name != "rounded":
        del parts["c"]
    return Computed(BRANCHES[name], **parts).double().eval()
