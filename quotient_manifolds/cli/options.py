"""Define the options that several commands share, and check the files that they write.

Nothing here or in a command's module imports torch before the command runs: help is to come at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from quotient_manifolds.cli.errors import BadInput, first_sentence
from quotient_manifolds.files import is_special

if TYPE_CHECKING:
    import torch

EXIT_CODES = """\b
Exit codes:
  0    done
  1    done, with a negative finding (such as a symmetry that is not proved)
  2    bad usage or bad input; one sentence on standard error says which
  70   a defect of this program
  130  interrupted
  141  whoever read the output has left, as in `| head -1`; files are written
"""

LANGUAGE = ("causal", "masked", "seq2seq")  # tasks of language models, as `load` calls them

Function = TypeVar("Function", bound=Callable[..., Any])


def command(function: Callable[..., Any]) -> click.Command:
    """Make a command of a function that click's options decorate, named like it."""
    return click.command(epilog=EXIT_CODES)(function)


def _usable_device(context: click.Context, parameter: click.Parameter, value: str) -> torch.device:
    import torch

    try:
        device = torch.device(value)
        float(torch.zeros(1, device=device))  # meta has no numbers
    except Exception as error:  # of torch and its backends: a dozen kinds
        raise click.BadParameter(f"{value!r} cannot be used here: {first_sentence(error)}") from error
    return device


def _torch_dtype(context: click.Context, parameter: click.Parameter, value: str) -> Any:
    import torch

    return getattr(torch, value)


quiet_option = click.option("--quiet", is_flag=True, help="Print nothing but errors.")


def out_option(default: str) -> Callable[[Function], Function]:
    """Return the option --out, the directory that a command writes to."""
    place = click.Path(path_type=Path, file_okay=False)
    return click.option("--out", type=place, default=Path(default), show_default=True, help="Directory.")


device_option = click.option(
    "--device", default="cpu", show_default=True, callback=_usable_device, help="cpu, cuda, cuda:1, ..."
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(("float32", "float64")),
    callback=_torch_dtype,
    default="float32",
    show_default=True,
    help="Precision the model runs in.",
)
seed_option = click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of all draws."
)
symmetries_option = click.option(
    "--symmetries",
    metavar="all|pairs|paper|PACKAGE.MODULE:FUNCTION",
    help="Which of the model's symmetries: all, pairs (with needless biases) or paper (pairs with biases as rows); or "
    "a function of the model that declares them.  [default: all]",
)
inputs_option = click.option(
    "--inputs",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="A function that returns inputs of the model, instead of those made from its configuration.",
)
report_option = click.option(
    "--report", type=click.Path(path_type=Path), help="Write a page to read in a browser to this .html file."
)


def common_options(function: Function) -> Function:
    """Add --seed, --device, --dtype and --quiet."""
    for option in (quiet_option, dtype_option, device_option, seed_option):
        function = option(function)
    return function


def check_outputs(inputs: list[str | None], /, quiet: bool = False, **files: Path | None) -> None:
    """Refuse, before hours of measuring, results that could not be written, replace an input, or share one file.

    files: by the name of their option; where all is `quiet` there must be one. Raises BadInput.
    """
    if quiet and not any(files.values()):
        *others, last = (f"--{name}" for name in files)
        where = f"{', '.join(others)} or {last}"
        raise BadInput(f"With --quiet nothing is printed, so the results would be lost: give {where}.")
    seen: dict[str, str] = {}
    for name, file in files.items():
        if file is None:
            continue
        check_writable(file, *inputs)
        if not is_special(file) and (other := seen.setdefault(os.path.realpath(file), name)) != name:
            raise BadInput(f"--{other} and --{name} name the same file, {file}.")


def check_writable(file: Path, *inputs: str | Path | None) -> None:
    """Refuse a file that cannot be written, or that is one of the inputs or part of one."""
    if is_special(file):
        if not os.access(file, os.W_OK):
            raise BadInput(f"Cannot write {file}: it is not open for writing.")
        return
    target = Path(os.path.realpath(file))  # a link stays, and what it leads to is written
    if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise BadInput(
            f"Cannot write {file}: expected the name of a file in a directory that exists and can be written."
        )
    if target.exists():
        for each in [str(given) for given in inputs if given]:
            here = Path(os.path.realpath(os.path.expanduser(each)))
            if target == here or here in target.parents or (here.exists() and target.samefile(here)):
                raise BadInput(f"Cannot write {file}: it is {'part of ' * (target != here)}the input {each}.")
