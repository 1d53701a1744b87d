"""Small nets of kinds of layers that people build, two of each, and the dimensions of their fibres, as measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.nets.net import Computed, generic
from tests.nets.parts import (
    cat,
    exp,
    gelu,
    merged_heads,
    mixed,
    relu,
    scan,
    sigmoid,
    silu,
    softplus,
    split_heads,
    tanh,
    unit,
)

ROWS = 32
L, C = nn.Linear, nn.Conv1d


@dataclass(frozen=True)
class Kind:
    """A net, the size of an example, the sizes of others that it takes, and parameters minus the rank of the Jacobian.

    The rank is taken on so many examples, of all of these sizes.
    """

    make: Callable[[], nn.Module]
    kernel: int
    size: tuple[int, ...]
    others: tuple[tuple[int, ...], ...] = ()
    rows: int = 96


def net(name: str) -> tuple[nn.Module, Tensor]:
    """Return a net at a generic point, and inputs."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, *KINDS[name].size)
    return generic(KINDS[name].make(), x[:2]), x.double()


def batches(name: str) -> list[Tensor]:
    """Return inputs of all sizes, enough for the rank of the Jacobian."""
    draw = torch.Generator().manual_seed(1)
    kind = KINDS[name]
    sizes = (kind.size, *kind.others)
    return [torch.randn(kind.rows // len(sizes), *size, generator=draw, dtype=torch.float64) for size in sizes]


# ---- parts


def p(*sizes: int) -> nn.Parameter:
    """Return a parameter with rows of length about 1."""
    return nn.Parameter(torch.randn(sizes) / math.sqrt(sizes[-1]))


def v(*sizes: int) -> nn.Parameter:
    """Return a parameter of positive numbers near 1."""
    return nn.Parameter(exp(0.3 * torch.randn(sizes)))


def plain(*sizes: int) -> nn.Linear:
    return nn.Linear(*sizes, bias=False)


def shifted(x: Tensor) -> Tensor:
    """Return the tokens before."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


def low_rank(s: Any) -> Tensor:
    return s.w + s.b @ s.a


def standard(w: Tensor) -> Tensor:
    """Return rows of mean 0 and variance 1."""
    rows = w.flatten(1)
    rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)
    return rows.view_as(w)


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


# ---- nets of more than a line


def adapted_attention(s: Any, x: Tensor) -> Tensor:
    def adapted(name: str) -> Tensor:
        return getattr(s, name)(x) + 0.5 * getattr(s, name + "b")(getattr(s, name + "a")(x))

    return x + s.o(mixed(adapted("q"), s.k(x), adapted("v")))


def prefixed(s: Any, x: Tensor) -> Tensor:
    def all_of(prefix: Tensor, rest: Tensor) -> Tensor:
        return cat([prefix.expand(len(x), *prefix.shape), rest], 1)

    return s.o(mixed(s.q(x), all_of(s.pk, s.k(x)), all_of(s.pv, s.v(x))))


def prefixed_heads(s: Any, x: Tensor) -> Tensor:
    """Attend with two heads, with prefixes that a small network makes of a table."""
    prefix = s.up(tanh(s.down(s.table))).expand(len(x), -1, -1)
    k, values = (cat([one, other], 1) for one, other in zip(prefix.chunk(2, -1), (s.k(x), s.v(x)), strict=True))
    return s.o(merged_heads(mixed(split_heads(s.q(x)), split_heads(k), split_heads(values))))


def film(s: Any, x: Tensor) -> Tensor:
    given, condition = x[..., :3], x[..., 3:]
    return s.c(tanh(s.gamma(condition) * s.a(given) + s.beta(condition)))


def film_of_channels(s: Any, x: Tensor) -> Tensor:
    """Modulate channels of a convolution by the mean of its inputs."""
    y, gamma, beta = s.a(x), *s.m(x.mean(2)).chunk(2, -1)
    return s.c(gelu(gamma[..., None] * y + beta[..., None]).mean(2))


def adaptive_norm(s: Any, x: Tensor) -> Tensor:
    given, condition = x[..., :3], x[..., 3:]
    return s.c(tanh((1 + s.gamma(condition)) * norm(s.a(given)) + s.beta(condition)))


def gated_adaptive_norm(s: Any, x: Tensor) -> Tensor:
    """Add neurons behind an adaptive norm to a stream, as diffusion transformers do."""
    x, condition = s.a(x[..., :3]), silu(s.e(x[..., 3:]))
    shift, scale, gate = s.m(condition).chunk(3, -1)
    return s.c(x + gate * s.down(gelu(s.up(norm(x) * (1 + scale) + shift))))


def adaptive_instance_norm(s: Any, x: Tensor) -> Tensor:
    y, style = s.a(x[..., :3]), x[:, 0, 3:]
    y = (y - y.mean(1, keepdim=True)) / y.std(1, keepdim=True)
    return s.c(tanh(s.gamma(style)[:, None] * y + s.beta(style)[:, None]))


def fourier(s: Any, x: Tensor) -> Tensor:
    angles = F.linear(x, s.w, s.phase)
    return s.c(cat([angles.cos(), angles.sin()], -1))


def fourier_of_a_map(s: Any, x: Tensor) -> Tensor:
    angles = 2 * F.linear(s.a(x), s.w)
    return s.c(tanh(s.b(cat([angles.cos(), angles.sin()], -1))))


def bumps(x: Tensor) -> Tensor:
    """Return values of three bumps, along a new last axis."""
    return exp(-((x[..., None] - torch.tensor([-1.0, 0.0, 1.0]).to(x)) ** 2))


def splines(s: Any, x: Tensor) -> Tensor:
    """Sum functions of channels, each with a scale of its own beside its coefficients, twice."""
    x = torch.einsum("...ik,oik,oi->...o", bumps(x), s.w, s.scale) + F.linear(silu(x), s.base)
    return torch.einsum("...ik,oik->...o", bumps(x), s.c)


def chebyshev(s: Any, x: Tensor) -> Tensor:
    for w in (s.w, s.c):
        x = tanh(x)
        polynomials = torch.stack([torch.ones_like(x), x, 2 * x**2 - 1, 4 * x**3 - 3 * x], -1)
        x = torch.einsum("...ik,oik->...o", polynomials, w)
    return x


def of_codes(s: Any, x: Tensor) -> Tensor:
    """Compute with weights of two layers that one network makes of a code each."""
    for code in s.codes:
        x = tanh(F.linear(x, s.h(tanh(s.e(code))).view(3, 3)))
    return s.c(x)


def neighbours(x: Tensor) -> Tensor:
    """Return which nodes of a ring see which."""
    n = x.shape[1]
    distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    return torch.minimum(distance, n - distance) <= 1


def graph_attention(s: Any, x: Tensor) -> Tensor:
    h = s.w(x)
    scores = F.leaky_relu(s.q(h) + s.k(h).mT, 0.2)
    return s.c(F.elu(scores.masked_fill(~neighbours(x), -math.inf).softmax(-1) @ h))


def graph_attention_of_heads(s: Any, x: Tensor) -> Tensor:
    h = split_heads(s.w(s.e(x)))
    scores = F.leaky_relu((h * s.q).sum(-1)[..., None] + (h * s.k).sum(-1)[..., None, :], 0.2)
    return s.c(tanh(merged_heads(scores.masked_fill(~neighbours(x), -math.inf).softmax(-1) @ h) + s.bias))


def second_graph_attention(s: Any, x: Tensor) -> Tensor:
    q, k = s.q(x), s.k(x)
    scores = s.a(F.leaky_relu(q[:, :, None] + k[:, None], 0.2))[..., 0]
    return s.c(scores.masked_fill(~neighbours(x), -math.inf).softmax(-1) @ k)


def second_graph_attention_of_edges(s: Any, x: Tensor) -> Tensor:
    """Attend with scores of both ends and of the edge, with values of their own."""
    edges = (x[:, :, None] - x[:, None]).square()
    scores = s.a(silu(s.q(x)[:, :, None] + s.k(x)[:, None] + s.e(edges)))[..., 0]
    return s.c(scores.masked_fill(~neighbours(x), -math.inf).softmax(-1) @ s.v(x))


def linformer(s: Any, x: Tensor) -> Tensor:
    return x + s.o(mixed(s.q(x), s.e @ s.k(x), s.f @ s.v(x)))


def linformer_of_heads(s: Any, x: Tensor) -> Tensor:
    """Attend with two heads that share one map of tokens."""
    k, values = s.e @ s.k(x), s.e @ s.v(x)
    return s.o(merged_heads(mixed(split_heads(s.q(x)), split_heads(k), split_heads(values))))


def rwkv(s: Any, x: Tensor) -> Tensor:
    """Mix tokens by averages whose weights decay, a bonus for the token itself, and a gate."""
    r, k, values = (f(x + mix * (shifted(x) - x)) for f, mix in ((s.r, s.mr), (s.k, s.mk), (s.v, s.mv)))
    decay, up, down, found = exp(-exp(s.decay)), 0.0, 0.0, []
    for t in range(x.shape[1]):
        now = exp(s.bonus + k[:, t])
        found.append((up + now * values[:, t]) / (down + now))
        up, down = decay * up + exp(k[:, t]) * values[:, t], decay * down + exp(k[:, t])
    return s.o(sigmoid(r) * torch.stack(found, 1))


def rwkv_of_matrices(s: Any, x: Tensor) -> Tensor:
    """Mix tokens by a matrix of keys and values, whose rows decay, read by receptances."""
    r, k, values = s.r(x), s.k(x), s.v(x)
    state, found = x.new_zeros(len(x), k.shape[-1], values.shape[-1]), []
    for t in range(x.shape[1]):
        now = k[:, t, :, None] * values[:, t, None]
        found.append((r[:, t, None] @ (state + s.bonus[:, None] * now))[:, 0])
        state = sigmoid(s.decay)[:, None] * state + now
    return s.o(silu(s.g(x)) * torch.stack(found, 1))


def mamba(s: Any, x: Tensor) -> Tensor:
    """Scan with steps, writers and readers that are maps of the token, and a diagonal of every channel."""
    delta, B, read = softplus(s.delta(x)), s.b(x), s.read(x)
    A = -exp(s.log)

    def step(state: Tensor, t: int) -> Tensor:
        return exp(delta[:, t, :, None] * A) * state + (delta[:, t] * x[:, t])[..., None] * B[:, t, None]

    states = scan(step, x.new_zeros(len(x), *A.shape), x.shape[1])
    return s.c((states @ read[..., None])[..., 0] + s.skip * x)


def second_mamba(s: Any, x: Tensor) -> Tensor:
    """Scan with one decay for all channels of a head, behind a short convolution, and before a gate."""
    y, gate = s.w(x).chunk(2, -1)
    y = silu(s.conv(F.pad(y.mT, (1, 0))).mT)
    delta, B, read = softplus(s.delta(x)), s.b(y), s.read(y)

    def step(state: Tensor, t: int) -> Tensor:
        decay = exp(-delta[:, t] * exp(s.log))[..., None]
        return decay * state + (delta[:, t] * y[:, t])[..., None] * B[:, t, None]

    states = scan(step, x.new_zeros(len(x), y.shape[-1], B.shape[-1]), x.shape[1])
    return s.c((states @ read[..., None])[..., 0] * silu(gate))


def states_of_a_matrix(s: Any, x: Tensor) -> Tensor:
    states = scan(lambda h, t: F.linear(h, s.A) + s.b(x[:, t]), x.new_zeros(len(x), 3), x.shape[1])
    return s.c(gelu(s.read(states) + s.skip(x)))


def states_of_planes(s: Any, x: Tensor) -> Tensor:
    """Scan with a complex diagonal, discretized by a step that is learned, written out in real numbers."""
    delta = exp(s.step)
    size, angle = exp(-delta * exp(s.decay)), delta * s.frequency
    re, im = size * angle.cos(), size * angle.sin()

    def step(state: Tensor, t: int) -> Tensor:
        a, b = state.chunk(2, -1)
        return cat([re * a - im * b + delta * s.b(x[:, t]), re * b + im * a + delta * s.d(x[:, t])], -1)

    states = scan(step, x.new_zeros(len(x), 2 * len(re)), x.shape[1])
    return s.c(gelu(s.read(states)))


def squared_distances(x: Tensor, points: Tensor) -> Tensor:
    return (x[..., None, :] - points).square().sum(-1)


def squash(x: Tensor) -> Tensor:
    square = x.square().sum(-1, keepdim=True)
    return x * square.sqrt() / (1 + square)


def routed(votes: Tensor) -> Tensor:
    """Return capsules (..., out, size) by agreement of votes (..., in, out, size)."""
    scores = votes.new_zeros(votes.shape[:-1])
    for _ in range(2):
        found = squash((scores.softmax(-1)[..., None] * votes).sum(-3))
        scores = scores + (votes * found[..., None, :, :]).sum(-1)
    return squash((scores.softmax(-1)[..., None] * votes).sum(-3))


def capsules_by_length(s: Any, x: Tensor) -> Tensor:
    poses = squash(s.a(x).unflatten(-1, (3, 2)))
    return routed(torch.einsum("...if,ijfg->...ijg", poses, s.w)).square().sum(-1)


def capsules_read(s: Any, x: Tensor) -> Tensor:
    poses = s.a(x).unflatten(-1, (3, 2))
    return s.c(routed(torch.einsum("...if,jfg->...ijg", poses, s.w)).flatten(-2))


def complex_map(x: tuple[Tensor, Tensor], re: nn.Linear, im: nn.Linear) -> tuple[Tensor, Tensor]:
    a, b = x
    return re(a) - im(b), re(b) + im(a)


def complex_layers(s: Any, x: Tensor) -> Tensor:
    """Map by two complex maps without anything between, then by neurons of both parts, and a third map."""
    y = complex_map(complex_map((x[..., :3], x[..., 3:]), s.a, s.ai), s.b, s.bi)
    return cat(complex_map((tanh(y[0]), tanh(y[1])), s.c, s.ci), -1)


def complex_sizes(s: Any, x: Tensor) -> Tensor:
    """Gate complex channels by their size and a bias."""
    a, b = complex_map((x[..., :3], x[..., 3:]), s.a, s.ai)
    gate = sigmoid(a**2 + b**2 + s.bias)
    return s.c(cat(complex_map((gate * a, gate * b), s.b, s.bi), -1))


def experts(s: Any, x: Tensor) -> Tensor:
    answers = torch.stack([expert(x) for expert in (s.a, s.b, s.d)], -1)
    return s.c(tanh((answers * s.gate(x).softmax(-1)[..., None, :]).sum(-1)))


KINDS: dict[str, Kind] = {
    "LoRA, neurons": Kind(
        lambda: Computed(
            lambda s, x: s.c(gelu(s.w(x) + s.b(s.a(x)))), w=L(4, 6), a=plain(4, 2), b=plain(2, 6), c=L(6, 3)
        ),
        20,
        (4,),
    ),
    "LoRA, attention": Kind(
        lambda: Computed(
            adapted_attention,
            q=L(4, 4),
            k=L(4, 4),
            v=L(4, 4),
            o=L(4, 4),
            qa=plain(4, 2),
            qb=plain(2, 4),
            va=plain(4, 1),
            vb=plain(1, 4),
        ),
        64,
        (5, 4),
        ((3, 4), (7, 4)),
    ),
    "DoRA, neurons": Kind(
        lambda: Computed(
            lambda s, x: s.c(tanh(F.linear(x, s.g[:, None] * unit(low_rank(s)), s.bias))),
            w=p(5, 4),
            a=p(2, 4),
            b=p(5, 2),
            g=v(5),
            bias=p(5),
            c=L(5, 3),
        ),
        23,
        (4,),
    ),
    "DoRA, two maps": Kind(
        lambda: Computed(
            lambda s, x: s.c(gelu(s.d(F.linear(s.e(x), s.g[:, None] * unit(low_rank(s)))))),
            e=L(3, 4),
            w=p(4, 4),
            a=p(1, 4),
            b=p(4, 1),
            g=v(4),
            d=plain(4, 5),
            c=L(5, 2),
        ),
        44,
        (3,),
    ),
    "convolution beside a residual": Kind(
        lambda: Computed(
            lambda s, x: s.c(gelu(s.d(s.a(x) + s.b(s.a(x)))).mean(2)),
            a=C(2, 3, 1),
            b=C(3, 3, 3, padding=1),
            d=C(3, 5, 2, bias=False),
            c=L(5, 3),
        ),
        21,
        (2, 6),
        ((2, 5), (2, 9)),
    ),
    "convolution beside a map": Kind(
        lambda: Computed(
            lambda s, x: s.c(tanh(s.b(x) + s.d(x)).mean((2, 3))),
            b=nn.Conv2d(2, 4, 3, padding=1),
            d=nn.Conv2d(2, 4, 1),
            c=L(4, 3),
        ),
        12,
        (2, 4, 4),
        ((2, 5, 3),),
    ),
    "prefix": Kind(
        lambda: Computed(prefixed, q=L(4, 3), k=L(4, 3), v=L(4, 3), o=L(3, 4), pk=p(2, 3), pv=p(2, 3)),
        24,
        (5, 4),
        ((3, 4), (7, 4)),
    ),
    "prefix of a network, heads": Kind(
        lambda: Computed(
            prefixed_heads, q=L(3, 4), k=L(3, 4), v=L(3, 4), o=L(4, 5), table=p(2, 2), down=L(2, 3), up=L(3, 8)
        ),
        53,
        (4, 3),
        ((3, 3), (6, 3)),
    ),
    "FiLM": Kind(lambda: Computed(film, a=L(3, 5), gamma=L(2, 5), beta=L(2, 5), c=L(5, 3)), 10, (5,)),
    "FiLM, convolution": Kind(
        lambda: Computed(film_of_channels, a=C(2, 4, 3), m=L(2, 8), c=L(4, 3)), 8, (2, 6), ((2, 5), (2, 8))
    ),
    "adaptive norm": Kind(lambda: Computed(adaptive_norm, a=L(3, 5), gamma=L(2, 5), beta=L(2, 5), c=L(5, 3)), 4, (5,)),
    "adaptive norm, gated": Kind(
        lambda: Computed(gated_adaptive_norm, a=L(3, 4), e=L(2, 2), m=L(2, 12), up=L(4, 5), down=L(5, 4), c=L(4, 5)),
        13,
        (5,),
    ),
    "adaptive norm of tokens": Kind(
        lambda: Computed(adaptive_instance_norm, a=L(3, 4), gamma=L(2, 4), beta=L(2, 4), c=L(4, 3)),
        8,
        (5, 5),
        ((4, 5), (7, 5)),
    ),
    "Bilinear": Kind(
        lambda: Computed(
            lambda s, x: s.c(tanh(s.m(s.a(x), s.b(x)))), a=plain(4, 3), b=L(4, 2), m=nn.Bilinear(3, 2, 5), c=L(5, 3)
        ),
        13,
        (4,),
    ),
    "Bilinear of itself": Kind(
        lambda: Computed(lambda s, x: s.c((lambda y: s.m(y, y))(s.a(x))), a=L(4, 4), m=nn.Bilinear(4, 4, 3), c=L(3, 5)),
        46,
        (4,),
    ),
    "Fourier features, phases": Kind(lambda: Computed(fourier, w=p(6, 3), phase=p(6), c=L(12, 4)), 6, (3,)),
    "Fourier features of a map": Kind(
        lambda: Computed(fourier_of_a_map, a=L(4, 3), w=p(5, 3), b=L(10, 4), c=L(4, 3)), 12, (4,)
    ),
    "Kolmogorov-Arnold, splines": Kind(
        lambda: Computed(splines, w=p(4, 3, 3), scale=v(4, 3), base=p(4, 3), c=p(3, 4, 3)), 12, (3,)
    ),
    "Kolmogorov-Arnold, polynomials": Kind(lambda: Computed(chebyshev, w=p(4, 3, 4), c=p(3, 4, 4)), 17, (3,)),
    "hypernetwork": Kind(
        lambda: Computed(
            lambda s, x: s.c(tanh(F.linear(x, (s.h @ s.code).view(4, 3), s.hb @ s.code))),
            h=p(12, 3),
            hb=p(4, 3),
            code=v(3),
            c=L(4, 3),
        ),
        35,
        (3,),
    ),
    "hypernetwork of two layers": Kind(
        lambda: Computed(of_codes, codes=p(2, 2), e=L(2, 3), h=L(3, 9), c=L(3, 4)), 31, (3,)
    ),
    "weight norm": Kind(
        lambda: Computed(lambda s, x: s.c(tanh(s.a(x))), a=weight_norm(L(4, 6)), c=weight_norm(L(6, 3))), 9, (4,)
    ),
    "weight norm, convolution": Kind(
        lambda: Computed(lambda s, x: s.c(relu(s.a(x)).mean(2)), a=weight_norm(C(2, 4, 3)), c=L(4, 3)),
        8,
        (2, 6),
        ((2, 5), (2, 8)),
    ),
    "weight norm by hand": Kind(
        lambda: Computed(
            lambda s, x: s.c(gelu(F.linear(x, s.g[:, None] * s.w / s.w.norm(dim=1, keepdim=True), s.b))),
            w=p(5, 4),
            g=v(5),
            b=p(5),
            c=L(5, 3),
        ),
        5,
        (4,),
    ),
    "weight norm by hand, two maps": Kind(
        lambda: Computed(
            lambda s, x: F.linear(tanh(F.linear(F.linear(x, s.a), F.normalize(s.w, dim=1))), exp(s.g) * unit(s.c)),
            a=p(3, 4),
            w=p(5, 3),
            c=p(3, 5),
            g=p(1),
        ),
        12,
        (4,),
    ),
    "weight standardization": Kind(
        lambda: Computed(
            lambda s, x: s.c(tanh(F.linear(x, s.g[:, None] * standard(s.w), s.b))), w=p(5, 4), g=v(5), b=p(5), c=L(5, 3)
        ),
        10,
        (4,),
    ),
    "weight standardization, convolution": Kind(
        lambda: Computed(
            lambda s, x: s.c(relu(s.n(F.conv1d(x, standard(s.w)))).mean(2)),
            w=p(4, 2, 3),
            n=nn.GroupNorm(2, 4),
            c=L(4, 3),
        ),
        12,
        (2, 6),
        ((2, 5), (2, 8)),
    ),
    "GAT": Kind(
        lambda: Computed(graph_attention, w=plain(3, 4), q=plain(4, 1), k=plain(4, 1), c=L(4, 3)),
        2,
        (5, 3),
        ((4, 3), (7, 3)),
    ),
    "GAT, heads": Kind(
        lambda: Computed(
            graph_attention_of_heads, e=plain(3, 3), w=plain(3, 6), q=p(2, 1, 3), k=p(2, 1, 3), bias=p(6), c=L(6, 3)
        ),
        9,
        (5, 3),
        ((4, 3), (7, 3)),
    ),
    "GATv2": Kind(
        lambda: Computed(second_graph_attention, q=L(3, 4), k=L(3, 4), a=plain(4, 1), c=L(4, 3)),
        11,
        (5, 3),
        ((4, 3), (7, 3)),
    ),
    "GATv2, edges": Kind(
        lambda: Computed(
            second_graph_attention_of_edges, q=L(3, 4), k=L(3, 4), e=plain(3, 4), a=L(4, 1), v=L(3, 3), c=L(3, 4)
        ),
        17,
        (5, 3),
        ((4, 3), (7, 3)),
    ),
    "Linformer": Kind(
        lambda: Computed(linformer, q=L(4, 3), k=L(4, 3), v=L(4, 3), o=L(3, 4), e=p(3, 6), f=p(3, 6)), 26, (6, 4)
    ),
    "Linformer, heads": Kind(
        lambda: Computed(linformer_of_heads, q=L(4, 4), k=L(4, 4), v=L(4, 4), o=L(4, 5), e=p(3, 6)), 17, (6, 4)
    ),
    "RWKV": Kind(
        lambda: Computed(
            rwkv,
            r=plain(4, 3),
            k=plain(4, 3),
            v=plain(4, 3),
            o=plain(3, 4),
            decay=p(3),
            bonus=p(3),
            mr=p(4),
            mk=p(4),
            mv=p(4),
        ),
        3,
        (5, 4),
        ((3, 4), (8, 4)),
    ),
    "RWKV, matrices": Kind(
        lambda: Computed(
            rwkv_of_matrices,
            r=plain(4, 3),
            k=plain(4, 3),
            v=plain(4, 3),
            g=plain(4, 3),
            o=plain(3, 4),
            decay=p(3),
            bonus=p(3),
        ),
        7,
        (5, 4),
        ((3, 4), (8, 4)),
    ),
    "Mamba": Kind(
        lambda: Computed(mamba, delta=L(4, 4), b=plain(4, 3), read=plain(4, 3), log=p(4, 3), skip=v(4), c=L(4, 3)),
        4,
        (5, 4),
        ((3, 4), (8, 4)),
    ),
    "Mamba 2": Kind(
        lambda: Computed(
            second_mamba,
            w=plain(3, 8),
            conv=C(4, 4, 2, groups=4),
            delta=L(3, 1),
            b=plain(4, 3),
            read=plain(4, 3),
            log=p(1),
            c=plain(4, 3),
        ),
        14,
        (5, 3),
        ((3, 3), (8, 3)),
    ),
    "S4": Kind(
        lambda: Computed(states_of_a_matrix, A=p(3, 3), b=plain(3, 3), read=plain(3, 4), skip=plain(3, 4), c=L(4, 3)),
        9,
        (6, 3),
        ((3, 3), (9, 3)),
    ),
    "S4 of planes": Kind(
        lambda: Computed(
            states_of_planes,
            step=p(3),
            decay=p(3),
            frequency=v(3),
            b=plain(3, 3),
            d=plain(3, 3),
            read=plain(6, 4),
            c=L(4, 3),
        ),
        9,
        (6, 3),
        ((3, 3), (9, 3)),
    ),
    "distances to prototypes": Kind(
        lambda: Computed(
            lambda s, x: -squared_distances(s.b(tanh(s.a(x))), s.points), a=L(3, 5), b=L(5, 3), points=p(6, 3)
        ),
        6,
        (3,),
    ),
    "bumps about prototypes": Kind(
        lambda: Computed(
            lambda s, x: s.c(exp(-s.g * squared_distances(s.a(x), s.points))),
            a=plain(4, 3),
            points=p(6, 3),
            g=v(6),
            c=L(6, 3),
        ),
        4,
        (4,),
    ),
    "maxout": Kind(
        lambda: Computed(lambda s, x: s.c(s.a(x).unflatten(-1, (4, 3)).amax(-1)), a=L(3, 12), c=L(4, 3)),
        11,
        (3,),
        rows=400,
    ),
    "maxout of two maps": Kind(
        lambda: Computed(
            lambda s, x: s.c(torch.maximum(s.b(s.a(x)), s.d(s.a(x)))),
            a=L(4, 3),
            b=plain(3, 5),
            d=plain(3, 5),
            c=L(5, 3),
        ),
        20,
        (4,),
    ),
    "softmax over channels": Kind(
        lambda: Computed(lambda s, x: s.c(s.a(x).softmax(-1)), a=L(4, 6), c=L(6, 3)), 8, (4,)
    ),
    "softmax over experts": Kind(
        lambda: Computed(experts, a=L(4, 4), b=L(4, 4), d=L(4, 4), gate=L(4, 3), c=L(4, 3)), 5, (4,)
    ),
    "capsules by length": Kind(lambda: Computed(capsules_by_length, a=L(4, 6), w=p(3, 4, 2, 3)), 15, (4,)),
    "capsules, read": Kind(lambda: Computed(capsules_read, a=L(4, 6), w=p(4, 2, 2), c=L(8, 3)), 8, (4,)),
    "complex layers": Kind(
        lambda: Computed(complex_layers, **{name: plain(3, 3) for name in ("a", "ai", "b", "bi", "c", "ci")}), 18, (6,)
    ),
    "complex layers, sizes": Kind(
        lambda: Computed(complex_sizes, **{name: plain(3, 3) for name in ("a", "ai", "b", "bi")}, bias=p(3), c=L(6, 3)),
        21,
        (6,),
    ),
}
"""Of each kind two nets, or more."""

MISSING: dict[str, tuple[int, str]] = {
    "Fourier features of a map": (3, "a constant of the first bias turns planes by angles that are products with w"),
    "weight norm by hand, two maps": (
        1,
        "coefficients rational in other weights: S with w_i S w_i = 0 for all rows",
    ),
}
"""Dimensions that are found by no group, and why."""
