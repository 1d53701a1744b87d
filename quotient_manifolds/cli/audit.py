"""Tell of optimizers whether their runs depend on the representative they start from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quotient_manifolds.cli.errors import BadInput
from quotient_manifolds.cli.options import (
    check_outputs,
    command,
    device_option,
    inputs_option,
    quiet_option,
    seed_option,
    symmetries_option,
)
from quotient_manifolds.cli.terminal import Terminal, progress_bars

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quotient_manifolds.optim import OrbitAudit
    from quotient_manifolds.report import Table
    from quotient_manifolds.symmetries import Symmetries


@command
@click.argument("model")
@click.option(
    "--optimizer",
    "optimizers",
    metavar="NAME|PACKAGE.MODULE:FUNCTION",
    multiple=True,
    default=("AdamW", "QuotientAdam"),
    show_default=True,
    help="Of torch.optim, QuotientSGD, QuotientAdam, or a function of the model that returns one; give it again for "
    "another.",
)
@click.option("--lr", type=click.FloatRange(min=0, min_open=True), default=1e-3, show_default=True, help="Of names.")
@click.option("--steps", type=click.IntRange(min=1), default=50, show_default=True, help="Of training.")
@click.option("--moves", type=click.IntRange(min=1), default=3, show_default=True, help="Points of the orbit besides.")
@click.option("--condition", type=click.FloatRange(min=1), default=100.0, show_default=True, help="Of a move.")
@click.option("--length", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens of an example text.")
@inputs_option
@symmetries_option
@click.option("--out", type=click.Path(path_type=Path), help="Write the audits to this JSON file.")
@seed_option
@device_option
@quiet_option
def audit(
    model: str,
    optimizers: tuple[str, ...],
    lr: float,
    steps: int,
    moves: int,
    condition: float,
    length: int,
    inputs: str | None,
    symmetries: str | None,
    out: Path | None,
    seed: int,
    device: torch.device,
    quiet: bool,
) -> None:
    """Train MODEL from several points of one orbit by each optimizer, and say how far the functions drift apart.

    MODEL is a Hugging Face directory, an adapter of peft, or package.module:function. Copies of it are moved by random
    group elements of the given condition, pair by pair, which changes no output, and trained in float64 on example
    inputs towards fixed Gaussian targets, by squared distance. The drift is the distance of the outputs after training,
    relative to how far training moved them: at rounding level if an optimizer does not see the representative, about 1
    if it goes quite another way.
    """
    check_outputs([model], quiet=quiet, out=out)
    from quotient_manifolds.cli.batches import distance, distance_batch, like
    from quotient_manifolds.cli.subject import described, inputs_for, model_named, symmetries_of
    from quotient_manifolds.files import write_text
    from quotient_manifolds.optim import orbit_audit

    network = model_named(model).to(device=device).double()
    with inputs_for(network, inputs, seed=seed, length=length) as given:
        found = symmetries_of(network, given, symmetries)
        batch = distance_batch(network, like(given, next(network.parameters())), seed)
    makers = {name: maker(name, found, lr) for name in dict.fromkeys(optimizers)}
    audits: dict[str, OrbitAudit] = {}
    settings: dict[str, Any] = {"steps": steps, "moves": moves, "condition": condition, "symmetries": found}
    with progress_bars(quiet=quiet) as progress:
        for name, make in makers.items():
            tell = partial(_told, progress, name)
            audits[name] = orbit_audit(make, network, distance, [batch], seed=seed, progress=tell, **settings)
    if out is not None:
        rows = {name: asdict(each) for name, each in audits.items()}
        write_text(out, json.dumps({"model": model, "lr": lr, "seed": seed, "audits": rows}, indent=2) + "\n")
    if not quiet:
        Terminal().show(*described(network, model), table(model, audits))


def maker(name: str, symmetries: Symmetries, lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return what makes the optimizer of this name, or BadInput if there is none."""
    import torch

    from quotient_manifolds.load import call_object, load_object
    from quotient_manifolds.optim import QuotientAdam, QuotientSGD

    if ":" in name:
        load_object(name, "a function of the model that returns an optimizer")
        return lambda network: call_object(name, "a function of the model that returns an optimizer", network)
    own: dict[str, Any] = {"QuotientAdam": QuotientAdam, "QuotientSGD": QuotientSGD}
    if name in own:
        return lambda network: own[name](network.named_parameters(), symmetries, lr=lr)
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
        raise BadInput(
            "--optimizer takes one of torch.optim, QuotientSGD, QuotientAdam or package.module:function; "
            f"found {name!r}."
        )
    made: Any = kind
    return lambda network: made([p for p in network.parameters() if p.requires_grad], lr=lr)


def _told(progress: Callable[[str, int, int], None], name: str, what: str, done: int, total: int) -> None:
    progress(name, done, total)


def table(model: str, audits: dict[str, OrbitAudit]) -> Table:
    """Return a row for every optimizer."""
    from quotient_manifolds.report import Table

    some = next(iter(audits.values()))
    caption = (
        f"{model}: drift of {some.steps} steps from {len(some.drifts)} other points of the orbit of {some.pairs} pairs "
        f"(condition {some.condition:g})"
    )
    rows = [
        [name, f"{each.drift:.1e}", f"{max(each.drifts):.1e}", f"{max(each.starts):.1e}", f"{each.loss:.4g}"]
        for name, each in audits.items()
    ]
    columns = ["optimizer", "drift (median)", "largest", "before training", "loss at the end"]
    return Table("audit", caption, columns, rows, [False, True, True, True, True])
