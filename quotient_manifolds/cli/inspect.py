"""Show which symmetries a model has, each proved numerically."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quotient_manifolds.cli.errors import BadInput
from quotient_manifolds.cli.exits import NEGATIVE_FINDING
from quotient_manifolds.cli.options import (
    check_outputs,
    command,
    common_options,
    inputs_option,
    report_option,
    symmetries_option,
)
from quotient_manifolds.cli.terminal import Terminal, progress_bars
from quotient_manifolds.files import write_text
from quotient_manifolds.report import Fact, Table
from quotient_manifolds.version import VERSION

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quotient_manifolds.load import Certificate
    from quotient_manifolds.symmetries import Count, PairProof, Proof, Symmetries


@command
@click.argument("model")
@inputs_option
@symmetries_option
@click.option(
    "--certify", is_flag=True, help="Say how many of all continuous symmetries these are, on a small copy of the model."
)
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the record to this JSON file.")
@report_option
@common_options
def inspect(
    model: str,
    inputs: str | None,
    symmetries: str | None,
    certify: bool,
    as_json: bool,
    out: Path | None,
    report: Path | None,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    quiet: bool,
) -> None:
    """Print the continuous symmetries of MODEL and prove each.

    MODEL is a Hugging Face directory (config.json and safetensors), an adapter of peft, or package.module:function, a
    function that returns a torch module. Each symmetric pair is moved by random group elements in float64, which must
    not change the output, and then on one side only, which must; biases that the function does not need are translated
    likewise. Also printed: how much of the model is redundant, and the singular values of G H^T in every pair. Inputs
    are made from the model's configuration; a model without one needs --inputs.

    With --certify, a small model with random weights is made of the class and the settings of MODEL: all parameters
    with the same function as its own have a dimension that needs no theory of symmetries (the parameters less the rank
    of the Jacobian of all outputs), and what is found is counted against it. A model without a configuration of Hugging
    Face's is taken as it is, with other random weights, if it is small; --inputs gives as many examples that the model
    has three times as many outputs on them as parameters.

    The exit code is 1 if a pair is refuted or cannot be proved on these inputs, or if the certificate is inconclusive,
    for which the reason is printed first.
    """
    check_outputs([model], out=out, report=report)
    from quotient_manifolds.cli.subject import described, inputs_for, model_named, symmetries_of
    from quotient_manifolds.symmetries import count_symmetries, prove_symmetries

    network = model_named(model).to(device=device, dtype=dtype)
    with inputs_for(network, inputs, seed=seed) as given:
        found = symmetries_of(network, given, symmetries)
        if not found.moved:
            raise BadInput(_nothing_found(model, network, found))
        proof = prove_symmetries(network, given, found, seed=seed)
    count = count_symmetries(network, found)
    certificate = _certificate(network, given, seed, quiet) if certify else None
    about = described(network, model)
    record = {
        "version": VERSION,
        "model": model,
        **({"about": about} if about else {}),
        "symmetries": found.to_dict(),
        "proof": proof.to_dict(),
        "count": count.to_dict(),
        **({"certificate": certificate.to_dict()} if certificate else {}),
    }
    title = f"{type(network).__name__}, {count.parameters:,} parameters"
    tables = [_pairs(title, found, proof, count)] if found.pairs else []
    if found.translations:
        tables.append(_translations("Translations of biases" if tables else title, found, proof))
    if found.freedoms:
        tables.append(_freedoms("What norms and streams leave free" if tables else title, found, proof))
    if certificate:
        tables.append(_dimensions(certificate))
    sentences = list(_sentences(network, found, proof, count))
    certified = str(certificate.fibre).splitlines() if certificate else []
    doubts = certificate.fibre.doubts if certificate else ()
    if out is not None:
        write_text(out, json.dumps(record, indent=1, allow_nan=False) + "\n")
    if report is not None:
        from quotient_manifolds.cli.pages import inspect_page, write_page

        notes = [*about, *sentences, *certified]
        write_page(inspect_page(f"Symmetries of {title}", _facts(proof, count), tables, notes, doubts), report)
    if as_json and not quiet:
        click.echo(json.dumps(record, indent=1))
    elif not quiet:
        Terminal().show(*certified, *about, *tables, *sentences)
    if doubts or not proof.all_proved:
        raise click.exceptions.Exit(NEGATIVE_FINDING)


def _certificate(network: nn.Module, given: Any, seed: int, quiet: bool) -> Certificate:
    from quotient_manifolds.load import certify, make_generic
    from quotient_manifolds.load.certificate import single_examples

    with progress_bars(quiet=quiet) as progress:
        if hasattr(getattr(network, "config", None), "to_diff_dict"):
            return certify(network, seed=seed, progress=progress)
        generic = make_generic(copy.deepcopy(network), seed=seed)
        return certify(generic, single_examples(given), seed=seed, progress=progress)


def _dimensions(certificate: Certificate) -> Table:
    """Return a row for each family that a small copy has, and one for what is not found."""
    found, fibre = certificate.found, certificate.fibre
    rows = [{"family": family, "dimension": str(size)} for family, size in found.families.items()]
    if certificate.shared:
        rows.append({"family": "counted twice", "dimension": str(-certificate.shared)})
    if certificate.unreached:
        rows.append({"family": "reached by no input", "dimension": str(certificate.unreached)})
    rows += [
        {"family": "not found", "dimension": "inconclusive" if fibre.doubts else str(certificate.missing)},
        {"family": "all parameters with the same function", "dimension": str(fibre.dimension)},
    ]
    size = f" of width 8 and {certificate.blocks} block" if certificate.blocks else ""
    return Table.of("dimensions", f"The fibre of a {certificate.model}{size}", rows, words={"family"})


def _nothing_found(model: str, network: nn.Module, symmetries: Symmetries) -> str:
    from quotient_manifolds.symmetries import HOW_TO

    kind = type(network).__name__
    if symmetries.unrecognised:
        first, more = symmetries.unrecognised[0], len(symmetries.unrecognised) - 1
        others = f" (and {more} more)" if more else ""
        return f"{model} ({kind}) has no attention that is recognised: {first}{others}; {HOW_TO}."
    if symmetries.refused:
        return f"{model} ({kind}) has no symmetric pair to show: {symmetries.refused[0]}."
    return f"{model} ({kind}) has no attention, so there is no symmetric pair to show."


def _facts(proof: Proof, count: Count) -> list[Fact]:
    proved = sum(each.verdict == "proved" for each in proof.claims)
    return [
        Fact(f"{proved} of {len(proof.claims)}", "symmetries are proved."),
        Fact(f"{count.share:.2%}", f"of the parameters are redundant: {count.dimension:,} of {count.parameters:,}."),
    ]


def _sentences(network: nn.Module, symmetries: Symmetries, proof: Proof, count: Count) -> Iterator[str]:
    from quotient_manifolds.symmetries import without_layers

    sizes = {name: value.numel() for name, value in network.named_parameters()}
    rest = sum(sizes[name] for name in symmetries.rest)
    yield f"Changes are relative to the output, whose own rounding noise is {proof.noise:.1e}; float64."
    yield (
        f"The symmetry group has {count.dimension:,} dimensions, {count.share:.2%} of the parameters "
        f"({', '.join(f'{size:,} {family}' for family, size in count.families.items())})."
    )
    yield f"In no pair: {len(symmetries.rest)} tensors, {rest:,} parameters (--json names them)."
    yield from (f"No symmetry: {refusal}" for refusal in without_layers(map(str, symmetries.refused)))
    yield from (f"Attention not recognised: {line}" for line in symmetries.unrecognised)


def _pairs(title: str, symmetries: Symmetries, proof: Proof, count: Count) -> Table:
    """Return a row for every symmetric pair: where it is, its group, its factors, their product, its proof."""
    rows = [
        {
            "symmetric pair": pair.name,
            "group": pair.group,
            "G": f"{pair.n} x {pair.h}",
            "H": f"{pair.m} x {pair.h}",
            "largest s": f"{s.largest:.1e}",
            "smallest s": f"{s.smallest:.1e}",
            **_seen(proved, "one side only"),
        }
        for pair, proved, s in zip(symmetries.pairs, proof.pairs, count.conditioning, strict=True)
    ]
    return Table.of("pairs", title, rows, words={"symmetric pair", "group", "G", "H", "verdict"})


def _translations(title: str, symmetries: Symmetries, proof: Proof) -> Table:
    """Return a row for every bias that can be moved without being noticed."""
    rows = [
        {"translation": shift.name, "group": shift.group, **_seen(proved, "uncompensated")}
        for shift, proved in zip(symmetries.translations, proof.translations, strict=True)
    ]
    return Table.of("translations", title, rows, words={"translation", "group", "verdict"})


def _freedoms(title: str, symmetries: Symmetries, proof: Proof) -> Table:
    """Return a row for everything that has one canonical place: its dimensions by family, its proof."""
    rows = [
        {
            "of": freedom.name,
            "dimensions": ", ".join(f"{family}: {size}" for family, size in freedom.families.items()),
            **_seen(proved, "uncompensated"),
        }
        for freedom, proved in zip(symmetries.freedoms, proof.freedoms, strict=True)
    ]
    return Table.of("freedoms", title, rows, words={"of", "dimensions", "verdict"})


def _seen(proved: PairProof, control: str) -> dict[str, str]:
    verdict = f"{proved.verdict}: {proved.reason}" if proved.reason else proved.verdict
    return {"output change": f"{proved.change:.1e}", control: f"{proved.control:.1e}", "verdict": verdict}
