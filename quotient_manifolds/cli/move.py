"""Move a model on disk to another with the same function, for testing any measure for invariance."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quotient_manifolds.cli import common

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quotient_manifolds.symmetries import Params, Symmetries

MARGIN = 100.0  # how often the rounding noise of the output the moved model may change it, in float64
NOISE = 1e-12  # of the output, at least
DRAWS = 4  # of example inputs that nothing was found on, which the written model is compared on
WEIGHTS = ("safetensors", "index.json", "bin", "pt", "pth", "ckpt", "h5", "msgpack", "onnx", "gguf")


@common.command
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--balance", "balanced", is_flag=True, help="To the canonical representative instead of a random one.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="Of the random group elements.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random group elements.")
@click.option(
    "--inputs",
    metavar="PACKAGE.MODULE:FUNCTION",
    multiple=True,
    help="A function that returns inputs on which the function is to stay, beside those made from the model's "
    "configuration; may be given several times.",
)
@common.symmetries_option
@common.quiet_option
def move(
    source: str,
    target: Path,
    balanced: bool,
    scale: float,
    seed: int,
    inputs: tuple[str, ...],
    symmetries: str | None,
    quiet: bool,
) -> None:
    """Move the Hugging Face model in IN along its symmetry orbit and write it to the new directory OUT.

    The weights become others, of the same dtype; the function stays the same up to rounding on the inputs given: text,
    images or sound made from the model's configuration, with and without the optional inputs that it tells of (token
    types, padding, masked patches), and --inputs. Symmetries that parameters which ran on none of them (experts, heads)
    may depend on are left out. What is written is read again and compared on other example inputs before OUT is there.
    Files beside the weights, such as a tokenizer, are copied.
    """
    common.check_new(target)
    if not Path(source).is_dir():
        raise common.BadInput(f"Expected a Hugging Face directory to move, found {source}.")
    from quotient_manifolds.cli.subject import ALONE, all_inputs, examples, symmetries_of
    from quotient_manifolds.load import load_model
    from quotient_manifolds.symmetries import balance, prove_symmetries, random_move

    network = load_model(source)
    given = all_inputs(network, inputs, seed=seed)
    first, *others = given.values()
    found = symmetries_of(network, first, symmetries, *others)
    kind = f"{source} ({type(network).__name__})"
    if not found.moved:
        raise common.BadInput(f"{kind} has no known symmetry to move it along{_why(found)}.")
    proved = prove_symmetries(network, first, found, seed=seed).proved(found)
    if not proved.moved:
        raise common.BadInput(f"No symmetry of {kind} is verified; `inspect` says why.")
    params = {name: w.detach().double() for name, w in network.named_parameters()}
    moved = balance(params, proved) if balanced else random_move(params, proved, scale=scale, seed=seed)
    unseen = examples(network, seed=seed + 1, draws=DRAWS) if ALONE in given else {}
    held_out = {name: unseen.get(name, one) for name, one in given.items()}
    change = _written(network, moved, held_out, Path(source), target)
    if not quiet:
        count = (
            f"{len(proved.pairs)} pairs, {len(proved.translations)} translations and {len(proved.freedoms)} freedoms"
        )
        common.Terminal().show(f"{target}: {count} moved; the output changed by {change:.1e} of its size.")
        if found.refused:
            common.Terminal().show(f"{len(found.refused)} more are refused{_why(found)}.")


def _why(symmetries: Symmetries) -> str:
    return f", the first one, {symmetries.refused[0]}" if symmetries.refused else ""


def _written(network: nn.Module, moved: Params, held_out: Mapping[str, Any], source: Path, target: Path) -> float:
    """Write the moved model to the directory OUT, and return how much it changes the output on held-out inputs.

    It is written beside OUT, read again, compared and renamed, so that OUT is complete or not there. Raises BadInput
    where something but rounding changes the output.
    """
    from quotient_manifolds.load import load_model
    from quotient_manifolds.symmetries.outputs import ModelOutputs

    before = {what: _unchanged(network, moved, what, one) for what, one in held_out.items()}
    stored = {name: moved[name].to(w.dtype) for name, w in network.named_parameters()}
    network.load_state_dict(stored, strict=False)  # buffers stay
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=f".{target.name}.") as folder:
        fresh = Path(folder) / target.name
        saved: Any = network
        saved.save_pretrained(fresh)
        # Everything but weights, which are the old ones; the original's config.json replaces the one just saved.
        ignored = shutil.ignore_patterns(*(f"*.{each}" for each in WEIGHTS), ".*")
        shutil.copytree(source, fresh, ignore=ignored, dirs_exist_ok=True)
        again = load_model(fresh)
        read = dict(again.named_parameters())
        for name, value in stored.items():
            if name not in read or read[name].dtype != value.dtype or not read[name].equal(value):
                raise common.BadInput(f"{target} would not hold {name} as it was moved: nothing written.")
        change = 0.0
        for what, one in held_out.items():
            here = ModelOutputs(again, one)
            here.outputs = before[what]
            change = max(change, here.change({}))
        if not change < 0.5:
            raise common.BadInput(
                f"Rounding to {next(iter(stored.values())).dtype} at this scale changes the output by {change:.1e} of "
                "its size: nothing written; choose a scale nearer 1, or another seed."
            )
        fresh.rename(target)
    return change


def _unchanged(network: nn.Module, moved: Params, what: str, inputs: Any) -> list[Tensor]:
    """Return the output of a model, in float64. Raises BadInput if the moved parameters change it beyond rounding."""
    import torch

    from quotient_manifolds.symmetries.outputs import ModelOutputs

    here = ModelOutputs(network, inputs)
    found, change = here.outputs, here.change({name: value.clone() for name, value in moved.items()})
    noise = here.rounding_noise(moved, torch.Generator().manual_seed(0))
    here.compare_with(moved)
    noise = max(noise, here.rounding_noise(moved, torch.Generator().manual_seed(0)), NOISE)
    if not change <= MARGIN * noise:
        raise common.BadInput(
            f"The moved model must compute the same on inputs that its symmetries were not found on. Found a change by "
            f"{change:.1e} on {what}: nothing written; give inputs that show the difference by --inputs."
        )
    return found
