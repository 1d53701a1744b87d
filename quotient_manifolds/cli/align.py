"""Choose a point of a model's orbit: where weights round or prune best, or nearest to another model."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from quotient_manifolds.cli import common
from quotient_manifolds.cli.orbit import FIGURES
from quotient_manifolds.files import write_text
from quotient_manifolds.report import Table
from quotient_manifolds.version import VERSION

if TYPE_CHECKING:
    from torch import nn

    from quotient_manifolds.orbit import WeightObjective

PURPOSES = (*(f"int{bits}" for bits in range(2, 9)), "sparsity")
RECORD = "orbit.json"

out_option = click.option(
    "--out", "target", required=True, type=click.Path(path_type=Path), help="The new directory to write."
)
more_inputs = click.option(
    "--inputs",
    metavar="PACKAGE.MODULE:FUNCTION",
    multiple=True,
    help="A function that returns inputs on which the function is verified, besides those made from the configuration; "
    "may be given several times.",
)


@common.command
@click.argument("model")
@click.option(
    "--for", "purpose", required=True, type=click.Choice(PURPOSES), help="Round to integers of so many bits, or prune."
)
@click.option("--group-size", type=click.IntRange(min=1), help="Weights that share a step size.  [default: a row]")
@click.option("--clip", is_flag=True, help="Describe a quantiser that clips for the least squared error.")
@click.option("--steps", type=click.IntRange(min=1), default=200, show_default=True, help="Steps of Adam.")
@click.option(
    "--condition",
    type=float,
    default=1e3,
    show_default=True,
    help="Bound on the condition number of the group element.",
)
@out_option
@more_inputs
@common.quiet_option
def descend(
    model: str,
    purpose: str,
    group_size: int | None,
    clip: bool,
    steps: int,
    condition: float,
    target: Path,
    inputs: tuple[str, ...],
    quiet: bool,
) -> None:
    """Write the model in MODEL at the point of its orbit where its weights round or prune best.

    MODEL is a Hugging Face directory. The function stays the same up to rounding to the dtype of the weights, which is
    verified on inputs made from the model's configuration, with and without optional ones, and on --inputs. No data is
    used: the objective is a bound on the error of rounding to nearest, or the L1 norm of the weights. The directory
    loads like MODEL; its orbit.json records what was minimized and verified.
    """
    common.check_new(target, model)
    if purpose == "sparsity" and (group_size or clip):
        raise common.BadInput("--group-size and --clip describe a quantiser. Found them with --for sparsity.")
    import torch

    from quotient_manifolds.orbit import RoundingError, Sparsity, descend_orbit

    objective: WeightObjective = (
        Sparsity() if purpose == "sparsity" else RoundingError(int(purpose.removeprefix("int")), group_size, clip)
    )
    network, precise, given = _loaded(model, inputs)
    first, *others = given.values()
    with common.progress_bars(quiet=quiet) as progress:
        found = descend_orbit(
            precise,
            objective,
            first,
            held_out=others,
            steps=steps,
            condition=condition,
            dtype=torch.float32,
            progress=progress,
        )
    record = {
        "for": purpose,
        "objective": {"before": found.before, "after": found.after, "path": found.path},
        "condition": found.condition,
    }
    change = _written(network, found.params, given, Path(model), target, record)
    if not quiet:
        less = 100 * (1 - found.after / found.before)
        common.show(
            f"{target}: the objective for {purpose} fell from {found.before:.4g} to {found.after:.4g}, "
            f"{less:.0f} % less, by a group element of condition {found.condition:.0f}; "
            f"the output changed by {change:.1e} of its size."
        )


@common.command
@click.argument("model", metavar="A")
@click.argument("other", metavar="B")
@click.option(
    "--data",
    help="A .jsonl, .csv, .tsv, .txt or .npz file, or package.module:function, a function that returns batches: for "
    "activations, and the loss along the path.  [default: example inputs, and no loss]",
)
@click.option(
    "--task", type=click.Choice(("classification", "causal")), help="What models of text predict.  [default: by class]"
)
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="Examples in a batch.")
@click.option(
    "--examples", type=click.IntRange(min=1), default=256, show_default=True, help="Largest number of examples."
)
@click.option(
    "--by",
    type=click.Choice(["activations", "weights"]),
    default="activations",
    show_default=True,
    help="What rotations of the residual stream are fitted to.",
)
@click.option(
    "--refine", type=click.IntRange(min=0), default=0, show_default=True, help="Steps on the loss along the path."
)
@click.option("--figure", type=click.Path(path_type=Path), help="Draw the losses into this .svg, .pdf or .png.")
@out_option
@common.quiet_option
def align(
    model: str,
    other: str,
    data: str | None,
    task: str | None,
    batch_size: int,
    examples: int,
    by: Literal["activations", "weights"],
    refine: int,
    figure: Path | None,
    target: Path,
    quiet: bool,
) -> None:
    """Write the model in A at the point of its orbit that is nearest to the model in B.

    A and B are Hugging Face directories of one architecture. The function of A stays the same; its heads, neurons and
    channels take the order and the basis of those of B. With --data the loss along the straight path between the two
    is computed before and after. Models from different seeds become closer, not equal; do not average them.
    """
    common.check_new(target, model, other)
    common.check_output(figure, model, other)
    if figure is not None and (figure.suffix not in FIGURES or data is None):
        raise common.BadInput(f"A figure needs --data and must be {', '.join(FIGURES)}. Found {figure.name!r}.")
    if refine and data is None:
        raise common.BadInput("--refine lowers the loss along the path. Found no --data to measure it on.")
    from quotient_manifolds import orbit
    from quotient_manifolds.load import load_model
    from quotient_manifolds.sharpness import cross_entropy, next_token_cross_entropy

    network, precise, given = _loaded(model, ())
    second = load_model(other).double()
    causal = task == "causal" if task else type(network).__name__.endswith(("CausalLM", "LMHeadModel"))
    batches = [] if data is None else _batches(data, network, model, causal, batch_size, examples)
    loss = next_token_cross_entropy if causal else cross_entropy
    settings: dict[str, Any] = {"loss": loss, "batches": batches, "steps": refine} if refine else {}
    with common.progress_bars(quiet=quiet) as progress:
        found = orbit.align(
            precise, second, _inputs(batches, given), held_out=[*given.values()], by=by, progress=progress, **settings
        )
        ends = [orbit.loss_along_path(each, second, loss, batches) for each in (precise, found.model) if batches]
    record: dict[str, Any] = {
        "distance": {"before": found.before, "after": found.distance},
        "condition": found.condition,
    }
    if ends:
        record["barrier"] = {"before": ends[0].barrier, "after": ends[1].barrier}
        record["path"] = {"t": ends[0].t, "before": ends[0].losses, "after": ends[1].losses}
    change = _written(network, found.params, given, Path(model), target, record | {"to": other})
    if figure is not None:
        from quotient_manifolds.plots import path_figure

        path_figure(ends[0].t, {"as stored": ends[0].losses, "aligned": ends[1].losses}).save(figure)
    if not quiet:
        rows = [["distance", f"{found.before:.4g}", f"{found.distance:.4g}"]]
        rows += [["barrier", f"{ends[0].barrier:.4g}", f"{ends[1].barrier:.4g}"]] if ends else []
        table = Table("alignment", "", ["from A to B", "before", "after"], rows, [False, True, True])
        common.show(table, f"{target}: the output of {model} changed by {change:.1e} of its size.")


def _loaded(model: str, references: Sequence[str]) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """Return a model, a copy in float64, and inputs by what they are."""
    from quotient_manifolds.cli.subject import all_inputs
    from quotient_manifolds.load import load_model

    network = load_model(model)
    return network, copy.deepcopy(network).double(), all_inputs(network, references, seed=0)


def _batches(data: str, network: nn.Module, home: str, causal: bool, size: int, most: int) -> list[Any]:
    from quotient_manifolds.load import Checkpoint, DataSource
    from quotient_manifolds.load.models import call_object

    if ":" in data and not Path(data).exists():
        return list(call_object(data, "a function that returns batches"))
    task = "causal" if causal else None
    source = DataSource(data, batch_size=size, max_examples=most, task=task)
    return list(source.batches(network, Checkpoint(Path(home).name, Path(home), "huggingface")))


def _inputs(batches: Sequence[Any], given: dict[str, Any]) -> Any:
    """Return what activations are compared on: the inputs of the first batch, or example inputs."""
    if not batches:
        return next(iter(given.values()))
    batch = batches[0]
    return {name: each for name, each in batch.items() if name != "labels"} if isinstance(batch, dict) else batch[0]


def _written(
    network: nn.Module, params: Any, given: dict[str, Any], source: Path, target: Path, record: dict[str, Any]
) -> float:
    from quotient_manifolds.cli.subject import write_moved

    change = write_moved(network, params, given, source, target, seed=1)
    record |= {"model": str(source), "version": VERSION, "command": common.command_line()}
    record |= {"change": change, "verified_on": list(given)}
    write_text(target / RECORD, json.dumps(record, indent=1) + "\n")
    return change
