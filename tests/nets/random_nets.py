"""Random networks on tokens, with masks, branches, gates and experts that show in later rows or batches only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
D = 5
HIDDEN = ("mask", "branch", "expert", "gate")
"""What may make a symmetry of the first two rows none of the others."""


KINDS = ("mlp", "glu", "norm", "rms", "gain", "attention", "linear")
PARTS = {"glu": "a b c", "norm": "norm b", "rms": "norm b", "gain": "gain", "attention": "q k a b"}  # or "a b"


class Layer(nn.Module):
    """A layer of a kind, x -> f(x) or x + f(x)."""

    ACTS = (torch.relu, torch.tanh, nn.functional.gelu, nn.functional.leaky_relu, lambda x: torch.relu(x).square())

    def __init__(self, draw: torch.Generator, hidden: bool) -> None:
        super().__init__()
        self.kind = KINDS[self._among(draw, len(KINDS))]
        self.act = self.ACTS[self._among(draw, len(self.ACTS))]
        self.residual = bool(self._among(draw, 2)) and self.kind not in ("norm", "rms")
        self.hides = HIDDEN[self._among(draw, len(HIDDEN))] if hidden and self._among(draw, 2) else ""
        width = 4 if self.kind in ("mlp", "glu") else D
        bias = bool(self._among(draw, 2))
        sizes = {"a": (D, width, bias), "b": (width, D), "c": (D, width), "q": (D, D, bias), "k": (D, D, bias)}
        parts: dict[str, nn.Module | nn.Parameter] = {name: nn.Linear(*size) for name, size in sizes.items()}
        parts["norm"] = (nn.RMSNorm if self.kind == "rms" else nn.LayerNorm)(D, eps=1e-5)
        parts |= {"gain": nn.Parameter(torch.ones(D)), "expert": nn.Linear(D, D)}
        parts["gate"] = nn.Parameter(torch.full((D,), float(self._among(draw, 2))))
        for name in (*PARTS.get(self.kind, "a b").split(), self.hides):
            if name in parts:
                setattr(self, name, parts[name])

    @staticmethod
    def _among(draw: torch.Generator, n: int) -> int:
        return int(torch.randint(n, (), generator=draw))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        padded = not bool(mask.all())
        y = self.layer(x, mask if self.hides == "mask" else torch.ones_like(mask))
        if self.hides == "gate":
            y = y * self.gate
        if self.hides == "branch" and padded:
            y = torch.tanh(y)
        if self.hides == "expert" and padded:
            y = y + self.expert(x)
        return x + y if self.residual else y

    def layer(self, x: Tensor, mask: Tensor) -> Tensor:
        m = mask[..., None]
        if self.kind == "mlp":
            return self.b(self.act(self.a(x)) * m)
        if self.kind == "glu":
            return self.b(self.act(self.a(x)) * self.c(x) * m)
        if self.kind in ("norm", "rms"):
            return self.b(self.norm(x) * m)
        if self.kind == "gain":
            return self.gain * x * m
        if self.kind == "attention":
            weights = (self.q(x) @ self.k(x).mT).softmax(-1)
            return self.b((weights * mask[:, None]) @ self.a(x))
        return self.b(self.a(x) * m)


class Net(nn.Module):
    """Two to five layers, a sum or mean over tokens, and three classes."""

    def __init__(self, seed: int, hidden: bool, fresh: bool) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        count = 2 + Layer._among(draw, 4)
        self.layers = nn.ModuleList(Layer(draw, hidden) for _ in range(count))
        self.norm = nn.LayerNorm(D) if Layer._among(draw, 2) else nn.Identity()
        self.mean, self.head = bool(Layer._among(draw, 2)), nn.Linear(D, 3)
        self.double().eval()
        with torch.no_grad():
            for name, w in self.named_parameters():
                vector = w.ndim == 1
                if not vector:
                    w.copy_(torch.randn(w.shape, generator=draw, dtype=w.dtype) / D**0.5)
                elif "gate" not in name:
                    start = float((".norm" in f".{name}" and name.endswith("weight")) or "gain" in name)
                    w.copy_(start + (0.0 if fresh else 0.5) * torch.randn(w.shape, generator=draw, dtype=w.dtype))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x)
        return self.head(x.mean(1) if self.mean else x.sum(1))


def net(seed: int, *, hidden: bool, fresh: bool) -> tuple[nn.Module, Loss, list[Batch]]:
    """Return a network, its loss and three batches; with `hidden` tokens of later rows, or of the third, are padded."""
    model = Net(seed, hidden, fresh)
    draw = torch.Generator().manual_seed(seed + 10**6)
    batches = []
    for index in range(3):
        x = torch.randn(5, 4, D, generator=draw, dtype=torch.float64)
        mask = torch.ones(5, 4, dtype=torch.float64)
        if hidden and (index == 2 or seed % 2):
            mask[-2:, -2:] = 0
        batches.append((x, mask, torch.randint(3, (5,), generator=draw)))
    return model, squares if seed % 3 == 0 else entropy, batches


def entropy(model: nn.Module, batch: Batch) -> Tensor:
    x, mask, y = batch
    return nn.functional.cross_entropy(model(x, mask), y)


def squares(model: nn.Module, batch: Batch) -> Tensor:
    x, mask, y = batch
    return (model(x, mask) - nn.functional.one_hot(y, 3)).square().mean()
