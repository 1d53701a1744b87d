"""Load a model, a function, the models of a zoo, or the symmetries of a model by name."""

from __future__ import annotations

import glob
import importlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quotient_manifolds.files import expanded
from quotient_manifolds.load.adapters import load_directory
from quotient_manifolds.messages import first_line
from quotient_manifolds.symmetries import Symmetries

HUGGING_FACE = "huggingface"


@dataclass(frozen=True)
class Checkpoint:
    """Describe one model of a zoo: its name in tables, the path of its weights, if any, and its loader.

    loader: "huggingface" for a directory, or package.module:function, which is called with the path if there is one.
    """

    name: str
    path: Path | None
    loader: str


def load_model(source: str | Path) -> nn.Module:
    """Load the model at `source`, in eval mode and in the dtype in which it is stored.

    source: one of
    - a Hugging Face directory: config.json, whose `architectures` names the class, and safetensors weights, in one file
      or in shards;
    - a directory of a peft adapter whose base model is a directory on this machine; the base is loaded with the
      adapter on it, not merged;
    - package.module:function, a function without arguments that returns an nn.Module.

    Nothing is unpickled, downloaded, or run from the directory. Raises ValueError if there is no such model, or if its
    safetensors lack a parameter.
    """
    if ":" in str(source) and not Path(source).exists():
        return _call_module(str(source)).eval()
    return load_directory(expanded(source))


def find_checkpoints(patterns: Sequence[str], loader: str, base: str | Path = ".") -> tuple[Checkpoint, ...]:
    """Return the checkpoints that glob patterns relative to `base` match, each once, model_2 before model_10.

    A name is the file's without its suffix, or the path relative to `base` if two names would be equal. The loader
    "huggingface" takes directories only, so other files that match (a README) are skipped. Without patterns, a
    function is a zoo of one model, the one that it returns.

    Raises ValueError for an unknown loader and for a pattern that matches no checkpoint.
    """
    if loader != HUGGING_FACE and ":" not in loader:
        raise ValueError(f"The loader must be {HUGGING_FACE} or package.module:function. Found {loader!r}")
    if not patterns:
        if loader == HUGGING_FACE:
            raise ValueError(f"The loader {loader!r} needs patterns that say which checkpoints to read")
        return (Checkpoint(loader, None, loader),)
    folder = expanded(base)
    matches: set[Path] = set()
    for pattern in map(str, map(expanded, patterns)):
        is_literal = (folder / pattern).exists()  # brackets may be part of a name
        names = [pattern] if is_literal else glob.glob(pattern, root_dir=folder, recursive=True)
        paths = {Path(os.path.abspath(folder / name)) for name in names}
        if loader == HUGGING_FACE:
            paths = {path for path in paths if path.is_dir()}
        if not paths:
            what = f"no directory: it matches files, such as {names[0]}," if names else "nothing"
            raise ValueError(f"The pattern {pattern!r} matches {what} in {folder}")
        matches |= paths
    places = sorted(((os.path.relpath(path, folder), path) for path in matches), key=lambda pair: _natural(pair[0]))
    short = [path.stem if path.is_file() else path.name for _, path in places]
    counts = Counter(short)
    named = zip(short, places, strict=True)
    return tuple(Checkpoint(name if counts[name] == 1 else place, path, loader) for name, (place, path) in named)


def load_checkpoint(checkpoint: Checkpoint) -> nn.Module:
    """Load the model of a checkpoint, in eval mode, in its stored dtype but at least in float32.

    Raises ValueError, naming the file, and ImportError if an optional package is missing.
    """
    if checkpoint.loader != HUGGING_FACE:
        model = _call_module(checkpoint.loader, *([] if checkpoint.path is None else [checkpoint.path]))
    elif checkpoint.path is None:
        raise ValueError(f"{checkpoint.name} has no path, which the loader {checkpoint.loader!r} needs")
    else:
        model = load_directory(checkpoint.path)
    tensors = (*model.parameters(), *model.buffers())
    is_precise = all(tensor.dtype.itemsize >= 4 for tensor in tensors if tensor.is_floating_point())
    return (model if is_precise else model.float()).eval()


def load_symmetries(reference: str, model: nn.Module) -> Symmetries:
    """Return the symmetries that package.module:function declares for the model, checked against its parameters.

    `verify_symmetries` checks whether they hold. Raises ValueError if the function is missing, raises, or returns
    another type, and if a pair needs a parameter, or a shape of it, that the model does not have.
    """
    declared = call_object(reference, "a function of the model that returns its Symmetries", model)
    if not isinstance(declared, Symmetries):
        raise ValueError(
            f"{reference} must return quotient_manifolds.Symmetries, as find_symmetries does. Found an object of type "
            f"{type(declared).__name__}"
        )
    shapes = {name: torch.empty(value.shape, device="meta") for name, value in model.named_parameters()}
    if unknown := [name for name in declared.moved if name not in shapes]:
        raise ValueError(
            f"{reference} must declare symmetries of model.named_parameters(). Found the parameter {unknown[0]!r}, "
            f"which {type(model).__name__} does not have"
        )
    try:
        for pair in declared.pairs:
            pair.write(shapes, pair.read(shapes))
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"{reference} declares a symmetry that does not fit {type(model).__name__}: {error}"
        ) from error
    return declared


def _call_module(reference: str, *arguments: Any) -> nn.Module:
    model = call_object(reference, "a function that returns an nn.Module", *arguments)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{reference} must return an nn.Module. Found an object of type {type(model).__name__}")
    return model


def call_object(reference: str, wanted: str, *arguments: Any) -> Any:
    """Return the result of the function package.module:function; any error that it raises becomes a ValueError."""
    function = load_object(reference, wanted)
    try:
        return function(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may raise anything, SystemExit too
        listed = ", ".join(type(each).__name__ if isinstance(each, nn.Module) else str(each) for each in arguments)
        called = f"called with {listed}" if listed else "called"
        raise ValueError(f"{reference} was {called} and raised {type(error).__name__}: {first_line(error)}") from error


def load_object(reference: str, wanted: str) -> Callable[..., Any]:
    """Return the callable that package.module:function names, also from a module in the current directory."""
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"Expected package.module:function naming {wanted}. Found {reference!r}")
    if os.getcwd() not in sys.path:  # `python -m` adds it, a console script does not
        sys.path.insert(0, os.getcwd())
    try:
        value = getattr(importlib.import_module(module_name), attribute, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may raise anything, SystemExit too
        what = "" if isinstance(error, ImportError) else f"{type(error).__name__} at import: "
        raise ValueError(f"Cannot import {module_name!r} to find {wanted}: {what}{first_line(error)}") from error
    if not callable(value):
        raise ValueError(f"Module {module_name!r} must have {wanted}. Found no function {attribute!r}")
    return value


def _natural(name: str) -> tuple[list[list[str | int]], str]:
    """Return a sort key in which numbers count as numbers.

    Words and numbers alternate in each part of the path, so that only like types are compared.
    """
    parts = [re.split(r"([0-9]+)", part) for part in Path(name).parts]
    return [[int(piece) if index % 2 else piece for index, piece in enumerate(pieces)] for pieces in parts], name
