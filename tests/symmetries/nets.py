"""Small nets in which something is free, or seems to be: of each a few lines, and how much of it nobody finds yet."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, TOKENS, GIVEN, CLASSES, WORDS, EPS = 8, 5, 9, 12, 40, 1e-5
Body = Callable[[Any, Tensor], Tensor]
Change = Callable[[Tensor], Tensor]


class Computed(nn.Module):
    """Compute a function of its parts, which are modules and parameters, and of the inputs."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def linear(names: str, *sizes: int, bias: bool = True) -> dict[str, nn.Module]:
    """Return a linear map of these sizes by each letter."""
    return {name: nn.Linear(*sizes, bias=bias) for name in names}


class Net(nn.Module):
    """Map tokens to a stream of channels, this by a body, and the mean over tokens, or each of them, to classes.

    What a body names is made when it first runs: letters are linear maps, `s.a_8_3` one of 8 channels to 3; `s.p_5_8`
    is a parameter of this shape, likewise g, h, t; `s.norm_4`, `s.rmsk` are norms, of 4 channels or of all. A name with
    an underscore behind it is another one of the same kind.
    """

    def __init__(self, body: Body, bias: bool, pooled: bool, words: bool, given: int = GIVEN) -> None:
        super().__init__()
        self.body, self.bias, self.pooled = body, bias, pooled
        self.embed = nn.Embedding(WORDS, D) if words else nn.Linear(given, D, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        self.given = x
        y = self.body(self, self.embed(x))
        del self.given
        y = y.mean(1) if self.pooled and y.ndim == 3 else y
        return self.z_8_12(y) if y.shape[-1] == D else y

    def __getattr__(self, name: str) -> Any:
        kind = re.fullmatch(r"([a-z]+)((?:_\d+)*)_?", name)
        if kind is None or name in {**self._modules, **self._parameters}:
            return super().__getattr__(name)
        sizes = [int(size) for size in kind[2].split("_")[1:]]
        for some, make in KINDS.items():
            if re.fullmatch(some, kind[1]):
                made = make(sizes or [D], self.bias)
                if isinstance(made, nn.Module):
                    self._modules[name] = made
                else:
                    self._parameters[name] = made
                return made
        return super().__getattr__(name)


def _with_statistics(norm: nn.BatchNorm1d) -> nn.BatchNorm1d:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean += torch.randn_like(norm.running_mean)
    norm.running_var += torch.rand_like(norm.running_var)
    return norm


KINDS: dict[str, Callable[[list[int], bool], nn.Module | nn.Parameter]] = {
    "[abcekmoqrvwz]": lambda sizes, bias: nn.Linear(*(sizes * 2)[:2], bias=bias),
    "[ghpt]": lambda sizes, _: nn.Parameter(torch.randn(sizes)),
    "norm[bckq]?": lambda sizes, _: nn.LayerNorm(sizes, eps=EPS),
    "plain": lambda sizes, _: nn.LayerNorm(sizes, eps=EPS, elementwise_affine=False),
    "rms[bkq]?": lambda sizes, _: nn.RMSNorm(sizes, eps=EPS),
    "group": lambda *_: nn.GroupNorm(2, D),
    "fresh": lambda sizes, _: nn.BatchNorm1d(*sizes),
    "batch": lambda sizes, _: _with_statistics(nn.BatchNorm1d(*sizes)),
    "flat": lambda sizes, _: _with_statistics(nn.BatchNorm1d(*sizes, affine=False)),
    "conv": lambda _, bias: nn.Conv1d(D, D, 3, padding=1, bias=bias),
    "deep": lambda _, bias: nn.Conv1d(D, D, 3, padding=1, groups=D, bias=bias),
    "apart": lambda _, bias: nn.Conv1d(D, D, 3, groups=2, bias=bias),
    "up": lambda sizes, bias: nn.ConvTranspose1d(D, D, *(sizes if len(sizes) > 1 else (3, 2)), bias=bias),
    "round": lambda _, bias: nn.Conv1d(D, D, 3, padding=1, padding_mode="circular", bias=bias),
    "rnn": lambda _, bias: nn.RNN(D, D, bias=bias, batch_first=True),
    "gru": lambda _, bias: nn.GRU(D, D, bias=bias, batch_first=True),
    "table": lambda *_: nn.Embedding(TOKENS, D),
}
"""What the letters before the sizes of a name stand for."""


tanh, relu, softmax, sigmoid, cat = torch.tanh, F.relu, torch.softmax, torch.sigmoid, torch.cat


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


def joined(x: Tensor) -> Tensor:
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
    return s.o(gate((change(q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)))


def one_weight(s: Any, x: Tensor) -> Tensor:  # for both halves
    return (x.unflatten(-1, (2, -1)) @ s.h_4_4).flatten(-2)


def latent(s: Any, x: Tensor) -> Tensor:
    """Attend with queries, and keys and values, through narrow normed latents."""
    q, k, v = (
        each.unflatten(-1, (2, 4)).transpose(1, 2)
        for each in (s.q_3_8(s.rmsq_3(s.a_8_3(x))), *s.k_3_16(s.rmsk_3(s.c_8_3(x))).chunk(2, -1))
    )
    return s.o(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))


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


def encoder(s: Any, x: Tensor) -> Tensor:
    x = x + heads(s, s.norm(x))
    return x + s.b(F.gelu(s.a(s.normb(x))))


def post_norm(s: Any, x: Tensor) -> Tensor:
    x = s.norm(x + heads(s, x))
    return s.normb(x + s.b(F.gelu(s.a(x))))


def two_streams(s: Any, x: Tensor) -> Tensor:
    y = s.c_9_8(s.given)
    x = x + s.b(tanh(s.a(s.norm(y))))
    y = y + s.w(tanh(s.e(s.normb(x))))
    return s.m_16_12(cat([x, y], -1).mean(1))


def start_token(s: Any, x: Tensor) -> Tensor:
    x = cat([own(s, x), x], 1) + s.p_6_8
    return encoder(s, x)[:, 0]


def weighed(s: Any, x: Tensor) -> Tensor:
    return F.linear(x, torch._weight_norm(s.p_8_8, s.g_8_1, 0))


def unit(v: Tensor) -> Tensor:
    return v / v.square().sum(1, keepdim=True).sqrt()


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


POOLED: dict[str, Body] = {
    "linear": lambda s, x: x,
    # functions of channels
    "relu": lambda s, x: s.b(relu(s.a(x))),
    "leaky": lambda s, x: s.b(F.leaky_relu(s.a(x))),
    "where leaky": lambda s, x: s.b((lambda y: torch.where(y > 0, y, 0.1 * y))(s.a(x))),
    "times its sign": lambda s, x: s.b((lambda y: y * y.sign())(s.a(x))),
    "abs": lambda s, x: s.b(s.a(x).abs()),
    "sq": lambda s, x: s.b(s.a(x) ** 2),
    "cube": lambda s, x: s.b(s.a(x) ** 3),
    "squared relu": lambda s, x: s.b(relu(s.a(x)).square()),
    "gelu": lambda s, x: s.b(F.gelu(s.a(x))),
    "glu": lambda s, x: s.b(sigmoid(s.a(x)) * s.c(x)),
    "bilinear": lambda s, x: s.b(s.a(x) * s.c(x)),
    "selfgate": lambda s, x: s.b(s.a(x) * s.a(x)),
    "maxout": lambda s, x: s.b(torch.maximum(s.a(x), s.c(x))),
    "max0": lambda s, x: s.b(torch.maximum(s.a(x), x.new_zeros(()))),
    "max1": lambda s, x: s.b(torch.maximum(s.a(x), x.new_ones(()))),
    "ratio": lambda s, x: s.b(s.a(x) / (1 + s.c(x) ** 2)),
    "softmax of channels": lambda s, x: s.b(s.a(x).softmax(-1)),
    "softmax of tokens": lambda s, x: s.r_8_1(x).softmax(1) * s.a(x),
    "max pool": lambda s, x: s.b(relu(s.a(x))).max(1).values,
    "cumsum": lambda s, x: s.b(s.a(x).cumsum(1)),
    "dead": lambda s, x: s.b_5_8(tanh(s.a(x))[..., :5]),
    "outer": lambda s, x: s.b_9_8((s.a_8_3(x)[..., :, None] * s.c_8_3(x)[..., None, :]).flatten(2)),
    # linear maps, gains
    "two": lambda s, x: s.b(s.a(x))[:, 0],
    "narrow": lambda s, x: x + s.b_3_8(s.a_8_3(x)),
    "lora": lambda s, x: tanh(s.w(x) + s.b_3_8(s.a_8_3(x))),
    "res lin": lambda s, x: tanh(x + s.w(x)),
    "gain": lambda s, x: s.b(tanh(s.g_8 * s.a(x))),
    "scalar gain": lambda s, x: s.b(tanh(s.g_1 * s.a(x))),
    "gain lin": lambda s, x: s.b(s.g_8 * s.a(x)),
    "gain two": lambda s, x: s.b(s.g_8 * s.h_8 * s.a(x)),
    "heads of one weight, crossed": lambda s, x: s.b(one_weight(s, s.given[..., :D])[..., [0, 5, 2, 7, 4, 1, 6, 3]]),
    "heads of one weight, in parts": lambda s, x: s.b(
        cat([one_weight(s, s.given[..., :D])[..., [0, 7]], s.o(x)[..., 1:7]], -1)
    ),
    "heads of one map, crossed": lambda s, x: s.b(one_weight(s, x)[..., [0, 5, 2, 7, 4, 1, 6, 3]]),
    "gate of heads": lambda s, x: s.b(s.a(x) * one_weight(s, s.given[:, :1, :D]).relu()),
    "gate of numbers": lambda s, x: s.b(sigmoid(s.g_8) * s.a(x)),
    "one more than a gain": lambda s, x: s.b((1 + s.g_8) * s.norm(x)),
    "tied": lambda s, x: s.a(tanh(s.a(x))),
    "tied T": lambda s, x: F.linear(tanh(s.a(x)), s.a.weight.T),
    "tied lin": lambda s, x: s.a(s.a(x)),
    "gain of two and of one": lambda s, x: s.b(
        tanh(s.h_8 * s.a(x)) + tanh((torch.stack([s.c(x), s.o(x)]) * s.h_8).sum(0))
    ),
    "added twice, partly seen": lambda s, x: (
        (F.linear(s.a(x) + 2 * s.p_8, s.p_8_8) + tanh(s.c(x)) + s.p_8) * s.h_8 @ s.g_8_3
    ),
    "bias of channels joined to one": lambda s, x: (
        joined(s.a_8_4(x).unflatten(-1, (2, 2)).sum(-2).repeat_interleave(2, -1) + s.a_8_4(x) + s.p_4) @ s.p_4_3
    ),
    "weight and weight + 1": lambda s, x: (
        s.b(tanh(F.linear(s.norm(x), s.p_8_8))) + s.v(tanh(F.linear(s.norm(x), s.p_8_8 + 1)))
    ),
    "gain and gain + 1": lambda s, x: s.b(torch.relu(s.a(x)) * s.h_8) + s.v(torch.relu(s.c(x)) * (s.h_8 + 1)),
    "tied T, minus it + 1": lambda s, x: s.b(F.linear(s.norm(s.a(s.o(x))), 1 - s.a.weight.T)),
    "tied T twice": lambda s, x: F.linear(s.a(x), s.a.weight.T) + s.b(tanh(s.a(x))),
    "tied T of another": lambda s, x: s.b(F.linear(tanh(s.c(x)), s.a.weight.T)) + s.v(tanh(s.a(s.o(x)))),
    "tied T, first of zeros": lambda s, x: s.b(s.a(zero(x)).sigmoid() * F.linear(s.c(x), s.a.weight.T)),
    "tied T within": lambda s, x: s.b(F.linear(s.a(s.o(x)), s.a.weight.T)),
    "tied T after a norm": lambda s, x: s.b(F.linear(s.norm(s.a(s.o(x))), s.a.weight.T)),
    "tied T before a norm": lambda s, x: s.b(tanh(s.norm(F.linear(s.a(s.o(x)) + s.p_5_8, s.a.weight.T)))),
    "tied half T": lambda s, x: s.b(tanh(F.linear(s.a(s.o(x)), s.a.weight[:4].T[:, :4].repeat(1, 2)))),
    "sum of experts": lambda s, x: s.b(
        (torch.stack([s.a(x), tanh(s.c(x)), s.o(x)]) * s.k(x).sigmoid()[..., :3].permute(2, 0, 1)[..., None]).sum(0)
    ),
    "sum of turned experts": lambda s, x: s.b(torch.stack([s.a(x), s.a(x).flip(-1)], -2).sum(-2)) + s.v(tanh(s.a(x))),
    "sum of scaled experts": lambda s, x: (
        s.b((torch.stack([s.a(x), s.o(x)], -2) * s.p_8).sum(-2)) + s.v(tanh(s.norm(s.o(x))))
    ),
    "sum heads": lambda s, x: s.b_4_8(s.a(x).unflatten(-1, (2, 4)).sum(2)),
    "shared heads": lambda s, x: s.b(s.c_4_4(s.a(x).unflatten(-1, (2, 4))).flatten(2)),
    "added twice": lambda s, x: s.b(tanh(s.a(x) + 2 * s.p_8)) + s.v(tanh(s.c(x) - s.p_8)),
    "added twice before norms": lambda s, x: s.norm(s.a(x) + s.p_8) + s.normb(s.c(x) + 3 * s.p_8),
    "added to inputs": lambda s, x: s.b(tanh(s.a_4_8(s.given[..., :4] + s.p_4))) + s.c(x),
    "added to a softmax": lambda s, x: s.b(softmax(s.a(x), -1) + s.p_8),
    "gain before a weight": lambda s, x: s.b_4_8(s.h_4 * s.a_8_4(s.norm(x))),
    "weighed twice": lambda s, x: (
        s.b(tanh(s.norm(x) @ s.p_8_8 + s.p_8)) + s.v(tanh(s.norm(x) @ (-3 * s.p_8_8) + s.h_8))
    ),
    "weight norm": lambda s, x: s.b(tanh(weighed(s, x))),
    "weight norm, read": lambda s, x: s.b(tanh(weighed(s, x) + x @ s.p_8_8)),
    "weight norm, one": lambda s, x: s.b(tanh(weighed(s, x) + s.p_8_8[0])),
    "weight norm by hand": lambda s, x: s.b(tanh(F.linear(x, s.g_8_1 * unit(s.p_8_8)))),
    "fewer classes": lambda s, x: s.w_8_3(encoder(s, x)),
    # norms
    "ln": lambda s, x: s.b(tanh(s.a(s.norm(x)))),
    "ln res": lambda s, x: x + s.b(tanh(s.a(s.norm(x)))),
    "ln final": lambda s, x: s.norm(x + s.b(tanh(s.a(x)))),
    "norms of other signs": lambda s, x: s.a(s.plain(x)) + s.b(s.plain(x * (1 - 2 * (channels(x) > 1.1)))),
    "ln plain": lambda s, x: s.b(s.plain((lambda n: n + s.a(n).tanh())(s.plain(x)))),
    "norm and head": lambda s, x: s.b(tanh(s.a(s.norm(x)))) + s.c(x),
    "rms": lambda s, x: x + s.b(tanh(s.a(s.rms(x)))),
    "rms with a bias": lambda s, x: x + s.b(tanh(s.a(s.rms(x) + s.p_8))),
    "rms hand": lambda s, x: x + s.b(tanh(s.a(s.g_8 * x * (mean(x.pow(2)) + EPS).rsqrt()))),
    "l2": lambda s, x: x + s.b(tanh(s.a(x / length(x, lambda y: y.sum(-1, keepdim=True))))),
    "ln hand": lambda s, x: x + s.b(tanh(s.a((lambda y: y / length(y, mean))(centred(x))))),
    "ln var": lambda s, x: x + s.b(tanh(s.a(centred(x) / (x.var(-1, keepdim=True, unbiased=False) + EPS).sqrt()))),
    "ln std": lambda s, x: x + s.b(tanh(s.a(centred(x) / (x.std(-1, keepdim=True) + EPS)))),
    "ln with its mean": lambda s, x: x + s.b(tanh(s.a(centred(x) / x.std(-1, keepdim=True) + mean(x)))),
    "ln by another's length": lambda s, x: x + s.b(tanh(s.a(centred(x) / x.tanh().std(-1, keepdim=True)))),
    "ln of tokens": lambda s, x: s.b(tanh(s.a((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)))),
    "half ln": lambda s, x: s.b(tanh(s.a(on_half(s.norm_4, x)))),
    "ln heads": lambda s, x: s.b(tanh(s.a(s.norm_4(x.unflatten(-1, (2, 4))).flatten(2)))),
    "centre only": lambda s, x: tanh(s.a(centred(x))),
    "mean used": lambda s, x: tanh(s.a(centred(x))) + mean(x),
    "less half its mean": lambda s, x: s.b(tanh(s.c((lambda y: y.sub(mean(y), alpha=0.5))(s.a(x))))),
    "less another's mean": lambda s, x: (lambda y: s.b(tanh(s.e(y))) + s.c(x) - mean(y))(s.a(x)),
    "less the mean of the turned pair": lambda s, x: (lambda z: s.b(tanh(s.c(z - mean(z).transpose(1, 2)))).mean(2))(
        s.a(x[:, :, None] - 2 * x[:, None])
    ),
    "squares of tokens": lambda s, x: s.b((s.a(x) ** 2).mean(1, keepdim=True) + x),
    "squares cut to integers": lambda s, x: (
        lambda y: s.b(y) + (y**2).detach().sum(-1, keepdim=True, dtype=torch.long)
    )(s.a(x)),
    "mean cut to integers": lambda s, x: (lambda y: s.b(y) + mean(y.detach()).long())(9 * s.a(x)),
    "squares without some tokens": lambda s, x: (
        lambda y: s.b(x[:, 1:]) * (y**2)[:, 1:].sum(-1, keepdim=True) + s.c(y)[:, 1:]
    )(s.a(x)),
    "norm masked": lambda s, x: s.b(tanh(s.a(s.norm(x) * (x[..., :1] > 0)))),
    "norm masked by inputs": lambda s, x: s.b(tanh(s.a(s.norm(x) * (s.given[..., :1] > 0)))),
    "norm in two places": lambda s, x: s.b(s.norm(s.a(s.norm(x)).tanh())),
    "norm of two, one reader": lambda s, x: s.a(s.norm(x)) * s.a(s.norm(x.roll(1, -1) ** 2)),
    "norm read and added": lambda s, x: (lambda n: n + s.a(n).sin())(s.norm(x)),
    "norm's reader elsewhere": lambda s, x: (s.a(s.norm(x)) + s.a(x)).sin(),
    "norms of averages": lambda s, x: s.a(s.norm(averaged(x)).sin()) + s.b(s.normb(x.mean(1, keepdim=True))).tanh(),
    "no norm at the end": lambda s, x: (lambda y: y + s.b(s.normb(y).sin()))(x - 2 * s.a(s.norm(x).tanh())),
    "parallel layers": lambda s, x: s.normb(x**3 + (s.a(s.norm(x).tanh()) + s.b(s.norm(x) ** 4))),
    "layer twice": lambda s, x: twice(s, s.norm(x)),
    "layer twice, norm once": lambda s, x: twice(s, s.normb(x)),
    "bias twice": lambda s, x: s.norm(x) + tanh(s.a(s.norm(x) + s.p_8) + s.p_8),
    "read twice": lambda s, x: (lambda u, v: tanh(s.a(u)) * tanh(2 * s.a(v)))(s.norm(x), s.norm(x) + s.p_8),
    "groupnorm": lambda s, x: s.b(tanh(normed(s.group, s.a(x)))),
    "groupnorm lin": lambda s, x: s.b(tanh(s.c(normed(s.group, s.a(x))))),
    "batchnorm": lambda s, x: s.b(tanh(normed(s.fresh, s.a(x)))),
    "bn mean": lambda s, x: s.b(tanh(normed(s.batch, s.a(x)))),
    "bn plain": lambda s, x: s.b(tanh(normed(s.flat, s.a(x)))),
    "bn relu": lambda s, x: s.b(relu(normed(s.batch, s.a(x)))),
    "bn relu plain": lambda s, x: s.b(relu(normed(s.flat, s.a(x)))),
    "bn lin": lambda s, x: s.b(tanh(s.c(normed(s.batch, s.a(x))))),
    "bn lin plain": lambda s, x: s.b(tanh(s.c(normed(s.flat, s.a(x))))),
    "bn twice": lambda s, x: s.b(tanh(normed(s.batch, s.c(tanh(normed(s.batch, s.a(x))))))),
    "bn half": lambda s, x: s.b(tanh(s.c(on_half(lambda y: normed(s.batch_4, y), s.a(x))))),
    "bn narrow": lambda s, x: s.b(tanh(s.c(normed(s.batch, s.e_3_8(s.a_8_3(x)))))),
    "bn res": lambda s, x: s.b(tanh(x + normed(s.batch, s.a(x)))),
    "bn one channel": lambda s, x: s.b(tanh(normed(s.batch, s.a_8_1(x).expand(-1, -1, D)))),
    # attention
    "attn": lambda s, x: x + heads(s, x),
    "attn rms": lambda s, x: x + heads(s, s.rms(x)),
    "attn ln": lambda s, x: x + heads(s, s.norm(x)),
    "gqa": lambda s, x: x + heads(s, x, "k_8_4"),
    "qknorm": lambda s, x: x + heads(s, x, norm="rms"),
    "qkln": lambda s, x: x + heads(s, x, norm="norm"),
    "causal": lambda s, x: x + heads(s, x, change=lambda w: w + x.new_full((TOKENS, TOKENS), -1e9).triu(1)),
    "capped": lambda s, x: x + heads(s, x, change=lambda w: 2 * tanh(w / 2)),
    "latent": lambda s, x: x + latent(s, x),
    "output gate": lambda s, x: x + s.o(attend(s, x) * sigmoid(s.e(x))),
    "linear attn": lambda s, x: x + s.o(F.elu(s.q(x)).add(1) @ (F.elu(s.k(x)).add(1).mT @ s.v(x))),
    "no softmax": lambda s, x: x + attend(s, x, lambda w: w),
    "sigmoid attn": lambda s, x: x + attend(s, x, sigmoid),
    "shared qk": lambda s, x: x + s.o((s.q(x) @ s.q(x).mT).softmax(-1) @ s.v(x)),
    "temp": lambda s, x: x + attend(s, x, lambda w: (s.t_1 * w).softmax(-1)),
    "score bias": lambda s, x: x + attend(s, x, lambda w: (w + s.t_5_5).softmax(-1)),
    "score by query": lambda s, x: (x + attend(s, x, lambda w: (w + s.r_8_5(x).softmax(1)).softmax(1)))[:, 0],
    "two scores": lambda s, x: x + s.o((s.q(x) @ s.k(x).mT + s.v(x) @ s.k(x).mT).softmax(-1) @ s.v(x)),
    "score of key": lambda s, x: x + attend(s, x, lambda w: (w + s.r_8_1(x).mT).softmax(-1)),
    "scores zeroed": lambda s, x: x + attend(s, x, lambda w: torch.where(lower(w) > 0, w, 0.0).softmax(-1)),
    "scores times": lambda s, x: x + attend(s, x, lambda w: (w * lower(w)).softmax(-1)),
    "scores hidden": lambda s, x: x + attend(s, x, lambda w: torch.where(lower(w) > 0, w, -torch.inf).softmax(-1)),
    "scores zeroed by inputs": lambda s, x: x + attend(s, x, lambda w: torch.where(positive(s), w, 0.0).softmax(-1)),
    "scores hidden by inputs": lambda s, x: x + attend(s, x, lambda w: w.masked_fill(positive(s), -1e38).softmax(-1)),
    "scores dropped": lambda s, x: x + attend(s, x, lambda w: w.softmax(-1).masked_fill(lower(w) == 0, 0.0)),
    "scores dropped by inputs": lambda s, x: x + attend(s, x, lambda w: w.softmax(-1).masked_fill(positive(s), 0.0)),
    "scores a key's gain": lambda s, x: x + attend(s, x, lambda w: (w * s.g_5).softmax(-1)),
    "two attentions less": lambda s, x: x + attend(s, x, lambda w: w.softmax(-1) - w.mT.softmax(-1) / 2),
    "attn with a sink": lambda s, x: (
        x + attend(s, x, lambda w: cat([w, s.p_1.expand(*w.shape[:2], 1)], -1).softmax(-1)[..., :TOKENS])
    ),
    "attn twice": lambda s, x: x + attend(s, x, lambda w: 2 * w.softmax(-1)),
    "rot": lambda s, x: x + s.o((rotated(s.q(x)) @ rotated(s.k(x)).mT).softmax(-1) @ s.v(x)),
    "rot2": lambda s, x: x + s.o((neighbours_rotated(s.q(x)) @ neighbours_rotated(s.k(x)).mT).softmax(-1) @ s.v(x)),
    "rot3": lambda s, x: x + s.o((partly_rotated(s.q(x)) @ partly_rotated(s.k(x)).mT).softmax(-1) @ s.v(x)),
    "rot by quotients": lambda s, x: s.b(turned_by_quotients(s.a(x))),
    "scores hidden and shown again": lambda s, x: (
        x + attend(s, x, lambda w: (torch.where(lower(w) > 0, w, -2e4) + 2e4 * (1 - lower(w))).softmax(-1))
    ),
    "scores that inputs show": lambda s, x: s.b(
        (lambda w: torch.where(s.given[:, :1, :1] > 0, w + LOUD, w).softmax(-1) @ s.v(x))(s.q(x) @ s.p_5_8.mT)
    ),
    "scores that inputs show, less others": lambda s, x: s.b(
        (s.q(x) @ s.p_5_8.mT + LOUD - (s.given[..., :TOKENS] + LOUD)).softmax(-1) @ s.v(x)
    ),
    "scores hidden, less their mean": lambda s, x: s.b(
        (lambda w: w - w.mean(1, keepdim=True))(s.q(x) @ s.p_5_8.mT + LOUD).softmax(-1) @ s.v(x)
    ),
    "weight of one key, repeated": lambda s, x: (
        x + attend(s, x, lambda w: w.softmax(-1)[..., :1].expand(-1, -1, TOKENS))
    ),
    "weights of some keys, twice": lambda s, x: (
        x + attend(s, x, lambda w: w.softmax(-1).repeat_interleave(2, -1)[..., :TOKENS])
    ),
    "zero key, own": lambda s, x: (
        x + s.o((s.q(x) @ cat([s.k(x), zero(x), own(s, x)], 1).mT).softmax(-1) @ cat([s.v(x), zero(x), zero(x)], 1))
    ),
    # positions, tokens of its own, masks
    "pos": lambda s, x: s.b(tanh(s.a(x + s.p_5_8))),
    "pos attn": lambda s, x: (lambda y: y + heads(s, y))(x + s.p_5_8),
    "cls": lambda s, x: by_token(s, cat([own(s, x), x], 1))[:, 0],
    "cls attn": lambda s, x: (lambda y: y + attend(s, y))(cat([own(s, x), x], 1))[:, 0],
    "cls, norms and positions": start_token,
    "short table": lambda s, x: by_token(s, s.norm(x + s.table(torch.arange(x.shape[1])))),
    "short slice": lambda s, x: by_token(s, s.norm(x + s.p_5_8[: x.shape[1]])),
    "products of a plain norm": lambda s, x: (lambda y: s.b_5_8(y @ y.mT))(s.plain(x + s.v(tanh(s.a(x))))),
    "positions twice": lambda s, x: sum(
        s.b(tanh(s.a(y + s.table(torch.arange(y.shape[1]))))).mean(1) for y in (x, x[:, 1:])
    ),
    "short mixing": lambda s, x: (lambda at: s.b(s.t_5_5[at][:, at] @ s.a(x)))(torch.arange(x.shape[1])),
    "short planes": lambda s, x: x + s.o((by_table(s, s.q(x)) @ by_table(s, s.k(x)).mT).softmax(-1) @ s.v(x)),
    "short attn": lambda s, x: (lambda y: y + attend(s, y))(x + s.table(torch.arange(x.shape[1]))),
    "short rows apart": lambda s, x: (
        tanh(s.a(x + s.p_5_8[0])) + tanh(s.b(x) + s.p_5_8[1]) + s.p_5_8[2 : x.shape[1]].sum(0)
    ),
    "masked tokens": lambda s, x: by_token(s, torch.where(keep(x) > 0, x, 0.0)),
    "masked tokens, own": lambda s, x: by_token(s, cat([own(s, x), torch.where(keep(x) > 0, x, 0.0)], 1)),
    "zero token, own": lambda s, x: by_token(s, cat([zero(x), x, own(s, x)], 1)),
    "masked tokens, tied": lambda s, x: s.a(torch.where(keep(x) > 0, tanh(s.a(torch.where(keep(x) > 0, x, 0.0))), 0.0)),
    "assigned": lambda s, x: by_token(s, assigned(x, s.c(x), slice(None), slice(4))),
    "assigned tokens": lambda s, x: by_token(s, assigned(x, s.c(x), slice(2))),
    "assigned one": lambda s, x: by_token(s, assigned(x, s.c(x), 0)),
    "assigned part": lambda s, x: by_token(s, assigned(x, s.c(x).roll(1, 1), slice(2), slice(4))),
    "assigned halves": lambda s, x: by_token(
        s,
        assigned(
            assigned(torch.zeros_like(x), s.c(x), slice(None), slice(4)), s.c(x).roll(1, 1), slice(None), slice(4, 8)
        ),
    ),
    # constants and biases
    "bias first": lambda s, x: s.b(tanh(s.c((s.a(x).mT + s.p_8_1).mT))),
    "positions first": lambda s, x: s.b(tanh(s.c((s.a(x).mT + s.p_8_5).mT))),
    "half bias": lambda s, x: s.b(tanh(s.c(on_half(lambda y: y + s.p_4, s.a(x))))),
    "constant": lambda s, x: s.b(tanh(s.a(x) + channels(x))),
    "constant lin": lambda s, x: s.b(tanh(s.c(s.a(x) + channels(x)))),
    "constant half": lambda s, x: s.b(tanh(s.c(on_half(lambda y: y + 1 + 4 * channels(x)[:4], s.a(x))))),
    "constant tokens": lambda s, x: s.b(tanh(s.c(s.a(x) + numbers(x)))),
    "a function of minus infinity": lambda s, x: s.b(tanh(torch.where(channels(x) > 0.9, -torch.inf, s.a(x)))),
    "far below, leaky": lambda s, x: s.b(F.leaky_relu(s.a(x) + -1e31 * (channels(x) > 1.6)) * 1e-30),
    "rows picked by a mask": lambda s, x: s.b(tanh(s.a(x)[:, :4] + s.p_5_8[keep(x)[:, 0] > 0])),
    "logit shift": lambda s, x: s.b_8_4(s.a(x).mean(1)).log_softmax(-1),
    # sums over tokens, experts
    "conv": lambda s, x: s.b(normed(s.conv, x).tanh()),
    "conv res": lambda s, x: x + normed(s.conv, x),
    "circular conv": lambda s, x: s.b(normed(s.round, x).tanh()),
    "rnn": lambda s, x: s.b(s.rnn(x)[0]),
    "gru": lambda s, x: s.b(s.gru(x)[0]),
    "half rolled by an index": lambda s, x: s.b((lambda y: y.reshape(len(y), -1)[:, ROLLED].view(y.shape))(s.a(x))),
    "strides": lambda s, x: s.b(s.a(x).contiguous().as_strided((len(x), TOKENS, D), (TOKENS * D, 1, TOKENS)).tanh()),
    "strides of a part": lambda s, x: s.b(s.a(x)[:, 1:].as_strided((len(x), 4, D), (TOKENS * D, D, 1), 0).tanh()),
    "rounded": lambda s, x: s.b(torch.div(s.a(x), 0.1, rounding_mode="floor")),
    "powers": lambda s, x: s.b(s.a(x).abs() ** torch.arange(1.0, 9.0)),
    "far clamp": lambda s, x: s.b((1e3 * s.a(x)).clamp(-2e3, 2e3)),
    "ones by inputs": lambda s, x: s.b(tanh(s.a(x).masked_fill(s.given[..., :1] > 0, 1.0) + s.p_8)),
    "logsumexp": lambda s, x: s.b_4_8(s.a(x).unflatten(-1, (4, 2)).logsumexp(-1)),
    "logsumexp of tokens": lambda s, x: s.b(s.a(x).logsumexp(1, keepdim=True) * x),
    "glu of torch": lambda s, x: s.b_4_8(F.glu(s.a(x))),
    "prelu": lambda s, x: s.b(F.prelu(s.a(x).mT, s.g_8).mT),
    # numbers that leave torch
    "read as a number": lambda s, x: s.b((lambda y: relu(y * float(y[0, 0, 0].detach())))(s.a(x))),
    "read as a list": lambda s, x: s.b((lambda y: relu(y * torch.tensor(y[0, 0].tolist())))(s.a(x))),
    "read by numpy": lambda s, x: s.b((lambda y: relu(y * torch.as_tensor(y[0, 0].detach().numpy().copy())))(s.a(x))),
    "depthwise": lambda s, x: s.b(normed(s.deep, x).tanh()),
    "group conv": lambda s, x: s.b(normed(s.apart, x).tanh()),
    "windows": lambda s, x: s.b(windows(s.a(x), s.r_8_3(x).softmax(-1), padding=(1, 0))),
    "windows inside": lambda s, x: s.b(windows(s.a(x), s.r_8_3(x)[:, :3].softmax(-1))),
    "half in windows": lambda s, x: s.b(on_half(lambda y: windows(y, s.r_8_3(x).softmax(-1), padding=(1, 0)), s.a(x))),
    "index add": lambda s, x: s.b(s.a(x).index_add(1, chosen(s), s.c(x)[:, chosen(s)])),
    "idle": lambda s, x: s.b(s.a(x).index_add(1, chosen(s), s.c(x)[:, chosen(s)])),
    "idle expert": lambda s, x: s.b(s.a(x).index_add(1, chosen(s), s.c(x[:, chosen(s)]))),
    "half index add": lambda s, x: s.b(on_half(lambda y: y.index_add(1, chosen(s), s.c(x)[:, chosen(s), :4]), s.a(x))),
    "experts": lambda s, x: s.b(
        torch.einsum("ei,bte->bti", torch.einsum("eij,j->ei", s.p_3_8_8, x.new_ones(D)), softmax(s.r_8_3(x), -1))
    ),
    "moe": lambda s, x: (torch.stack([tanh(each(x)) for each in (s.a, s.c)], -1) @ softmax(s.r_8_2(x), -1)[..., None])[
        ..., 0
    ],
    "moe of three": lambda s, x: torch.einsum(
        "beth,ehd,bte->btd", F.gelu(torch.einsum("btd,edh->beth", x, s.p_3_8_4)), s.g_3_4_8, s.r_8_3(x).softmax(-1)
    ),
    "weight cut to integers": lambda s, x: s.b(relu(F.linear(x, (9 * s.p_8_8).int().to(x.dtype)))),
    "gain cut to integers": lambda s, x: s.b(s.a(x) * (9 * s.g_8).int()),
    "weight without some entries": lambda s, x: s.b(F.linear(x, s.p_8_8 * x.new_ones(D, D).tril())),
    "diagonal weight": lambda s, x: s.b(F.linear(x, s.p_8_8 * torch.eye(D, dtype=x.dtype))),
    "weight filled with zeros": lambda s, x: s.b(F.linear(x, s.p_8_8.masked_fill(torch.eye(D).bool(), 0.0))),
    "keys without some entries": lambda s, x: s.c_8_8(tanh(s.a(x) @ (s.p_8_8 * torch.eye(D, dtype=x.dtype)))),
    "rows of one weight": lambda s, x: s.b(F.linear(x, s.p_1_8.expand(D, D))),
    "rows of one weight, normed too": lambda s, x: s.b(F.linear(x, s.p_1_8.expand(D, D))) + s.v(s.norm(s.p_1_8)),
    "repeated, normed too": lambda s, x: (
        s.b(tanh(s.a(x[:, :2]) + s.p_2_8.expand(len(x), 2, D).reshape(-1, D).view(-1, 2, D))) + s.v(s.norm(s.p_2_8))
    ),
    "overlapping rows": lambda s, x: s.b(F.linear(x, s.p_15.unfold(0, D, 1))),
    "weight of more axes": lambda s, x: s.b(F.linear(x, (s.p_8_8 * x.new_full((1, 1, 1), 2.0))[0])),
    "half without some tokens": lambda s, x: s.b(s.a(x) * x.new_ones(TOKENS, D).tril()),
    "positions before a conv": lambda s, x: s.b(s.conv((s.a(x) + s.p_5_8).mT).mT),
    "two writers, by half": lambda s, x: s.b(by_halves(s, x)),
    "two writers, by half, attn": lambda s, x: attend(s, by_halves(s, x)),
    "two writers, by half, norm": lambda s, x: s.b(F.layer_norm(by_halves(s, x), (D,))),
    "two writers, by half, sum": lambda s, x: s.b(by_halves(s, x).sum(1)),
    "sum and difference, by half": lambda s, x: s.b(
        (lambda y, z: cat([(y - z)[..., :4], (y + z)[..., 4:]], -1))(s.c(x), s.e(x))
    ),
    "sum cut to integers": lambda s, x: s.b((9 * s.a(x)).detach().sum(1, keepdim=True, dtype=torch.long) + x),
    "whole numbers of its shape": lambda s, x: (lambda y: s.b(relu(y) * torch.ones_like(y, dtype=torch.long)))(s.a(x)),
    "assigned to integers": lambda s, x: s.b(integers(s.a(x))) + s.c(x),
    "cut to 8 bits": lambda s, x: s.b(relu(s.a(x)).to(torch.float8_e4m3fn).to(x.dtype)),
    "two writers, crossed": lambda s, x: s.b(torch.where(CROSSED, s.c(x), s.e(x))),
    "two constants, crossed": lambda s, x: s.b(x.new_ones(1, TOKENS) @ torch.where(CROSSED, s.p_1_8, s.t_1_8)) + s.o(x),
    "two constants, attn": lambda s, x: s.o(x) + s.b(attended(s, x, torch.where(STEPS[:, :1], s.p_1_8, s.t_1_8))),
    "two constants, by steps, attn": lambda s, x: (
        s.o(x) + s.b(attended(s, x, torch.where(torch.arange(TOKENS)[:, None] < torch.arange(D), s.p_1_8, s.t_1_8)))
    ),
    "two constants, crossed, attn": lambda s, x: s.o(x) + s.b(attended(s, x, torch.where(CROSSED, s.p_1_8, s.t_1_8))),
    "two writers of tokens by half": lambda s, x: s.b(attended(s, x, torch.where(STEPS, s.c(x), s.e(x)))),
    "idle token by the inputs": lambda s, x: (
        lambda y: s.o(y).mean(1) + s.b(tanh(s.v(y[torch.arange(len(x)), picked(s)])))
    )(cat([own(s, x), s.a(x)], 1)),
    "idle tokens by the inputs": lambda s, x: s.b(
        tanh(s.v(cat([own(s, x), s.a(x)], 1).index_select(1, picked(s).amax()[None])))
    ),
    "idle row by the inputs": lambda s, x: (
        lambda y: s.c_2_8(tanh(s.a(x) @ y.mT)).mean(1) + s.b(tanh(s.v(y[picked(s)])))
    )(F.normalize(s.p_2_8, dim=-1)),
    "rows twice": lambda s, x: s.b(s.norm(s.p_2_8[None]).mean() + tanh(s.a(x)[:, :2] + s.c(s.p_2_8[None]))),
    "whole numbers beside channels": lambda s, x: s.b_11_8(cat([s.a(x), (s.given[..., :3] > 0).long() + 2], -1)).tanh(),
    "norms, compared": lambda s, x: (
        lambda q: s.b((q @ s.plain_(s.k(x)).mT).softmax(-1) @ s.v(x) + torch.where(q > 0, q, q / 2))
    )(s.plain(s.q(x))),
    "resized": lambda s, x: s.b(resized(relu(s.a(x)), mode="linear")).tanh(),
    "resized, positions": lambda s, x: s.b(resized(s.a(x) + s.p_5_8, mode="linear", align_corners=True)).tanh(),
    "resized, softmax": lambda s, x: s.b(resized(s.a(x), mode="linear").softmax(-1)),
    "resized to the nearest": lambda s, x: s.b(resized(relu(s.a(x)))).tanh(),
    "resized, of zeros": lambda s, x: s.b(resized(padded(s.a(x), 1, 1), mode="linear")).tanh(),
    "resized channels": lambda s, x: s.b_12_8(F.interpolate(s.a(x), size=12)),
    "resized channels, by lines": lambda s, x: s.b_12_8(F.interpolate(relu(s.a(x)), size=12, mode="linear")),
    "averaged to three": lambda s, x: s.b(F.adaptive_avg_pool1d(relu(s.a(x)).mT, 3).mT).tanh(),
    "averaged to three, of zeros": lambda s, x: s.b(F.adaptive_avg_pool1d(padded(s.a(x), 1, 2).mT, 3).mT).tanh(),
    "averaged to three channels": lambda s, x: s.b_3_8(F.adaptive_avg_pool1d(s.a(x), 3)).tanh(),
    "reflected": lambda s, x: s.b(normed(s.apart, padded(relu(s.a(x)), 1, 2, mode="reflect"))).tanh(),
    "repeated at the ends": lambda s, x: s.b(normed(s.apart, padded(s.a(x), 1, 2, mode="replicate"))).tanh(),
    "padded before a conv": lambda s, x: s.b(normed(s.conv, padded(relu(s.a(x)), 2, 0))).tanh(),
    "padded before a conv, lin": lambda s, x: s.b(normed(s.conv, padded(s.a(x), 2, 0))).tanh(),
    "padded before a conv, positions": lambda s, x: normed(s.conv, padded(s.a(x) + s.p_5_8, 0, 2)).tanh(),
    "padded before a conv, by half": lambda s, x: normed(
        s.conv, cat([padded(h, *side) for h, side in zip(halves(s.a(x)), ((2, 0), (0, 2)), strict=True)], -1)
    ).tanh(),
    "padded by ones before a conv": lambda s, x: normed(s.conv, padded(s.a(x), 2, 0, value=1.0)).tanh(),
    "up": lambda s, x: s.b(normed(s.up, relu(s.a(x)))).tanh(),
    "up, apart": lambda s, x: s.b(normed(s.up_2_3, s.a(x))).tanh(),
    "up twice": lambda s, x: normed(s.up_3_1_, normed(s.up_3_1, x)).tanh(),
    "up, norm": lambda s, x: s.norm(normed(s.up, s.a(x))).relu(),
    "most of windows": lambda s, x: s.b(F.max_pool1d(s.a(x).mT, 2).mT).tanh(),
    "most of windows, padded": lambda s, x: s.b(F.max_pool1d(relu(s.a(x)).mT, 3, 1, 1).mT).tanh(),
    "most of windows, positions": lambda s, x: s.b(F.max_pool1d((s.a(x) + s.p_5_8).mT, 2).mT).tanh(),
    "most of windows of zeros": lambda s, x: s.b(F.max_pool1d(padded(s.a(x), 1, 1).mT, 2).mT).tanh(),
    "most of windows of channels": lambda s, x: s.b_4_8(F.max_pool1d(s.a(x), 2)).tanh(),
    "most of three": lambda s, x: s.b(F.adaptive_max_pool1d(s.a(x).mT, 3).mT).tanh(),
    "most of tokens": lambda s, x: s.b(s.a(x).amax(1)),
    "most of tokens, at least": lambda s, x: s.b(s.a(x).amin(1)),
    "most of tokens, and where": lambda s, x: (lambda y: s.b(y.values) + y.indices)(s.a(x).max(1)),
    "most of tokens, softmax": lambda s, x: s.b(s.a(x).amax(1).softmax(-1)),
    "most of tokens, norm": lambda s, x: s.b(s.norm(s.a(x).amax(1))),
    "most of tokens, both": lambda s, x: s.b_16_8(cat([s.a(x).amax(1), s.a(x).amin(1)], -1)),
    "most of two": lambda s, x: s.b(cat([s.a(x), s.c(x)], 1).amax(1)),
    "most of tokens and channels": lambda s, x: s.a(x).amax((1, 2))[:, None] + s.b(s.c(x)).mean(1),
    "mean of all": lambda s, x: s.r_1_8(s.a(x).mean((1, 2))[:, None]),
    "sum of all": lambda s, x: s.r_1_8(s.a(x).sum((1, 2))[:, None]),
    "mean of all, of two": lambda s, x: (lambda y: tanh(s.o(y)).mean(1) + s.r_1_8(y.mean((1, 2))[:, None]))(
        cat([own(s, x), s.a(x)], 1)
    ),
    "two streams": two_streams,
    "recurrent": recurrent,
    "one token, recurrent": recurrent,
    "one token, gated recurrent": lambda s, x: s.b(s.gru(x)[0][:, -1]),
    "encoder": encoder,
    "post-norm": post_norm,
}
"""Nets of which the mean over tokens is seen, or what they answer themselves."""

ALL_TOKENS: dict[str, Body] = {
    "squares of a norm": lambda s, x: s.norm_4(s.a_8_4(x)).square(),
    "half pooled": lambda s, x: on_half(lambda y: y.mean(1, keepdim=True).expand(-1, TOKENS, -1), x),
    "half pooled lin": lambda s, x: s.a(on_half(lambda y: y.mean(1, keepdim=True).expand(-1, TOKENS, -1), x)).tanh(),
    "half rolled": lambda s, x: s.a(on_half(lambda y: y.roll(1, 1), x)).tanh(),
    "half number": lambda s, x: s.a(on_half(lambda y: y * numbers(x), x)).tanh(),
    "half first": lambda s, x: s.a(on_half(lambda y: y[:, :1].expand(-1, TOKENS, -1), x)).tanh(),
    "half mixed": lambda s, x: s.a(
        on_half(lambda y: softmax(torch.arange(25.0, dtype=y.dtype).view(5, 5) / 9, -1) @ y, x)
    ).tanh(),
    "average pool": lambda s, x: s.norm(averaged(x + s.p_5_8)),
    "average padded": lambda s, x: s.norm(averaged(x + s.p_5_8, padding=1)),
    "average whole": lambda s, x: s.norm(averaged(x, padding=1, count_include_pad=False)),
    "half averaged": lambda s, x: s.a(cat([averaged(x[..., :4]), x[:, ::4, 4:]], -1)).tanh(),
    "average of channels": lambda s, x: s.a_4_8(F.avg_pool1d(x, 2)).tanh(),
    "a function of zeros": lambda s, x: s.b_9_8(F.pad(s.a(x), (0, 1)).exp()),
    "group norm of zeros": lambda s, x: s.b(normed(s.group, F.pad(s.a_8_6(x), (0, 2)))),
    "group norm of positions": lambda s, x: s.b(normed(s.group, s.a(x) + s.p_5_8)),
    "group norm, read": lambda s, x: s.b(normed(s.group, s.a(x))),
    "sum of channels of two kinds": lambda s, x: (lambda y: s.b(s.c(y).mean(1)) + y.sum((1, 2))[:, None])(
        cat([x, s.a(x)], 1)
    ),
    "one token, sum": lambda s, x: s.b(s.a(x).sum(1)),
    "one token, sum of all": lambda s, x: s.b_1_8(s.a(x).sum((1, 2))[:, None]),
    "one token, less its mean": lambda s, x: (lambda y: s.b(tanh(s.c(y - y.mean((1, 2), keepdim=True)))))(s.a(x)),
    "bits": lambda s, x: s.b(s.a(x).double().view(torch.int64).to(x.dtype) / 1e18),
    "diagonal": lambda s, x: s.b_5_8(s.a_8_5(x).diagonal(dim1=1, dim2=2)),
    "diagonal, positions": lambda s, x: s.b_5_8((s.a_8_5(x) + s.p_5_5).diagonal(dim1=1, dim2=2)),
    "diagonal, norm": lambda s, x: s.b_5_8(s.plain_5(s.a_8_5(x).flatten(1)[:, ::6])),
    "tokens crossed": lambda s, x: s.b_10_8(s.a_8_5(x).flatten(1)[:, [0, 1, 7, 8, 4, 5, 6, 2, 3, 9]]),
    "tokens crossed by halves": lambda s, x: s.b_16_8(
        (lambda u, v: cat([u[0], v[1], v[0], u[1]], -1))(*(halves(s.a(x)[:, t]) for t in (0, 1)))
    ),
    "tokens rolled": lambda s, x: s.b(s.a(x).roll(1)),
    "tokens rolled by an index": lambda s, x: s.b((lambda y: y.reshape(len(y), -1)[:, ROLLED].view(y.shape))(s.a(x))),
    "tokens masked": lambda s, x: s.b_25_8(torch.where(torch.eye(5) > 0, 0.0, s.a_8_5(x)).flatten(1)),
    "tokens assigned": lambda s, x: s.b_25_8(assigned(s.a_8_5(x).flatten(1), s.c_8_25(x)[:, 0], slice(None, None, 6))),
    "tokens cut": lambda s, x: s.b_36_8(F.pad(s.a(x).flatten(1), (-2, -2))),
    "copies crossed, times": lambda s, x: crossed(s, x, lambda y, z: s.b(y * s.given[..., :1] + z)),
    "copies crossed, read": lambda s, x: beside(s, x, lambda y: s.b(y)),
    "copies crossed, norm": lambda s, x: beside(s, x, lambda y: y.norm(dim=-1, keepdim=True)),
    "copies crossed, scores": lambda s, x: beside(s, x, lambda y: s.b_5_8(y @ s.k(x).mT)),
    "scores of halves, crossed": lambda s, x: (
        crossed(s, x, lambda y, z: y @ z.mT) + (lambda y: y[..., :8] @ y[..., 8:].mT)(s.a_8_16(x))
    ),
    "of one length": lambda s, x: (lambda y: F.normalize(y + s.b(s.deep(y.mT).mT), dim=-1))(s.a(tanh(x))),
    "wide scores of itself": lambda s, x: (lambda y: y @ y.mT)(s.a_8_12(x)),
    "wide scores of halves": lambda s, x: (lambda y: y[..., :12] @ y[..., 12:].mT)(s.a_8_24(x)),
    "wide keys": lambda s, x: x + (lambda y: s.o((s.q_8_16(y) @ s.k_8_16(y).mT).softmax(-1) @ s.v(y)))(s.plain(x)),
    "wide scores of a stream": lambda s, x: (lambda y: s.q_12(y) @ s.k_12(y).mT)(s.a_8_12(x)),
}
"""Nets of which each token is seen."""

OF_WORDS: dict[str, Body] = {
    "words and positions": lambda s, x: encoder(s, x + s.p_5_8),
    "words and positions, norms alone": lambda s, x: s.normc(encoder(s, x + s.p_5_8)),
    "words multiplied in place": lambda s, x: s.normb((x * 3 + s.p_5_8) + s.b(F.gelu(s.a(s.norm(x * 3 + s.p_5_8))))),
    "tied table and head": lambda s, x: F.linear(encoder(s, x).mean(1), s.embed.weight),
    "tied table and head, norms alone": lambda s, x: F.linear(s.normc(encoder(s, x)).mean(1), s.embed.weight),
}
"""Nets with a table in place of the first linear map."""

NETS = {**POOLED, **ALL_TOKENS, **OF_WORDS}


def generic(model: nn.Module, inputs: Tensor) -> nn.Module:
    """Return a net whose parts are all made at a generic point, in float64: what starts as a constant would be one."""
    model(inputs)
    model = model.double().eval()
    with torch.no_grad():
        for w in model.parameters():
            if w.ndim < 2 or bool((w == w.reshape(-1)[0]).all()):
                w += 0.3 * torch.randn_like(w)
    return model


def net(name: str, bias: bool) -> tuple[nn.Module, Tensor]:
    """Return a net at a generic point, and inputs enough for the rank of its Jacobian."""
    torch.manual_seed(0)
    given = torch.randint(WORDS, (96, TOKENS)) if name in OF_WORDS else torch.randn(96, TOKENS, GIVEN)
    model = generic(Net(NETS[name], bias, name not in ALL_TOKENS, name in OF_WORDS), given[:2])
    inputs = given if name in OF_WORDS else given.double()
    return model, inputs[: 24 if name in ALL_TOKENS else 96]


FOUND = """
linear: 72 64; relu: 152/161 136; leaky: 152 136; where leaky: 152 136; abs: 152 136; times its sign: 152 136; sq: 152
136; cube: 152 136; squared relu: 152/161 136; gelu: 144 128; glu: 152 136; bilinear: 160 144; selfgate: 152 136;
maxout: 160/168 136; max0: 152/161 136; max1: 144/303 128/270; ratio: 152 136; softmax of channels: 153/166 137/145;
softmax of tokens: 137/145 128; max pool: 96/113 80; cumsum: 208/216 192; dead: 186/210 167/191; outer: 164 148; two:
216 192; narrow: 92/131 73/112; lora: 116/131 112; res lin: 8/72 0/64; gain: 152 136; scalar gain: 145 129; gain lin:
224 200; gain two: 168/232 152/208; gate of heads: 156 140; gate of numbers: 152/224 136/200; one more than a gain:
135/147 118/126; tied: 0/72 1/64; tied T: 72 64; tied lin: 72/144 65/128; sum heads: 204/220 184/196; shared heads:
184/236 161/208; weight norm: 144 136; weight norm, read: 73/144 65/136; weight norm, one: 80/144 72/128; weight norm by
hand: 144 136; fewer classes: 221/283 173/224; ln: 127 110; ln res: 61/62 45; ln final: 74 53; ln plain: 98/110 89/93;
norm and head: 133/134 109; rms: 44 36; rms with a bias: 52 36; rms hand: 44 36; l2: 36 28; ln hand: 45/46 37; ln var:
45/46 37; ln std: 45/46 37; ln with its mean: 31/32 23; ln by another's length: 16 8; ln of tokens: 88 72; half ln:
115/121 99/100; ln heads: 105/122 92/104; centre only: 67 66; mean used: 57/65 57; norm masked: 110/119 102/110; norm
masked by inputs: 119 110; norm in two places: 114/139 89/97; norm of two, one reader: 32 24; norm read and added: 26 9;
norm's reader elsewhere: 8/11 0/2; norms of averages: 42 25; no norm at the end: 16/18 8; parallel layers: 53 32; layer
twice: 31/48 9/19; layer twice, norm once: 19/39 9/17; bias twice: 26/34 9/17; read twice: 55 46; groupnorm: 145/146
128; batchnorm: 160 136; bn mean: 160 136; bn plain: 144 128; bn relu: 168/214 144/179; bn relu plain: 152/183 128/163;
bn lin: 232 200; bn lin plain: 216 184; bn twice: 160 128/136; bn half: 208/224 180/192; bn narrow: 249 214; bn res:
96/160 72/136; bn one channel: 151/153 135/136; attn: 160 128; attn rms: 124 100; attn ln: 157/158 117; gqa: 120 96;
qknorm: 124 100; qkln: 162/166 136/138; causal: 160 128; capped: 152 128; latent: 172/188 138/146; output gate: 88/160
73/136; linear attn: 144 128; no softmax: 209 193; sigmoid attn: 208 192; shared qk: 180 156; temp: 225 193; score bias:
229 197; score by query: 221 192; two scores: 152/224 128/192; score of key: 225/233 192; scores zeroed: 216 192; scores
times: 216 192; scores hidden: 224 192; scores zeroed by inputs: 216 192; scores hidden by inputs: 224 192; scores
dropped: 216 192; scores dropped by inputs: 216 192; scores a key's gain: 217 193; two attentions less: 216 192; attn
with a sink: 208 192; attn twice: 224 192; rot: 160 136; rot2: 160 136; rot3: 164 138; zero key, own: 208 192; pos: 152
128; pos attn: 168 128; cls: 224/328 200/292; cls attn: 224/352 192/304; cls, norms and positions: 206/310 150/253;
short table: 139 115; short slice: 0/139 0/115; short attn: 232 192; short rows apart: 0/112 0/80; masked tokens:
136/144 128; masked tokens, own: 136/152 128; zero token, own: 136/152 128; masked tokens, tied: 0/72 1/64; assigned:
184/216 160/192; assigned tokens: 144 128; assigned one: 144 128; assigned part: 144/148 128; assigned halves: 184 160;
bias first: 224 192; positions first: 224 192; half bias: 204/220 176/188; constant: 144 128; constant lin: 216 184;
constant half: 216 184; constant tokens: 208 184; logit shift: 153/198 136/181; conv: 136 128; conv res: 72/144 64/128;
depthwise: 80 72; group conv: 112 96; windows: 217 200; windows inside: 225 200; half in windows: 185/189 168; index
add: 216/224 192; idle: 160/224 136/192; idle expert: 96/224 80/192; half index add: 236/240 208; experts: 167/423
150/394; moe: 81 72; moe of three: 137 136; two streams: 122/124 90; encoder: 181/183 133; post-norm: 158/159 96/106;
half pooled: 40 32; half pooled lin: 40 32; half rolled: 40 32; half number: 32/36 32; half first: 40 32; half mixed: 40
32; average pool: 71/92 50/72; average padded: 64/85 43/65; average whole: 59 46; half averaged: 40 32; average of
channels: 40/60 52; words and positions: 189/196 141/146; words and positions, norms alone: 263 209/210; words
multiplied in place: 134 113; tied table and head: 165/166 125; tied table and head, norms alone: 162 120/121; added
twice: 160 128; added twice before norms: 122/124 97; weighed twice: 135 118; added to inputs: 156 128; added to a
softmax: 162/174 137/145; gain before a weight: 163 146; tied T twice: 80 64; tied T of another: 224 192; tied T within:
245/288 221/256; tied T after a norm: 226/275 201/238; tied half T: 188/240 160/212; sum of experts: 189 168; sum of
turned experts: 152/184 128/160; sum of scaled experts: 160/241 136/208; gain of two and of one: 160/224 136/200; weight
and weight + 1: 90/119 73/102; gain and gain + 1: 168/204 144/152; tied T, minus it + 1: 226/275 201/238; added twice,
partly seen: 120/197 112/181; bias of channels joined to one: 110 98; circular conv: 80 72; rnn: 152 128; gru: 160 128;
read as a number: 151 135; read as a list: 144 128; read by numpy: 144 128; logsumexp: 160 144; logsumexp of tokens: 80
72; glu of torch: 164 148; prelu: 152 136; rounded: 144 128; powers: 152 136; far clamp: 144 128; ones by inputs: 144
128; strides: 144 128; strides of a part: 144 128; half rolled by an index: 216 192; weight cut to integers: 73/144
65/136; gain cut to integers: 162/230 136/200; weight without some entries: 109/208 101/192; keys without some entries:
208 192; diagonal weight: 144/208 136/192; weight filled with zeros: 96/208 88/192; rows of one weight: 150/236 135/220;
overlapping rows: 72/159 64/143; weight of more axes: 144/208 136/192; half without some tokens: 203/220 184/196;
positions before a conv: 312/328 272/288; two writers, by half: 184/288 160/256; two writers, by half, attn: 328 288;
two writers, by half, norm: 158/171 142/154; two writers, by half, sum: 184/288 160/256; two writers of tokens by half:
204 176; sum and difference, by half: 192/288 160/256; cut to 8 bits: 144/154 128; two writers, crossed: 184/224
160/192; two constants, crossed: 184/232 160/200; two constants, attn: 236/244 208; two constants, by steps, attn:
176/221 148/185; two constants, crossed, attn: 204/244 176/208; tied T before a norm: 197/238 165/206; heads of one
weight, crossed: 160/168 144/152; heads of one weight, in parts: 216/232 192/208; heads of one map, crossed: 97/160
89/144; groupnorm lin: 161/168 136/142; recurrent: 160 136; tied T, first of zeros: 216/288 256; rows of one weight,
normed too: 189/324 164/288; repeated, normed too: 176/240 143/200; idle token by the inputs: 224 192; idle tokens by
the inputs: 160/216 136/192; idle row by the inputs: 154/376 130/326; mean of all: 243/244 220; sum of all: 243/244 220;
mean of all, of two: 137/153 121; a function of zeros: 144/160 128; group norm of zeros: 164/178 140/149; group norm,
read: 161/168 136/142; sum of channels of two kinds: 201/288 177/256; one token, sum: 208/216 192; bits: 144 128;
diagonal: 169 148; diagonal, positions: 174/194 148/168; diagonal, norm: 168/172 151/155; tokens crossed: 165/177
144/156; tokens crossed by halves: 184/216 192; tokens rolled: 202 178; tokens rolled by an index: 184 160; tokens
masked: 197/213 176/184; tokens assigned: 364/438 318/384; tokens cut: 184/328 160/296; copies crossed, times: 184/216
192; copies crossed, read: 288/360 256/320; copies crossed, norm: 229/237 77/213; copies crossed, scores: 281/297 257;
scores of halves, crossed: 96/135 108/128; wide scores of itself: 135 124; wide scores of halves: 207 192; wide scores
of a stream: 411 384; wide keys: 349/350 308; rows twice: 159/240 135/207; squares of a norm: 86 77; resized: 80/89 72;
resized, positions: 152 128; of one length: 17 9; resized, softmax: 153/166 137/145; resized to the nearest: 80/89 72;
resized, of zeros: 136/144 128; resized channels: 200/248 176/224; resized channels, by lines: 145/205 129/168; averaged
to three: 80/89 72; averaged to three, of zeros: 136 128; averaged to three channels: 123/134 110/118; reflected:
120/133 104; repeated at the ends: 152 128; padded before a conv: 152 136; padded before a conv, lin: 208 192; padded
before a conv, positions: 144 128; padded before a conv, by half: 104 96; padded by ones before a conv: 128 120; up: 152
136; up, apart: 208 192; up twice: 128 128; up, norm: 169/170 160; most of windows: 88 72; most of windows, padded:
80/89 72; most of windows, positions: 88/109 72/90; most of windows of zeros: 80 72; most of windows of channels: 76/93
68; most of three: 88 72; most of tokens: 160 136; most of tokens, at least: 160 136; most of tokens, and where: 96 72;
most of tokens, softmax: 145/157 128; most of tokens, norm: 169/181 144/152; most of tokens, both: 152/160 136; most of
two: 160/171 136; most of tokens and channels: 145/255 129/206; group norm of positions: 169/176 136/144; less half its
mean: 208/216 192; less another's mean: 201/224 177/192; less the mean of the turned pair: 195/202 178; squares of
tokens: 88/96 72; squares without some tokens: 173 157; sum cut to integers: 80/152 64/128; whole numbers of its shape:
152 136; assigned to integers: 152/224 128/192; whole numbers beside channels: 144 128; norms, compared: 170 144; rot by
quotients: 160/168 144; scores hidden and shown again: 216 192; scores that inputs show: 292 264; scores that inputs
show, less others: 292 264; scores hidden, less their mean: 296 264; norms of other signs: 111 95; weight of one key,
repeated: 216 192; weights of some keys, twice: 216 192; squares cut to integers: 136/208 120/184; mean cut to integers:
192/208 176/184; a function of minus infinity: 184/232 164/200; far below, leaky: 288/320 256/284; rows picked by a
mask: 152/160 128/136; one token, sum of all: 243/244 220; one token, less its mean: 195/202 178; one token, recurrent:
160 136; one token, gated recurrent: 160 128; positions twice: 144/152 128; products of a plain norm: 130 113; short
mixing: 152 136; short planes: 168 144
"""
"""Dimensions found in each net with biases and without, of how many there are where these are more."""
