"""quotient-manifolds move: another model with the same function, for testing any measure for invariance."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

from quotient_manifolds.cli.inspect import proof_inputs, prove_with_inputs
from quotient_manifolds.cli.options import EXIT_CODES, BadInput, console, one_sentence_errors
from quotient_manifolds.load import first_line, load_model
from quotient_manifolds.symmetries import Params, Symmetries, balance, find_symmetries, output_change, random_move

MARGIN = 100.0  # how often the moved model may change by what rounding its own weights once more does to it
WEIGHTS = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt"),
    *("*.h5", "*.msgpack", "*.onnx", "*.gguf"),
)


@click.command(epilog=EXIT_CODES)
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--balance", "balanced", is_flag=True, help="To the canonical representative instead of a random one.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="Of the random group elements.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random group elements.")
@click.option("--inputs", metavar="PACKAGE.MODULE:FUNCTION", help="A function that returns inputs for the check.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@one_sentence_errors
def move(source: str, target: Path, balanced: bool, scale: float, seed: int, inputs: str | None, quiet: bool) -> None:
    """Move the Hugging Face model in IN along its symmetry orbit and write it to the new directory OUT.

    The weights become others, of the same dtype; the function stays the same up to rounding, which is checked on
    example inputs before OUT is there. Only symmetries that are proved on these inputs are used. Files beside the
    weights, such as a tokenizer, are copied.
    """
    if target.exists():
        raise BadInput(f"{target} is there already; give a new directory.")
    if not target.absolute().parent.is_dir():
        raise BadInput(f"{target.absolute().parent} is no directory to write {target.name} into.")
    if not Path(source).is_dir():
        raise BadInput(f"Expected a Hugging Face directory to move, found {source}.")
    network = load_model(source)
    symmetries = _proved(network, inputs, seed, source)
    moved = balance(network, symmetries) if balanced else random_move(network, symmetries, scale=scale, seed=seed)
    change = _check(network, moved, symmetries, inputs, seed)
    _write(network, moved, Path(source), target)
    if not quiet:
        count = f"{len(symmetries.pairs)} pairs and {len(symmetries.translations)} translations"
        console(quiet=False).print(f"{target}: {count} moved; the output changed by {change:.1e} of its size.")


def _proved(network: nn.Module, inputs: str | None, seed: int, source: str) -> Symmetries:
    found = find_symmetries(network)
    if not found.pairs and not found.translations:
        raise BadInput(f"{source} ({type(network).__name__}) has no known symmetry to move it along.")
    proved = prove_with_inputs(network, inputs, found, seed).proved(found)
    if not proved.pairs and not proved.translations:
        raise BadInput(f"No symmetry of {source} ({type(network).__name__}) is proved; `inspect` tells why.")
    return proved


def _check(network: nn.Module, moved: Params, symmetries: Symmetries, inputs: str | None, seed: int) -> float:
    """The change of the output by the move; BadInput if it is more than rounding the moved weights explains."""
    rounded = {name: _rounded(moved[name], seed) for name in symmetries.moved}
    change = proof_inputs(network, inputs, seed, lambda given: output_change(network, given, {}, moved))
    noise = proof_inputs(network, inputs, seed, lambda given: output_change(network, given, moved, moved | rounded))
    if not change <= MARGIN * max(noise, 1e-15):
        raise BadInput(f"The moved model should have the same output, but it changes by {change:.1e}: nothing written.")
    if not change < 0.5:
        raise BadInput(
            f"Rounding to {next(iter(moved.values())).dtype} at this scale changes the output by {change:.1e} of its "
            "size: nothing written; choose a scale nearer 1, or another seed."
        )
    return change


def _rounded(value: Tensor, seed: int) -> Tensor:
    """Every weight off by half a unit in its last place, at random."""
    sign = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)).sign().to(value.device)
    return value.double() * (1 + sign * torch.finfo(value.dtype).eps / 2)


def _write(network: nn.Module, moved: Mapping[str, Tensor], source: Path, target: Path) -> None:
    """The whole directory at once, by renaming: OUT is complete or not there."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(moved[name])
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=f".{target.name}.") as folder:
        fresh = Path(folder) / target.name
        saved: Any = network
        try:
            saved.save_pretrained(fresh)
        except Exception as error:  # of transformers: a dozen kinds
            raise BadInput(f"{type(network).__name__} does not save: {first_line(error)}; nothing written.") from error
        _copy_beside(source, fresh)
        _same(load_model(fresh), moved, target)
        fresh.rename(target)


def _copy_beside(source: Path, fresh: Path) -> None:
    """Everything but weights: they are the old ones."""
    ignored = shutil.ignore_patterns(*WEIGHTS, ".*")
    with tempfile.TemporaryDirectory(dir=fresh.parent) as folder:
        beside = Path(shutil.copytree(source, Path(folder) / "beside", ignore=ignored))
        shutil.copytree(beside, fresh, dirs_exist_ok=True)


def _same(read: nn.Module, moved: Mapping[str, Tensor], target: Path) -> None:
    """What was written is what was meant, dtype and all."""
    there = dict(read.named_parameters())
    wrong = [name for name, value in moved.items() if name not in there or not torch.equal(there[name], value)]
    wrong += [name for name, value in moved.items() if name in there and there[name].dtype != value.dtype]
    if wrong:
        raise BadInput(f"{target} would not hold {wrong[0]} as it was moved: nothing written.")
