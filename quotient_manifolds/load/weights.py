"""Read files of weights by name, without running code that may be in a file, and account for every tensor."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.messages import first_line, shown

SUFFIXES = (".pt", ".pth", ".safetensors")

Shapes = Mapping[str, tuple[int, ...]]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a flat state dict, by name, on the CPU and mapped from the file where that is possible.

    Raises ValueError if the file is damaged (the checksums of a zip archive are compared) or holds anything else.
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"Expected weights in a file that ends in {', '.join(SUFFIXES)}, found {path}.")
    if path.suffix == ".safetensors":
        with _open_safetensors(path) as weights:
            found: Any = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
    else:
        found = _torch_file(path)
    if not isinstance(found, Mapping) or not found:
        raise ValueError(f"{path} must hold a flat dict of tensors by name, found {type(found).__name__}.")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(
                f"{path} must hold a flat dict of tensors by name, but {name!r} is of type {type(value).__name__}."
            )
    return dict(found)


def _torch_file(path: Path) -> object:
    zipped = zipfile.is_zipfile(path)
    try:
        damaged = zipfile.ZipFile(path).testzip() if zipped else None  # torch.load compares no checksums
        if damaged is None:
            return torch.load(path, weights_only=True, map_location="cpu", mmap=zipped)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is damaged or holds more than tensors, and unpickling that can run any code: save a plain dict "
            "of tensors, or convert it to safetensors where you trust it."
        ) from error
    except Exception as error:  # torch and zipfile raise a dozen kinds for damaged files, from KeyError to EOFError
        raise ValueError(f"{path} is no readable file of weights: {first_line(error)}") from error
    raise ValueError(f"{path} is damaged: the checksum of its part {damaged} is not the stored one.")


@contextmanager
def _open_safetensors(file: Path) -> Iterator[Any]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            'Files of safetensors need that library: pip install "quotient-manifolds[transformers]".'
        ) from error
    try:
        with safe_open(file, framework="pt") as weights:
            yield weights
    except Exception as error:  # safetensors' own kind, or the system's
        raise ValueError(f"{shown(file)} does not load: {first_line(error)}") from error


def shapes_in(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor in files of safetensors; only their headers are read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with _open_safetensors(file) as weights:
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


def check_shapes(found: Shapes, wanted: Shapes, what: str) -> None:
    """Raise ValueError naming the first parameter that `what` lacks, should not have, or has in another shape."""
    check_names(found, wanted, what)
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(f"{what} has {name} of shape {found[name]}, expected {shape}.")
