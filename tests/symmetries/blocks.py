"""Build small networks by hand, one for each family of symmetries, and count these by the rank of a Jacobian."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, HEADS, HIDDEN, POSITIONS, INPUTS, CLASSES, WORDS = 8, 2, 6, 5, 7, 10, 40
EPS = 1e-5
RELATIVE = 1e-11  # of the largest singular value: smaller ones are 0, but what an eps makes near is not

Layer = Callable[[], nn.Module]
Make = Callable[[], nn.Module]
Inputs = Callable[[torch.Generator], Tensor]


class Attention(nn.Module):
    """Attend by softmax, with what is asked for besides."""

    def __init__(self, groups: int = HEADS, extra: str = "") -> None:
        super().__init__()
        self.q, self.o = nn.Linear(D, D), nn.Linear(D, D)
        self.k, self.v = (nn.Linear(D, groups * D // HEADS) for _ in range(2))
        self.extra = extra
        if extra == "norms":
            self.query_norm, self.key_norm = (nn.RMSNorm(D // HEADS, eps=EPS) for _ in range(2))
        elif extra == "temperature":
            self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))
        elif extra == "temperature of keys":
            self.temperature = nn.Parameter(torch.ones(POSITIONS))
        elif extra == "gate":
            self.gate = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, D // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        if self.extra == "norms":
            q, k = self.query_norm(q), self.key_norm(k)
        k, v = (each.repeat_interleave(HEADS // each.shape[1], 1) for each in (k, v))
        scores = q @ k.mT / 2
        if self.extra.startswith("temperature"):
            scores = scores * self.temperature
        elif self.extra == "cap":
            scores = 2 * torch.tanh(scores / 2)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        if self.extra == "gate":
            mixed = mixed * torch.sigmoid(self.gate(x))
        answer: Tensor = self.o(mixed)
        return answer


class LinearAttention(nn.Module):
    """Sum products of keys and values over tokens, with no softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        mixed = q @ (k.mT @ v) / (q @ k.sum(2, keepdim=True).mT)
        answer: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return answer


