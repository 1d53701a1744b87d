"""Attention as people write it themselves. Nothing here is imported from the library, or from one of models."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


class NanoGPT(nn.Module):
    """A GPT of two blocks: queries, keys and values packed in one layer, the mask a buffer, softmax written down."""

    def __init__(self, d: int = 12, heads: int = 3, words: int = 11, tokens: int = 6) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, d), nn.Embedding(tokens, d)
        self.h = nn.ModuleList(self.Block(d, heads, tokens) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, words, bias=False)

    class Block(nn.Module):
        def __init__(self, d: int, heads: int, tokens: int) -> None:
            super().__init__()
            self.heads = heads
            self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.c_fc, self.mlp_proj = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
            self.register_buffer("mask", torch.tril(torch.ones(tokens, tokens)).view(1, 1, tokens, tokens))

        def forward(self, x: Tensor) -> Tensor:
            B, T, C = x.size()
            q, k, v = self.c_attn(self.ln_1(x)).split(C, dim=2)
            q, k, v = (each.view(B, T, self.heads, C // self.heads).transpose(1, 2) for each in (q, k, v))
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
            y = F.softmax(att, dim=-1) @ v
            x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
            return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))

    def forward(self, words: Tensor) -> Tensor:
        x = self.wte(words) + self.wpe(torch.arange(words.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class RearrangedViT(nn.Module):
    """A ViT that takes heads apart by einops, with a class token."""

    def __init__(self, d: int = 10, heads: int = 2, dim_head: int = 4) -> None:
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.to_patch, self.cls = nn.Linear(6, d), nn.Parameter(torch.randn(1, 1, d))
        self.pos, self.norm = nn.Parameter(torch.randn(1, 6, d)), nn.LayerNorm(d)
        self.to_qkv = nn.Linear(d, 3 * heads * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, d), nn.Dropout(0.1))
        self.head = nn.Linear(d, 4)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.to_patch(patches)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1)
        x = x + self.pos[:, : x.shape[1]]
        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in qkv)
        attn = (torch.matmul(q, k.transpose(-1, -2)) * self.scale).softmax(dim=-1)
        x = x + self.to_out(rearrange(torch.matmul(attn, v), "b h n d -> b n (h d)"))
        return self.head(x.mean(dim=1))


class CrossAttention(nn.Module):
    """Cross-attention to states of another width, and a feed-forward network with a gate, as in diffusion models."""

    def __init__(self, d: int = 12, context: int = 8, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.to_q = nn.Linear(d, d, bias=False)
        self.to_k, self.to_v = nn.Linear(context, d, bias=False), nn.Linear(context, d, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(d, d), nn.Dropout(0.0)])
        self.proj, self.ff = nn.Linear(d, 4 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = self.to_q(self.norm1(x)), self.to_k(context), self.to_v(context)
        q, k, v = (t.view(len(t), -1, self.heads, t.shape[-1] // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        for module in self.to_out:
            y = module(y)
        x = x + y
        hidden, gate = self.proj(self.norm2(x)).chunk(2, dim=-1)
        return x + self.ff(hidden * F.gelu(gate))


class PermutedQKV(nn.Module):
    """A block with a scale for each channel: one layer for queries, keys and values, unbound after a permutation."""

    def __init__(self, d: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, d // heads
        self.norm, self.qkv, self.proj = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.gamma = nn.Parameter(torch.randn(d))

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(self.norm(x)).reshape(B, N, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C)
        return x + self.gamma * self.proj(y)


class Einsum(nn.Module):
    """One matrix for each head, everything by einsum, softmax by exp and a sum."""

    def __init__(self, d: int = 7, heads: int = 2, h: int = 3) -> None:
        super().__init__()
        self.Q, self.K, self.V = (nn.Parameter(torch.randn(heads, d, h)) for _ in range(3))
        self.O = nn.Parameter(torch.randn(heads, h, d))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bnd,hdk->bhnk", x, W) for W in (self.Q, self.K, self.V))
        scores = torch.einsum("bhik,bhjk->bhij", q, k) / q.shape[-1] ** 0.5
        weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return torch.einsum("bhij,bhjk,hkd->bid", weights, v, self.O)


class ComplexRotary(nn.Module):
    """Grouped keys, positions as complex numbers, keys repeated for their queries, a gated network behind."""

    def __init__(self, d: int = 12, heads: int = 4, groups: int = 2, h: int = 4, ff: int = 10) -> None:
        super().__init__()
        self.heads, self.groups, self.h = heads, groups, h
        self.wq, self.wo = nn.Linear(d, heads * h, bias=False), nn.Linear(heads * h, d, bias=False)
        self.wk, self.wv = nn.Linear(d, groups * h, bias=False), nn.Linear(d, groups * h, bias=False)
        self.w1, self.w2, self.w3 = (nn.Linear(*size, bias=False) for size in ((d, ff), (ff, d), (d, ff)))
        angles = torch.outer(torch.arange(8.0), 0.5 ** torch.arange(h // 2))
        self.register_buffer("angles", angles)

    def rotated(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        turn = torch.polar(torch.ones_like(self.angles), self.angles)[: x.shape[1], None]
        return torch.view_as_real(pairs * turn).flatten(3)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.rotated(self.wq(x).view(B, T, self.heads, self.h))
        k = self.rotated(self.wk(x).view(B, T, self.groups, self.h))
        v = self.wv(x).view(B, T, self.groups, self.h)
        k, v = (t[:, :, :, None].expand(-1, -1, -1, self.heads // self.groups, -1).flatten(2, 3) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.wo(y)
        return x + self.w2(F.silu(self.w1(x)) * self.w3(x))


class PartlyRotated(nn.Module):
    """The first four of six coordinates of a head rotate, neighbours into each other, and are written in place."""

    def __init__(self, d: int = 12, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))

    def rotated(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
        turned = x.clone()
        even, odd = x[..., 0:4:2], x[..., 1:4:2]
        turned[..., 0:4:2] = even * angle.cos() - odd * angle.sin()
        turned[..., 1:4:2] = odd * angle.cos() + even * angle.sin()
        return turned

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = torch.softmax(self.rotated(q) @ self.rotated(k).mT, dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Temperature(nn.Module):
    """A learned temperature and a learned bias of positions for each head; heads interleaved in one layer."""

    def __init__(self, d: int = 8, heads: int = 2, tokens: int = 5) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.temperature = nn.Parameter(torch.rand(heads, 1, 1) + 0.5)
        self.bias = nn.Parameter(torch.randn(heads, tokens, tokens))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (self.heads, 3, -1))
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        weights = (q * self.temperature @ k.mT + self.bias[:, : x.shape[1], : x.shape[1]]).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class HeadByHead(nn.Module):
    """A module for every head, put together before the output layer."""

    class Head(nn.Module):
        def __init__(self, d: int, h: int) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(d, h, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weights = self.query(x) @ self.key(x).transpose(-2, -1) * 0.7
            weights = weights.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), float("-inf"))
            return F.softmax(weights, dim=-1) @ self.value(x)

    def __init__(self, d: int = 8, heads: int = 2, h: int = 3) -> None:
        super().__init__()
        self.heads = nn.ModuleList(self.Head(d, h) for _ in range(heads))
        self.proj = nn.Linear(heads * h, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class PixelAttention(nn.Module):
    """Attention between pixels by convolutions of size 1, and a residual network of convolutions with ReLUs."""

    def __init__(self, c: int = 6) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, c)
        self.q, self.k, self.v, self.out = (nn.Conv2d(c, c, 1) for _ in range(4))
        self.conv1, self.conv2 = nn.Conv2d(c, 5, 3, padding=1), nn.Conv2d(5, c, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y = self.norm(x)
        q, k, v = (layer(y).reshape(b, c, h * w) for layer in (self.q, self.k, self.v))
        weights = torch.softmax(torch.bmm(q.permute(0, 2, 1), k) * c**-0.5, dim=2)
        x = x + self.out(torch.bmm(v, weights.permute(0, 2, 1)).reshape(b, c, h, w))
        return x + self.conv2(F.relu(self.conv1(x)))


class Adapted(nn.Module):
    """Low-rank updates on the first layer of a network with a bottleneck."""

    def __init__(self, d: int = 8, rank: int = 2) -> None:
        super().__init__()
        self.base, self.A, self.B = (
            nn.Linear(d, 2 * d),
            nn.Linear(d, rank, bias=False),
            nn.Linear(rank, 2 * d, bias=False),
        )
        self.down, self.up, self.last = nn.Linear(2 * d, 3), nn.Linear(3, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x) + 0.5 * self.B(self.A(x))
        return self.last(torch.tanh(self.up(self.down(torch.tanh(y)))))


class Normalised(nn.Module):
    """Queries and keys of length 1, and a gate on what the heads answer: no pair of attention is left."""

    def __init__(self, d: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.gate, self.out = (nn.Linear(d, d) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2) * torch.sigmoid(self.gate(x)))


class Seq2Seq(nn.Module):
    """torch's own layers: an encoder with ReLUs, and attention with keys and values of other widths and added ones."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.cross = nn.MultiheadAttention(8, 2, kdim=6, vdim=5, add_bias_kv=True, batch_first=True)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        y, _ = self.cross(self.encoder(x), keys, values, need_weights=False)
        return y


class SelfAttention(nn.Module):
    """torch's attention of a sequence with itself, without the attention weights."""

    def __init__(self, width: int, heads: int = 2, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]
