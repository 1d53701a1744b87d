"""Move a model on disk to another with the same function, for testing any measure for invariance."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quotient_manifolds.cli.errors import BadInput
from quotient_manifolds.cli.options import command, inputs_option, quiet_option, symmetries_option
from quotient_manifolds.cli.terminal import Terminal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quotient_manifolds.symmetries import Params, Symmetries

MARGIN = 100.0  # how often the moved model may change by what rounding its own weights once more does to it
WEIGHTS = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt"),
    *("*.h5", "*.msgpack", "*.onnx", "*.gguf"),
)


@command
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--balance", "balanced", is_flag=True, help="To the canonical representative instead of a random one.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="Of the random group elements.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random group elements.")
@inputs_option
@symmetries_option
@quiet_option
def move(
    source: str,
    target: Path,
    balanced: bool,
    scale: float,
    seed: int,
    inputs: str | None,
    symmetries: str | None,
    quiet: bool,
) -> None:
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
    from quotient_manifolds.cli.subject import inputs_for, model_named, symmetries_of
    from quotient_manifolds.symmetries import balance, prove_symmetries, random_move

    network = model_named(source)
    with inputs_for(network, inputs, seed=seed) as given:
        found = symmetries_of(network, given, symmetries)
        if not found.moved:
            raise BadInput(f"{source} ({type(network).__name__}) has no known symmetry to move it along.")
        proved = prove_symmetries(network, given, found, seed=seed).proved(found)
    if not proved.moved:
        raise BadInput(f"No symmetry of {source} ({type(network).__name__}) is proved; `inspect` tells why.")
    moved = balance(network, proved) if balanced else random_move(network, proved, scale=scale, seed=seed)
    with inputs_for(network, inputs, seed=seed) as given:
        change = _change(network, given, moved, proved, seed)
    _write(network, moved, Path(source), target)
    if not quiet:
        count = (
            f"{len(proved.pairs)} pairs, {len(proved.translations)} translations and {len(proved.freedoms)} freedoms"
        )
        Terminal().show(f"{target}: {count} moved; the output changed by {change:.1e} of its size.")


def _change(network: nn.Module, given: Any, moved: Params, symmetries: Symmetries, seed: int) -> float:
    """Return the change of the output by the move. Raises BadInput if it is more than rounding explains."""
    from quotient_manifolds.symmetries import output_change

    rounded = {name: _rounded(moved[name], seed) for name in symmetries.moved}
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
    """Return the weights, each off by half a unit in its last place, up or down at random."""
    import torch

    drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return value.double() * (1 + drawn.sign().to(value.device) * torch.finfo(value.dtype).eps / 2)


def _write(network: nn.Module, moved: Mapping[str, Tensor], source: Path, target: Path) -> None:
    """Write the directory beside OUT, read it again, and rename it, so that OUT is complete or not there."""
    from quotient_manifolds.load import load_model
    from quotient_manifolds.messages import first_line

    network.load_state_dict(dict(moved), strict=False)  # buffers stay
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=f".{target.name}.") as folder:
        fresh = Path(folder) / target.name
        saved: Any = network
        try:
            saved.save_pretrained(fresh)
        except Exception as error:  # of transformers: a dozen kinds
            raise BadInput(f"{type(network).__name__} does not save: {first_line(error)}; nothing written.") from error
        # Everything but weights, which are the old ones; the original's config.json replaces the one just saved.
        shutil.copytree(source, fresh, ignore=shutil.ignore_patterns(*WEIGHTS, ".*"), dirs_exist_ok=True)
        read = dict(load_model(fresh).named_parameters())
        for name, value in moved.items():
            if name not in read or read[name].dtype != value.dtype or not read[name].equal(value):
                raise BadInput(f"{target} would not hold {name} as it was moved: nothing written.")
        fresh.rename(target)
