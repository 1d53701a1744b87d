"""Choose a point of a model's orbit: one that rounds or prunes better, or one nearer to another model."""

from __future__ import annotations

import copy
from dataclasses import replace
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
EXAMPLES = 256  # default of --examples

out_option = click.option(
    "--out", "target", required=True, type=click.Path(path_type=Path), help="The new directory to write."
)


@common.command
@click.argument("model")
@click.option(
    "--for", "purpose", required=True, type=click.Choice(PURPOSES), help="Round to integers of so many bits, or prune."
)
@common.count_option("--group-size", "Number of weights that share a step size.  [default: a row]")
@click.option("--clip", is_flag=True, help="Assume a quantizer that clips to minimize the squared error.")
@common.count_option("--steps", "Number of steps of Adam.", default=200)
@out_option
@common.more_inputs
@common.quiet_option
def descend(
    model: str, purpose: str, group_size: int | None, clip: bool, steps: int, target: Path, inputs: tuple[str, ...]
) -> None:
    """Write the model in MODEL at a point of its orbit at which its weights round or prune better.

    MODEL is a Hugging Face directory. The function is unchanged up to rounding to the dtype of the weights. This is
    verified on inputs made from the model's configuration, with and without optional ones, and on --inputs. No data is
    used: the objective is a bound on the error of rounding to nearest, or the L1 norm of the weights. The new directory
    loads like MODEL; its orbit.json records the objective and the verification.
    """
    check_new(target, model)
    if purpose == "sparsity" and (group_size or clip):
        raise common.BadInput("--group-size and --clip describe a quantizer. Found them with --for sparsity")
    from quotient_manifolds.cli.subject import all_inputs, load_directory
    from quotient_manifolds.orbit import RoundingError, Sparsity, descend_orbit

    is_sparsity = purpose == "sparsity"
    objective = Sparsity() if is_sparsity else RoundingError(int(purpose.removeprefix("int")), group_size, clip)
    network = load_directory(model)
    described = all_inputs(network, inputs, seed=0)
    first, *others = described.values()
    with common.progress_bars() as progress:
        result = descend_orbit(network, objective, first, held_out=others, steps=steps, progress=progress)
    objectives = {"before": result.before, "after": result.after, "path": result.path}
    change = _write(network, result, described, model, target, {"for": purpose, "objective": objectives})
    common.show(
        f"{target}: the objective for {purpose} fell from {result.before:.4g} to {result.after:.4g}, "
        f"{1 - result.after / result.before:.0%} less, by a group element of condition {result.condition:.0f}; "
        f"the output changed by {change:.1e} of its size."
    )


@common.command
@click.argument("model", metavar="A")
@click.argument("other", metavar="B")
@click.option(
    "--data",
    help=f"{common.DATA} For activations, and the loss along the path.  [default: example inputs, and no loss]",
)
@common.data_options("task", "batch_size", max_examples=f"Largest number of examples.  [default: {EXAMPLES} of a file]")
@common.count_option("--refine", "Number of steps on the loss along the path.", least=0, default=0)
@common.figure_option
@out_option
@common.quiet_option
def align(model: str, other: str, data: str | None, refine: int, figure: Path | None, target: Path) -> None:
    """Move the model in A along its orbit toward the model in B, and write it.

    A and B are Hugging Face directories of one architecture. The function of A is unchanged; its heads, neurons and
    channels get the order and the basis of those in B. With --data, the loss along the straight path between the two is
    computed before and after. Models from different seeds become closer, not equal; do not average them.
    """
    check_new(target, model, other)
    if figure is not None:
        check_file(figure, model, other)
    if data is None and (figure or refine):
        raise common.BadInput("--figure and --refine need the loss along the path. Found no --data to compute it on")
    from quotient_manifolds import orbit
    from quotient_manifolds.cli.subject import all_inputs, load_directory
    from quotient_manifolds.load import DataSource, data_of
    from quotient_manifolds.sharpness.losses import cross_entropy, inputs_in, next_token_cross_entropy

    network, second = load_directory(model), load_directory(other).double()
    described, precise = all_inputs(network, (), seed=0), copy.deepcopy(network).double()
    settings = common.data_settings()
    loss = next_token_cross_entropy if settings.get("task") == "causal" else cross_entropy
    batches, inputs = [], next(iter(described.values()))
    if data is not None:
        source = data_of(data, settings)
        if isinstance(source, DataSource) and source.max_examples is None:
            source = replace(source, max_examples=EXAMPLES)
        batches = list(source.batches(network))
        inputs = inputs_in(batches[0])
    refinement: dict[str, Any] = {"loss": loss, "batches": batches, "steps": refine} if refine else {}
    with common.progress_bars() as progress:
        held_out = [*described.values()]
        result = orbit.align(precise, second, inputs, held_out=held_out, progress=progress, **refinement)
        paths = [orbit.loss_along_path(each, second, loss, batches) for each in (precise, result.model) if batches]
    record: dict[str, Any] = {"to": other, "distance": {"before": result.before, "after": result.distance}}
    rows = [["distance", f"{result.before:.4g}", f"{result.distance:.4g}"]]
    if paths:
        before, after = paths
        record["barrier"] = {"before": before.barrier, "after": after.barrier}
        record["path"] = {"t": before.t, "before": before.losses, "after": after.losses}
        rows.append(["barrier", f"{before.barrier:.4g}", f"{after.barrier:.4g}"])
    change = _write(network, result, described, model, target, record)
    if figure is not None:
        from quotient_manifolds.plots import path_figure

        path_figure(before.t, {"as stored": before.losses, "aligned": after.losses}).save(figure)
    table = Table("alignment", "", ["from A to B", "before", "after"], rows)
    common.show(table, f"{target}: the output of {model} changed by {change:.1e} of its size.")


def _write(
    network: nn.Module, result: Moved, described: dict[str, Any], source: str, target: Path, record: dict[str, Any]
) -> float:
    """Write the transformed model with a record of the command, and return the relative change of its output."""
    import torch

    from quotient_manifolds.cli.subject import write_moved
    from quotient_manifolds.orbit.path import state

    # The group element acts in float64 on the stored weights, so that write_moved compares before rounding.
    stored = state(network)
    record = record | {"model": source, "version": VERSION, "command": common.command_line()}
    record |= {"condition": result.condition, "verified_on": list(described)}
    moved = result.element.apply(stored, torch.float64)
    return write_moved(network, moved, described, source, target, seed=1, record=record)
