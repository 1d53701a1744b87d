"""Read files of safetensors by name, and account for every tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from quotient_manifolds.messages import first_line

Shapes = Mapping[str, tuple[int, ...]]


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
    """Return the tensors of a file of safetensors by name, on the CPU."""
    with opened(path) as weights:
        return {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118


def shapes_in(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor in files of safetensors; only their headers are read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with opened(file) as weights:
            shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    return shapes


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor."""
    return {name: tuple(value.shape) for name, value in tensors.items()}


def check_names(found: Iterable[str], wanted: Iterable[str], what: str) -> None:
    """Raise ValueError naming the first parameter that `what` lacks, or has and should not have."""
    have, want = set(found), set(wanted)
    for odd, verb in ((sorted(want - have), "lacks"), (sorted(have - want), "has the unexpected")):
        if odd:
            more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
            raise ValueError(f"{what} {verb} parameter {odd[0]}{more}.")
