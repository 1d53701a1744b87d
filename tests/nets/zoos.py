"""Small zoos on disk: classifiers of 8 x 8 images, their data, and specs that name them."""

from __future__ import annotations

import math
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from quotient_manifolds.compare import Comparison, run_comparison
from tests.nets.net import shaken

CLASSES = 3
SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "image_size": 8, "patch_size": 4, "num_channels": 1,
}  # fmt: skip


def vit(seed: int, classes: int = CLASSES, **sizes: Any) -> nn.Module:
    """A vision transformer with random weights, none of them zero."""
    import transformers

    config = transformers.ViTConfig(**{**SIZES, **sizes}, num_labels=classes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: nn.Module = transformers.ViTForImageClassification(config)
        return shaken(model, 0.3)


def save(model: nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def write_images(path: Path, count: int, seed: int, size: int = 8) -> None:
    draw = np.random.default_rng(seed)
    images = draw.random((count, 1, size, size), dtype=np.float32)
    np.savez(path, images=images, labels=draw.integers(0, CLASSES, count))


def write_zoo(folder: Path, models: int = 4, examples: int = 16) -> Path:
    """models/m_0, m_1, ...; train.npz and test.npz."""
    for seed in range(models):
        save(vit(seed), folder / "models" / f"m_{seed}")
    write_images(folder / "train.npz", examples, seed=0)
    write_images(folder / "test.npz", 12, seed=1)
    return folder


def write_seeds(folder: Path, models: int, examples: int = 8) -> Path:
    """models/m_0, m_1, ..., a seed in each, for the loaders below; train.npz and test.npz."""
    (folder / "models").mkdir()
    for seed in range(models):
        (folder / "models" / f"m_{seed}").write_text(str(seed))
    write_images(folder / "train.npz", examples, seed=0)
    write_images(folder / "test.npz", 8, seed=1)
    return folder


HEAD = """\
checkpoints: {paths: models/*}
data: {path: train.npz, batch_size: 8}
test: {path: test.npz}
"""


def write_spec(folder: Path, *measures: str, head: str = HEAD, tail: str = "", name: str = "zoo") -> Path:
    """A spec with these measures, each the inside of a mapping in one line."""
    path = folder / f"{name}.yaml"
    path.write_text("\n".join([head.strip(), "measures:", *(f"  - {{{each}}}" for each in measures), tail]) + "\n")
    return path


def run(spec: Path, **options: Any) -> Comparison:
    """Compare, into a folder beside the spec, without the report's figures, which take longer than all else."""
    with patch("quotient_manifolds.compare.report.comparison_page", lambda comparison: ""):
        return run_comparison(spec, spec.parent / "out", **options)


def values(found: Comparison) -> dict[str, list[float | None]]:
    """The means of each checkpoint, None where one is not known."""
    means = found.frame()[found.labels].astype(object)
    return {str(name): row.where(row.notna(), None).tolist() for name, row in means.iterrows()}


MARK = -7.0  # a pixel that says: here


class Plain(nn.Module):
    """A classifier without symmetries: the softmax behind it does see what its logits have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, CLASSES)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.tanh(self.linear(pixels.flatten(1)))
        return out


def plain() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Plain()


class Small(Plain):
    """A linear classifier whose forward pass does what a file asks for."""

    def __init__(self, trouble: str = "") -> None:
        super().__init__()
        self.trouble = trouble

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.trouble == "exit forward":
            sys.exit(0)
        if self.trouble == "nan" or (self.trouble == "nan at mark" and bool((pixels == MARK).any())):
            return super().forward(pixels) * math.nan
        if self.trouble == "raise":
            raise IndexError("no such row")
        if self.trouble == "interrupt":
            raise KeyboardInterrupt
        return super().forward(pixels)


def deadly(file: Path) -> nn.Module:
    """A loader whose second model kills its process whenever a gradient is wanted, where a file `die` says so."""
    model = small(file)

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        dies = file.name == "m_1" and (file.parent.parent / "die").exists()
        if dies and torch.is_grad_enabled():
            os.kill(os.getpid(), signal.SIGKILL)

    model.register_forward_pre_hook(before)
    return model


def small(file: Path) -> nn.Module:
    """A loader of linear classifiers from files with a seed each, or what is to happen instead."""
    text = file.read_text()
    if text == "exit load":
        sys.exit(0)
    with torch.random.fork_rng():
        torch.manual_seed(int(text) if text.isdigit() else 0)
        return Small(text).eval()


def fickle(file: Path) -> nn.Module:
    """A loader that fails for all models where a file `broken` says so."""
    if (file.parent.parent / "broken").exists():
        raise RuntimeError("broken")
    return small(file)


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss of the user's."""
    return (model(batch[0]) ** 2).mean()


def waves(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss of the user's with many maxima: an ascent may find less in a larger ball."""
    return torch.sin(10 * model(batch[0])).mean()


def two_batches() -> list[Any]:
    """Batches of the user's."""
    return [(pixels, torch.zeros(2, dtype=torch.long)) for pixels in torch.linspace(0, 1, 256).reshape(2, 2, 64)]


SCALED = ("number", "function", "hook", "head of zeros")


class Scaled(nn.Module):
    """A classifier that scales what a ReLU returns by something that no state dictionary holds, in one of many ways."""

    def __init__(self, kind: str, factor: float) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 8), nn.Linear(8, CLASSES)
        scales: dict[str, Any] = {
            "number": factor,
            "function": {1: torch.relu, 2: torch.tanh, 5: torch.sin}[int(factor)],
            "head of zeros": lambda x: factor * x,  # whose effect only shows where the head is not zero
        }
        self.scale = scales.get(kind, 1.0)
        if kind == "hook":
            self.first.register_forward_hook(lambda module, inputs, output: factor * output)
        if kind == "head of zeros":
            nn.init.zeros_(self.head.weight)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(pixel_values.flatten(1)))
        logits: torch.Tensor = self.head(self.scale(x) if callable(self.scale) else self.scale * x)
        return logits


def scaled(file: Path) -> nn.Module:
    kind, factor = file.name.split("-")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Scaled(kind, float(factor))


def neurons(file: Path) -> nn.Module:
    """A loader of networks of four neurons; the third has nothing between its layers, which is another group."""
    with torch.random.fork_rng():
        torch.manual_seed(int(file.read_text()))
        between = nn.Identity() if file.name == "m_2" else nn.ReLU()
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), between, nn.Linear(4, CLASSES))


# Forks of this process, which has imported everything.

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")


def start(work: Callable[..., None], *arguments: Any) -> int:
    """The process id of a fork that does this work and exits with 0, or prints its error and exits with 1."""
    with warnings.catch_warnings():
        # pytest-xdist has threads; the child calls nothing that they could have locked.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    try:
        work(*arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def end_of(child: int) -> int:
    """Its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
