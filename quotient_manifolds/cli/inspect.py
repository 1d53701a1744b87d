"""quotient-manifolds inspect: which symmetries a model has, each proved numerically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quotient_manifolds.cli.options import (
    EXIT_CODES,
    check_different,
    check_writable,
    common_options,
    inputs_option,
    one_sentence_errors,
    report_option,
    symmetries_option,
)


@click.command(epilog=EXIT_CODES)
@click.argument("model")
@inputs_option
@symmetries_option
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the record to this JSON file.")
@report_option
@common_options
@one_sentence_errors
def inspect(out: Path | None, report: Path | None, **settings: Any) -> None:
    """Print the continuous symmetries of MODEL and prove each.

    MODEL is a Hugging Face directory (config.json and safetensors), an adapter of peft, or package.module:function, a
    function that returns a torch module. Each symmetric pair is moved by random group elements in float64, which must
    not change the output, and then on one side only, which must; biases that the function does not need are translated
    likewise. Also printed: how much of the model is redundant, and the singular values of G H^T in every pair. Inputs
    are made from the model's configuration; a model without one needs --inputs.

    The exit code is 1 if a pair is refuted or cannot be proved on these inputs.
    """
    for file in (out, report):
        check_writable(file, settings["model"])
    check_different(out=out, report=report)
    from quotient_manifolds.cli.proving import prove_model

    prove_model(out=out, report=report, **settings)
