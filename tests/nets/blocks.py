"""Blocks, one for each family of symmetries, which are counted by the rank of a Jacobian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nets import parts
from tests.nets.net import TOKENS, WORDS, Body, D, Net, generic
from tests.nets.parts import cat, gelu, heads, latent, merged_heads, normed, own, relu, sigmoid, split_heads, tanh

INPUTS = 7  # fewer than channels
RELATIVE = 1e-11  # of the largest singular value: smaller ones are 0, but what an eps makes near is not


def neurons(s: Any, x: Tensor) -> Tensor:
    return s.b_6_8(gelu(s.a_8_6(x)))


def block(s: Any, x: Tensor, mixer: Body = heads, mlp: Body = neurons, norm: str = "norm") -> Tensor:
    return parts.block(s, x, mixer, mlp, norm)


class Again:
    """Name other parts of the same net, of the same kinds."""

    def __init__(self, s: Any) -> None:
        self.s = s

    def __getattr__(self, name: str) -> Any:
        return getattr(self.s, f"{name}_")


def no_norms(s: Any, x: Tensor) -> Tensor:
    x = x + heads(s, x)
    return x + neurons(s, x)


def two_streams(s: Any, x: Tensor) -> Tensor:
    y = s.r_7_8(s.given)
    x = x + neurons(s, s.norm(y))
    y = y + neurons(Again(s), s.normb(x))
    return s.m_16_12(cat([x, y], -1))


def start_token(s: Any, x: Tensor) -> Tensor:
    x = block(s, cat([own(s, x), x], 1) + s.p_6_8)
    return block(Again(s), x)[:, 0]


def linear_attention(s: Any, x: Tensor) -> Tensor:
    """Sum products of keys and values over tokens, with no softmax."""
    q, k, v = (split_heads(each(x)) for each in (s.q, s.k, s.v))
    q, k = F.elu(q) + 1, F.elu(k) + 1
    mixed = q @ (k.mT @ v) / (q @ k.sum(2, keepdim=True).mT)
    return s.o(merged_heads(mixed))


def experts(s: Any, x: Tensor) -> Tensor:
    """Run all experts, and add them up by a softmax of a router."""
    rows = x.reshape(1, -1, D).expand(3, -1, -1)
    each = torch.bmm(gelu(torch.bmm(rows, s.p_3_8_3)), s.p_3_3_8)
    weights = F.linear(x, s.g_3_8).softmax(-1).reshape(-1, 3)
    return (each * weights.T[..., None]).sum(0).view(x.shape)


def by_hidden(s: Any, x: Tensor, hidden: Body) -> Tensor:
    return block(s, x, mlp=lambda s, y: s.b_6_8(hidden(s, y)))


def by_scores(s: Any, x: Tensor, **how: Any) -> Tensor:
    return block(s, x, lambda s, y: heads(s, y, **how))


OF_WORDS: dict[str, Body] = {
    "classifier with a mean pool": lambda s, x: block(s, x + s.p_5_8),
    "tied table and head": lambda s, x: F.linear(block(s, x).mean(1), s.embed.weight),
}
BLOCKS: dict[str, Body] = {
    **OF_WORDS,
    "no norms": no_norms,
    "RMSNorm with a final norm": lambda s, x: s.rmsq(block(s, x, norm="rms")),
    "post-norm": lambda s, x: parts.post_norm(s, x, neurons),
    "fewer classes than channels": lambda s, x: s.r_8_3(block(s, x)),
    "LoRA beside its base": lambda s, x: by_hidden(s, x, lambda s, y: gelu(s.a_8_6(y) + y @ s.p_8_2 @ s.h_2_6)),
    "GLU": lambda s, x: by_hidden(s, x, lambda s, y: sigmoid(s.c_8_6(y)) * s.a_8_6(y)),
    "bilinear": lambda s, x: by_hidden(s, x, lambda s, y: s.c_8_6(y) * s.a_8_6(y)),
    "maxout": lambda s, x: by_hidden(s, x, lambda s, y: torch.maximum(s.a_8_6(y), s.c_8_6(y))),
    "leaky by where": lambda s, x: by_hidden(s, x, lambda s, y: (lambda z: torch.where(z > 0, z, z / 10))(s.a_8_6(y))),
    "ReLU": lambda s, x: by_hidden(s, x, lambda s, y: relu(s.a_8_6(y))),
    "squared ReLU": lambda s, x: by_hidden(s, x, lambda s, y: relu(s.a_8_6(y)) ** 2),
    "mixture of experts": lambda s, x: block(s, x, mlp=experts),
    "depthwise convolution": lambda s, x: block(s, x, lambda s, y: s.o(tanh(normed(s.deep, y)))),
    "full convolution": lambda s, x: block(s, x, lambda s, y: s.o(tanh(normed(s.conv, y)))),
    "linear attention": lambda s, x: block(s, x, linear_attention),
    "multi-latent attention": lambda s, x: block(s, x, latent),
    "norm per head": lambda s, x: block(s, x, lambda s, y: s.o(s.norm_4(s.q(y).unflatten(-1, (2, 4))).flatten(2))),
    "output gate": lambda s, x: block(s, x, lambda s, y: heads(s, y, gate=lambda mixed: mixed * sigmoid(s.e(y)))),
    "capped scores": lambda s, x: by_scores(s, x, change=lambda w: 2 * tanh(w / 2)),
    "temperature of scores": lambda s, x: by_scores(s, x, change=lambda w: w * s.t_2_1_1),
    "temperature of keys": lambda s, x: by_scores(s, x, change=lambda w: w * s.t_5),
    "norms of queries and keys": lambda s, x: by_scores(s, x, norm="rms"),
    "grouped queries": lambda s, x: by_scores(s, x, keys="k_8_4"),
    "class token with positions": start_token,
    "two streams": two_streams,
    "BatchNorm": lambda s, x: s.b_6_12(tanh(s.a_8_6(tanh(normed(s.batch, x))))),
}
"""By name: what maps the stream of channels, in nets with biases of which the mean over tokens is seen."""


@dataclass(frozen=True)
class Truth:
    """Hold the Jacobian (outputs, parameters) of all outputs, and what its singular values tell.

    dimension: of the kernel, P - rank. gap: the smallest singular value that counts, over the largest that does not.
    """

    jacobian: Tensor
    dimension: int
    gap: float


def build(name: str) -> tuple[nn.Module, Tensor]:
    """Return a network at a generic point, in float64, and inputs enough for the rank of its Jacobian."""
    torch.manual_seed(0)
    given = torch.randint(WORDS, (600, TOKENS)) if name in OF_WORDS else torch.randn(600, TOKENS, INPUTS)
    model = generic(Net(BLOCKS[name], True, True, name in OF_WORDS, INPUTS), given[:2])
    inputs = given if name in OF_WORDS else given.double()
    enough = 1.3 * sum(w.numel() for w in model.parameters()) / model(inputs[:1]).numel()
    return model, inputs[: int(enough) + 36]


def truth(model: nn.Module, x: Tensor) -> Truth:
    """Return how many directions of the parameters leave all outputs alone."""
    params = {name: w.detach() for name, w in model.named_parameters()}

    def outputs(params: dict[str, Tensor], row: Tensor) -> Tensor:
        answer: Tensor = torch.func.functional_call(model, params, (row[None],))
        return answer.reshape(-1)

    parts = torch.func.vmap(torch.func.jacrev(outputs), in_dims=(None, 0), chunk_size=32)(params, x)
    jacobian = torch.cat([part.flatten(0, 1).flatten(1) for part in parts.values()], 1)
    sizes = torch.linalg.svdvals(jacobian)
    rank = int((sizes > RELATIVE * sizes[0]).sum())
    beyond = float(sizes[rank]) if rank < len(sizes) else 0.0
    return Truth(jacobian, jacobian.shape[1] - rank, float(sizes[rank - 1]) / max(beyond, 1e-300))
