"""Find the models of a zoo by patterns, name them, and read each by the loader of its format."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from quotient_manifolds.files import expanded
from quotient_manifolds.load.adapters import load_directory
from quotient_manifolds.load.bert_tensorflow import load_bert, prefix_of
from quotient_manifolds.load.clip_soup import load_clip_soup
from quotient_manifolds.load.models import call_module
from quotient_manifolds.load.weights import SUFFIXES
from quotient_manifolds.messages import first_line, shown


@dataclass(frozen=True)
class Checkpoint:
    """Describe one model of a zoo: its name in tables, where its weights lie (None: nowhere) and what reads them.

    loader: "huggingface" (a directory), "clip-soup" (a model-soups state dict), "bert-tensorflow" (a TensorFlow-1
    checkpoint of a BERT classifier) or package.module:function (called with the path where there is one).
    """

    name: str
    path: Path | None
    loader: str


@dataclass(frozen=True)
class _Format:
    """Describe what a loader reads: the checkpoint that a matched file belongs to, if to any, and how it loads."""

    wanted: str
    checkpoint_of: Callable[[Path], Path | None]
    load: Callable[[Path, Path | None], nn.Module]  # (path, cache)


def _tensorflow(path: Path) -> Path | None:
    """Return the checkpoint's prefix, or its directory if that is what was matched: it gives the model its name."""
    prefix = prefix_of(path)
    return path if prefix is not None and path.is_dir() else prefix


_FORMATS = {
    "huggingface": _Format(
        "a directory", lambda path: path if path.is_dir() else None, lambda path, _: load_directory(path)
    ),
    "clip-soup": _Format(
        f"a {', '.join(SUFFIXES)} file",
        lambda path: path if path.suffix in SUFFIXES and path.is_file() else None,
        lambda path, _: load_clip_soup(path),
    ),
    "bert-tensorflow": _Format(
        "a TensorFlow checkpoint (an .index file, or a directory with one)", _tensorflow, load_bert
    ),
}


def find_checkpoints(patterns: Sequence[str], loader: str, base: str | Path = ".") -> tuple[Checkpoint, ...]:
    """Return the checkpoints that glob patterns relative to `base` match, each once, model_2 before model_10.

    A name is the file's without its ending, or the path relative to `base` where two would be called the same. What
    the patterns match besides (a README, an optimizer's state) is left out. Without patterns, a function is a zoo of
    the one model that it returns.

    Raises ValueError for an unknown loader and for a pattern that matches no checkpoint.
    """
    known = _format(loader)
    if not patterns:
        if known is not None:
            raise ValueError(f"The loader {loader!r} needs patterns that say which checkpoints to read.")
        return (Checkpoint(loader, None, loader),)
    folder = expanded(base)
    found = {path for pattern in patterns for path in _matches(pattern, folder, loader, known)}
    paths = sorted(found, key=lambda path: [_natural(part) for part in _relative(path, folder).parts])
    return tuple(Checkpoint(name, path, loader) for name, path in zip(_names(paths, folder), paths, strict=True))


def load_checkpoint(checkpoint: Checkpoint, *, cache: str | Path | None = None) -> nn.Module:
    """Load the model of a checkpoint, in eval mode, in the dtype it was stored in, but at least in float32.

    `cache` is where conversions (of TensorFlow checkpoints) are kept; by default they lie beside their source. Nothing
    is unpickled or downloaded. Raises ValueError in one sentence that names the file, ImportError if an optional
    package is wanted.
    """
    known = _format(checkpoint.loader)
    if known is None:
        model = call_module(checkpoint.loader, *([] if checkpoint.path is None else [checkpoint.path]))
    elif checkpoint.path is None:
        raise ValueError(f"{checkpoint.name} has no path, which the loader {checkpoint.loader!r} needs.")
    else:
        try:
            model = known.load(checkpoint.path, None if cache is None else expanded(cache))
        except OSError as error:
            raise ValueError(f"{shown(checkpoint.path)} cannot be read: {first_line(error)}") from error
    tensors = (*model.parameters(), *model.buffers())
    precise = all(tensor.dtype.itemsize >= 4 for tensor in tensors if tensor.is_floating_point())
    return (model if precise else model.float()).eval()


def _format(loader: str) -> _Format | None:
    """Return the format that a loader reads; None for a function of the user's."""
    if loader not in _FORMATS and ":" not in loader:
        raise ValueError(
            f"The loader must be one of {', '.join(_FORMATS)}, or package.module:function; found {loader!r}."
        )
    return _FORMATS.get(loader)


def _matches(pattern: str, folder: Path, loader: str, known: _Format | None) -> list[Path]:
    pattern = os.path.expanduser(pattern)
    literal = folder / pattern  # tried first, for a name may hold brackets
    names = [pattern] if literal.exists() else glob.glob(pattern, root_dir=folder, recursive=True)
    paths = [Path(os.path.normpath(folder / name)) for name in names]
    if not paths:
        raise ValueError(f"The pattern {pattern!r} matches nothing in {shown(folder)}.")
    if known is None:
        return paths
    checkpoints = [found for path in paths if (found := known.checkpoint_of(path)) is not None]
    if not checkpoints:
        raise ValueError(
            f"The pattern {pattern!r} matches no checkpoint in {shown(folder)}: {loader} reads {known.wanted}, and "
            f"this matches {shown(paths[0].name)}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}."
        )
    return checkpoints


def _natural(text: str) -> tuple[list[str | int], str]:
    """Return a sort key in which numbers count as numbers: words and numbers take turns, so like meets like."""
    pieces = re.split(r"([0-9]+)", text)
    return [int(piece) if place % 2 else piece for place, piece in enumerate(pieces)], text


def _names(paths: list[Path], folder: Path) -> list[str]:
    """Return for each path the shortest name of its own: the file's, the relative path, that with its ending."""
    relative = [_relative(path, folder) for path in paths]
    bare = [place.with_suffix("") if path.is_file() else place for path, place in zip(paths, relative, strict=True)]
    names, places = [shown(place.name) for place in bare], [shown(place.as_posix()) for place in bare]
    named, placed = Counter(names), Counter(places)
    return [
        name if named[name] == 1 else place if placed[place] == 1 else shown(whole.as_posix())
        for name, place, whole in zip(names, places, relative, strict=True)
    ]


def _relative(path: Path, folder: Path) -> Path:
    return Path(os.path.relpath(path, folder))