class LatentAttention(nn.Module):
    """Attend with queries, and keys and values, through narrow normed latents."""

    def __init__(self, rank: int = 3) -> None:
        super().__init__()
        self.q_down, self.kv_down = nn.Linear(D, rank, bias=False), nn.Linear(D, rank, bias=False)
        self.q_norm, self.kv_norm = nn.RMSNorm(rank, eps=EPS), nn.RMSNorm(rank, eps=EPS)
        self.q_up, self.kv_up = nn.Linear(rank, D, bias=False), nn.Linear(rank, 2 * D, bias=False)
        self.o = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        kv = self.kv_up(self.kv_norm(self.kv_down(x))).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = kv.chunk(2, -1)
        answer: Tensor = self.o(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return answer


class Convolution(nn.Module):
    """Convolve over tokens, with zeros beside them."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3, padding=1, groups=groups)
        self.out = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.out(torch.tanh(self.conv(x.mT).mT))
        return answer


class LowRankLinear(nn.Module):
    """Add a product B A of low rank to a weight that is trained, too."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(D, HIDDEN)
        self.a, self.b = nn.Linear(D, rank, bias=False), nn.Linear(rank, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.base(x) + self.b(self.a(x))
        return answer


class Mlp(nn.Module):
    """Map by hidden neurons: of one layer, or of two that are multiplied or compared.

    thresholds: layers whose sum has to change its sign on the inputs, with signs.
    """

    thresholds: dict[str, float]

    def __init__(self, kind: str = "gelu") -> None:
        super().__init__()
        self.kind = kind
        self.up = LowRankLinear() if kind == "low rank" else nn.Linear(D, HIDDEN)
        self.down = nn.Linear(HIDDEN, D)
        if kind in ("glu", "bilinear", "maxout"):
            self.other = nn.Linear(D, HIDDEN)
        self.thresholds = {"up": 1.0} if kind in ("relu", "squared", "leaky") else {}
        if kind == "maxout":
            self.thresholds = {"up": 1.0, "other": -1.0}

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.kind == "glu":
            y = torch.sigmoid(self.other(x)) * y
        elif self.kind == "bilinear":
            y = self.other(x) * y
        elif self.kind == "maxout":
            y = torch.maximum(y, self.other(x))
        elif self.kind == "leaky":
            y = torch.where(y > 0, y, 0.1 * y)
        elif self.kind in ("relu", "squared"):
            y = F.relu(y) ** (2 if self.kind == "squared" else 1)
        else:
            y = F.gelu(y)
        answer: Tensor = self.down(y)
        return answer


class Experts(nn.Module):
    """Run all experts, and add them up by a softmax of a router."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(D, count, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(count, D, 3)), nn.Parameter(torch.randn(count, 3, D))

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        each = torch.bmm(F.gelu(torch.bmm(x.reshape(1, B * T, D).expand(len(self.up), -1, -1), self.up)), self.down)
        weights = self.router(x).softmax(-1).reshape(B * T, -1)
        answer: Tensor = (each * weights.T[..., None]).sum(0).view(B, T, D)
        return answer


class Block(nn.Module):
    """Add what two layers return to a stream: norms before them, after the sums, or nowhere."""

    def __init__(self, mixer: Layer, mlp: Layer, norm: Layer, post: bool = False) -> None:
        super().__init__()
        self.mixer, self.mlp, self.first, self.second, self.post = mixer(), mlp(), norm(), norm(), post

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.first(x + self.mixer(x))
            answer: Tensor = self.second(x + self.mlp(x))
            return answer
        x = x + self.mixer(self.first(x))
        return x + self.mlp(self.second(x))


def layer_norm() -> nn.Module:
    return nn.LayerNorm(D, eps=EPS)


class Network(nn.Module):
    """Map tokens (Gaussian vectors, or words) to classes by a stream of channels."""

    def __init__(
        self,
        mixer: Layer = Attention,
        mlp: Layer = Mlp,
        norm: Layer = layer_norm,
        *,
        final: Layer = nn.Identity,
        positions: bool = False,
        words: bool = False,
        start: bool = False,
        tied: bool = False,
        post: bool = False,
        depth: int = 1,
        classes: int = CLASSES,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, D) if words or tied else nn.Linear(INPUTS, D)
        self.positions = nn.Parameter(torch.randn(POSITIONS + start, D)) if positions else None
        self.start = nn.Parameter(torch.randn(1, 1, D)) if start else None
        self.blocks, self.final = nn.Sequential(*(Block(mixer, mlp, norm, post) for _ in range(depth))), final()
        self.head = None if tied else nn.Linear(D, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.start is not None:
            x = torch.cat([self.start.expand(len(x), 1, D), x], 1)
        if self.positions is not None:
            x = x + self.positions
        x = self.final(self.blocks(x))
        x = x[:, 0] if self.start is not None else x.mean(1)
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)


class HeadNorm(nn.Module):
    """Norm the channels of each head by themselves, with one gain and bias for all heads, between two maps."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(D, D), nn.LayerNorm(D // HEADS, eps=EPS), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.out(self.norm(self.into(x).unflatten(-1, (HEADS, -1))).flatten(2))
        return answer


class TwoStreams(nn.Module):
    """Let each of two streams change by what the other holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Linear(INPUTS, D) for _ in range(2))
        self.norms, self.mlps = nn.ModuleList(layer_norm() for _ in range(2)), nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(2 * D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (embed(x) for embed in self.embed)
        a = a + self.mlps[0](self.norms[0](b))
        b = b + self.mlps[1](self.norms[1](a))
        answer: Tensor = self.head(torch.cat([a, b], -1).mean(1))
        return answer


class BatchNormed(nn.Module):
    """Norm each neuron by the statistics of training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(INPUTS, D), nn.BatchNorm1d(D)
        self.second, self.head = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        assert self.norm.running_mean is not None
        assert self.norm.running_var is not None
        self.norm.running_mean += torch.randn(D)
        self.norm.running_var += torch.rand(D)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.norm(self.first(x).mT).mT)))).mean(1)
        return answer


def gaussian(generator: torch.Generator) -> Tensor:
    return torch.randn(4, POSITIONS, INPUTS, generator=generator, dtype=torch.float64)


