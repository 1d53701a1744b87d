"""Keep directories of unknown origin from filling the memory, using the network, or hanging a process.

A configuration is a few lines of text that can ask for anything. Before and while a model is built from it, what it
asks for is compared with the headers of the weights, and every request to a network is refused.
"""

from __future__ import annotations

import importlib
import math
import re
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from quotient_manifolds.load.weights import Shapes
from quotient_manifolds.messages import brief, shown

# A model may have more parameters than its file: tied weights stand there once, quantised ones are packed.
EXCESS = 8
NUMBERS, TENSORS = 10_000_000, 1_000  # and that many more, for models that are small
# Settings of peft that are matched with the names of modules as regular expressions, and how many repeats one may have.
PATTERNS = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern")
REPEATS = 4
LABELS, LAYERS = 10_000, 1_000  # that any configuration may have; more only if the weights have as many

_LOCK = threading.Lock()
_OPEN_BLOCKS: list[bool] = []  # for each open block of `no_network`, in any thread: the switch when it was entered


class TooLarge(ValueError):
    """Report a configuration that describes a model many times larger than its weights."""


def check_regular(path: Path) -> None:
    """Raise ValueError for a pipe or a device in a directory: reading one may never end."""
    for entry in path.iterdir():
        try:
            mode = entry.stat().st_mode
        except OSError:  # a link to nothing
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ValueError(f"{shown(entry)} is no regular file (a pipe or a device), and is not read.")


def check_config(config: Mapping[str, Any], shapes: Shapes, where: str) -> None:
    """Raise ValueError if `config` has, at any depth, far more classes or layers than the weights.

    Called before transformers makes any object of the configuration: the label of each class and the settings of each
    layer alone can fill the memory.
    """
    widest = max((size for shape in shapes.values() for size in shape), default=0)
    for name, value in _integers(config):
        limit = max(LABELS, widest) if name in ("num_labels", "num_classes") else None
        if "layer" in name or name in ("depth", "depths"):
            limit = max(LAYERS, len(shapes))
        if limit is not None and value > limit:
            raise TooLarge(
                f"{where} asks for {name} = {value}, but its weights are {len(shapes)} tensors of at most {widest} "
                "rows or columns; one of the two is not this model's."
            )


def check_patterns(settings: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if peft would match names of modules by an expression whose time may grow without bound.

    Python's `re` tries all ways to split a name among repeats: exponentially many where a repeat or a choice stands in
    a repeat, a power of the length where repeats stand side by side. Expressions that are none are left to others.
    """
    for key in PATTERNS:
        given = settings.get(key)
        for pattern in [given] if isinstance(given, str) else given if isinstance(given, (list, dict)) else []:
            if isinstance(pattern, str) and _is_slow(pattern):
                raise ValueError(
                    f"{key} in {where} must be simple expressions. Found {brief(pattern)}, which may take for ever: "
                    "name the modules instead"
                )


def _is_slow(pattern: str) -> bool:
    try:
        parsed = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse").parse(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    repeats, stack = 0, [(parsed, False)]
    while stack:
        part, repeated = stack.pop()
        if isinstance(part, tuple) and len(part) == 2 and "REPEAT" in str(part[0]):
            _, most, inside = part[1]
            if repeated:
                return True
            repeats += most > 1
            stack.append((inside, most > 1))
        elif isinstance(part, tuple) and len(part) == 2 and str(part[0]) == "BRANCH" and repeated:
            return True
        elif isinstance(part, (tuple, list)) or hasattr(part, "data"):
            stack += [(each, repeated) for each in (getattr(part, "data", None) or part)]
    return repeats > REPEATS


def _integers(value: Any) -> Iterator[tuple[str, int]]:
    """Yield (key, number) for the numbers in nested dicts and lists; those of a list go by the list's key."""
    stack = [("", value)]  # no recursion: a file may be nested deeper than Python's stack
    while stack:
        key, each = stack.pop()
        if isinstance(each, dict):
            stack += [(str(inner), content) for inner, content in each.items()]
        elif isinstance(each, list):
            stack += [(key, content) for content in each]
        elif isinstance(each, (int, float)) and not isinstance(each, bool) and math.isfinite(each):
            yield key, int(each)


@contextmanager
def at_most(shapes: Shapes, where: str) -> Iterator[None]:
    """Raise `TooLarge` inside the block as soon as a model has many times the parameters that `shapes` lists.

    Parameters are counted when a module of this thread registers them; replacing a parameter does not count again.
    """
    here = threading.get_ident()
    held = sum(math.prod(shape) for shape in shapes.values())
    numbers, count = EXCESS * held + NUMBERS, EXCESS * len(shapes) + TENSORS
    seen: set[tuple[int, str]] = set()
    built = 0

    def watch(module: nn.Module, name: str, parameter: Tensor | None) -> None:
        nonlocal built
        if threading.get_ident() != here or parameter is None or (id(module), name) in seen:
            return
        seen.add((id(module), name))
        built += math.prod(parameter.shape)
        if built > numbers or len(seen) > count:
            raise TooLarge(
                f"{where} describes a model that is many times larger than its weights, which are {len(shapes)} "
                f"tensors of {held} numbers in all; one of the two is not this model's."
            )

    handle = register_module_parameter_registration_hook(watch)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def no_network() -> Iterator[None]:
    """Make huggingface_hub refuse every request inside the block, for all threads until the last block is left.

    Libraries ask it for what a configuration names and a directory lacks: a backbone, a kernel, a list of files.
    """
    from huggingface_hub import constants

    with _LOCK:
        _OPEN_BLOCKS.append(constants.HF_HUB_OFFLINE)
        constants.HF_HUB_OFFLINE = True
        _forget_sessions()
    try:
        yield
    finally:
        with _LOCK:
            before = _OPEN_BLOCKS.pop()  # the last one left is the first one entered, with the user's own setting
            if not _OPEN_BLOCKS:
                constants.HF_HUB_OFFLINE = before
                _forget_sessions()


def _forget_sessions() -> None:
    """Make huggingface_hub open new sessions: before 1.0 they keep the switch as it stood when they were made."""
    from huggingface_hub import utils

    getattr(utils, "reset_sessions", lambda: None)()


def asked_network(error: BaseException) -> bool:
    """Return whether an error, or one that it arose from, is a request that `no_network` refused."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OfflineModeIsEnabled):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
