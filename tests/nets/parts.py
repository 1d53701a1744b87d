"""Pieces of the functions that nets compute: layers, attention, norms, masks, windows, rotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nets.net import EPS, TOKENS, Body, Change, D

tanh, relu, gelu, silu, softmax, sigmoid = torch.tanh, F.relu, F.gelu, F.silu, torch.softmax, torch.sigmoid
cat, exp, softplus = torch.cat, torch.exp, F.softplus


def by_token(s: Any, x: Tensor) -> Tensor:
    return s.b(tanh(s.a(x)))


ROLLED = torch.arange(TOKENS * D).view(TOKENS, D)
STEPS = torch.arange(TOKENS)[:, None] < 2 + (torch.arange(D) >= 4)
LOUD = 2e4 * (torch.arange(TOKENS) == 0).float()
CROSSED = (torch.arange(TOKENS)[:, None] < 2) ^ (torch.arange(D) >= 4)
ROLLED = torch.cat([ROLLED[:, :4].roll(1, 0), ROLLED[:, 4:]], 1).reshape(-1)


def numbers(x: Tensor) -> Tensor:  # one for each token
    return torch.arange(1.0, 1 + TOKENS).to(x)[:, None]


def channels(x: Tensor) -> Tensor:
    return torch.arange(float(D)).to(x) / 4


def integers(x: Tensor) -> Tensor:
    made = torch.zeros(x.shape, dtype=torch.long)
    made[:] = 9 * x.detach()
    return made.to(x)


def own(s: Any, x: Tensor) -> Tensor:  # a token that is a parameter
    return s.p_1_8.expand(len(x), 1, D)


def zero(x: Tensor) -> Tensor:
    return x.new_zeros(len(x), 1, D)


def keep(x: Tensor) -> Tensor:
    return torch.tensor([1.0, 1, 0, 1, 1]).to(x)[:, None]


def lower(x: Tensor) -> Tensor:
    return torch.ones(TOKENS, TOKENS).to(x).tril()


def chosen(s: Any) -> Tensor:
    return (s.given[1, :, 0] > 0).nonzero()[:, 0]


def picked(s: Any) -> Tensor:
    return (s.given[:, 0, 0] > 0).long()


def positive(s: Any) -> Tensor:
    return (s.given[..., 0] > 0)[:, None]


def averaged(x: Tensor, **how: Any) -> Tensor:
    return F.avg_pool1d(x.mT, 3, 2, **how).mT


def resized(x: Tensor, size: int = 7, **how: Any) -> Tensor:
    return F.interpolate(x.mT, size=size, **how).mT


def padded(x: Tensor, *sides: int, **how: Any) -> Tensor:
    return F.pad(x.mT, sides, **how).mT


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    return norm(x.mT).mT


def folded(x: Tensor) -> Tensor:
    return x + x.flip(-1)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x[..., :4], x[..., 4:])


def on_half(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    first, second = halves(x)
    return cat([f(first), second], -1)


def assigned(x: Tensor, y: Tensor, *where: slice | int) -> Tensor:
    z = x.clone()
    z[(slice(None), *where)] = y[(slice(None), *where)]
    return z


def split_heads(x: Tensor) -> Tensor:
    """Return channels of two heads, on an axis before the tokens."""
    return x.unflatten(-1, (2, -1)).transpose(-2, -3)


def merged_heads(x: Tensor) -> Tensor:
    return x.transpose(-2, -3).flatten(-2)


def mixed(q: Tensor, k: Tensor, values: Tensor, change: Change = lambda w: w) -> Tensor:
    """Return values weighed by the softmax of scores."""
    return change(q @ k.mT / 2).softmax(-1) @ values


def attend(s: Any, x: Tensor, change: Change = lambda w: w.softmax(-1)) -> Tensor:
    """Attend with one head, with something else than a softmax, too."""
    return s.o(change(s.q(x) @ s.k(x).mT) @ s.v(x))


def heads(
    s: Any, x: Tensor, keys: str = "k", norm: str = "", change: Change = lambda w: w, gate: Change = lambda y: y
) -> Tensor:
    """Attend with two heads of queries, with norms of queries and keys, and changes of scores and of what is mixed."""

    def apart(y: Tensor) -> Tensor:
        return y.unflatten(-1, (-1, 4)).transpose(1, 2)

    q, k, v = apart(s.q(x)), apart(getattr(s, keys)(x)), apart(getattr(s, keys.replace("k", "v"))(x))
    if norm:
        q, k = getattr(s, f"{norm}q_4")(q), getattr(s, f"{norm}k_4")(k)
    k, v = (each.repeat_interleave(2 // each.shape[1], 1) for each in (k, v))
    return s.o(gate(merged_heads(mixed(q, k, v, change))))


def one_weight(s: Any, x: Tensor) -> Tensor:  # for both halves
    return (x.unflatten(-1, (2, -1)) @ s.h_4_4).flatten(-2)


def latent(s: Any, x: Tensor) -> Tensor:
    """Attend with queries, and keys and values, through narrow normed latents."""
    queries = s.q_3_8(s.rmsq_3(s.a_8_3(x)))
    q, k, v = map(split_heads, (queries, *s.k_3_16(s.rmsk_3(s.c_8_3(x))).chunk(2, -1)))
    return s.o(merged_heads(mixed(q, k, v)))


def attended(s: Any, x: Tensor, values: Tensor) -> Tensor:
    return (s.q_8_4(x) @ s.k_8_4(x).mT).softmax(-1) @ values


def by_halves(s: Any, x: Tensor) -> Tensor:
    """Tokens of one map, of its second half beside the first one of another map, and of that alone."""
    y, other = s.c(x), s.e(x)
    return cat([y, cat([other[..., :4], y[..., 4:]], -1), other], 1)


def windows(y: Tensor, w: Tensor, **how: Any) -> Tensor:
    y = F.unfold(y.mT[..., None], (3, 1), **how).mT
    return (y.view(*y.shape[:2], -1, 3) @ w[..., None])[..., 0]


def angles(x: Tensor) -> Tensor:
    return numbers(x) * torch.tensor([1.0, 0.1, 0.01, 0.3]).to(x)


def rotated(x: Tensor) -> Tensor:
    cos, sin = angles(x).cos().repeat(1, 2), angles(x).sin().repeat(1, 2)
    return x * cos + cat([-x[..., 4:], x[..., :4]], -1) * sin


def by_table(s: Any, x: Tensor) -> Tensor:
    cos, sin = (each.repeat(1, 2) for each in s.table(torch.arange(x.shape[1])).split(4, -1))
    return x * cos + cat([-x[..., 4:], x[..., :4]], -1) * sin


def neighbours_rotated(x: Tensor) -> Tensor:
    a, b, cos, sin = x[..., ::2], x[..., 1::2], angles(x).cos(), angles(x).sin()
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def partly_rotated(x: Tensor) -> Tensor:
    y, a, b, cos, sin = x.clone(), x[..., 0:6:2], x[..., 1:6:2], angles(x)[:, :3].cos(), angles(x)[:, :3].sin()
    y[..., 0:6:2], y[..., 1:6:2] = a * cos - b * sin, b * cos + a * sin
    return y


def turned_by_quotients(x: Tensor) -> Tensor:  # by no rotation
    (a, b), c, d = halves(x), 2 + numbers(x), numbers(x).sin()
    return cat([a / c + b * d, b * c - a * d], -1)


def twice(s: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        x = s.norm(x + s.b(tanh(s.a(x))))
    return x


def recurrent(s: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), D)
    for token in x.unbind(1):
        h = relu(s.a(token) + s.c(h))
    return s.b(h)


def scan(step: Callable[[Tensor, int], Tensor], state: Tensor, length: int) -> Tensor:
    """Return the states after each token, along axis 1."""
    states = []
    for t in range(length):
        state = step(state, t)
        states.append(state)
    return torch.stack(states, 1)


def neurons(s: Any, x: Tensor) -> Tensor:
    return s.b(gelu(s.a(x)))


def block(s: Any, x: Tensor, mixer: Body = heads, mlp: Body = neurons, norm: str = "norm") -> Tensor:
    """Add to a stream what two layers return, with norms before them."""
    x = x + mixer(s, getattr(s, norm)(x))
    return x + mlp(s, getattr(s, f"{norm}b")(x))


def post_norm(s: Any, x: Tensor, mlp: Body = neurons) -> Tensor:
    x = s.norm(x + heads(s, x))
    return s.normb(x + mlp(s, x))


def two_streams(s: Any, x: Tensor) -> Tensor:
    y = s.c_9_8(s.given)
    x = x + s.b(tanh(s.a(s.norm(y))))
    y = y + s.w(tanh(s.e(s.normb(x))))
    return s.m_16_12(cat([x, y], -1).mean(1))


def start_token(s: Any, x: Tensor) -> Tensor:
    x = cat([own(s, x), x], 1) + s.p_6_8
    return block(s, x)[:, 0]


def weighed(s: Any, x: Tensor) -> Tensor:
    return F.linear(x, torch._weight_norm(s.p_8_8, s.g_8_1, 0))


def unit(w: Tensor) -> Tensor:
    """Return rows of length 1."""
    return w / w.flatten(1).square().sum(1).sqrt().view(-1, *[1] * (w.ndim - 1))


def length(x: Tensor, means: Callable[[Tensor], Tensor]) -> Tensor:
    return (means(x * x) + EPS).sqrt()


def crossed(s: Any, x: Tensor, f: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Take half of each of two copies of some channels, and what is left of both."""
    y = s.a_8_16(x).unflatten(-1, (4, 4))
    return f(y[..., [0, 3], :].flatten(2), y[..., [2, 1], :].flatten(2))


def beside(s: Any, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """Read the sum of two copies of some channels, and beside it half of each."""
    y = s.a_8_16(x).unflatten(-1, (4, 4))
    return s.c((y[..., :2, :] + y[..., 2:, :]).flatten(2)) + f(y[..., [0, 3], :].flatten(2))


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def centred(x: Tensor) -> Tensor:
    return x - mean(x)
