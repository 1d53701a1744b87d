"""Write files and directories atomically, try places before work begins, and say in one sentence what fails.

What is written is made in a hidden folder beside its target, and moved there when all of it is on disk.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

HIDDEN = ".unfinished-"  # the beginning of the name of a folder in which a file or a directory is written


# What a mistake in a program raises, and no disk: it stays what it is.
DEFECTS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError)


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turn whatever is raised while `path` is written, inside, into an OSError that names it.

    Writers have errors of their own kinds (`SafetensorError` on a full disk, RuntimeError for a link to itself). A pipe
    whose reader has left stays a BrokenPipeError.
    """
    try:
        yield
    except (BrokenPipeError, *DEFECTS):
        raise
    except Exception as error:
        kind = type(error) if isinstance(error, OSError) and type(error).__module__ == "builtins" else OSError
        reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
        raise kind(f"Cannot write {path}: {reason or type(error).__name__}") from error


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Yield a path of the target's name in a new hidden folder beside it, which is removed with all that is left."""
    parent = target.absolute().parent
    with tempfile.TemporaryDirectory(dir=parent, prefix=HIDDEN, ignore_cleanup_errors=True) as folder:
        yield Path(folder) / target.name


def _is_file(path: Path) -> bool:
    """Return whether a file is to be made or replaced at `path`, and not a device or a pipe written to as it is."""
    return os.path.isfile(path) or not os.path.exists(path)


def _target(path: Path) -> Path:
    """Return the file that a link leads to, or the path itself."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return target


def _check_outside(path: Path, inputs: Iterable[Path | str]) -> None:
    target, *places = map(os.path.realpath, (path, *map(expanded, inputs)))
    if any(Path(target).is_relative_to(each) for each in places):
        raise ValueError(f"Cannot write {path}: it must not be in an input.")


def check_file(path: Path, *inputs: Path | str) -> None:
    """Raise OSError unless a file can be written at `path`: an empty one is made beside it, and removed.

    ValueError if it would lie in one of the inputs, files or directories.
    """
    _check_outside(path, inputs)
    with writing(path):
        if os.path.isdir(path):
            raise IsADirectoryError("it is a directory")
        if not _is_file(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        with _beside(_target(path)) as unfinished:
            unfinished.touch()


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a name to write to; what was written is at `path` when all of it is on disk: nobody meets half of it.

    A file that is there keeps its mode, a link stays and what it points to is replaced. A device or a pipe is written
    to as it is, also by a link to it such as /dev/stdout. Raises OSError, also for what is raised inside.
    """
    with writing(path):
        if not _is_file(path):
            yield path
            return
        target = _target(path)
        with _beside(target) as unfinished:
            yield unfinished
            with unfinished.open("rb+") as file:
                os.fsync(file.fileno())
            if target.exists():
                unfinished.chmod(stat.S_IMODE(target.stat().st_mode))
            os.replace(unfinished, target)


def write_text(path: Path, text: str) -> None:
    """Write the text as UTF-8, whole, its line ends as they are."""
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="")


def check_new(directory: Path, *inputs: Path | str) -> None:
    """Raise OSError unless a directory can be made: an empty one is made beside it, and removed.

    ValueError if it exists, if the one above it does not, or if it would lie in one of the inputs.
    """
    parent = directory.absolute().parent
    if os.path.lexists(directory) or not parent.is_dir():
        problem = f"there is no directory {parent}" if not parent.is_dir() else "it exists already"
        raise ValueError(f"{directory} must be a new directory. Found that {problem}.")
    _check_outside(directory, inputs)
    with writing(directory), _beside(directory) as unfinished:
        unfinished.mkdir()


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory, which is at `path` when all is written, or not at all. Raises what `check_new` does.

    What is written inside is to be written in `writing`: other things may be done there, such as reading it again.
    """
    check_new(path)
    with ExitStack() as stack:
        with writing(path):
            unfinished = stack.enter_context(_beside(path))
            unfinished.mkdir()
        yield unfinished
        with writing(path):
            unfinished.rename(path)


def expanded(path: Path | str) -> Path:
    """Return the path with ~ replaced by a home directory; that of an unknown user stays as it is written."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"A path must be text. Found {path!r}")
    return Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown user
