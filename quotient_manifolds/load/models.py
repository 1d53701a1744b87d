"""Load models and functions of the user's by name: a Hugging Face directory, or package.module:function."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quotient_manifolds.files import expanded
from quotient_manifolds.load.adapters import load_directory
from quotient_manifolds.messages import first_line
from quotient_manifolds.symmetries import Symmetries


def load_model(source: str | Path) -> nn.Module:
    """Load the model at `source`, in eval mode and in the dtype it was stored in.

    `source` is a Hugging Face directory (config.json and safetensors weights, in one file or in shards; the class is
    the one that `architectures` names), a directory of a peft adapter whose base model is a directory on this machine
    (the base is loaded with the adapter on it, not merged), or `package.module:function`, where the function takes no
    argument and returns an nn.Module. Nothing is unpickled, downloaded, or run from the directory.

    Raises ValueError, in one sentence, when there is no such model, when the weights are not safetensors, or when they
    do not cover every parameter (the rest would be random numbers).
    """
    if ":" in str(source) and not Path(source).exists():
        return call_module(str(source)).eval()
    return load_directory(expanded(source))


def load_symmetries(reference: str, model: nn.Module) -> Symmetries:
    """Return what the function `package.module:function` declares of the model, checked against its parameters.

    The function is called with the model and returns its `Symmetries`. ValueError, in one sentence, where there is no
    such function, where it raises or returns anything else, and where a pair or a translation names a parameter that
    the model does not have, or reads it in a shape that it does not have. Whether the symmetries are true is for
    `prove_symmetries` to say.
    """
    declared = call_object(reference, "a function of the model that returns its Symmetries", model)
    if not isinstance(declared, Symmetries):
        raise ValueError(
            f"{reference} must return quotient_manifolds.Symmetries, as find_symmetries does, but it returned "
            f"an object of type {type(declared).__name__}."
        )
    shapes = {name: torch.empty(value.shape, device="meta") for name, value in model.named_parameters()}
    if unknown := [name for name in declared.moved if name not in shapes]:
        raise ValueError(
            f"{reference} declares a symmetry of the parameter {unknown[0]!r}, which {type(model).__name__} does not "
            "have; names are those of model.named_parameters()."
        )
    try:
        for pair in declared.pairs:
            pair.write(shapes, pair.read(shapes))
        for shift in declared.translations:
            shift.remove(shapes)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"{reference} declares a symmetry that does not fit {type(model).__name__}: {error}"
        ) from error
    return declared


def call_module(reference: str, *arguments: Any) -> nn.Module:
    """Return the nn.Module that the function `package.module:function` makes of the arguments, as it is."""
    model = call_object(reference, "a function that returns an nn.Module", *arguments)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{reference} must return an nn.Module, but it returned an object of type {type(model).__name__}."
        )
    return model


def call_object(reference: str, wanted: str, *arguments: Any) -> Any:
    """Return what the function `package.module:function` returns; whatever it raises becomes one ValueError."""
    function = load_object(reference, wanted)
    try:
        return function(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code: anything
        given = ", ".join(type(each).__name__ if isinstance(each, nn.Module) else str(each) for each in arguments)
        called = f"called with {given}" if given else "called"
        raise ValueError(f"{reference} was {called} and raised {type(error).__name__}: {first_line(error)}") from error


def load_object(reference: str, wanted: str) -> Callable[..., Any]:
    """Return the callable that `package.module:function` names; modules of the current directory are found too."""
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"Expected package.module:function naming {wanted}, found {reference!r}.")
    if os.getcwd() not in sys.path:  # a console script does not have it, `python -m` has
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), attribute, None)
    except ImportError as error:
        raise ValueError(f"Cannot import {module_name!r} to find {wanted}: {error}.") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code: anything
        raise ValueError(
            f"{module_name!r}, which should have {wanted}, raised {type(error).__name__} when it was imported: "
            f"{first_line(error)}"
        ) from error
    if not callable(found):
        raise ValueError(f"Module {module_name!r} has no function {attribute!r}; {wanted} was expected there.")
    return found
