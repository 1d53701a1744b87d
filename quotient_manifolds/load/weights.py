"""Read files of safetensors by name: numbers, and nothing that could run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from quotient_manifolds.messages import first_line


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a file of safetensors; whatever fails inside becomes one ValueError."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            'Files of safetensors need that library: pip install "quotient-manifolds[transformers]".'
        ) from error
    try:
        with safe_open(file, framework="pt") as weights:
            yield weights
    except ValueError:
        raise
    except Exception as error:  # safetensors' own kind, or the system's
        raise ValueError(f"{file} does not load: {first_line(error)}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name, on the CPU."""
    with opened(path) as weights:
        return {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118


def shapes_in(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor in files; only their headers are read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with opened(file) as weights:
            shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    return shapes
