"""Small transformers that studies train themselves: on digits, and as language models on documentation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, NEURONS, LAYERS = 64, 4, 256, 2
CONTEXT = 64  # characters of a language model
Kind = Literal["RMSNorm, digits", "LayerNorm and GELU, digits", "language model"]
Batch = tuple[Tensor, Tensor]


def parts(kind: Kind) -> tuple[Callable[..., nn.Module], Callable[..., nn.Module], Callable[[Tensor], Tensor]]:
    """Return norms, linear maps and activation: RMSNorm, without biases, ReLU; or as in a vision transformer."""
    if kind == "LayerNorm and GELU, digits":
        return nn.LayerNorm, nn.Linear, F.gelu
    return nn.RMSNorm, partial(nn.Linear, bias=False), F.relu


class Block(nn.Module):
    """Attend, then apply an MLP, each to what a norm gives, and add to the stream."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        norm, linear, self.activation = parts(kind)
        self.first, self.second, self.causal = norm(WIDTH), norm(WIDTH), kind == "language model"
        self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = linear(WIDTH, NEURONS), linear(NEURONS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = (each(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
        return x + self.down(self.activation(self.up(self.second(x))))


class Transformer(nn.Module):
    """Classify 16 patches of 2 x 2 pixels by their mean, or predict the next of CONTEXT characters."""

    def __init__(self, kind: Kind, outputs: int) -> None:
        super().__init__()
        self.language, (norm, linear, _) = kind == "language model", parts(kind)
        self.embed = nn.Embedding(outputs, WIDTH) if self.language else linear(4, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT if self.language else 16, WIDTH))
        self.blocks = nn.Sequential(*(Block(kind) for _ in range(LAYERS)))
        self.norm, self.head = norm(WIDTH), linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.blocks(self.embed(x) + self.position[: x.shape[1]]))
        return self.head(y if self.language else y.mean(1))


def loss(model: Callable[[Tensor], Any], batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the classes, or of the next characters."""
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


@torch.no_grad()
def accuracy(model: Callable[[Tensor], Any], batch: Batch) -> float:
    """Return how often the most likely class, or character, is right."""
    return float((model(batch[0]).argmax(-1) == batch[1]).double().mean())


@cache
def data(kind: Kind) -> tuple[Batch, Batch, int]:
    """Return what is trained on, what is tested on, and the number of classes or characters."""
    if kind == "language model":
        text = "\n\n".join(paragraphs())
        letters = sorted(set(text))
        codes = torch.tensor([letters.index(c) for c in text])
        rows = codes[: len(codes) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
        cut, count = len(rows) - 512, len(letters)
        x, y = rows[:, :-1], rows[:, 1:]
    else:
        found = load_digits()
        pixels = torch.from_numpy(found.images / 16).float().unfold(1, 2, 2).unfold(2, 2, 2)
        order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
        x, y = pixels.reshape(len(pixels), 16, 4)[order], torch.from_numpy(found.target)[order]
        cut, count = 1297, 10
    return (x[:cut], y[:cut]), (x[cut:], y[cut:]), count


def paragraphs() -> list[str]:
    """Return the paragraphs of the docstrings of functions and classes of numpy and scipy, each once."""
    import scipy.linalg
    import scipy.optimize
    import scipy.signal
    import scipy.stats

    modules = (np, np.linalg, scipy.linalg, scipy.optimize, scipy.signal, scipy.stats)
    texts = (text for module in modules for text in _docstrings(module))
    found = dict.fromkeys(each for text in texts for each in text.split("\n\n"))
    return [each for each in found if each.isascii() and ">>>" not in each and len(each) > 60]


def _docstrings(module: ModuleType) -> Iterator[str]:
    for name in sorted(dir(module)):
        if not name.startswith("_") and callable(each := getattr(module, name)):
            yield inspect.getdoc(each) or ""


def trained(kind: Kind, seed: int, steps: int) -> Transformer:
    """Train a transformer by AdamW with a rate that falls to 0; torch's global generator is left alone."""
    (x, y), _, outputs = data(kind)
    size = 16 if kind == "language model" else 64
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(kind, outputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(len(x), (size,), generator=draw)
        optimizer.zero_grad()
        loss(model, (x[rows], y[rows])).backward()
        optimizer.step()
        rate.step()
    return model.eval()
