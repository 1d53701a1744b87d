"""Hash what decides a number: a model, the tensors of a batch, and what the one computes of the other."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from quotient_manifolds.load.adapters import base_of
from quotient_manifolds.symmetries import Evaluate
from quotient_manifolds.symmetries.verify import BatchLosses, jittered


def model_hash(model: nn.Module) -> str:
    """Return the SHA-256 of all that decides what a model computes, as far as it can be read.

    The classes of its modules and their plain attributes (numbers, text); its configuration; name, shape, dtype and
    bytes of its whole state. What it calls, and what else it holds, `computed` tells.
    """
    config: Any = getattr(model, "config", None)
    settings = json.loads(config.to_json_string()) if callable(getattr(config, "to_json_string", None)) else {}
    for passing in ("transformers_version", "_name_or_path"):  # who wrote it, and where it lies
        settings.pop(passing, None)
    modules = [f"{name}: {type(module)} {_settings(module)}" for name, module in model.named_modules()]
    frozen = [name for name, w in model.named_parameters() if not w.requires_grad]
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return _hash([*modules, json.dumps(settings, sort_keys=True), repr(frozen)], state)


def _settings(module: nn.Module) -> str:
    """Return its plain attributes, but for private ones, of which nobody knows what they say."""
    own = {key: value for key, value in vars(module).items() if not key.startswith("_") and key != "name_or_path"}
    return repr(sorted((key, repr(value)) for key, value in own.items() if _plain(value)))


def _plain(value: Any) -> bool:
    """Return whether a value is a number, a text, or a list of such."""
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def computed(model: nn.Module, evaluate: Evaluate, batch: Any) -> str:
    """Return evaluate(model, batch) in float64, at the weights and 1 % beside them, as text of 6 digits; or "nothing".

    It tells models apart that hold alike weights and yet compute different things, whatever decides that: a function
    that is called, a tensor that is no buffer, a hook. Beside the weights it shows what these hide, as a head of zeros
    does. More digits than 6 may depend on the machine. What is random draws alike each time.
    """
    losses = BatchLosses(model, evaluate, [batch])
    with torch.no_grad(), torch.random.fork_rng(), _one_thread():
        try:
            torch.manual_seed(0)
            return " ".join(
                f"{losses.value(params, 0):.5e}" for params in (losses.params(), jittered(losses.params(), 0))
            )
        except Exception:  # the model is the user's; the measures say what is wrong
            return "nothing"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Add in one order, however many threads there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def batch_hash(batch: Any) -> str:
    """Return the SHA-256 of a batch: its structure, and name, shape, dtype and bytes of every tensor in it."""
    leaves, structure = tree_flatten_with_path(batch)
    tensors = {repr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
    others = [f"{path!r}: {leaf!r}" for path, leaf in leaves if not isinstance(leaf, Tensor)]
    return _hash([str(structure), *others], tensors)


def files_fingerprint(path: Path | None) -> str:
    """Return the SHA-256 of name, size, times of change and inode of a checkpoint's files: as before if none changed.

    The time of modification can be set, as copies and archives do; that of the inode (ctime) cannot.

    Those of a file are also all beside it that begin with its stem; of a directory, the files in it (not below), and in
    that of the base model if it is an adapter's.
    """
    if path is None:
        return "no files"
    folders = [path, *filter(None, [base_of(path)])] if path.is_dir() else []
    beside = path.parent.glob(f"{glob.escape(path.stem)}*")
    found = sorted(each for folder in folders for each in folder.glob("*")) if folders else sorted(beside)
    stats = [(each, each.stat()) for each in found if each.is_file()]
    seen = [f"{each} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}" for each, stat in stats]
    return _hash([str(path), *seen], {})


def _hash(texts: Iterable[str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)}:{text}".encode(errors="surrogateescape"))  # names of files need not be text
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
