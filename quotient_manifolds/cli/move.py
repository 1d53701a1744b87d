"""Move a model on disk to another with the same function, for testing any measure for invariance."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quotient_manifolds.cli import common

if TYPE_CHECKING:
    from quotient_manifolds.symmetries import Symmetries


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
    from quotient_manifolds.cli.subject import ALONE, DRAWS, all_inputs, examples, symmetries_of, write_moved
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
    change = write_moved(network, moved, held_out, Path(source), target)
    if not quiet:
        count = (
            f"{len(proved.pairs)} pairs, {len(proved.translations)} translations and {len(proved.freedoms)} freedoms"
        )
        common.Terminal().show(f"{target}: {count} moved; the output changed by {change:.1e} of its size.")
        if found.refused:
            common.Terminal().show(f"{len(found.refused)} more are refused{_why(found)}.")


def _why(symmetries: Symmetries) -> str:
    return f", the first one, {symmetries.refused[0]}" if symmetries.refused else ""
