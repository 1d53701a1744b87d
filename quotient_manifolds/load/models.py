"""Models by name: a Hugging Face directory, or a function of the user's."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from quotient_manifolds.load.adapters import load_directory
from quotient_manifolds.load.names import expanded, first_line


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


def call_module(reference: str, *arguments: Any) -> nn.Module:
    """The nn.Module that the function `package.module:function` returns for the arguments, as it is."""
    model = call_object(reference, "a function that returns an nn.Module", *arguments)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{reference} must return an nn.Module, but it returned {_article(type(model).__name__)}.")
    return model


def load_object(reference: str, wanted: str) -> Callable[..., Any]:
    """The callable that `package.module:function` names; modules of the current directory are found too."""
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


def call_object(reference: str, wanted: str, *arguments: Any) -> Any:
    """What the function that `package.module:function` names returns; whatever it raises becomes one sentence."""
    function = load_object(reference, wanted)
    try:
        return function(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code: anything
        called = f"called with {', '.join(map(_shown, arguments))}" if arguments else "called"
        raise ValueError(f"{reference} was {called} and raised {type(error).__name__}: {first_line(error)}") from error


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def _shown(argument: Any) -> str:
    return _article(type(argument).__name__) if isinstance(argument, nn.Module) else str(argument)
