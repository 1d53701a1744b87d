"""Show which symmetries a model has, each verified numerically."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quotient_manifolds.cli import common
from quotient_manifolds.files import check_file, write_text
from quotient_manifolds.messages import text_table
from quotient_manifolds.version import VERSION

if TYPE_CHECKING:
    import torch


@common.command
@click.argument("model")
@common.inputs_option
@common.symmetries_option
@click.option(
    "--certify", is_flag=True, help="Compare with the dimension of all continuous symmetries, on a small copy."
)
@common.record_option("report")
@common.run_options
def inspect(
    model: str,
    inputs: str | None,
    symmetries: str | None,
    certify: bool,
    out: Path | None,
    seed: int,
    device: torch.device,
) -> None:
    """Print the continuous symmetries of MODEL and verify each.

    MODEL is a Hugging Face directory (config.json and safetensors), a peft adapter, or package.module:function,
    a function that returns a torch module. In float64, the gradient of the output must be orthogonal to the orbit
    of each symmetry, though the summands of these products are not 0; random group elements must not change the
    output. The number of redundant parameters and the singular values of G H^T in every pair are also printed. Inputs
    are made from the model's configuration; a model without one needs --inputs.

    With --certify, a small model of MODEL's class is created with random weights. The dimension of all parameters that
    compute its function is the number of parameters minus the rank of the Jacobian of all outputs, by linear algebra
    alone. It is compared with the dimension of the symmetries that are found. For a small model built by Python
    code, call quotient_manifolds.symmetries.certify.

    The exit code is 1 if a symmetry fails or cannot be verified on these inputs, or if the certificate is inconclusive.
    """
    if out is not None:
        check_file(out, model)
    from quotient_manifolds import load
    from quotient_manifolds import symmetries as room
    from quotient_manifolds.cli.subject import inputs_of, symmetries_of

    network = load.load_model(model).to(device)
    examples = inputs_of(network, inputs, seed=seed)
    with common.progress_bars() as progress:
        with common.step(progress, "symmetries found"):
            group = symmetries_of(network, symmetries, examples)
        with common.step(progress, "verified"):
            verification = room.verify_symmetries(network, examples, group, seed=seed)
            count = room.count_symmetries(network, group)
        reports: dict[str, Any] = {"symmetries": group, "verification": verification, "count": count}
        if certify:
            reports["certificate"] = room.certify(network, seed=seed, progress=progress)
    if out is not None:
        record = {"version": VERSION, "model": model, **{name: each.to_dict() for name, each in reports.items()}}
        write_text(out, json.dumps(record, indent=1, allow_nan=False) + "\n")
    blocks = [
        *([reports["certificate"]] if certify else []),
        f"{type(network).__name__}, {count.parameters:,} parameters",
        group,
        verification,
        f"The symmetry group has {count.dimension:,} dimensions, {count.share:.2%} of the parameters.",
    ]
    if count.conditioning:
        values = [(each.pair, f"{each.smallest:.1e}", f"{each.largest:.1e}") for each in count.conditioning]
        blocks.append(text_table(("singular values of G H^T", "smallest", "largest"), values))
    common.show("\n\n".join(map(str, blocks)))
    if not verification.all_hold or (certify and reports["certificate"].fibre.doubts):
        raise click.exceptions.Exit(common.NEGATIVE_FINDING)