def words(generator: torch.Generator) -> Tensor:
    return torch.randint(WORDS, (4, POSITIONS), generator=generator)


def _network(*args: Any, **kwargs: Any) -> tuple[Make, Inputs]:
    return lambda: Network(*args, **kwargs), words if kwargs.get("words") or kwargs.get("tied") else gaussian


def _mlp(kind: str) -> tuple[Make, Inputs]:
    return _network(mlp=lambda: Mlp(kind))


def _attention(extra: str) -> tuple[Make, Inputs]:
    return _network(mixer=lambda: Attention(extra=extra))


BLOCKS: dict[str, tuple[Make, Inputs]] = {
    "classifier with a mean pool": _network(words=True, positions=True),
    "no norms": _network(norm=nn.Identity),
    "RMSNorm with a final norm": _network(norm=lambda: nn.RMSNorm(D, eps=EPS), final=lambda: nn.RMSNorm(D, eps=EPS)),
    "post-norm": _network(post=True),
    "fewer classes than channels": _network(classes=3),
    "LoRA beside its base": _mlp("low rank"),
    "GLU": _mlp("glu"),
    "bilinear": _mlp("bilinear"),
    "maxout": _mlp("maxout"),
    "leaky by where": _mlp("leaky"),
    "ReLU": _mlp("relu"),
    "squared ReLU": _mlp("squared"),
    "mixture of experts": _network(mlp=Experts),
    "depthwise convolution": _network(mixer=lambda: Convolution(D)),
    "full convolution": _network(mixer=lambda: Convolution(1)),
    "linear attention": _network(mixer=LinearAttention),
    "multi-latent attention": _network(mixer=LatentAttention),
    "norm per head": _network(mixer=HeadNorm),
    "output gate": _attention("gate"),
    "capped scores": _attention("cap"),
    "temperature of scores": _attention("temperature"),
    "temperature of keys": _attention("temperature of keys"),
    "norms of queries and keys": _attention("norms"),
    "grouped queries": _network(mixer=lambda: Attention(groups=1)),
    "tied table and head": _network(tied=True),
    "class token with positions": _network(start=True, positions=True, depth=2),
    "two streams": (TwoStreams, gaussian),
    "BatchNorm": (BatchNormed, gaussian),
}
"""By name: how a network is made, and its inputs."""


@dataclass(frozen=True)
class Truth:
    """Hold the Jacobian (outputs, parameters) of all outputs, and what its singular values tell.

    dimension: of the kernel, P - rank. gap: the smallest singular value that counts, over the largest that does not.
    """

    jacobian: Tensor
    dimension: int
    gap: float


def build(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """Return a network at a generic point, in float64, and inputs enough for the rank of its Jacobian.

    What starts as a constant would pass for one, so vectors and constant parameters are jittered.
    """
    make, inputs = BLOCKS[name]
    torch.manual_seed(seed)
    model = make().double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for w in model.parameters():
            if w.ndim < 2 or bool((w == w.reshape(-1)[0]).all()):
                w.add_(0.3 * torch.randn(w.shape, generator=generator, dtype=w.dtype))
        first = inputs(generator)
        enough = 1.3 * sum(w.numel() for w in model.parameters()) / (model(first).numel())
        x = torch.cat([first, *(inputs(generator) for _ in range(int(enough) + 8))])
        _centre(model, x)
    return model, x


def _centre(model: nn.Module, x: Tensor) -> None:
    """Move thresholds to medians: a neuron that is always on, or off, has symmetries on these inputs alone."""
    for mlp in model.modules():
        if isinstance(mlp, Mlp) and mlp.thresholds:
            before: list[Tensor] = []
            handle = mlp.register_forward_pre_hook(lambda _, args, before=before: before.append(args[0]))
            model(x)
            handle.remove()
            layers = {name: mlp.get_submodule(name) for name in mlp.thresholds}
            total = torch.stack([sign * layers[name](before[0]) for name, sign in mlp.thresholds.items()]).sum(0)
            assert isinstance(mlp.up.bias, Tensor)
            mlp.up.bias.sub_(total.reshape(-1, HIDDEN).median(0).values)


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
