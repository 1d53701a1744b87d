"""Hashes of what decides a number: the weights of a model, and the tensors of a batch."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

SHARED = ("vocab.txt", "bert_config.json")  # of several checkpoints, in a directory of theirs


def model_hash(model: nn.Module) -> str:
    """SHA-256 of the model's class and configuration, and of name, shape, dtype and bytes of its whole state."""
    config: Any = getattr(model, "config", None)
    settings = json.loads(config.to_json_string()) if callable(getattr(config, "to_json_string", None)) else {}
    for passing in ("transformers_version", "_name_or_path"):  # who wrote it, and where it lies
        settings.pop(passing, None)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    frozen = [name for name, w in model.named_parameters() if not w.requires_grad]
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return _hash([kind, json.dumps(settings, sort_keys=True), repr(frozen)], state)


def batch_hash(batch: Any) -> str:
    """SHA-256 of a batch: its structure, and name, shape, dtype and bytes of every tensor in it."""
    leaves, structure = tree_flatten_with_path(batch)
    tensors = {repr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
    others = [f"{path!r}: {leaf!r}" for path, leaf in leaves if not isinstance(leaf, Tensor)]
    return _hash([str(structure), *others], tensors)


def files_fingerprint(path: Path | None) -> str:
    """SHA-256 of name, size and time of change of a checkpoint's files: what tells, unread, that none has changed.

    Those of a file are also all beside it that share its stem; of a directory, the files in it (not below, where
    conversions lie). And what a checkpoint may take from the directory it is in, or the one above.
    """
    if path is None:
        return "no files"
    found = set(path.glob("*") if path.is_dir() else path.parent.glob(f"{glob.escape(path.stem)}*"))
    found |= {folder / name for folder in path.parents[:2] for name in SHARED}
    stats = [(str(each), each.stat()) for each in sorted(found) if each.is_file()]
    return _hash([f"{path} {name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats], {})


def _hash(texts: Iterable[str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)}:{text}".encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
