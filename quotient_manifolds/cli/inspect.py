"""quotient-manifolds inspect: which symmetries a model has, each proved numerically."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from torch import nn

from quotient_manifolds.cli.options import (
    EXIT_CODES,
    NEGATIVE_FINDING,
    BadInput,
    check_writable,
    common_options,
    console,
    one_sentence_errors,
    table,
    write_json,
)
from quotient_manifolds.load import call_object, example_inputs, first_line, load_model
from quotient_manifolds.symmetries import (
    HOW_TO,
    Count,
    PairProof,
    Proof,
    SymmetricPair,
    Symmetries,
    count_symmetries,
    find_symmetries,
    prove_symmetries,
)
from quotient_manifolds.version import VERSION

Result = TypeVar("Result")


@click.command(epilog=EXIT_CODES)
@click.argument("model")
@click.option("--inputs", metavar="PACKAGE.MODULE:FUNCTION", help="A function that returns inputs for the proof.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the record to this JSON file.")
@common_options
@one_sentence_errors
def inspect(
    model: str,
    inputs: str | None,
    as_json: bool,
    out: Path | None,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    quiet: bool,
) -> None:
    """Print the continuous symmetries of MODEL and prove each.

    MODEL is a Hugging Face directory (config.json and safetensors) or package.module:function, a function that
    returns a torch module. Each symmetric pair is moved by random group elements in float64, which must not change the
    output, and then on one side only, which must; biases that the function does not need are translated likewise. Also
    printed: how much of the model is redundant, and the singular values of G H^T in every pair. Inputs are made from
    the model's configuration; a model without one needs --inputs.

    The exit code is 1 if a pair is refuted or cannot be proved on these inputs.
    """
    check_writable(out)
    network = load_model(model).to(device=device, dtype=dtype)
    symmetries = find_symmetries(network)
    if not symmetries.pairs:
        raise BadInput(_nothing_found(model, network, symmetries))
    proof = prove_with_inputs(network, inputs, symmetries, seed)
    count = count_symmetries(network, symmetries)
    record = {
        "version": VERSION,
        "model": model,
        "symmetries": symmetries.to_dict(),
        "proof": proof.to_dict(),
        "count": count.to_dict(),
    }
    if out is not None:
        write_json(out, record)
    if as_json and not quiet:
        click.echo(json.dumps(record, indent=1))
    elif not quiet:
        _print(network, symmetries, proof, count)
    if not proof.all_proved:
        raise click.exceptions.Exit(NEGATIVE_FINDING)


def prove_with_inputs(network: nn.Module, inputs: str | None, symmetries: Symmetries, seed: int) -> Proof:
    """The proof on inputs that the function `inputs` names, or on some made from the model's configuration."""
    return proof_inputs(network, inputs, seed, lambda given: prove_symmetries(network, given, symmetries, seed=seed))


def proof_inputs(network: nn.Module, inputs: str | None, seed: int, use: Callable[[Any], Result]) -> Result:
    """use(inputs), with what a model raises on inputs it cannot take made one sentence."""
    given = call_object(inputs, "a function that returns inputs") if inputs else example_inputs(network, seed=seed)
    try:
        return use(given)
    except (
        RuntimeError,
        IndexError,
        KeyError,
        AttributeError,
    ) as error:  # what a model raises on inputs it cannot take
        source = inputs or "its configuration"
        raise BadInput(
            f"{type(network).__name__} does not take the inputs made from {source}: {first_line(error)}; "
            "give others with --inputs."
        ) from error


def _nothing_found(model: str, network: nn.Module, symmetries: Symmetries) -> str:
    kind = type(network).__name__
    if symmetries.unrecognised:
        first, more = symmetries.unrecognised[0], len(symmetries.unrecognised) - 1
        others = f" (and {more} more)" if more else ""
        return f"{model} ({kind}) has no attention that is recognised: {first}{others}; {HOW_TO}."
    if symmetries.refused:
        return f"{model} ({kind}) has no symmetric pair to show: {symmetries.refused[0]}."
    return f"{model} ({kind}) has no attention, so there is no symmetric pair to show."


def _print(network: nn.Module, symmetries: Symmetries, proof: Proof, count: Count) -> None:
    terminal = console(quiet=False)
    sizes: dict[str, int] = {name: value.numel() for name, value in network.named_parameters()}
    title = f"{type(network).__name__}, {count.parameters:,} parameters"
    terminal.print(table_of_pairs(title, symmetries, proof, count))
    if symmetries.translations:
        terminal.print(table_of_translations(symmetries, proof))
    terminal.print(f"Changes are relative to the output, whose own rounding noise is {proof.noise:.1e}; float64.")
    terminal.print(
        f"The symmetry group has {count.group:,} dimensions, {count.share:.2%} of the parameters "
        f"({count.pairs:,} of pairs, {count.translations:,} of translations)."
    )
    rest = sum(sizes[name] for name in symmetries.rest)
    terminal.print(f"In no pair: {len(symmetries.rest)} tensors, {rest:,} parameters (--json names them).")
    for refusal in symmetries.refused:
        terminal.print(f"No symmetry: {refusal}")
    for line in symmetries.unrecognised:
        terminal.print(f"Attention not recognised: {line}")


def table_of_pairs(title: str, symmetries: Symmetries, proof: Proof, count: Count) -> Any:
    """A row for every symmetric pair: where it is, its group, its factors, their product, and what the proof saw."""
    seen = ["output change", "one side only", "verdict"]
    header = ["symmetric pair", "group", "G", "H", "largest s", "smallest s", *seen]
    rows = [
        [*_factors(pair), f"{s.largest:.1e}", f"{s.smallest:.1e}", *_seen(proved)]
        for pair, proved, s in zip(symmetries.pairs, proof.pairs, count.conditioning, strict=True)
    ]
    return table(title, header, rows)


def table_of_translations(symmetries: Symmetries, proof: Proof) -> Any:
    """A row for every bias that can be moved without being noticed."""
    rows = [
        [shift.name, shift.group, *_seen(proved)]
        for shift, proved in zip(symmetries.translations, proof.translations, strict=True)
    ]
    return table("", ["translation", "group", "output change", "uncompensated", "verdict"], rows)


def _factors(pair: SymmetricPair) -> list[str]:
    return [pair.name, pair.group, f"{pair.n} x {pair.h}", f"{pair.m} x {pair.h}"]


def _seen(proved: PairProof) -> list[str]:
    verdict = f"{proved.verdict}: {proved.reason}" if proved.reason else proved.verdict
    return [f"{proved.change:.1e}", f"{proved.control:.1e}", verdict]
