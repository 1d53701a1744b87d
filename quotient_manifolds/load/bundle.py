"""The one door to tensorflow: the variables of a TensorFlow checkpoint, by name."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, Protocol

from quotient_manifolds.load.listing import beside
from quotient_manifolds.load.names import first_line


class VariableReader(Protocol):
    """What tensorflow reads a checkpoint with."""

    def get_variable_to_shape_map(self) -> dict[str, list[int]]: ...

    def get_tensor(self, name: str) -> Any: ...


def bundle_of(path: Path) -> Path | None:
    """The prefix (dir/model.ckpt-3) of the checkpoint that `path` is a file of, or of the only one in a directory.

    None if there is none, or a directory has several: then one of their .index files has to be named.
    """
    if path.is_dir():
        found = list(path.glob("*.index"))
        return found[0].with_suffix("") if len(found) == 1 else None
    named = re.fullmatch(r"(.+)\.(index|meta|data-\d{5}-of-\d{5})", path.name)
    prefix = path.with_name(named[1]) if named else path
    return prefix if _index(prefix).is_file() else None


def open_bundle(prefix: Path) -> VariableReader:
    """A reader of the checkpoint's variables."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # tensorflow reports on the processor when it is imported
    try:
        from tensorflow import train
    except ImportError as error:
        raise ImportError(
            f'{prefix} is a TensorFlow checkpoint, read by tensorflow: pip install "quotient-manifolds[tensorflow]" '
            "(it is converted once; without tensorflow the conversion is read)."
        ) from error
    try:
        return train.load_checkpoint(str(prefix))
    except Exception as error:  # tensorflow has kinds of its own, which derive from Exception
        raise ValueError(f"{prefix} is no readable TensorFlow checkpoint: {first_line(error)}") from error


def read_variable(reader: VariableReader, name: str, prefix: Path) -> Any:
    """A variable as a numpy array; tensorflow compares it with its checksum."""
    try:
        return reader.get_tensor(name)
    except Exception as error:  # as above, and IndexError for a file that is too short
        raise ValueError(f"{prefix} is damaged: {name} cannot be read: {first_line(error)}") from error


def content_hash(prefix: Path, *also: Path) -> str:
    """What tells the checkpoint from every other, without reading it all: its index holds a checksum of each variable.

    The sizes of its data files count too, and the files `also` with all they hold.
    """
    digest = hashlib.sha256(_index(prefix).read_bytes())
    for file in beside(prefix, f"{prefix.name}.data-"):
        digest.update(os.fsencode(file.name) + f" {file.stat().st_size}\n".encode())
    for file in also:
        digest.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _index(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.index")
