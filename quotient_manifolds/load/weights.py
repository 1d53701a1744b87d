"""Tensors by name from a file, without running code that may be in it, and into a module, every one accounted for."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from quotient_manifolds.load.names import first_line

SUFFIXES = (".pt", ".pth", ".safetensors")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a flat state dict, by name, on the CPU and mapped from the file where that is possible.

    Raises ValueError if the file is damaged (the checksums of a zip archive are compared) or holds anything else.
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"Expected weights in a file that ends in {', '.join(SUFFIXES)}, found {path}.")
    found = _safetensors(path) if path.suffix == ".safetensors" else _torch_file(path)
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


def _safetensors(path: Path) -> object:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError(
            'Files of safetensors need that library: pip install "quotient-manifolds[transformers]".'
        ) from error
    try:
        return load_file(path)
    except Exception as error:  # safetensors' own kind, or the system's
        raise ValueError(f"{path} is no readable safetensors file: {first_line(error)}") from error


def check_names(found: Iterable[str], wanted: Iterable[str], what: str) -> None:
    """Raises ValueError naming the first parameter that `what` lacks, or has and should not have."""
    have, want = set(found), set(wanted)
    for odd, verb in ((sorted(want - have), "lacks"), (sorted(have - want), "has the unexpected")):
        if odd:
            more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
            raise ValueError(f"{what} {verb} parameter {odd[0]}{more}.")


def check_shapes(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Raises ValueError naming the first parameter of another shape; both must have the same names."""
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(f"{what} has {name} of shape {found[name]}, expected {shape}.")


def fill(module: nn.Module, tensors: Mapping[str, Tensor], names: Mapping[str, str], what: str) -> nn.Module:
    """The module (it may be on the meta device) with float32 copies of the tensors as its parameters.

    names: for each of the module's, the tensor's name. Raises ValueError naming the tensor that is missing, unexpected,
    of another shape or not floating point.
    """
    check_names(tensors, names.values(), what)
    wanted = {names[name]: tuple(value.shape) for name, value in module.state_dict().items()}
    check_shapes({name: tuple(value.shape) for name, value in tensors.items()}, wanted, what)
    for name, value in tensors.items():
        if not value.is_floating_point():
            raise ValueError(f"{what} has {name} of dtype {value.dtype}, expected floating point numbers.")
    # Copies, so that no parameter hangs on a mapped file that may change.
    copies = {name: tensors[source].to(torch.float32, copy=True).contiguous() for name, source in names.items()}
    module.load_state_dict(copies, strict=True, assign=True)
    return module
