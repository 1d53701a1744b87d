"""Keep directories of unknown origin from filling the memory, using the network, or hanging a process.

A configuration is a few lines of text that can ask for anything. Before and while a model is built from it, what it
asks for is compared with the headers of the weights, and every request to a network is refused.
"""

from __future__ import annotations

import math
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from quotient_manifolds.load.weights import Shapes
from quotient_manifolds.messages import brief

# A model may have more parameters than its file: tied weights stand there once, quantised ones are packed.
EXCESS = 8
NUMBERS, TENSORS = 10_000_000, 1_000  # and that many more, for models that are small
LABELS, LAYERS = 10_000, 1_000  # that any configuration may have; more only if the weights have as many
# Settings of peft that are matched with the names of modules as regular expressions, and how many repeats one may have.
PATTERNS = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern")
REPEATS = 4

_LOCK = threading.RLock()


class TooLarge(ValueError):
    """Report a configuration that describes a model many times larger than its weights."""


def check_regular(path: Path) -> None:
    """Raise ValueError for a pipe or a device in a directory: reading one may never end."""
    for entry in path.iterdir():
        if entry.exists() and not stat.S_ISREG(mode := entry.stat().st_mode) and not stat.S_ISDIR(mode):
            raise ValueError(f"{entry} is no regular file (a pipe or a device), and is not read.")


def check_config(config: Mapping[str, Any], shapes: Shapes, where: str) -> None:
    """Raise ValueError if `config` has, at any depth, far more classes or layers than the weights.

    Called before transformers makes any object of the configuration: the label of each class and the settings of each
    layer alone can fill the memory.
    """
    widest = max((size for shape in shapes.values() for size in shape), default=0)
    stack: list[tuple[str, Any]] = [("", config)]
    while stack:
        name, value = stack.pop()
        if isinstance(value, (dict, list)):
            stack += value.items() if isinstance(value, dict) else [(name, each) for each in value]
        elif isinstance(value, (int, float)):
            layers = "layer" in name or name in ("depth", "depths")
            most = max(LAYERS, len(shapes)) if layers else max(LABELS, widest)
            if value > most and (layers or name in ("num_labels", "num_classes")):
                raise TooLarge(
                    f"{where} asks for {name} = {value}, but its weights are {len(shapes)} tensors of at most "
                    f"{widest} rows or columns; one of the two is not this model's."
                )


def check_patterns(settings: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if peft would match names of modules by an expression whose time may grow without bound.

    Python's `re` tries all ways to split a name among repeats: exponentially many where a group is repeated that
    itself repeats or chooses, a power of the length where repeats stand side by side.
    """
    for key in PATTERNS:
        given = settings.get(key) or ()
        for pattern in [given] if isinstance(given, str) else given if isinstance(given, (list, dict)) else ():
            repeats = re.findall(r"(?<!\()[*+?{][?+]?", str(pattern))
            if re.search(r"\)[*+{]", str(pattern)) or len(repeats) > REPEATS:
                raise ValueError(
                    f"{key} in {where} must be simple expressions. Found {brief(pattern)}, which may take for ever: "
                    "name the modules instead."
                )


@contextmanager
def at_most(shapes: Shapes, where: str) -> Iterator[None]:
    """Raise `TooLarge` inside the block as soon as a model has many times the parameters that `shapes` lists.

    Parameters are counted when a module of this thread registers them; replacing a parameter does not count again.
    """
    here = threading.get_ident()
    held = sum(math.prod(shape) for shape in shapes.values())
    seen: set[tuple[int, str]] = set()
    built = 0

    def watch(module: nn.Module, name: str, parameter: Tensor | None) -> None:
        nonlocal built
        if threading.get_ident() != here or parameter is None or (id(module), name) in seen:
            return
        seen.add((id(module), name))
        built += math.prod(parameter.shape)
        if built > EXCESS * held + NUMBERS or len(seen) > EXCESS * len(shapes) + TENSORS:
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
    """Make huggingface_hub refuse every request inside the block; threads take turns, for its switch is global.

    Libraries ask it for what a configuration names and a directory lacks: a backbone, a kernel, a list of files.
    """
    from huggingface_hub import constants, utils

    renew = getattr(utils, "reset_sessions", lambda: None)  # before 1.0, sessions keep the switch as it stood
    with _LOCK:
        before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        renew()
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before
            renew()


def asked_network(error: BaseException | None) -> bool:
    """Return whether an error, or one that it arose from, is a request that `no_network` refused."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    while error is not None and not isinstance(error, OfflineModeIsEnabled):
        error = error.__cause__ or error.__context__
    return error is not None
