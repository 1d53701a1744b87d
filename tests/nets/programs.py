"""Programs of tensor operations on a stream of tokens, which tests draw at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.nets.net import D
from tests.nets.parts import assigned, merged_heads, split_heads

Program = list[tuple[str, int, int]]
"""Of each operation its name, and which values before it takes."""


OPERATIONS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "given": lambda s, x, y: s.given[..., :D],
    "map a": lambda s, x, y: s.a(x),
    "map b": lambda s, x, y: s.b(x),
    "map c": lambda s, x, y: s.c(x),
    "map a, turned": lambda s, x, y: x @ s.a.weight,
    "narrow": lambda s, x, y: s.o_3_8(s.q_8_3(x)),
    "neurons": lambda s, x, y: s.o_8_8(F.gelu(s.k_8_8(x))),
    "gated neurons": lambda s, x, y: s.o_8_8(F.relu(s.k_8_8(x)) * s.m_8_8(x)),
    "bilinear": lambda s, x, y: s.a(x) * s.c(y),
    "one map of halves": lambda s, x, y: (x.unflatten(-1, (2, -1)) @ s.h_4_4).flatten(-2),
    "convolution": lambda s, x, y: s.conv(x.mT).mT,
    "by channel": lambda s, x, y: s.deep(x.mT).mT,
    "mixed tokens": lambda s, x, y: s.t_5_5 @ x,
    "gain": lambda s, x, y: s.g_8 * x,
    "bias": lambda s, x, y: s.p_8 + x,
    "positions": lambda s, x, y: s.p_5_8 + x,
    "norm": lambda s, x, y: s.norm(x),
    "rms": lambda s, x, y: s.rms(x),
    "norm of heads": lambda s, x, y: merged_heads(s.norm_4(split_heads(x))),
    "norm of groups": lambda s, x, y: s.group(x.mT).mT,
    "batch norm": lambda s, x, y: s.batch(x.mT).mT,
    "unit length": lambda s, x, y: F.normalize(x, dim=-1),
    "attention": lambda s, x, y: (s.q(x) @ s.k(y).mT).softmax(-1) @ s.v(y),
    "heads": lambda s, x, y: merged_heads(
        (split_heads(s.q(x)) @ split_heads(s.k(y)).mT).softmax(-1) @ split_heads(s.v(y))
    ),
    "shared heads": lambda s, x, y: merged_heads(
        (split_heads(s.q(x)) @ s.k_8_4(y)[:, None].mT).softmax(-1) @ s.v_8_4(y)[:, None]
    ),
    "products of tokens": lambda s, x, y: (x @ y.mT).softmax(-1) @ x,
    "linear attention": lambda s, x, y: s.q(x) @ (s.k(y).mT @ y),
    "sum": lambda s, x, y: x + y,
    "difference": lambda s, x, y: x - 2 * y,
    "product": lambda s, x, y: x * y,
    "larger": lambda s, x, y: torch.maximum(x, y),
    "ratio": lambda s, x, y: x / (1 + y.abs()),
    "gate by token": lambda s, x, y: x * y[..., :1].sigmoid(),
    "gate by channel": lambda s, x, y: x * y[:, :1].relu(),
    "gate by length": lambda s, x, y: x * y.norm(dim=-1, keepdim=True),
    "gate by head": lambda s, x, y: merged_heads(split_heads(x) * split_heads(y).mean(-1, keepdim=True)),
    "choice": lambda s, x, y: torch.where(s.given[..., :1] > 0, x, y),
    "choice by sign": lambda s, x, y: torch.where(x > 0, x, y),
    "halves of channels": lambda s, x, y: torch.cat([x[..., :4], y[..., 4:]], -1),
    "halves of tokens": lambda s, x, y: torch.cat([x[:, :2], y[:, 2:]], 1),
    "some channels": lambda s, x, y: assigned(x, y, slice(None), slice(1, 7)),
    "some tokens": lambda s, x, y: assigned(x, y, slice(1, 3)),
    "channels of tokens": lambda s, x, y: assigned(x, y, slice(2, None), slice(4)),
    "relu": lambda s, x, y: x.relu(),
    "leaky": lambda s, x, y: F.leaky_relu(x, 0.1),
    "tanh": lambda s, x, y: x.tanh(),
    "square": lambda s, x, y: x.square(),
    "sign": lambda s, x, y: x * x.sign(),
    "softmax of channels": lambda s, x, y: x.softmax(-1),
    "softmax of tokens": lambda s, x, y: x.softmax(1),
    "cumulative sum": lambda s, x, y: x.cumsum(1),
    "largest token": lambda s, x, y: x.amax(1, keepdim=True).expand_as(x),
    "mean token": lambda s, x, y: x.mean(1, keepdim=True).expand_as(x),
    "mean channel": lambda s, x, y: x - x.mean(-1, keepdim=True),
    "mean of all": lambda s, x, y: x - x.mean((1, 2), keepdim=True),
    "averages": lambda s, x, y: F.avg_pool1d(x.mT, 3, 1, 1).mT,
    "convolution of padded tokens": lambda s, x, y: s.conv(F.pad(x.mT[..., 1:], (1, 0))).mT,
    "transposed convolution": lambda s, x, y: s.up_3_1(x.mT[..., :3]).mT,
    "resized": lambda s, x, y: F.interpolate(x.mT[..., ::2], size=5, mode="linear").mT,
    "resized to the nearest": lambda s, x, y: F.interpolate(F.adaptive_avg_pool1d(x.mT, 3), size=5).mT,
    "reflected": lambda s, x, y: F.pad(x.mT[..., :3], (1, 1), mode="reflect").mT,
    "largest of windows": lambda s, x, y: F.max_pool1d(x.mT, 3, 1, 1).mT,
    "largest channel": lambda s, x, y: x - x.amax(-1, keepdim=True),
    "mask of tokens": lambda s, x, y: x * torch.tensor([1.0, 0, 1, 1, 0]).to(x)[:, None],
    "mask of channels": lambda s, x, y: x * torch.tensor([1.0, 0, 1, 1, 0, 1, 1, 1]).to(x),
    "later tokens": lambda s, x, y: F.pad(x[:, :-1], (0, 0, 1, 0)),
    "rolled tokens": lambda s, x, y: x.roll(1, 1),
    "rolled channels": lambda s, x, y: x.roll(1, -1),
    "rolled": lambda s, x, y: x.roll(3),
    "channels in another order": lambda s, x, y: x[..., [0, 5, 2, 7, 4, 1, 6, 3]],
    "channels twice": lambda s, x, y: x[..., :4].repeat_interleave(2, -1),
    "sorted tokens": lambda s, x, y: x.sort(1).values,
    "chosen tokens": lambda s, x, y: x.gather(1, s.given[..., :1].argsort(1).expand_as(x)),
    "of the batch": lambda s, x, y: x - x.mean(0),
    "recurrence": lambda s, x, y: recurrence(s, x),
}


def recurrence(s: Any, x: Tensor) -> Tensor:
    states = [x.new_zeros(len(x), D)]
    for token in x.unbind(1):
        states.append((s.a(token) + s.c(states[-1])).tanh())
    return torch.stack(states[1:], 1)


def body(program: Program) -> Callable[[Any, Tensor], Tensor]:
    """Return what computes the last value, and what this is made of."""

    def run(s: Any, x: Tensor) -> Tensor:
        def value(at: int) -> Tensor:
            if at not in known:
                name, one, other = program[at - 1]
                # Mostly of the value before; an operation of one value leaves the other aside.
                known[at] = OPERATIONS[name](s, value(max(0, at - 1 - one // 2)), value(other % at))
            return known[at]

        known = {0: x}
        return value(len(program))

    return run
