"""Small networks that need no attention to have symmetries, and decoders with RMSNorm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def pre_norm_encoder() -> nn.Module:
    """Return torch's own layer, with norms before attention and feed-forward network, and ReLUs."""
    return nn.TransformerEncoderLayer(8, 2, 12, norm_first=True, batch_first=True)


def relu_network() -> nn.Module:
    """Return three linear layers with ReLUs between them."""
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 4))


def batch_norm_network() -> nn.Module:
    """Return linear layers with BatchNorm after the first, and a smooth activation."""
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.GELU(), nn.Linear(9, 4))


def convolutions() -> nn.Module:
    """Return two convolutions with BatchNorm and ReLU, the mean over pixels, and a head."""
    return nn.Sequential(
        *(nn.Conv2d(2, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU()),
        *(nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    )


class Gated(nn.Module):
    """A gated unit between two linear layers."""

    def __init__(self, d: int = 6, ff: int = 9) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(d, ff), nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x: Tensor) -> Tensor:
        """Return down(silu(gate(x)) * up(x))."""
        answer: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return answer


class Decoder(nn.Module):
    """One block with RMSNorm, attention of all heads at once, a gated unit, and a head of its own."""

    def __init__(self, d: int = 8, heads: int = 2, ff: int = 10, words: int = 11) -> None:
        super().__init__()
        self.heads = heads
        self.table, self.head = nn.Embedding(words, d), nn.Linear(d, words, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(d) for _ in range(3))
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.unit = nn.ModuleList(nn.Linear(*size, bias=False) for size in ((d, ff), (d, ff), (ff, d)))

    def forward(self, words: Tensor) -> Tensor:
        """Return logits for every position."""
        x = self.table(words)
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up, down = self.unit
        y = self.norms[1](x)
        logits: Tensor = self.head(self.norms[2](x + down(F.silu(gate(y)) * up(y))))
        return logits


class TiedDecoder(Decoder):
    """The same with the table of words for a head: neither its gain nor a rotation is free."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.table.weight
