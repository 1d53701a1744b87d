"""Small nets in which something is free, or seems to be: a row for each, with how much of it is found and is there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quotient_manifolds.symmetries import Symmetries, find_symmetries
from tests.nets.net import EPS, GIVEN, TOKENS, WORDS, Body, Change, D, Net, generic
from tests.nets.parts import (
    CROSSED,
    LOUD,
    ROLLED,
    STEPS,
    assigned,
    attend,
    attended,
    averaged,
    beside,
    block,
    by_halves,
    by_table,
    by_token,
    cat,
    centred,
    channels,
    chosen,
    crossed,
    folded,
    halves,
    heads,
    integers,
    keep,
    latent,
    length,
    lower,
    mean,
    neighbours_rotated,
    normed,
    numbers,
    on_half,
    one_weight,
    own,
    padded,
    partly_rotated,
    picked,
    positive,
    post_norm,
    recurrent,
    relu,
    resized,
    rotated,
    sigmoid,
    softmax,
    start_token,
    tanh,
    turned_by_quotients,
    twice,
    two_streams,
    unit,
    weighed,
    windows,
    zero,
)

Dimensions = int | tuple[int, int]
LIMIT = "the least length has no closed form, and steps to it end before its limit"
FEWER = "of groups that are products of others, fewer are found than there are, and what is left is not settled"
HELD = "numbers of one part of a function hold at these weights alone, and the canonical point is far from them"


@dataclass(frozen=True)
class Row:
    """A net, and what is found in it.

    body: maps the stream of channels. biased, plain: dimensions found with biases, and without; (found, there are)
    where these are more. several, several_plain: why orbits of these two have more than one place yet, or none.
    shown: what of inputs symmetries are found on: those of shorter sequences hold for longer ones, those of some
    experts for all. pooled: the mean over tokens is seen, or what the body answers itself; else each token is.
    words: a table stands in place of the first linear map.
    """

    body: Body
    biased: Dimensions
    plain: Dimensions
    several: str = ""
    several_plain: str = ""
    shown: Change = lambda x: x
    pooled: bool = True
    words: bool = False

    def found(self, bias: bool) -> int:
        """Return how many dimensions are found."""
        dimensions = self.biased if bias else self.plain
        return dimensions if isinstance(dimensions, int) else dimensions[0]

    def reason(self, bias: bool) -> str:
        """Return why the orbit has several places, nothing where it has one."""
        return self.several if bias else self.several_plain


def first_token(x: Tensor) -> Tensor:
    return x[:, :1]


def first_three(x: Tensor) -> Tensor:
    return x[:, :3]


def negative(x: Tensor) -> Tensor:
    return -x.abs()


NETS: dict[str, Row] = {
    "linear": Row(lambda s, x: x, 72, 64),
    # functions of channels
    "relu": Row(lambda s, x: s.b(relu(s.a(x))), (152, 161), 136),
    "leaky": Row(lambda s, x: s.b(F.leaky_relu(s.a(x))), 152, 136),
    "where leaky": Row(lambda s, x: s.b((lambda y: torch.where(y > 0, y, 0.1 * y))(s.a(x))), 152, 136),
    "times its sign": Row(lambda s, x: s.b((lambda y: y * y.sign())(s.a(x))), 152, 136),
    "abs": Row(lambda s, x: s.b(s.a(x).abs()), 152, 136),
    "sq": Row(lambda s, x: s.b(s.a(x) ** 2), 152, 136),
    "cube": Row(lambda s, x: s.b(s.a(x) ** 3), 152, 136),
    "squared relu": Row(lambda s, x: s.b(relu(s.a(x)).square()), (152, 161), 136),
    "gelu": Row(lambda s, x: s.b(F.gelu(s.a(x))), 144, 128),
    "glu": Row(lambda s, x: s.b(sigmoid(s.a(x)) * s.c(x)), 152, 136),
    "bilinear": Row(lambda s, x: s.b(s.a(x) * s.c(x)), 160, 144),
    "selfgate": Row(lambda s, x: s.b(s.a(x) * s.a(x)), 152, 136),
    "maxout": Row(lambda s, x: s.b(torch.maximum(s.a(x), s.c(x))), (160, 168), 136),
    "max0": Row(lambda s, x: s.b(torch.maximum(s.a(x), x.new_zeros(()))), (152, 161), 136),
    "max1": Row(lambda s, x: s.b(torch.maximum(s.a(x), x.new_ones(()))), (144, 303), (128, 270)),
    "ratio": Row(lambda s, x: s.b(s.a(x) / (1 + s.c(x) ** 2)), 152, 136),
    "softmax of channels": Row(lambda s, x: s.b(s.a(x).softmax(-1)), (153, 166), (137, 145)),
    "softmax of tokens": Row(lambda s, x: s.r_8_1(x).softmax(1) * s.a(x), (137, 145), 128),
    "max pool": Row(lambda s, x: s.b(relu(s.a(x))).max(1).values, (96, 113), 80),
    "cumsum": Row(lambda s, x: s.b(s.a(x).cumsum(1)), (208, 216), 192),
    "dead": Row(lambda s, x: s.b_5_8(tanh(s.a(x))[..., :5]), (186, 210), (167, 191)),
    "outer": Row(lambda s, x: s.b_9_8((s.a_8_3(x)[..., :, None] * s.c_8_3(x)[..., None, :]).flatten(2)), 164, 148),
    # linear maps, gains
    "two": Row(lambda s, x: s.b(s.a(x))[:, 0], 216, 192),
    "narrow": Row(lambda s, x: x + s.b_3_8(s.a_8_3(x)), (92, 131), (73, 112)),
    "lora": Row(lambda s, x: tanh(s.w(x) + s.b_3_8(s.a_8_3(x))), (116, 131), 112),
    "res lin": Row(lambda s, x: tanh(x + s.w(x)), (8, 72), (0, 64)),
    "gain": Row(lambda s, x: s.b(tanh(s.g_8 * s.a(x))), 152, 136),
    "scalar gain": Row(lambda s, x: s.b(tanh(s.g_1 * s.a(x))), 145, 129),
    "gain lin": Row(lambda s, x: s.b(s.g_8 * s.a(x)), 224, 200),
    "gain two": Row(lambda s, x: s.b(s.g_8 * s.h_8 * s.a(x)), (168, 232), (152, 208)),
    "heads of one weight, crossed": Row(
        lambda s, x: s.b(one_weight(s, s.given[..., :D])[..., [0, 5, 2, 7, 4, 1, 6, 3]]), (160, 168), (144, 152)
    ),
    "heads of one weight, in parts": Row(
        lambda s, x: s.b(cat([one_weight(s, s.given[..., :D])[..., [0, 7]], s.o(x)[..., 1:7]], -1)),
        (216, 232),
        (192, 208),
    ),
    "heads of one map, crossed": Row(
        lambda s, x: s.b(one_weight(s, x)[..., [0, 5, 2, 7, 4, 1, 6, 3]]), (97, 160), (89, 144)
    ),
    "gate of heads": Row(lambda s, x: s.b(s.a(x) * one_weight(s, s.given[:, :1, :D]).relu()), 156, 140),
    "gate of numbers": Row(lambda s, x: s.b(sigmoid(s.g_8) * s.a(x)), (152, 224), (136, 200)),
    "one more than a gain": Row(lambda s, x: s.b((1 + s.g_8) * s.norm(x)), (135, 147), (118, 126)),
    "tied": Row(lambda s, x: s.a(tanh(s.a(x))), (0, 72), (1, 64)),
    "tied T": Row(lambda s, x: F.linear(tanh(s.a(x)), s.a.weight.T), 72, 64),
    "tied lin": Row(lambda s, x: s.a(s.a(x)), (72, 144), (65, 128)),
    "gain of two and of one": Row(
        lambda s, x: s.b(tanh(s.h_8 * s.a(x)) + tanh((torch.stack([s.c(x), s.o(x)]) * s.h_8).sum(0))),
        (160, 224),
        (136, 200),
    ),
    "added twice, partly seen": Row(
        lambda s, x: (F.linear(s.a(x) + 2 * s.p_8, s.p_8_8) + tanh(s.c(x)) + s.p_8) * s.h_8 @ s.g_8_3,
        (120, 197),
        (112, 181),
    ),
    "bias of channels joined to one": Row(
        lambda s, x: (
            folded(s.a_8_4(x).unflatten(-1, (2, 2)).sum(-2).repeat_interleave(2, -1) + s.a_8_4(x) + s.p_4) @ s.p_4_3
        ),
        110,
        98,
    ),
    "weight and weight + 1": Row(
        lambda s, x: s.b(tanh(F.linear(s.norm(x), s.p_8_8))) + s.v(tanh(F.linear(s.norm(x), s.p_8_8 + 1))),
        (90, 119),
        (73, 102),
    ),
    "gain and gain + 1": Row(
        lambda s, x: s.b(torch.relu(s.a(x)) * s.h_8) + s.v(torch.relu(s.c(x)) * (s.h_8 + 1)), (168, 204), (144, 152)
    ),
    "tied T, minus it + 1": Row(
        lambda s, x: s.b(F.linear(s.norm(s.a(s.o(x))), 1 - s.a.weight.T)), (226, 275), (201, 238)
    ),
    "tied T twice": Row(lambda s, x: F.linear(s.a(x), s.a.weight.T) + s.b(tanh(s.a(x))), 80, 64),
    "tied T of another": Row(lambda s, x: s.b(F.linear(tanh(s.c(x)), s.a.weight.T)) + s.v(tanh(s.a(s.o(x)))), 224, 192),
    "tied T, first of zeros": Row(
        lambda s, x: s.b(s.a(zero(x)).sigmoid() * F.linear(s.c(x), s.a.weight.T)), (216, 288), 256
    ),
    "tied T within": Row(lambda s, x: s.b(F.linear(s.a(s.o(x)), s.a.weight.T)), (245, 288), (221, 256)),
    "tied T after a norm": Row(lambda s, x: s.b(F.linear(s.norm(s.a(s.o(x))), s.a.weight.T)), (226, 275), (201, 238)),
    "tied T before a norm": Row(
        lambda s, x: s.b(tanh(s.norm(F.linear(s.a(s.o(x)) + s.p_5_8, s.a.weight.T)))), (197, 238), (165, 206)
    ),
    "tied half T": Row(
        lambda s, x: s.b(tanh(F.linear(s.a(s.o(x)), s.a.weight[:4].T[:, :4].repeat(1, 2)))), (188, 240), (160, 212)
    ),
    "sum of experts": Row(
        lambda s, x: s.b(
            (torch.stack([s.a(x), tanh(s.c(x)), s.o(x)]) * s.k(x).sigmoid()[..., :3].permute(2, 0, 1)[..., None]).sum(0)
        ),
        189,
        168,
    ),
    "sum of turned experts": Row(
        lambda s, x: s.b(torch.stack([s.a(x), s.a(x).flip(-1)], -2).sum(-2)) + s.v(tanh(s.a(x))), (152, 184), (128, 160)
    ),
    "sum of scaled experts": Row(
        lambda s, x: s.b((torch.stack([s.a(x), s.o(x)], -2) * s.p_8).sum(-2)) + s.v(tanh(s.norm(s.o(x)))),
        (160, 241),
        (136, 208),
    ),
    "sum heads": Row(lambda s, x: s.b_4_8(s.a(x).unflatten(-1, (2, 4)).sum(2)), (204, 220), (184, 196), several=FEWER),
    "shared heads": Row(lambda s, x: s.b(s.c_4_4(s.a(x).unflatten(-1, (2, 4))).flatten(2)), (184, 236), (161, 208)),
    "added twice": Row(lambda s, x: s.b(tanh(s.a(x) + 2 * s.p_8)) + s.v(tanh(s.c(x) - s.p_8)), 160, 128),
    "added twice before norms": Row(lambda s, x: s.norm(s.a(x) + s.p_8) + s.normb(s.c(x) + 3 * s.p_8), (122, 124), 97),
    "added to inputs": Row(lambda s, x: s.b(tanh(s.a_4_8(s.given[..., :4] + s.p_4))) + s.c(x), 156, 128),
    "added to a softmax": Row(lambda s, x: s.b(softmax(s.a(x), -1) + s.p_8), (162, 174), (137, 145)),
    "gain before a weight": Row(lambda s, x: s.b_4_8(s.h_4 * s.a_8_4(s.norm(x))), 163, 146),
    "weighed twice": Row(
        lambda s, x: s.b(tanh(s.norm(x) @ s.p_8_8 + s.p_8)) + s.v(tanh(s.norm(x) @ (-3 * s.p_8_8) + s.h_8)), 135, 118
    ),
    "weight norm": Row(lambda s, x: s.b(tanh(weighed(s, x))), 144, 136),
    "weight norm, read": Row(lambda s, x: s.b(tanh(weighed(s, x) + x @ s.p_8_8)), (73, 144), (65, 136)),
    "weight norm, one": Row(lambda s, x: s.b(tanh(weighed(s, x) + s.p_8_8[0])), (80, 144), (72, 128)),
    "weight norm by hand": Row(lambda s, x: s.b(tanh(F.linear(x, s.g_8_1 * unit(s.p_8_8)))), 144, 136),
    "fewer classes": Row(lambda s, x: s.w_8_3(block(s, x)), (221, 283), (173, 224)),
    # norms
    "ln": Row(lambda s, x: s.b(tanh(s.a(s.norm(x)))), 127, 110),
    "ln res": Row(lambda s, x: x + s.b(tanh(s.a(s.norm(x)))), (61, 62), 45),
    "ln final": Row(lambda s, x: s.norm(x + s.b(tanh(s.a(x)))), 74, 53),
    "norms of other signs": Row(
        lambda s, x: s.a(s.plain(x)) + s.b(s.plain(x * (1 - 2 * (channels(x) > 1.1)))), 111, 95
    ),
    "ln plain": Row(lambda s, x: s.b(s.plain((lambda n: n + s.a(n).tanh())(s.plain(x)))), (98, 110), (89, 93)),
    "norm and head": Row(lambda s, x: s.b(tanh(s.a(s.norm(x)))) + s.c(x), (133, 134), 109),
    "rms": Row(lambda s, x: x + s.b(tanh(s.a(s.rms(x)))), 44, 36),
    "rms with a bias": Row(lambda s, x: x + s.b(tanh(s.a(s.rms(x) + s.p_8))), 52, 36),
    "rms hand": Row(lambda s, x: x + s.b(tanh(s.a(s.g_8 * x * (mean(x.pow(2)) + EPS).rsqrt()))), 44, 36),
    "l2": Row(lambda s, x: x + s.b(tanh(s.a(x / length(x, lambda y: y.sum(-1, keepdim=True))))), 36, 28),
    "ln hand": Row(lambda s, x: x + s.b(tanh(s.a((lambda y: y / length(y, mean))(centred(x))))), (45, 46), 37),
    "ln var": Row(
        lambda s, x: x + s.b(tanh(s.a(centred(x) / (x.var(-1, keepdim=True, unbiased=False) + EPS).sqrt()))),
        (45, 46),
        37,
    ),
    "ln std": Row(lambda s, x: x + s.b(tanh(s.a(centred(x) / (x.std(-1, keepdim=True) + EPS)))), (45, 46), 37),
    "ln with its mean": Row(
        lambda s, x: x + s.b(tanh(s.a(centred(x) / x.std(-1, keepdim=True) + mean(x)))), (31, 32), 23
    ),
    "ln by another's length": Row(lambda s, x: x + s.b(tanh(s.a(centred(x) / x.tanh().std(-1, keepdim=True)))), 16, 8),
    "ln of tokens": Row(lambda s, x: s.b(tanh(s.a((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)))), 88, 72),
    "half ln": Row(lambda s, x: s.b(tanh(s.a(on_half(s.norm_4, x)))), (115, 121), (99, 100)),
    "ln heads": Row(lambda s, x: s.b(tanh(s.a(s.norm_4(x.unflatten(-1, (2, 4))).flatten(2)))), (105, 122), (92, 104)),
    "centre only": Row(lambda s, x: tanh(s.a(centred(x))), 67, 66),
    "mean used": Row(lambda s, x: tanh(s.a(centred(x))) + mean(x), (57, 65), 57),
    "less half its mean": Row(
        lambda s, x: s.b(tanh(s.c((lambda y: y.sub(mean(y), alpha=0.5))(s.a(x))))), (208, 216), 192
    ),
    "less another's mean": Row(
        lambda s, x: (lambda y: s.b(tanh(s.e(y))) + s.c(x) - mean(y))(s.a(x)), (201, 224), (177, 192)
    ),
    "less the mean of the turned pair": Row(
        lambda s, x: (lambda z: s.b(tanh(s.c(z - mean(z).transpose(1, 2)))).mean(2))(
            s.a(x[:, :, None] - 2 * x[:, None])
        ),
        (195, 202),
        178,
    ),
    "squares of tokens": Row(lambda s, x: s.b((s.a(x) ** 2).mean(1, keepdim=True) + x), (88, 96), 72),
    "squares cut to integers": Row(
        lambda s, x: (lambda y: s.b(y) + (y**2).detach().sum(-1, keepdim=True, dtype=torch.long))(s.a(x)),
        (136, 208),
        (120, 184),
    ),
    "mean cut to integers": Row(
        lambda s, x: (lambda y: s.b(y) + mean(y.detach()).long())(9 * s.a(x)), (192, 208), (176, 184)
    ),
    "squares without some tokens": Row(
        lambda s, x: (lambda y: s.b(x[:, 1:]) * (y**2)[:, 1:].sum(-1, keepdim=True) + s.c(y)[:, 1:])(s.a(x)), 173, 157
    ),
    "norm masked": Row(lambda s, x: s.b(tanh(s.a(s.norm(x) * (x[..., :1] > 0)))), (110, 119), (102, 110)),
    "norm masked by inputs": Row(lambda s, x: s.b(tanh(s.a(s.norm(x) * (s.given[..., :1] > 0)))), 119, 110),
    "norm in two places": Row(lambda s, x: s.b(s.norm(s.a(s.norm(x)).tanh())), (114, 139), (89, 97)),
    "norm of two, one reader": Row(lambda s, x: s.a(s.norm(x)) * s.a(s.norm(x.roll(1, -1) ** 2)), 32, 24),
    "norm read and added": Row(lambda s, x: (lambda n: n + s.a(n).sin())(s.norm(x)), 26, 9),
    "norm's reader elsewhere": Row(lambda s, x: (s.a(s.norm(x)) + s.a(x)).sin(), (8, 11), (0, 2)),
    "norms of averages": Row(
        lambda s, x: s.a(s.norm(averaged(x)).sin()) + s.b(s.normb(x.mean(1, keepdim=True))).tanh(), 42, 25
    ),
    "no norm at the end": Row(
        lambda s, x: (lambda y: y + s.b(s.normb(y).sin()))(x - 2 * s.a(s.norm(x).tanh())), (16, 18), 8
    ),
    "parallel layers": Row(lambda s, x: s.normb(x**3 + (s.a(s.norm(x).tanh()) + s.b(s.norm(x) ** 4))), 53, 32),
    "layer twice": Row(lambda s, x: twice(s, s.norm(x)), (47, 48), (17, 19)),
    "layer twice, norm once": Row(lambda s, x: twice(s, s.normb(x)), 39, 17),
    "bias twice": Row(lambda s, x: s.norm(x) + tanh(s.a(s.norm(x) + s.p_8) + s.p_8), (26, 34), (9, 17)),
    "read twice": Row(
        lambda s, x: (lambda u, v: tanh(s.a(u)) * tanh(2 * s.a(v)))(s.norm(x), s.norm(x) + s.p_8), 55, 46
    ),
    "groupnorm": Row(lambda s, x: s.b(tanh(normed(s.group, s.a(x)))), (145, 146), 128),
    "groupnorm lin": Row(lambda s, x: s.b(tanh(s.c(normed(s.group, s.a(x))))), (161, 168), (136, 142)),
    "batchnorm": Row(lambda s, x: s.b(tanh(normed(s.fresh, s.a(x)))), 160, 136),
    "bn mean": Row(lambda s, x: s.b(tanh(normed(s.batch, s.a(x)))), 160, 136),
    "bn plain": Row(lambda s, x: s.b(tanh(normed(s.flat, s.a(x)))), 144, 128),
    "bn relu": Row(lambda s, x: s.b(relu(normed(s.batch, s.a(x)))), (168, 214), (144, 179)),
    "bn relu plain": Row(lambda s, x: s.b(relu(normed(s.flat, s.a(x)))), (152, 183), (128, 163)),
    "bn lin": Row(lambda s, x: s.b(tanh(s.c(normed(s.batch, s.a(x))))), 232, 200),
    "bn lin plain": Row(lambda s, x: s.b(tanh(s.c(normed(s.flat, s.a(x))))), 216, 184),
    "bn twice": Row(lambda s, x: s.b(tanh(normed(s.batch, s.c(tanh(normed(s.batch, s.a(x))))))), 160, (128, 136)),
    "bn half": Row(
        lambda s, x: s.b(tanh(s.c(on_half(lambda y: normed(s.batch_4, y), s.a(x))))), (208, 224), (180, 192)
    ),
    "bn narrow": Row(lambda s, x: s.b(tanh(s.c(normed(s.batch, s.e_3_8(s.a_8_3(x)))))), 249, 214),
    "bn res": Row(lambda s, x: s.b(tanh(x + normed(s.batch, s.a(x)))), (96, 160), (72, 136)),
    "bn one channel": Row(
        lambda s, x: s.b(tanh(normed(s.batch, s.a_8_1(x).expand(-1, -1, D)))), (151, 153), (135, 136)
    ),
    # attention
    "attn": Row(lambda s, x: x + heads(s, x), 160, 128),
    "attn rms": Row(lambda s, x: x + heads(s, s.rms(x)), 124, 100),
    "attn ln": Row(lambda s, x: x + heads(s, s.norm(x)), (157, 158), 117),
    "gqa": Row(lambda s, x: x + heads(s, x, "k_8_4"), 120, 96),
    "qknorm": Row(lambda s, x: x + heads(s, x, norm="rms"), 124, 100),
    "qkln": Row(lambda s, x: x + heads(s, x, norm="norm"), (162, 166), (136, 138)),
    "causal": Row(
        lambda s, x: x + heads(s, x, change=lambda w: w + x.new_full((TOKENS, TOKENS), -1e9).triu(1)), 160, 128
    ),
    "capped": Row(lambda s, x: x + heads(s, x, change=lambda w: 2 * tanh(w / 2)), 152, 128),
    "latent": Row(lambda s, x: x + latent(s, x), (172, 188), (138, 146)),
    "output gate": Row(lambda s, x: x + s.o(attend(s, x) * sigmoid(s.e(x))), (88, 160), (73, 136)),
    "linear attn": Row(lambda s, x: x + s.o(F.elu(s.q(x)).add(1) @ (F.elu(s.k(x)).add(1).mT @ s.v(x))), 144, 128),
    "no softmax": Row(lambda s, x: x + attend(s, x, lambda w: w), 209, 193),
    "sigmoid attn": Row(lambda s, x: x + attend(s, x, sigmoid), 208, 192),
    "shared qk": Row(lambda s, x: x + s.o((s.q(x) @ s.q(x).mT).softmax(-1) @ s.v(x)), 180, 156),
    "temp": Row(lambda s, x: x + attend(s, x, lambda w: (s.t_1 * w).softmax(-1)), 225, 193),
    "score bias": Row(lambda s, x: x + attend(s, x, lambda w: (w + s.t_5_5).softmax(-1)), 229, 197),
    "score by query": Row(
        lambda s, x: (x + attend(s, x, lambda w: (w + s.r_8_5(x).softmax(1)).softmax(1)))[:, 0], 221, 192
    ),
    "two scores": Row(
        lambda s, x: x + s.o((s.q(x) @ s.k(x).mT + s.v(x) @ s.k(x).mT).softmax(-1) @ s.v(x)), (160, 224), (128, 192)
    ),
    "score of key": Row(lambda s, x: x + attend(s, x, lambda w: (w + s.r_8_1(x).mT).softmax(-1)), (225, 233), 192),
    "scores zeroed": Row(
        lambda s, x: x + attend(s, x, lambda w: torch.where(lower(w) > 0, w, 0.0).softmax(-1)), 216, 192
    ),
    "scores times": Row(lambda s, x: x + attend(s, x, lambda w: (w * lower(w)).softmax(-1)), 216, 192),
    "scores hidden": Row(
        lambda s, x: x + attend(s, x, lambda w: torch.where(lower(w) > 0, w, -torch.inf).softmax(-1)), 224, 192
    ),
    "scores zeroed by inputs": Row(
        lambda s, x: x + attend(s, x, lambda w: torch.where(positive(s), w, 0.0).softmax(-1)), 216, 192
    ),
    "scores hidden by inputs": Row(
        lambda s, x: x + attend(s, x, lambda w: w.masked_fill(positive(s), -1e38).softmax(-1)), 224, 192
    ),
    "scores dropped": Row(
        lambda s, x: x + attend(s, x, lambda w: w.softmax(-1).masked_fill(lower(w) == 0, 0.0)), 216, 192
    ),
    "scores dropped by inputs": Row(
        lambda s, x: x + attend(s, x, lambda w: w.softmax(-1).masked_fill(positive(s), 0.0)), 216, 192
    ),
    "scores a key's gain": Row(lambda s, x: x + attend(s, x, lambda w: (w * s.g_5).softmax(-1)), 217, 193),
    "two attentions less": Row(lambda s, x: x + attend(s, x, lambda w: w.softmax(-1) - w.mT.softmax(-1) / 2), 216, 192),
    "attn with a sink": Row(
        lambda s, x: x + attend(s, x, lambda w: cat([w, s.p_1.expand(*w.shape[:2], 1)], -1).softmax(-1)[..., :TOKENS]),
        208,
        192,
    ),
    "attn twice": Row(lambda s, x: x + attend(s, x, lambda w: 2 * w.softmax(-1)), 224, 192),
    "rot": Row(lambda s, x: x + s.o((rotated(s.q(x)) @ rotated(s.k(x)).mT).softmax(-1) @ s.v(x)), 160, 136),
    "rot2": Row(
        lambda s, x: x + s.o((neighbours_rotated(s.q(x)) @ neighbours_rotated(s.k(x)).mT).softmax(-1) @ s.v(x)),
        160,
        136,
    ),
    "rot3": Row(
        lambda s, x: x + s.o((partly_rotated(s.q(x)) @ partly_rotated(s.k(x)).mT).softmax(-1) @ s.v(x)), 164, 138
    ),
    "rot by quotients": Row(lambda s, x: s.b(turned_by_quotients(s.a(x))), (160, 168), 144),
    "scores hidden and shown again": Row(
        lambda s, x: (
            x + attend(s, x, lambda w: (torch.where(lower(w) > 0, w, -2e4) + 2e4 * (1 - lower(w))).softmax(-1))
        ),
        216,
        192,
    ),
    "scores that inputs show": Row(
        lambda s, x: s.b(
            (lambda w: torch.where(s.given[:, :1, :1] > 0, w + LOUD, w).softmax(-1) @ s.v(x))(s.q(x) @ s.p_5_8.mT)
        ),
        292,
        264,
    ),
    "scores that inputs show, less others": Row(
        lambda s, x: s.b((s.q(x) @ s.p_5_8.mT + LOUD - (s.given[..., :TOKENS] + LOUD)).softmax(-1) @ s.v(x)), 292, 264
    ),
    "scores hidden, less their mean": Row(
        lambda s, x: s.b((lambda w: w - w.mean(1, keepdim=True))(s.q(x) @ s.p_5_8.mT + LOUD).softmax(-1) @ s.v(x)),
        296,
        264,
    ),
    "weight of one key, repeated": Row(
        lambda s, x: x + attend(s, x, lambda w: w.softmax(-1)[..., :1].expand(-1, -1, TOKENS)), 216, 192
    ),
    "weights of some keys, twice": Row(
        lambda s, x: x + attend(s, x, lambda w: w.softmax(-1).repeat_interleave(2, -1)[..., :TOKENS]), 216, 192
    ),
    "zero key, own": Row(
        lambda s, x: (
            x + s.o((s.q(x) @ cat([s.k(x), zero(x), own(s, x)], 1).mT).softmax(-1) @ cat([s.v(x), zero(x), zero(x)], 1))
        ),
        208,
        192,
    ),
    # positions, tokens of its own, masks
    "pos": Row(lambda s, x: s.b(tanh(s.a(x + s.p_5_8))), 152, 128),
    "pos attn": Row(lambda s, x: (lambda y: y + heads(s, y))(x + s.p_5_8), 168, 128),
    "cls": Row(lambda s, x: by_token(s, cat([own(s, x), x], 1))[:, 0], (224, 328), (200, 292), several=LIMIT),
    "cls attn": Row(lambda s, x: (lambda y: y + attend(s, y))(cat([own(s, x), x], 1))[:, 0], (224, 352), (192, 304)),
    "cls, norms and positions": Row(start_token, (211, 310), (155, 253)),
    "short table": Row(
        lambda s, x: by_token(s, s.norm(x + s.table(torch.arange(x.shape[1])))), 139, 115, shown=first_three
    ),
    "short slice": Row(
        lambda s, x: by_token(s, s.norm(x + s.p_5_8[: x.shape[1]])), (0, 139), (0, 115), shown=first_three
    ),
    "products of a plain norm": Row(
        lambda s, x: (lambda y: s.b_5_8(y @ y.mT))(s.plain(x + s.v(tanh(s.a(x))))),
        130,
        113,
        several=LIMIT,
        several_plain=LIMIT,
    ),
    "positions twice": Row(
        lambda s, x: sum(s.b(tanh(s.a(y + s.table(torch.arange(y.shape[1]))))).mean(1) for y in (x, x[:, 1:])),
        152,
        128,
    ),
    "short mixing": Row(
        lambda s, x: (lambda at: s.b(s.t_5_5[at][:, at] @ s.a(x)))(torch.arange(x.shape[1])),
        152,
        136,
        shown=first_three,
    ),
    "short planes": Row(
        lambda s, x: x + s.o((by_table(s, s.q(x)) @ by_table(s, s.k(x)).mT).softmax(-1) @ s.v(x)),
        168,
        144,
        several=FEWER,
        several_plain=FEWER,
        shown=first_three,
    ),
    "short attn": Row(
        lambda s, x: (lambda y: y + attend(s, y))(x + s.table(torch.arange(x.shape[1]))), 232, 192, shown=first_three
    ),
    "short rows apart": Row(
        lambda s, x: tanh(s.a(x + s.p_5_8[0])) + tanh(s.b(x) + s.p_5_8[1]) + s.p_5_8[2 : x.shape[1]].sum(0),
        (0, 112),
        (0, 80),
        shown=first_three,
    ),
    "masked tokens": Row(lambda s, x: by_token(s, torch.where(keep(x) > 0, x, 0.0)), (136, 144), 128),
    "masked tokens, own": Row(
        lambda s, x: by_token(s, cat([own(s, x), torch.where(keep(x) > 0, x, 0.0)], 1)), (136, 152), 128
    ),
    "zero token, own": Row(lambda s, x: by_token(s, cat([zero(x), x, own(s, x)], 1)), (136, 152), 128),
    "masked tokens, tied": Row(
        lambda s, x: s.a(torch.where(keep(x) > 0, tanh(s.a(torch.where(keep(x) > 0, x, 0.0))), 0.0)), (0, 72), (1, 64)
    ),
    "assigned": Row(lambda s, x: by_token(s, assigned(x, s.c(x), slice(None), slice(4))), (184, 216), (160, 192)),
    "assigned tokens": Row(lambda s, x: by_token(s, assigned(x, s.c(x), slice(2))), 144, 128),
    "assigned one": Row(lambda s, x: by_token(s, assigned(x, s.c(x), 0)), 144, 128),
    "assigned part": Row(lambda s, x: by_token(s, assigned(x, s.c(x).roll(1, 1), slice(2), slice(4))), (144, 148), 128),
    "assigned halves": Row(
        lambda s, x: by_token(
            s,
            assigned(
                assigned(torch.zeros_like(x), s.c(x), slice(None), slice(4)),
                s.c(x).roll(1, 1),
                slice(None),
                slice(4, 8),
            ),
        ),
        184,
        160,
    ),
    # constants and biases
    "bias first": Row(lambda s, x: s.b(tanh(s.c((s.a(x).mT + s.p_8_1).mT))), 224, 192),
    "positions first": Row(lambda s, x: s.b(tanh(s.c((s.a(x).mT + s.p_8_5).mT))), 224, 192),
    "half bias": Row(lambda s, x: s.b(tanh(s.c(on_half(lambda y: y + s.p_4, s.a(x))))), (204, 220), (176, 188)),
    "constant": Row(lambda s, x: s.b(tanh(s.a(x) + channels(x))), 144, 128),
    "constant lin": Row(lambda s, x: s.b(tanh(s.c(s.a(x) + channels(x)))), 216, 184),
    "constant half": Row(
        lambda s, x: s.b(tanh(s.c(on_half(lambda y: y + 1 + 4 * channels(x)[:4], s.a(x))))), 216, 184, several=FEWER
    ),
    "constant tokens": Row(lambda s, x: s.b(tanh(s.c(s.a(x) + numbers(x)))), 208, 184),
    "a function of minus infinity": Row(
        lambda s, x: s.b(tanh(torch.where(channels(x) > 0.9, -torch.inf, s.a(x)))), (184, 232), (164, 200)
    ),
    "far below, leaky": Row(
        lambda s, x: s.b(F.leaky_relu(s.a(x) + -1e31 * (channels(x) > 1.6)) * 1e-30),
        (288, 320),
        (256, 284),
        several=HELD,
    ),
    "rows picked by a mask": Row(
        lambda s, x: s.b(tanh(s.a(x)[:, :4] + s.p_5_8[keep(x)[:, 0] > 0])), (152, 160), (128, 136)
    ),
    "logit shift": Row(lambda s, x: s.b_8_4(s.a(x).mean(1)).log_softmax(-1), (153, 198), (136, 181)),
    # sums over tokens, experts
    "conv": Row(lambda s, x: s.b(normed(s.conv, x).tanh()), 136, 128),
    "conv res": Row(lambda s, x: x + normed(s.conv, x), (72, 144), (64, 128)),
    "circular conv": Row(lambda s, x: s.b(normed(s.round, x).tanh()), 80, 72),
    "rnn": Row(lambda s, x: s.b(s.rnn(x)[0]), 152, 128),
    "gru": Row(lambda s, x: s.b(s.gru(x)[0]), 160, 128),
    "half rolled by an index": Row(
        lambda s, x: s.b((lambda y: y.reshape(len(y), -1)[:, ROLLED].view(y.shape))(s.a(x))), 216, 192
    ),
    "strides": Row(
        lambda s, x: s.b(s.a(x).contiguous().as_strided((len(x), TOKENS, D), (TOKENS * D, 1, TOKENS)).tanh()), 144, 128
    ),
    "strides of a part": Row(
        lambda s, x: s.b(s.a(x)[:, 1:].as_strided((len(x), 4, D), (TOKENS * D, D, 1), 0).tanh()), 144, 128
    ),
    "rounded": Row(lambda s, x: s.b(torch.div(s.a(x), 0.1, rounding_mode="floor")), 144, 128),
    "powers": Row(lambda s, x: s.b(s.a(x).abs() ** torch.arange(1.0, 9.0)), 152, 136),
    "far clamp": Row(lambda s, x: s.b((1e3 * s.a(x)).clamp(-2e3, 2e3)), 144, 128),
    "ones by inputs": Row(lambda s, x: s.b(tanh(s.a(x).masked_fill(s.given[..., :1] > 0, 1.0) + s.p_8)), 144, 128),
    "logsumexp": Row(lambda s, x: s.b_4_8(s.a(x).unflatten(-1, (4, 2)).logsumexp(-1)), 160, 144),
    "logsumexp of tokens": Row(lambda s, x: s.b(s.a(x).logsumexp(1, keepdim=True) * x), 80, 72),
    "glu of torch": Row(lambda s, x: s.b_4_8(F.glu(s.a(x))), 164, 148),
    "prelu": Row(lambda s, x: s.b(F.prelu(s.a(x).mT, s.g_8).mT), 152, 136),
    # numbers that leave torch
    "read as a number": Row(lambda s, x: s.b((lambda y: relu(y * float(y[0, 0, 0].detach())))(s.a(x))), 151, 135),
    "read as a list": Row(lambda s, x: s.b((lambda y: relu(y * torch.tensor(y[0, 0].tolist())))(s.a(x))), 144, 128),
    "read by numpy": Row(
        lambda s, x: s.b((lambda y: relu(y * torch.as_tensor(y[0, 0].detach().numpy().copy())))(s.a(x))), 144, 128
    ),
    "depthwise": Row(lambda s, x: s.b(normed(s.deep, x).tanh()), 80, 72),
    "group conv": Row(lambda s, x: s.b(normed(s.apart, x).tanh()), 112, 96),
    "windows": Row(lambda s, x: s.b(windows(s.a(x), s.r_8_3(x).softmax(-1), padding=(1, 0))), 217, 200),
    "windows inside": Row(lambda s, x: s.b(windows(s.a(x), s.r_8_3(x)[:, :3].softmax(-1))), 225, 200),
    "half in windows": Row(
        lambda s, x: s.b(on_half(lambda y: windows(y, s.r_8_3(x).softmax(-1), padding=(1, 0)), s.a(x))), (185, 189), 168
    ),
    "index add": Row(lambda s, x: s.b(s.a(x).index_add(1, chosen(s), s.c(x)[:, chosen(s)])), (216, 224), 192),
    "idle": Row(
        lambda s, x: s.b(s.a(x).index_add(1, chosen(s), s.c(x)[:, chosen(s)])), (160, 224), (136, 192), shown=negative
    ),
    "idle expert": Row(
        lambda s, x: s.b(s.a(x).index_add(1, chosen(s), s.c(x[:, chosen(s)]))), (96, 224), (80, 192), shown=negative
    ),
    "half index add": Row(
        lambda s, x: s.b(on_half(lambda y: y.index_add(1, chosen(s), s.c(x)[:, chosen(s), :4]), s.a(x))),
        (236, 240),
        208,
    ),
    "experts": Row(
        lambda s, x: s.b(
            torch.einsum("ei,bte->bti", torch.einsum("eij,j->ei", s.p_3_8_8, x.new_ones(D)), softmax(s.r_8_3(x), -1))
        ),
        (167, 423),
        (150, 394),
    ),
    "moe": Row(
        lambda s, x: (torch.stack([tanh(each(x)) for each in (s.a, s.c)], -1) @ softmax(s.r_8_2(x), -1)[..., None])[
            ..., 0
        ],
        81,
        72,
    ),
    "moe of three": Row(
        lambda s, x: torch.einsum(
            "beth,ehd,bte->btd", F.gelu(torch.einsum("btd,edh->beth", x, s.p_3_8_4)), s.g_3_4_8, s.r_8_3(x).softmax(-1)
        ),
        137,
        136,
    ),
    "weight cut to integers": Row(
        lambda s, x: s.b(relu(F.linear(x, (9 * s.p_8_8).int().to(x.dtype)))), (73, 144), (65, 136), several_plain=HELD
    ),
    "gain cut to integers": Row(lambda s, x: s.b(s.a(x) * (9 * s.g_8).int()), (162, 230), (136, 200), several=FEWER),
    "weight without some entries": Row(
        lambda s, x: s.b(F.linear(x, s.p_8_8 * x.new_ones(D, D).tril())), (109, 208), (101, 192)
    ),
    "diagonal weight": Row(
        lambda s, x: s.b(F.linear(x, s.p_8_8 * torch.eye(D, dtype=x.dtype))), (144, 208), (136, 192)
    ),
    "weight filled with zeros": Row(
        lambda s, x: s.b(F.linear(x, s.p_8_8.masked_fill(torch.eye(D).bool(), 0.0))), (96, 208), (88, 192)
    ),
    "keys without some entries": Row(
        lambda s, x: s.c_8_8(tanh(s.a(x) @ (s.p_8_8 * torch.eye(D, dtype=x.dtype)))), 208, 192
    ),
    "rows of one weight": Row(lambda s, x: s.b(F.linear(x, s.p_1_8.expand(D, D))), (150, 236), (135, 220)),
    "rows of one weight, normed too": Row(
        lambda s, x: s.b(F.linear(x, s.p_1_8.expand(D, D))) + s.v(s.norm(s.p_1_8)), (189, 324), (164, 288)
    ),
    "repeated, normed too": Row(
        lambda s, x: (
            s.b(tanh(s.a(x[:, :2]) + s.p_2_8.expand(len(x), 2, D).reshape(-1, D).view(-1, 2, D))) + s.v(s.norm(s.p_2_8))
        ),
        (176, 240),
        (143, 200),
    ),
    "overlapping rows": Row(lambda s, x: s.b(F.linear(x, s.p_15.unfold(0, D, 1))), (75, 159), (67, 143)),
    "weight of more axes": Row(
        lambda s, x: s.b(F.linear(x, (s.p_8_8 * x.new_full((1, 1, 1), 2.0))[0])), (144, 208), (136, 192)
    ),
    "half without some tokens": Row(lambda s, x: s.b(s.a(x) * x.new_ones(TOKENS, D).tril()), (203, 220), (184, 196)),
    "positions before a conv": Row(lambda s, x: s.b(s.conv((s.a(x) + s.p_5_8).mT).mT), (312, 328), (272, 288)),
    "two writers, by half": Row(lambda s, x: s.b(by_halves(s, x)), (184, 288), (160, 256)),
    "two writers, by half, attn": Row(lambda s, x: attend(s, by_halves(s, x)), 328, 288),
    "two writers, by half, norm": Row(lambda s, x: s.b(F.layer_norm(by_halves(s, x), (D,))), (158, 171), (142, 154)),
    "two writers, by half, sum": Row(lambda s, x: s.b(by_halves(s, x).sum(1)), (184, 288), (160, 256)),
    "sum and difference, by half": Row(
        lambda s, x: s.b((lambda y, z: cat([(y - z)[..., :4], (y + z)[..., 4:]], -1))(s.c(x), s.e(x))),
        (192, 288),
        (160, 256),
    ),
    "sum cut to integers": Row(
        lambda s, x: s.b((9 * s.a(x)).detach().sum(1, keepdim=True, dtype=torch.long) + x), (80, 152), (64, 128)
    ),
    "whole numbers of its shape": Row(
        lambda s, x: (lambda y: s.b(relu(y) * torch.ones_like(y, dtype=torch.long)))(s.a(x)), 152, 136
    ),
    "assigned to integers": Row(lambda s, x: s.b(integers(s.a(x))) + s.c(x), (152, 224), (128, 192)),
    "cut to 8 bits": Row(lambda s, x: s.b(relu(s.a(x)).to(torch.float8_e4m3fn).to(x.dtype)), (144, 154), 128),
    "two writers, crossed": Row(lambda s, x: s.b(torch.where(CROSSED, s.c(x), s.e(x))), (184, 224), (160, 192)),
    "two constants, crossed": Row(
        lambda s, x: s.b(x.new_ones(1, TOKENS) @ torch.where(CROSSED, s.p_1_8, s.t_1_8)) + s.o(x),
        (184, 232),
        (160, 200),
    ),
    "two constants, attn": Row(
        lambda s, x: s.o(x) + s.b(attended(s, x, torch.where(STEPS[:, :1], s.p_1_8, s.t_1_8))), (236, 244), 208
    ),
    "two constants, by steps, attn": Row(
        lambda s, x: (
            s.o(x) + s.b(attended(s, x, torch.where(torch.arange(TOKENS)[:, None] < torch.arange(D), s.p_1_8, s.t_1_8)))
        ),
        (176, 221),
        (148, 185),
    ),
    "two constants, crossed, attn": Row(
        lambda s, x: s.o(x) + s.b(attended(s, x, torch.where(CROSSED, s.p_1_8, s.t_1_8))), (204, 244), (176, 208)
    ),
    "two writers of tokens by half": Row(
        lambda s, x: s.b(attended(s, x, torch.where(STEPS, s.c(x), s.e(x)))), 204, 176
    ),
    "idle token by the inputs": Row(
        lambda s, x: (lambda y: s.o(y).mean(1) + s.b(tanh(s.v(y[torch.arange(len(x)), picked(s)]))))(
            cat([own(s, x), s.a(x)], 1)
        ),
        224,
        192,
        shown=negative,
    ),
    "idle tokens by the inputs": Row(
        lambda s, x: s.b(tanh(s.v(cat([own(s, x), s.a(x)], 1).index_select(1, picked(s).amax()[None])))),
        (160, 216),
        (136, 192),
        shown=negative,
    ),
    "idle row by the inputs": Row(
        lambda s, x: (lambda y: s.c_2_8(tanh(s.a(x) @ y.mT)).mean(1) + s.b(tanh(s.v(y[picked(s)]))))(
            F.normalize(s.p_2_8, dim=-1)
        ),
        (154, 376),
        (130, 326),
        shown=negative,
    ),
    "rows twice": Row(
        lambda s, x: s.b(s.norm(s.p_2_8[None]).mean() + tanh(s.a(x)[:, :2] + s.c(s.p_2_8[None]))),
        (159, 240),
        (135, 207),
    ),
    "whole numbers beside channels": Row(
        lambda s, x: s.b_11_8(cat([s.a(x), (s.given[..., :3] > 0).long() + 2], -1)).tanh(), 144, 128
    ),
    "norms, compared": Row(
        lambda s, x: (lambda q: s.b((q @ s.plain_(s.k(x)).mT).softmax(-1) @ s.v(x) + torch.where(q > 0, q, q / 2)))(
            s.plain(s.q(x))
        ),
        170,
        144,
    ),
    "resized": Row(lambda s, x: s.b(resized(relu(s.a(x)), mode="linear")).tanh(), (80, 89), 72),
    "resized, positions": Row(
        lambda s, x: s.b(resized(s.a(x) + s.p_5_8, mode="linear", align_corners=True)).tanh(), 152, 128
    ),
    "resized, softmax": Row(lambda s, x: s.b(resized(s.a(x), mode="linear").softmax(-1)), (153, 166), (137, 145)),
    "resized to the nearest": Row(lambda s, x: s.b(resized(relu(s.a(x)))).tanh(), (80, 89), 72),
    "resized, of zeros": Row(lambda s, x: s.b(resized(padded(s.a(x), 1, 1), mode="linear")).tanh(), (136, 144), 128),
    "resized channels": Row(lambda s, x: s.b_12_8(F.interpolate(s.a(x), size=12)), (200, 248), (176, 224)),
    "resized channels, by lines": Row(
        lambda s, x: s.b_12_8(F.interpolate(relu(s.a(x)), size=12, mode="linear")), (145, 205), (129, 168)
    ),
    "averaged to three": Row(lambda s, x: s.b(F.adaptive_avg_pool1d(relu(s.a(x)).mT, 3).mT).tanh(), (80, 89), 72),
    "averaged to three, of zeros": Row(
        lambda s, x: s.b(F.adaptive_avg_pool1d(padded(s.a(x), 1, 2).mT, 3).mT).tanh(), 136, 128
    ),
    "averaged to three channels": Row(
        lambda s, x: s.b_3_8(F.adaptive_avg_pool1d(s.a(x), 3)).tanh(), (123, 134), (110, 118)
    ),
    "reflected": Row(
        lambda s, x: s.b(normed(s.apart, padded(relu(s.a(x)), 1, 2, mode="reflect"))).tanh(), (120, 133), 104
    ),
    "repeated at the ends": Row(
        lambda s, x: s.b(normed(s.apart, padded(s.a(x), 1, 2, mode="replicate"))).tanh(), 152, 128
    ),
    "padded before a conv": Row(lambda s, x: s.b(normed(s.conv, padded(relu(s.a(x)), 2, 0))).tanh(), 152, 136),
    "padded before a conv, lin": Row(lambda s, x: s.b(normed(s.conv, padded(s.a(x), 2, 0))).tanh(), 208, 192),
    "padded before a conv, positions": Row(
        lambda s, x: normed(s.conv, padded(s.a(x) + s.p_5_8, 0, 2)).tanh(), 144, 128
    ),
    "padded before a conv, by half": Row(
        lambda s, x: normed(
            s.conv, cat([padded(h, *side) for h, side in zip(halves(s.a(x)), ((2, 0), (0, 2)), strict=True)], -1)
        ).tanh(),
        104,
        96,
    ),
    "padded by ones before a conv": Row(lambda s, x: normed(s.conv, padded(s.a(x), 2, 0, value=1.0)).tanh(), 128, 120),
    "up": Row(lambda s, x: s.b(normed(s.up, relu(s.a(x)))).tanh(), 152, 136),
    "up, apart": Row(lambda s, x: s.b(normed(s.up_2_3, s.a(x))).tanh(), 208, 192),
    "up twice": Row(lambda s, x: normed(s.up_3_1_, normed(s.up_3_1, x)).tanh(), 128, 128),
    "up, norm": Row(lambda s, x: s.norm(normed(s.up, s.a(x))).relu(), (169, 170), 160),
    "most of windows": Row(lambda s, x: s.b(F.max_pool1d(s.a(x).mT, 2).mT).tanh(), 88, 72),
    "most of windows, padded": Row(lambda s, x: s.b(F.max_pool1d(relu(s.a(x)).mT, 3, 1, 1).mT).tanh(), (80, 89), 72),
    "most of windows, positions": Row(
        lambda s, x: s.b(F.max_pool1d((s.a(x) + s.p_5_8).mT, 2).mT).tanh(), (88, 109), (72, 90)
    ),
    "most of windows of zeros": Row(lambda s, x: s.b(F.max_pool1d(padded(s.a(x), 1, 1).mT, 2).mT).tanh(), 80, 72),
    "most of windows of channels": Row(lambda s, x: s.b_4_8(F.max_pool1d(s.a(x), 2)).tanh(), (76, 93), 68),
    "most of three": Row(lambda s, x: s.b(F.adaptive_max_pool1d(s.a(x).mT, 3).mT).tanh(), 88, 72),
    "most of tokens": Row(lambda s, x: s.b(s.a(x).amax(1)), 160, 136),
    "most of tokens, at least": Row(lambda s, x: s.b(s.a(x).amin(1)), 160, 136),
    "most of tokens, and where": Row(lambda s, x: (lambda y: s.b(y.values) + y.indices)(s.a(x).max(1)), 96, 72),
    "most of tokens, softmax": Row(lambda s, x: s.b(s.a(x).amax(1).softmax(-1)), (145, 157), 128),
    "most of tokens, norm": Row(lambda s, x: s.b(s.norm(s.a(x).amax(1))), (169, 181), (144, 152)),
    "most of tokens, both": Row(lambda s, x: s.b_16_8(cat([s.a(x).amax(1), s.a(x).amin(1)], -1)), (152, 160), 136),
    "most of two": Row(lambda s, x: s.b(cat([s.a(x), s.c(x)], 1).amax(1)), (160, 171), 136),
    "most of tokens and channels": Row(
        lambda s, x: s.a(x).amax((1, 2))[:, None] + s.b(s.c(x)).mean(1), (145, 255), (129, 206)
    ),
    "mean of all": Row(lambda s, x: s.r_1_8(s.a(x).mean((1, 2))[:, None]), (243, 244), 220, several=FEWER),
    "sum of all": Row(lambda s, x: s.r_1_8(s.a(x).sum((1, 2))[:, None]), (243, 244), 220, several=FEWER),
    "mean of all, of two": Row(
        lambda s, x: (lambda y: tanh(s.o(y)).mean(1) + s.r_1_8(y.mean((1, 2))[:, None]))(cat([own(s, x), s.a(x)], 1)),
        (137, 153),
        121,
    ),
    "two streams": Row(two_streams, (122, 124), 90),
    "recurrent": Row(recurrent, 160, 136),
    "one token, recurrent": Row(recurrent, 160, 136, shown=first_token),
    "one token, gated recurrent": Row(lambda s, x: s.b(s.gru(x)[0][:, -1]), 160, 128, shown=first_token),
    "encoder": Row(block, (181, 183), 133),
    "post-norm": Row(post_norm, (158, 159), (103, 106)),
    # each token is seen
    "squares of a norm": Row(lambda s, x: s.norm_4(s.a_8_4(x)).square(), 86, 77, pooled=False),
    "half pooled": Row(
        lambda s, x: on_half(lambda y: y.mean(1, keepdim=True).expand(-1, TOKENS, -1), x), 40, 32, pooled=False
    ),
    "half pooled lin": Row(
        lambda s, x: s.a(on_half(lambda y: y.mean(1, keepdim=True).expand(-1, TOKENS, -1), x)).tanh(),
        40,
        32,
        pooled=False,
    ),
    "half rolled": Row(lambda s, x: s.a(on_half(lambda y: y.roll(1, 1), x)).tanh(), 40, 32, pooled=False),
    "half number": Row(lambda s, x: s.a(on_half(lambda y: y * numbers(x), x)).tanh(), (32, 36), 32, pooled=False),
    "half first": Row(
        lambda s, x: s.a(on_half(lambda y: y[:, :1].expand(-1, TOKENS, -1), x)).tanh(), 40, 32, pooled=False
    ),
    "half mixed": Row(
        lambda s, x: s.a(
            on_half(lambda y: softmax(torch.arange(25.0, dtype=y.dtype).view(5, 5) / 9, -1) @ y, x)
        ).tanh(),
        40,
        32,
        pooled=False,
    ),
    "average pool": Row(lambda s, x: s.norm(averaged(x + s.p_5_8)), (71, 92), (50, 72), pooled=False),
    "average padded": Row(lambda s, x: s.norm(averaged(x + s.p_5_8, padding=1)), (64, 85), (43, 65), pooled=False),
    "average whole": Row(lambda s, x: s.norm(averaged(x, padding=1, count_include_pad=False)), 59, 46, pooled=False),
    "half averaged": Row(lambda s, x: s.a(cat([averaged(x[..., :4]), x[:, ::4, 4:]], -1)).tanh(), 40, 32, pooled=False),
    "average of channels": Row(lambda s, x: s.a_4_8(F.avg_pool1d(x, 2)).tanh(), (40, 60), 52, pooled=False),
    "a function of zeros": Row(lambda s, x: s.b_9_8(F.pad(s.a(x), (0, 1)).exp()), (144, 160), 128, pooled=False),
    "group norm of zeros": Row(
        lambda s, x: s.b(normed(s.group, F.pad(s.a_8_6(x), (0, 2)))), (164, 178), (140, 149), pooled=False
    ),
    "group norm of positions": Row(
        lambda s, x: s.b(normed(s.group, s.a(x) + s.p_5_8)), (169, 176), (136, 144), pooled=False
    ),
    "group norm, read": Row(lambda s, x: s.b(normed(s.group, s.a(x))), (161, 168), (136, 142), pooled=False),
    "sum of channels of two kinds": Row(
        lambda s, x: (lambda y: s.b(s.c(y).mean(1)) + y.sum((1, 2))[:, None])(cat([x, s.a(x)], 1)),
        (201, 288),
        (177, 256),
        pooled=False,
    ),
    "one token, sum": Row(lambda s, x: s.b(s.a(x).sum(1)), (208, 216), 192, shown=first_token, pooled=False),
    "one token, sum of all": Row(
        lambda s, x: s.b_1_8(s.a(x).sum((1, 2))[:, None]),
        (243, 244),
        220,
        several=FEWER,
        shown=first_token,
        pooled=False,
    ),
    "one token, less its mean": Row(
        lambda s, x: (lambda y: s.b(tanh(s.c(y - y.mean((1, 2), keepdim=True)))))(s.a(x)),
        (195, 202),
        178,
        shown=first_token,
        pooled=False,
    ),
    "bits": Row(lambda s, x: s.b(s.a(x).double().view(torch.int64).to(x.dtype) / 1e18), 144, 128, pooled=False),
    "diagonal": Row(lambda s, x: s.b_5_8(s.a_8_5(x).diagonal(dim1=1, dim2=2)), 169, 148, pooled=False),
    "diagonal, positions": Row(
        lambda s, x: s.b_5_8((s.a_8_5(x) + s.p_5_5).diagonal(dim1=1, dim2=2)), (174, 194), (148, 168), pooled=False
    ),
    "diagonal, norm": Row(
        lambda s, x: s.b_5_8(s.plain_5(s.a_8_5(x).flatten(1)[:, ::6])), (168, 172), (151, 155), pooled=False
    ),
    "tokens crossed": Row(
        lambda s, x: s.b_10_8(s.a_8_5(x).flatten(1)[:, [0, 1, 7, 8, 4, 5, 6, 2, 3, 9]]),
        (165, 177),
        (144, 156),
        pooled=False,
    ),
    "tokens crossed by halves": Row(
        lambda s, x: s.b_16_8(
            (lambda u, v: cat([u[0], v[1], v[0], u[1]], -1))(*(halves(s.a(x)[:, t]) for t in (0, 1)))
        ),
        (184, 216),
        192,
        pooled=False,
    ),
    "tokens rolled": Row(lambda s, x: s.b(s.a(x).roll(1)), 202, 178, pooled=False),
    "tokens rolled by an index": Row(
        lambda s, x: s.b((lambda y: y.reshape(len(y), -1)[:, ROLLED].view(y.shape))(s.a(x))), 184, 160, pooled=False
    ),
    "tokens masked": Row(
        lambda s, x: s.b_25_8(torch.where(torch.eye(5) > 0, 0.0, s.a_8_5(x)).flatten(1)),
        (197, 213),
        (176, 184),
        pooled=False,
    ),
    "tokens assigned": Row(
        lambda s, x: s.b_25_8(assigned(s.a_8_5(x).flatten(1), s.c_8_25(x)[:, 0], slice(None, None, 6))),
        (364, 438),
        (318, 384),
        pooled=False,
    ),
    "tokens cut": Row(lambda s, x: s.b_36_8(F.pad(s.a(x).flatten(1), (-2, -2))), (184, 328), (160, 296), pooled=False),
    "copies crossed, times": Row(
        lambda s, x: crossed(s, x, lambda y, z: s.b(y * s.given[..., :1] + z)),
        (208, 216),
        192,
        several=LIMIT,
        pooled=False,
    ),
    "copies crossed, read": Row(lambda s, x: beside(s, x, lambda y: s.b(y)), (288, 360), (256, 320), pooled=False),
    "copies crossed, norm": Row(
        lambda s, x: beside(s, x, lambda y: y.norm(dim=-1, keepdim=True)),
        (229, 237),
        213,
        several_plain=LIMIT,
        pooled=False,
    ),
    "copies crossed, scores": Row(
        lambda s, x: beside(s, x, lambda y: s.b_5_8(y @ s.k(x).mT)), (281, 297), 257, pooled=False
    ),
    "scores of halves, crossed": Row(
        lambda s, x: crossed(s, x, lambda y, z: y @ z.mT) + (lambda y: y[..., :8] @ y[..., 8:].mT)(s.a_8_16(x)),
        (96, 135),
        (108, 128),
        several_plain=FEWER,
        pooled=False,
    ),
    "of one length": Row(
        lambda s, x: (lambda y: F.normalize(y + s.b(s.deep(y.mT).mT), dim=-1))(s.a(tanh(x))), 17, 9, pooled=False
    ),
    "wide scores of itself": Row(lambda s, x: (lambda y: y @ y.mT)(s.a_8_12(x)), 135, 124, pooled=False),
    "wide scores of halves": Row(
        lambda s, x: (lambda y: y[..., :12] @ y[..., 12:].mT)(s.a_8_24(x)), 207, 192, pooled=False
    ),
    "wide keys": Row(
        lambda s, x: x + (lambda y: s.o((s.q_8_16(y) @ s.k_8_16(y).mT).softmax(-1) @ s.v(y)))(s.plain(x)),
        (349, 350),
        308,
        pooled=False,
    ),
    "wide scores of a stream": Row(
        lambda s, x: (lambda y: s.q_12(y) @ s.k_12(y).mT)(s.a_8_12(x)), 411, 384, pooled=False
    ),
    # of words
    "words and positions": Row(lambda s, x: block(s, x + s.p_5_8), (189, 196), (141, 146), words=True),
    "words and positions, norms alone": Row(lambda s, x: s.normc(block(s, x + s.p_5_8)), 263, (209, 210), words=True),
    "words multiplied in place": Row(
        lambda s, x: s.normb((x * 3 + s.p_5_8) + s.b(F.gelu(s.a(s.norm(x * 3 + s.p_5_8))))), 134, 113, words=True
    ),
    "tied table and head": Row(lambda s, x: F.linear(block(s, x).mean(1), s.embed.weight), (165, 166), 125, words=True),
    "tied table and head, norms alone": Row(
        lambda s, x: F.linear(s.normc(block(s, x)).mean(1), s.embed.weight), 162, (120, 121), words=True
    ),
}
"""By name. A test moves each along all that is found, counts the dimensions, and compares canonical points."""


def net(name: str, bias: bool) -> tuple[nn.Module, Tensor]:
    """Return a net at a generic point, and inputs enough for the rank of its Jacobian."""
    row = NETS[name]
    torch.manual_seed(0)
    given = torch.randint(WORDS, (96, TOKENS)) if row.words else torch.randn(96, TOKENS, GIVEN)
    model = generic(Net(row.body, bias, row.pooled, row.words), given[:2])
    inputs = given if row.words else given.double()
    return model, inputs[: 96 if row.pooled else 24]


def shown(name: str, x: Tensor) -> Tensor:
    """Return what of the inputs symmetries of a net are found on."""
    return NETS[name].shown(x)


@cache
def found_in(name: str, bias: bool) -> tuple[nn.Module, Tensor, Symmetries]:
    """Return a net, its inputs, and its symmetries."""
    model, x = net(name, bias)
    return model, x, find_symmetries(model, shown(name, x))
