"""Keep directories of unknown origin from filling the memory, using the network, or hanging a process."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quotient_manifolds.messages import brief

MANY = 10_000  # classes or layers that any configuration may have; more only if the weights have as many
# Settings of peft that are matched with the names of modules as regular expressions, and how many repeats one may have.
PATTERNS = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern")
REPEATS = 4

_LOCK = threading.RLock()


def check_config(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise ValueError if `config` has far more classes, layers or ranks than the weights, whose shapes these are.

    Called before an object of the configuration is made: labels of classes and settings of layers can fill the memory.
    """
    most = max(MANY, len(shapes), *(size for shape in shapes.values() for size in shape))
    for name, value in config.items():
        counts = name in ("num_labels", "r") or "layer" in name
        if counts and isinstance(value, (int, float)) and value > most:
            raise ValueError(f"{name} in {where} must be at most {most}, as large as its weights are. Found {value}.")


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
