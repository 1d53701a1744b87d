"""Hash everything that determines a value: code, model and its outputs, batch, and files before they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.batches import taken_apart
from quotient_manifolds.geometry import Euclidean
from quotient_manifolds.load.adapters import base_of
from quotient_manifolds.sharpness import Loss
from quotient_manifolds.sharpness.data_checks import ALL_CHECKS, data_checks
from quotient_manifolds.sharpness.objective import BatchObjective, autograd_available
from quotient_manifolds.symmetries import Evaluate
from quotient_manifolds.symmetries.outputs import ModelOutputs
from quotient_manifolds.symmetries.verify import jittered


@dataclass(frozen=True)
class Identity:
    """Hold hashes of everything that determines the values of a checkpoint, and the notes on them by split.

    code: hashes from `code_imported`. model: its hash. batches: by split, for each batch its hash and the text of
    `computed`.
    """

    code: Mapping[str, str]
    model: str
    batches: Mapping[str, Sequence[str]]
    notes: Mapping[str, Sequence[str]]


def model_hash(model: nn.Module) -> str:
    """Return the SHA-256 of a model's printed modules, the names of its frozen parameters, and its whole state.

    The state is name, shape, dtype and bytes of every parameter and buffer. Code is hashed separately, and `computed`
    covers anything else that changes the outputs.
    """
    frozen = [name for name, w in model.named_parameters() if not w.requires_grad]
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return hashed([repr(model), repr(frozen)], state)


def computed(model: nn.Module, evaluate: Evaluate, loss: Loss, batch: Any) -> str:
    """Return numbers, as text, that differ between models with equal weights but different outputs.

    Such models may differ in a file that the code reads, a tensor that is not a buffer, or a hook. The numbers are
    evaluate(model, batch) in float64, at the weights and at a 1 % perturbation (a head of zeros hides differences), and
    the loss and its gradient norm as measures compute them. "nothing" stands for numbers that cannot be computed; the
    measures report why. Digits are few, as more may depend on the machine.
    """

    def outputs() -> str:
        found = ModelOutputs(model, [batch], evaluate)
        with torch.no_grad():
            points = (found.params(), jittered(found.params(), 0))
            return " ".join(f"{found.value(params, 0):.5e}" for params in points)

    def slope() -> str:
        with autograd_available():
            objective = BatchObjective(model, loss, Euclidean().tangent_space(model), batch)
            value, gradient = objective.value_and_gradient(objective.zero())
            norm = sum(float(each.double().square().sum()) for each in gradient.values()) ** 0.5
            return f"{value:.3e} {norm:.3e}"

    return f"{_alike(outputs)} {_alike(slope)}"


def _alike(work: Callable[[], str]) -> str:
    """Return work(), or "nothing" if it raises; a fixed seed and a single thread make it reproducible."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(), data_checks(ALL_CHECKS):
            torch.manual_seed(0)
            return work()
    except Exception:  # the user's model may raise anything
        return "nothing"
    finally:
        torch.set_num_threads(threads)


def batch_hash(batch: Any) -> str:
    """Return the SHA-256 of a batch: its structure, and name, shape, dtype and bytes of every tensor in it."""
    found = list(taken_apart(batch))
    tensors = {path: leaf for path, leaf in found if isinstance(leaf, Tensor)}
    others = [f"{path}: {leaf!r}" for path, leaf in found if not isinstance(leaf, Tensor)]
    return hashed(others, tensors)


def files_in(folder: Path) -> list[Path]:
    """Return the files directly in a folder, sorted by name; an empty list if the folder does not exist."""
    return sorted(each for each in folder.iterdir() if each.is_file()) if folder.is_dir() else []


def files_fingerprint(path: Path | None, listed: Callable[[Path], list[Path]] = files_in) -> str:
    """Return the SHA-256 of path, size, mtime, ctime and inode of a checkpoint's files; unchanged if no file changed.

    Copies and archives may set the modification time (mtime), but not the change time of the inode (ctime). For a file,
    all files beside it whose names begin with its stem count, too. For a directory, its files count, and for an adapter
    also the files of the base model. listed: `files_in`, or a cached version for folders with many checkpoints.
    """
    if path is None:
        return "no files"
    if path.is_dir():
        found = [each for folder in (path, base_of(path)) if folder is not None for each in listed(folder)]
    else:
        found = [each for each in listed(path.parent) if each.name.startswith(path.stem)]
    stats = [(each, each.stat()) for each in found]
    seen = [f"{each} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}" for each, stat in stats]
    return hashed([str(path), *seen])


def hashed(texts: Iterable[str], tensors: Mapping[str, Tensor] | None = None) -> str:
    """Return the SHA-256 of texts and of tensors with their names."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)}:{text}".encode(errors="surrogateescape"))  # file names may not be valid text
    for name, tensor in (tensors or {}).items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
