"""Choose a point of a model's orbit: where weights round or prune better, or nearer to another model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quotient_manifolds.cli import common
from quotient_manifolds.files import check_file, check_new
from quotient_manifolds.report import Table
from quotient_manifolds.version import VERSION

if TYPE_CHECKING:
    from torch import nn

    from quotient_manifolds.orbit.descend import Moved

PURPOSES = (*(f"int{bits}" for bits in range(2, 9)), "sparsity")

out_option = click.option(
    "--out", "target", required=True, type=click.Path(path_type=Path), help="The new directory to write."
)


@common.command
@click.argument("model")
@click.option(
    "--for", "purpose", required=True, type=click.Choice(PURPOSES), help="Round to integers of so many bits, or prune."
)
@click.option("--group-size", type=click.IntRange(min=1), help="Weights that share a step size.  [default: a row]")
@click.option("--clip", is_flag=True, help="Describe a quantiser that clips for the least squared error.")
@click.option("--steps", type=click.IntRange(min=1), default=200, show_default=True, help="Steps of Adam.")
@out_option
@common.more_inputs
@common.quiet_option
def descend(
    model: str, purpose: str, group_size: int | None, clip: bool, steps: int, target: Path, inputs: tuple[str, ...]
) -> None:
    """Write the model in MODEL at a point of its orbit where its weights round or prune better.

    MODEL is a Hugging Face directory. The function stays the same up to rounding to the dtype of the weights, which is
    verified on inputs made from the model's configuration, with and without optional ones, and on --inputs. No data is
    used: the objective is a bound on the error of rounding to nearest, or the L1 norm of the weights. The directory
    loads like MODEL; its orbit.json records what was minimized and verified.
    """
    check_new(target, model)
    if purpose == "sparsity" and (group_size or clip):
        raise common.BadInput("--group-size and --clip describe a quantiser. Found them with --for sparsity.")
    from quotient_manifolds.cli.subject import all_inputs, load_directory
    from quotient_manifolds.orbit import RoundingError, Sparsity, descend_orbit

    bits = purpose.removeprefix("int")
    objective = Sparsity() if purpose == "sparsity" else RoundingError(int(bits), group_size, clip)
    network = load_directory(model)
    given = all_inputs(network, inputs, seed=0)
    first, *others = given.values()
    with common.progress_bars() as progress:
        found = descend_orbit(network, objective, first, held_out=others, steps=steps, progress=progress)
    objectives = {"before": found.before, "after": found.after, "path": found.path}
    change = _written(network, found, given, model, target, {"for": purpose, "objective": objectives})
    common.show(
        f"{target}: the objective for {purpose} fell from {found.before:.4g} to {found.after:.4g}, "
        f"{1 - found.after / found.before:.0%} less, by a group element of condition {found.condition:.0f}; "
        f"the output changed by {change:.1e} of its size."
    )


@common.command
@click.argument("model", metavar="A")
@click.argument("other", metavar="B")
@click.option(
    "--data",
    help=f"{common.DATA} For activations, and the loss along the path.  [default: example inputs, and no loss]",
)
@common.task_option
@common.batch_size_option
@click.option(
    "--examples",
    "max_examples",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Largest number of examples of a file.",
)
@click.option(
    "--refine", type=click.IntRange(min=0), default=0, show_default=True, help="Steps on the loss along the path."
)
@common.figure_option
@out_option
@common.quiet_option
def align(
    model: str,
    other: str,
    data: str | None,
    max_examples: int,
    refine: int,
    figure: Path | None,
    target: Path,
    **settings: Any,
) -> None:
    """Move the model in A along its orbit towards the model in B, and write it.

    A and B are Hugging Face directories of one architecture. The function of A stays the same; its heads, neurons and
    channels take the order and the basis of those of B. With --data the loss along the straight path between the two
    is computed before and after. Models from different seeds become closer, not equal; do not average them.
    """
    check_new(target, model, other)
    if figure is not None:
        check_file(figure, model, other)
    if data is None and (figure or refine):
        raise common.BadInput("--figure and --refine take the loss along the path. Found no --data to compute it on.")
    from quotient_manifolds import orbit
    from quotient_manifolds.cli.subject import all_inputs, load_directory
    from quotient_manifolds.load import data_of
    from quotient_manifolds.sharpness.losses import cross_entropy, inputs_in, next_token_cross_entropy

    network, second = load_directory(model), load_directory(other).double()
    given, precise = all_inputs(network, (), seed=0), copy.deepcopy(network).double()
    loss = next_token_cross_entropy if settings["task"] == "causal" else cross_entropy
    batches, inputs = [], next(iter(given.values()))
    if data is not None:
        named = {name: value for name, value in settings.items() if value is not None}
        batches = list(data_of(data, named).batches(network))
        inputs = inputs_in(batches[0])
    how: dict[str, Any] = {"loss": loss, "batches": batches, "steps": refine} if refine else {}
    with common.progress_bars() as progress:
        found = orbit.align(precise, second, inputs, held_out=[*given.values()], progress=progress, **how)
        ends = [orbit.loss_along_path(each, second, loss, batches) for each in (precise, found.model) if batches]
    record: dict[str, Any] = {"to": other, "distance": {"before": found.before, "after": found.distance}}
    rows = [["distance", f"{found.before:.4g}", f"{found.distance:.4g}"]]
    if ends:
        before, after = ends
        record["barrier"] = {"before": before.barrier, "after": after.barrier}
        record["path"] = {"t": before.t, "before": before.losses, "after": after.losses}
        rows.append(["barrier", f"{before.barrier:.4g}", f"{after.barrier:.4g}"])
    change = _written(network, found, given, model, target, record)
    if figure is not None:
        from quotient_manifolds.plots import path_figure

        path_figure(before.t, {"as stored": before.losses, "aligned": after.losses}).save(figure)
    table = Table("alignment", "", ["from A to B", "before", "after"], rows)
    common.show(table, f"{target}: the output of {model} changed by {change:.1e} of its size.")


def _written(
    network: nn.Module, found: Moved, given: dict[str, Any], source: str, target: Path, record: dict[str, Any]
) -> float:
    """Write the model with a record of it, and return how much its output changed."""
    import torch

    from quotient_manifolds.cli.subject import write_moved
    from quotient_manifolds.orbit.path import state

    # What rounding to the dtype of the weights changes is no matter of the function: it is compared before.
    own = state(network)
    record |= {"model": source, "version": VERSION, "command": common.command_line()}
    record |= {"condition": found.condition, "verified_on": list(given)}
    moved = found.element.apply(own, torch.float64)
    return write_moved(network, moved, given, source, target, seed=1, record=record)
