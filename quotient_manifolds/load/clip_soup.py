"""Load CLIP's vision transformer with a linear head from a state dict of model soups (Wortsman et al., 2022)."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from quotient_manifolds.load.weights import check_shapes, read_tensors, shapes_of

HEAD_WIDTH = 64
PREFIX = "model."  # of everything but the classification head
# What is left of the text tower: no output depends on it.
TEXT_TOWER = re.compile(
    r"model\.(positional_embedding|text_projection|logit_scale|token_embedding\.weight|ln_final\.(weight|bias))"
)


@dataclass(frozen=True)
class ClipSizes:
    """Describe a CLIP classifier; `grid` patches a side, `hidden` neurons in a block, `features` after proj."""

    channels: int
    patch: int
    grid: int
    width: int
    heads: int
    layers: int
    hidden: int
    features: int
    classes: int


@final
class QuickGELU(nn.Module):
    """Compute x sigmoid(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


@final
class Block(nn.Module):
    """Compute x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, sizes: ClipSizes) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(sizes.width)
        self.attn = nn.MultiheadAttention(sizes.width, sizes.heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(sizes.width)
        c_fc, c_proj = nn.Linear(sizes.width, sizes.hidden), nn.Linear(sizes.hidden, sizes.width)
        self.mlp = nn.Sequential(OrderedDict(c_fc=c_fc, gelu=QuickGELU(), c_proj=c_proj))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ln_1(x)
        x = x + self.attn(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


@final
class ClipVision(nn.Module):
    """Map images (N, channels, side, side) to features of the class token, (N, features)."""

    def __init__(self, sizes: ClipSizes) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(sizes.channels, sizes.width, sizes.patch, stride=sizes.patch, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(sizes.width))
        self.positional_embedding = nn.Parameter(torch.empty(sizes.grid**2 + 1, sizes.width))
        self.ln_pre = nn.LayerNorm(sizes.width)
        blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))
        self.transformer = nn.ModuleDict({"resblocks": blocks})
        self.ln_post = nn.LayerNorm(sizes.width)
        self.proj = nn.Parameter(torch.empty(sizes.width, sizes.features))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.conv1(images).flatten(2).transpose(1, 2)  # (N, grid^2, width)
        token = self.class_embedding.expand(len(images), 1, -1)
        x = self.ln_pre(torch.cat([token, patches], dim=1) + self.positional_embedding)
        x = self.transformer["resblocks"](x)
        return self.ln_post(x[:, 0]) @ self.proj


@final
class ClipClassifier(nn.Module):
    """Compute logits = head(f / |f|), f the features of CLIP's vision transformer.

    Parameters are named as in model-soups, without the leading "model.". Their values are not initialised.
    """

    def __init__(self, sizes: ClipSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.visual = ClipVision(sizes)
        self.classification_head = nn.Linear(sizes.features, sizes.classes)

    def forward(self, images: Tensor) -> Tensor:
        side = self.sizes.patch * self.sizes.grid
        if images.shape[1:] != (self.sizes.channels, side, side):
            raise ValueError(
                f"This model takes images (N, {self.sizes.channels}, {side}, {side}). Found {tuple(images.shape)}"
            )
        features = self.visual(images)
        return self.classification_head(features / torch.linalg.vector_norm(features, dim=-1, keepdim=True))


def load_clip_soup(path: Path, *, heads: int | None = None) -> nn.Module:
    """Return the classifier in a state dict of model-soups (.pt, .pth or .safetensors), in float32 and eval mode.

    Sizes are read off the tensors; heads are 64 wide unless their number is given. The six tensors of the text tower
    that those files keep are left out, and every other one must be a parameter of the model and the reverse. Raises
    ValueError naming the parameter where that is not so.
    """
    tensors = {name: value for name, value in read_tensors(path).items() if not TEXT_TOWER.fullmatch(name)}
    with torch.device("meta"):
        model = ClipClassifier(_sizes(tensors, path, heads))
    stored = {name: f"{PREFIX}{name}" if name.startswith("visual.") else name for name in model.state_dict()}
    wanted = {stored[name]: shape for name, shape in shapes_of(model.state_dict()).items()}
    check_shapes(shapes_of(tensors), wanted, str(path))
    for name, value in tensors.items():
        if not value.is_floating_point():
            raise ValueError(f"{path} has {name} of dtype {value.dtype}, expected floating point numbers.")
    # Copies, so that no parameter depends on a mapped file that may change.
    copies = {name: tensors[other].to(torch.float32, copy=True).contiguous() for name, other in stored.items()}
    model.load_state_dict(copies, assign=True)
    return model.eval()


def _sizes(tensors: Mapping[str, Tensor], path: Path, heads: int | None) -> ClipSizes:
    width, channels, patch, _ = _shape(tensors, f"{PREFIX}visual.conv1.weight", 4, path)
    positions, _ = _shape(tensors, f"{PREFIX}visual.positional_embedding", 2, path)
    _, features = _shape(tensors, f"{PREFIX}visual.proj", 2, path)
    hidden, _ = _shape(tensors, f"{PREFIX}visual.transformer.resblocks.0.mlp.c_fc.weight", 2, path)
    classes, _ = _shape(tensors, "classification_head.weight", 2, path)
    heads = width // HEAD_WIDTH if heads is None else heads
    if heads < 1 or width % heads:
        raise ValueError(f"{path} is {width} wide, which does not make {heads} heads; give their number.")
    grid = math.isqrt(positions - 1)
    if grid < 1 or grid**2 + 1 != positions:
        raise ValueError(f"{path} has {positions} positions, expected a square number and one for the class token.")
    layers = {found[1] for name in tensors if (found := re.match(r".*\.resblocks\.(\d+)\.", name))}
    return ClipSizes(channels, patch, grid, width, heads, len(layers), hidden, features, classes)


def _shape(tensors: Mapping[str, Tensor], name: str, ndim: int, path: Path) -> tuple[int, ...]:
    if name not in tensors:
        raise ValueError(f"{path} is no CLIP classifier as model-soups saves them: it lacks parameter {name}.")
    shape = tuple(tensors[name].shape)
    if len(shape) != ndim or 0 in shape:
        raise ValueError(f"{path} has {name} of shape {shape}, expected {ndim} axes, none of them empty.")
    return shape
