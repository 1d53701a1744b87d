"""Map the names in a peft directory: names of tensors in the file, and names of modules in the settings.

Regular expressions that come with an adapter are never given to `re`, which may take exponential time.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

from quotient_manifolds.messages import brief

PREFIX = "base_model.model."  # prefix of all names in an adapter's file
# Tensors of an update have names such as MODULE.lora_..., and full tensors may have names such as MODULE.base_layer....
UPDATES = ("lora_", "ia3_", "hada_", "lokr_")
FULL = ("base_layer", "modules_to_save", "original_module", "token_adapter")

# One atom of a key of rank_pattern or alpha_pattern: a character, "." or "\d", with or without a repeat.
_ATOM = re.compile(r"(?:(\\d|\.)(?:([*+])\??)?|(\\\W|[^\\^$*+?{}\[\]()|.]))")


def split_name(name: str) -> tuple[str, str]:
    """Return the module of the base model that a tensor in an adapter's file belongs to, and the rest of its name."""
    parts = name.removeprefix(PREFIX).split(".")
    ends = (place for place, part in enumerate(parts) if part.startswith(UPDATES) or part in FULL)
    end = next(ends, len(parts) - 1)
    return ".".join(parts[:end]), ".".join(parts[end:])


def is_update(name: str) -> bool:
    """Return whether a tensor is a factor of a module's update, not a full tensor or an update of a parameter."""
    return split_name(name)[1].startswith(UPDATES)


def renamed_module(module: str, rename: Callable[[str], str]) -> str:
    """Return the new name of a module, given a function that renames parameters."""
    return rename(f"{module}.weight").removesuffix(".weight")


def current_names(names: Iterable[str], rename: Callable[[str], str]) -> dict[str, str]:
    """Return the current name of each tensor by its name in the file; `rename` takes the name of a module.

    Raises ValueError if two tensors get one name.
    """
    old_names: dict[str, str] = {}
    for name in names:
        module, rest = split_name(name)
        current = f"{PREFIX}{rename(module)}.{rest}" if module and name.startswith(PREFIX) else name
        if current in old_names:
            raise ValueError(
                f"An adapter must hold each tensor once. Found {old_names[current]} and {name}, which are the same one"
            )
        old_names[current] = name
    return {name: current for current, name in old_names.items()}


def target_modules(setting: Any, modules: Collection[str], names: Iterable[str]) -> list[str] | str:
    """Return a value of target_modules for which peft selects exactly `modules` among all `names`.

    It is the given setting if possible, else the list of modules. If the name of a module is also the end of another
    name, it is a regular expression.
    """
    names = set(names)
    wanted = names & set(modules)
    for keys in (setting, sorted(modules)):
        if isinstance(keys, list) and all(isinstance(key, str) for key in keys):
            ends = tuple(f".{key}" for key in keys)
            if {name for name in names if name in keys or name.endswith(ends)} == wanted:
                return keys
    return "|".join(map(re.escape, sorted(modules)))


# ---- keys of rank_pattern and alpha_pattern


def key_matches(key: Any, module: str) -> bool | None:
    """Return whether a key selects a module, as in peft's get_pattern_key; None if the key has other syntax.

    peft searches for the regular expression `(.*\\.)?(key)$`. Supported are characters, ".", "\\d", each of these two
    with "*" or "+", escaped punctuation, "^", "$" and "|". The time is polynomial in the lengths of key and name.
    """
    alternatives = [_parsed(part) for part in key.split("|")] if isinstance(key, str) else [None]
    if None in alternatives:
        return None
    return any(_matches(*alternative, module) for alternative in alternatives if alternative is not None)


@lru_cache(maxsize=4096)
def _parsed(alternative: str) -> tuple[bool, list[tuple[str, str]]] | None:
    """Return whether an alternative is anchored at the start, and its (atom, repeat) pairs; None for other syntax."""
    inner = alternative[:-1] if alternative.endswith("$") and not alternative.endswith("\\$") else alternative
    body = inner.removeprefix("^")
    if not re.fullmatch(f"{_ATOM.pattern}*", body):
        return None
    return inner != body, [(wild or literal, repeat) for wild, repeat, literal in _ATOM.findall(body)]


def _matches(anchored: bool, atoms: list[tuple[str, str]], name: str) -> bool:
    """Return whether the atoms match `name`, or its end after a dot unless anchored, by simulating the automaton."""

    def step(places: set[int], atom: str) -> set[int]:
        return {place + 1 for place in places if place < len(name) and _accepts(atom, name[place])}

    ends = {place for place in range(len(name)) if place == 0 or (not anchored and name[place - 1] == ".")}
    for atom, repeat in atoms:
        reached = step(ends, atom)
        while repeat and (more := step(reached, atom) - reached):
            reached |= more
        ends = reached | ends if repeat == "*" else reached
        if not ends:
            return False
    return len(name) in ends


def _accepts(atom: str, character: str) -> bool:
    return atom == "." or (character.isdecimal() if atom == "\\d" else character == atom[-1])


def module_setting(module: str, settings: Mapping[str, Any], pattern: str, default: Any, where: str) -> float:
    """Return the rank or alpha of a module: the value of the first key that selects it, or the default.

    Raises ValueError for a key with other syntax, unless all values equal the default.
    """
    values = _numbers(settings, pattern, default, where)
    for key, value in values.items() if set(values.values()) != {default} else ():
        if (matched := key_matches(key, module)) is None:
            raise ValueError(
                f"{pattern} in {where} must have names of modules as keys. Found {brief(key)}, a regular expression, "
                "which is not evaluated; write a key for each name"
            )
        if matched:
            return value
    return default


def check_rank(module: str, rank: int, settings: Mapping[str, Any], where: str) -> None:
    """Raise ValueError unless the settings mention the rank of a module's factors."""
    default = settings.get("r", 8)
    if rank not in (default, *_numbers(settings, "rank_pattern", default, where).values()):
        raise ValueError(
            f"{module} must have the rank that {where} states, {brief(default)}. Found factors of rank {rank}"
        )


def _numbers(settings: Mapping[str, Any], pattern: str, default: Any, where: str) -> dict[Any, float]:
    values = settings.get(pattern) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{pattern} in {where} must be a dict of numbers. Found {brief(values)}")
    for value in (default, *values.values()):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            raise ValueError(f"Rank and alpha in {where} must be numbers. Found {brief(value)}")
    return values
