"""Names in a directory of peft: of tensors in the file, of modules in the settings. No stranger's expression is run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

from quotient_manifolds.messages import brief

PREFIX = "base_model.model."  # of the names in an adapter's file
UPDATES = ("lora_", "ia3_", "hada_", "lokr_")  # what the name of a tensor of an update goes on with after its module
STORED = ("base_layer", "modules_to_save", "original_module", "token_adapter")  # and that of one that is stored whole

# One choice of a key of rank_pattern or alpha_pattern: characters, and "." or "\d" with or without a repeat.
_ATOM = re.compile(r"(?:(\\d|\.)(?:([*+])\??)?|(\\\W|[^\\^$*+?{}\[\]()|.]))")


def split(name: str) -> tuple[str, str]:
    """Return the module of the base model that a tensor in an adapter's file belongs to, and what follows its name."""
    parts = name.removeprefix(PREFIX).split(".")
    own = (place for place, part in enumerate(parts) if part.startswith(UPDATES) or part in STORED)
    place = next(own, len(parts) - 1)
    return ".".join(parts[:place]), ".".join(parts[place:])


def is_update(name: str) -> bool:
    """Return whether a tensor is one of an update, and not one that is stored whole or a parameter's (of experts)."""
    return split(name)[1].startswith(UPDATES)


def renamed_module(module: str, rename: Callable[[str], str]) -> str:
    """Return the name of a module by a function of names of parameters."""
    return rename(f"{module}.weight").removesuffix(".weight")


def present_names(names: Iterable[str], rename: Callable[[str], str]) -> dict[str, str]:
    """Return the present name of each tensor by the one in the file; `rename` takes the name of a module.

    Raises ValueError in one sentence if two tensors have one name.
    """
    found: dict[str, str] = {}
    for name in names:
        module, rest = split(name)
        present = f"{PREFIX}{rename(module)}.{rest}" if module and name.startswith(PREFIX) else name
        if present in found:
            raise ValueError(
                f"An adapter must hold each tensor once. Found {found[present]} and {name}, which are one."
            )
        found[present] = name
    return {name: present for present, name in found.items()}


def targets(given: Any, modules: Collection[str], names: Iterable[str]) -> list[str] | str:
    """Return a setting target_modules by which peft reaches these modules among those with `names`, and no others.

    It is the given list if that does; an expression if whole names match the ends of others.
    """
    names = set(names)
    present = names & set(modules)
    for keys in (given, sorted(modules)):
        if isinstance(keys, list) and all(isinstance(key, str) for key in keys):
            ends = tuple(f".{key}" for key in keys)
            if {name for name in names if name in keys or name.endswith(ends)} == present:
                return keys
    return "|".join(map(re.escape, sorted(modules)))


# ---- keys of rank_pattern and alpha_pattern


def names_module(key: Any, module: str) -> bool | None:
    """Return whether a key names a module, as peft's get_pattern_key has it; None if the key is not read here.

    peft takes it for a regular expression that must match the module's name or its end after a dot. Read are names, in
    which "." is any character and "\\." a dot, with "\\d", ".*", "\\d+" and the like, "^", "$" and "|": the positions
    that a name can be read to are followed, in a time that is bounded by key and name. Python's `re` may take for ever.
    """
    choices = [_read(choice) for choice in key.split("|")] if isinstance(key, str) else [None]
    if None in choices:
        return None
    return any(_matches(*choice, module) for choice in choices if choice is not None)


@lru_cache(maxsize=4096)
def _read(choice: str) -> tuple[bool, list[tuple[str, str]]] | None:
    """Return whether a choice starts with the name, and its characters with their repeats; None if it has others."""
    inner = choice[:-1] if choice.endswith("$") and not choice.endswith("\\$") else choice
    body = inner.removeprefix("^")
    if not re.fullmatch(f"{_ATOM.pattern}*", body):
        return None
    return inner != body, [(wild or literal, repeat) for wild, repeat, literal in _ATOM.findall(body)]


def _matches(anchored: bool, atoms: list[tuple[str, str]], name: str) -> bool:
    def step(places: set[int], atom: str) -> set[int]:
        inside = (place for place in places if place < len(name))
        return {place + 1 for place in inside if _takes(atom, name[place])}

    start = len(name) - len(atoms)  # without repeats there is one place to start from
    places = range(len(name)) if any(repeat for _, repeat in atoms) else range(start, start + 1)
    ends = {place for place in places if place == 0 or (place > 0 and not anchored and name[place - 1] == ".")}
    for atom, repeat in atoms:
        reached = step(ends, atom)
        while repeat and (more := step(reached, atom) - reached):
            reached |= more
        ends = reached | ends if repeat == "*" else reached
        if not ends:
            return False
    return len(name) in ends


def _takes(atom: str, character: str) -> bool:
    return atom == "." or (character.isdecimal() if atom == "\\d" else character == atom[-1])


def value_of(module: str, settings: Mapping[str, Any], pattern: str, default: Any, where: str) -> float:
    """Return the rank or alpha of a module: the value of the first key that names it, or the default.

    Raises ValueError in one sentence for keys that are no names, unless they decide nothing.
    """
    given = _numbers(settings, pattern, default, where)
    for key, value in given.items() if set(given.values()) != {default} else ():
        if (matched := names_module(key, module)) is None:
            raise ValueError(
                f"{pattern} in {where} must have names of modules as keys. Found {brief(key)}, a regular expression, "
                "which is not evaluated: write a key for each name."
            )
        if matched:
            return value
    return default


def check_rank(module: str, rank: int, settings: Mapping[str, Any], where: str) -> None:
    """Raise ValueError unless the rank of a module's factors is one that the settings name."""
    known = settings.get("r", 8)
    if rank not in (known, *_numbers(settings, "rank_pattern", known, where).values()):
        raise ValueError(f"The file has factors of rank {rank} for {module}, but {where} says {brief(known)}.")


def _numbers(settings: Mapping[str, Any], pattern: str, default: Any, where: str) -> dict[Any, float]:
    given = settings.get(pattern) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{pattern} in {where} must be a dict of numbers. Found {brief(given)}.")
    for value in (default, *given.values()):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            raise ValueError(f"Rank and alpha in {where} must be numbers. Found {brief(value)}.")
    return given
