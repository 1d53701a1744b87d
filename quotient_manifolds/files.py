"""Write files and directories atomically, and check targets before work begins, with errors that name the path.

Content is written in a hidden folder beside its target, and moved there when all of it is on disk.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

HIDDEN = ".unfinished-"  # prefix of the folder in which a file or a directory is written

# A mistake in a program raises these, a disk never does, so they are not turned into an OSError.
DEFECTS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError)


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turn any error raised inside while `path` is written into an OSError that names it.

    Writers raise types of their own (`SafetensorError` on a full disk, RuntimeError for a link to itself). A
    BrokenPipeError, of a pipe whose reader has exited, is unchanged.
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
    """Yield a path with the target's name in a new hidden folder beside it, which is removed at the end."""
    parent = target.absolute().parent
    with tempfile.TemporaryDirectory(dir=parent, prefix=HIDDEN, ignore_cleanup_errors=True) as folder:
        yield Path(folder) / target.name


def _is_file(path: Path) -> bool:
    """Return whether `path` is a regular file or does not exist, rather than a device or a pipe."""
    return os.path.isfile(path) or not os.path.exists(path)


def _target(path: Path) -> Path:
    """Return the file that a link leads to, or the path itself."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return target


def _check_outside(path: Path, inputs: Iterable[Path | str]) -> None:
    target, *sources = map(os.path.realpath, (path, *map(expanded, inputs)))
    for source in sources:
        if Path(target).is_relative_to(source):
            raise ValueError(f"{path} must not be in an input. Found it in {source}; write to another place")


def check_file(path: Path, *inputs: Path | str) -> None:
    """Raise OSError unless a file can be written at `path`, by creating an empty one beside it and removing it.

    Raises ValueError if the file would be in one of the inputs, which are files or directories.
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
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to, and move its content to `path` atomically when all of it is on disk.

    An existing file keeps its mode. A link is kept, and the file that it points to is replaced. A device or a pipe is
    written to directly, also through a link such as /dev/stdout. Raises OSError for any error inside.
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
    """Write the text atomically as UTF-8, with its line ends unchanged."""
    with atomic_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="")


def check_new(directory: Path, *inputs: Path | str) -> None:
    """Raise OSError unless a directory can be created, by creating an empty one beside it and removing it.

    Raises ValueError if it exists, if its parent does not, or if it would be in one of the inputs.
    """
    parent = directory.absolute().parent
    if os.path.lexists(directory) or not parent.is_dir():
        problem = f"there is no directory {parent}" if not parent.is_dir() else "it exists already"
        raise ValueError(f"{directory} must be a new directory. Found that {problem}")
    _check_outside(directory, inputs)
    with writing(directory), _beside(directory) as unfinished:
        unfinished.mkdir()


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory, which is moved to `path` when the block ends without an error, else removed.

    Raises the errors of `check_new`. Write files in it inside a `writing` block; other work, such as reading them
    again, keeps its own errors.
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
    """Return the path with ~ replaced by a home directory, unless the user is unknown."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"A path must be text. Found {path!r}")
    return Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown user
