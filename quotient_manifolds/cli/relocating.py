"""What `move` does, once its options are read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.cli.options import BadInput, console
from quotient_manifolds.cli.proving import prove_with_inputs, symmetries_of
from quotient_manifolds.cli.subject import inputs_of, model_named, taking
from quotient_manifolds.load import first_line, load_model
from quotient_manifolds.symmetries import Params, Symmetries, balance, output_change, random_move

MARGIN = 100.0  # how often the moved model may change by what rounding its own weights once more does to it
WEIGHTS = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt"),
    *("*.h5", "*.msgpack", "*.onnx", "*.gguf"),
)


def relocate(
    *,
    source: str,
    target: Path,
    balanced: bool,
    scale: float,
    seed: int,
    inputs: str | None,
    symmetries: str | None,
    quiet: bool,
) -> None:
    """Write the moved model to a new directory."""
    if target.exists():
        raise BadInput(f"{target} is there already; give a new directory.")
    if not target.absolute().parent.is_dir():
        raise BadInput(f"{target.absolute().parent} is no directory to write {target.name} into.")
    if not Path(source).is_dir():
        raise BadInput(f"Expected a Hugging Face directory to move, found {source}.")
    network = model_named(source)
    found = _proved(network, symmetries, inputs, seed, source)
    moved = balance(network, found) if balanced else random_move(network, found, scale=scale, seed=seed)
    change = _check(network, moved, found, inputs, seed)
    _write(network, moved, Path(source), target)
    if not quiet:
        count = f"{len(found.pairs)} pairs and {len(found.translations)} translations"
        console(quiet=False).print(f"{target}: {count} moved; the output changed by {change:.1e} of its size.")


def _proved(network: nn.Module, symmetries: str | None, inputs: str | None, seed: int, source: str) -> Symmetries:
    found = symmetries_of(network, symmetries)
    if not found.pairs and not found.translations:
        raise BadInput(f"{source} ({type(network).__name__}) has no known symmetry to move it along.")
    proved = prove_with_inputs(network, inputs, found, seed).proved(found)
    if not proved.pairs and not proved.translations:
        raise BadInput(f"No symmetry of {source} ({type(network).__name__}) is proved; `inspect` tells why.")
    return proved


def _check(network: nn.Module, moved: Params, symmetries: Symmetries, inputs: str | None, seed: int) -> float:
    """The change of the output by the move; BadInput if it is more than rounding the moved weights explains."""
    rounded = {name: _rounded(moved[name], seed) for name in symmetries.moved}
    given = inputs_of(network, inputs, seed=seed)
    with taking(network, inputs):
        change = output_change(network, given, {}, moved)
        noise = output_change(network, given, moved, moved | rounded)
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
