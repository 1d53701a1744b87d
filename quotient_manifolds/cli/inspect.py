"""Show which symmetries a model has, each verified numerically."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quotient_manifolds.cli import common
from quotient_manifolds.files import write_text
from quotient_manifolds.report import Table
from quotient_manifolds.version import VERSION

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quotient_manifolds.load import Certificate
    from quotient_manifolds.symmetries import Count, Proof, Symmetries


@common.command
@click.argument("model")
@common.inputs_option
@common.symmetries_option
@click.option(
    "--certify", is_flag=True, help="Say how many of all continuous symmetries these are, on a small copy of the model."
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the record to this JSON file.")
@common.run_options
def inspect(
    model: str,
    inputs: str | None,
    symmetries: str | None,
    certify: bool,
    out: Path | None,
    seed: int,
    device: torch.device,
    quiet: bool,
) -> None:
    """Print the continuous symmetries of MODEL and verify each.

    MODEL is a Hugging Face directory (config.json and safetensors), an adapter of peft, or package.module:function, a
    function that returns a torch module. Each symmetry is acted on by random group elements in float64, which must not
    change the output, and then on one side only, which must. Also printed: how much of the model is redundant, and the
    singular values of G H^T in every pair. Inputs are made from the model's configuration; a model without one needs
    --inputs.

    With --certify, a small model with random weights is made of the class and the settings of MODEL: all parameters
    with the same function as its own have a dimension that needs no theory of symmetries (the parameters less the rank
    of the Jacobian of all outputs), and what is found is counted against it. A model without a configuration of Hugging
    Face's is taken as it is, with other random weights, if it is small; --inputs gives as many examples that the model
    has three times as many outputs on them as parameters.

    The exit code is 1 if a symmetry is refuted or cannot be verified on these inputs, or if the certificate is
    inconclusive, for which the reason is printed first.
    """
    common.check_output(out, model)
    from quotient_manifolds.cli.subject import inputs_for, symmetries_of
    from quotient_manifolds.load import load_model
    from quotient_manifolds.symmetries import count_symmetries, prove_symmetries

    network = load_model(model).to(device)
    with inputs_for(network, inputs, seed=seed) as given:
        found = symmetries_of(network, given, symmetries)
        if not found.moved:
            raise common.BadInput(_nothing_found(model, network, found))
        proof = prove_symmetries(network, given, found, seed=seed)
    count = count_symmetries(network, found)
    certificate = _certificate(network, given, seed, quiet) if certify else None
    record = {
        "version": VERSION,
        "model": model,
        "symmetries": found.to_dict(),
        "proof": proof.to_dict(),
        "count": count.to_dict(),
        **({"certificate": certificate.to_dict()} if certificate else {}),
    }
    if out is not None:
        write_text(out, json.dumps(record, indent=1, allow_nan=False) + "\n")
    if not quiet:
        title = f"{type(network).__name__}, {count.parameters:,} parameters"
        certified: list[str | Table] = (
            [*str(certificate.fibre).splitlines(), _dimensions(certificate)] if certificate else []
        )
        common.Terminal().show(
            *certified, _table(title, found, proof, count), *_sentences(network, found, proof, count)
        )
    if not proof.all_proved or (certificate and certificate.fibre.doubts):
        raise click.exceptions.Exit(common.NEGATIVE_FINDING)


def _certificate(network: nn.Module, given: Any, seed: int, quiet: bool) -> Certificate:
    from quotient_manifolds.load import certify, make_generic
    from quotient_manifolds.load.certificate import single_examples

    with common.progress_bars(quiet=quiet) as progress:
        if hasattr(getattr(network, "config", None), "to_diff_dict"):
            return certify(network, seed=seed, progress=progress)
        generic = make_generic(copy.deepcopy(network), seed=seed)
        return certify(generic, single_examples(given), seed=seed, progress=progress)


def _dimensions(certificate: Certificate) -> Table:
    """Return a row for each family that a small copy has, and one for what is not found."""
    found, fibre = certificate.found, certificate.fibre
    rows = [[family, str(size)] for family, size in found.families.items()]
    if certificate.shared:
        rows.append(["counted twice", str(-certificate.shared)])
    if certificate.unreached:
        rows.append(["reached by no input", str(certificate.unreached)])
    rows.append(["not found", "inconclusive" if fibre.doubts else str(certificate.missing)])
    rows.append(["all parameters with the same function", str(fibre.dimension)])
    size = f" of width 8 and {certificate.blocks} block" if certificate.blocks else ""
    caption = f"The fibre of a {certificate.model}{size}"
    return Table("dimensions", caption, ["family", "dimension"], rows, [False, True])


def _nothing_found(model: str, network: nn.Module, symmetries: Symmetries) -> str:
    from quotient_manifolds.symmetries import HOW_TO

    kind = f"{model} ({type(network).__name__})"
    if symmetries.unrecognised:
        return f"{kind} has no attention that is recognised: {symmetries.unrecognised[0]}; {HOW_TO}."
    why = f": {symmetries.refused[0]}" if symmetries.refused else ", for it has no attention"
    return f"{kind} has no symmetric pair to show{why}."


def _sentences(network: nn.Module, symmetries: Symmetries, proof: Proof, count: Count) -> Iterator[str]:
    from quotient_manifolds.symmetries import without_layers

    sizes = {name: value.numel() for name, value in network.named_parameters()}
    rest = sum(sizes[name] for name in symmetries.rest)
    yield f"Changes are relative to the output, whose own rounding noise is {proof.noise:.1e}; float64."
    yield (
        f"The symmetry group has {count.dimension:,} dimensions, {count.share:.2%} of the parameters "
        f"({', '.join(f'{size:,} {family}' for family, size in count.families.items())})."
    )
    yield f"In no pair: {len(symmetries.rest)} tensors, {rest:,} parameters (--out names them)."
    yield from (f"No symmetry: {refusal}" for refusal in without_layers(map(str, symmetries.refused)))
    yield from (f"Attention not recognised: {line}" for line in symmetries.unrecognised)


def _table(title: str, symmetries: Symmetries, proof: Proof, count: Count) -> Table:
    """Return a row for every symmetry: where it is, its group, the singular values of a pair's product, its check."""
    pairs = [
        (each.name, f"{each.group}, {each.n} x {each.m}", f"{s.largest:.1e}", f"{s.smallest:.1e}")
        for each, s in zip(symmetries.pairs, count.conditioning, strict=True)
    ]
    shifts = [(each.name, each.group, "", "") for each in symmetries.translations]
    freedoms = [
        (each.name, ", ".join(f"{family}: {size}" for family, size in each.families.items()), "", "")
        for each in symmetries.freedoms
    ]
    checks = [*proof.pairs, *proof.translations, *proof.freedoms]
    verdicts = [f"{each.verdict}: {each.reason}" if each.reason else each.verdict for each in checks]
    rows = [
        [*place, f"{seen.change:.1e}", f"{seen.control:.1e}", verdict]
        for place, seen, verdict in zip([*pairs, *shifts, *freedoms], checks, verdicts, strict=True)
    ]
    columns = ["symmetry", "group", "largest s", "smallest s", "output change", "one side only", "verdict"]
    return Table("symmetries", title, columns, rows, [False] * 2 + [True] * 4 + [False])
