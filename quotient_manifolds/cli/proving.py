"""What `inspect` does, once its options are read, and the proof that `move` relies on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from torch import nn

from quotient_manifolds.cli.options import (
    NEGATIVE_FINDING,
    BadInput,
    command_line,
    console,
    table,
    write_json,
)
from quotient_manifolds.cli.subject import described, inputs_of, model_named, taking
from quotient_manifolds.files import write_text
from quotient_manifolds.load import load_symmetries
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


def prove_model(
    *,
    model: str,
    inputs: str | None,
    symmetries: str | None,
    as_json: bool,
    out: Path | None,
    report: Path | None,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    quiet: bool,
) -> None:
    """Find, prove and count the symmetries of a model, and print and write what was found."""
    network = model_named(model).to(device=device, dtype=dtype)
    found = symmetries_of(network, symmetries)
    if not found.pairs and not (symmetries and found.translations):
        raise BadInput(_nothing_found(model, network, found))
    proof = prove_with_inputs(network, inputs, found, seed)
    count = count_symmetries(network, found)
    about = described(network, model)
    record = {
        "version": VERSION,
        "model": model,
        **({"about": about} if about else {}),
        "symmetries": found.to_dict(),
        "proof": proof.to_dict(),
        "count": count.to_dict(),
    }
    if out is not None:
        write_json(out, record)
    if report is not None:
        _write_page(network, found, proof, count, about, report)
    if as_json and not quiet:
        click.echo(json.dumps(record, indent=1))
    elif not quiet:
        _print(network, found, proof, count, about)
    if not proof.all_proved:
        raise click.exceptions.Exit(NEGATIVE_FINDING)


def symmetries_of(network: nn.Module, reference: str | None) -> Symmetries:
    """Return what the function `reference` declares, or what is found."""
    return find_symmetries(network) if reference is None else load_symmetries(reference, network)


def prove_with_inputs(network: nn.Module, inputs: str | None, symmetries: Symmetries, seed: int) -> Proof:
    """Return the proof on inputs that the function `inputs` names, or on some made from the model's configuration."""
    given = inputs_of(network, inputs, seed=seed)
    with taking(network, inputs):
        return prove_symmetries(network, given, symmetries, seed=seed)


def _nothing_found(model: str, network: nn.Module, symmetries: Symmetries) -> str:
    kind = type(network).__name__
    if symmetries.unrecognised:
        first, more = symmetries.unrecognised[0], len(symmetries.unrecognised) - 1
        others = f" (and {more} more)" if more else ""
        return f"{model} ({kind}) has no attention that is recognised: {first}{others}; {HOW_TO}."
    if symmetries.refused:
        return f"{model} ({kind}) has no symmetric pair to show: {symmetries.refused[0]}."
    return f"{model} ({kind}) has no attention, so there is no symmetric pair to show."


def _print(network: nn.Module, symmetries: Symmetries, proof: Proof, count: Count, about: list[str]) -> None:
    terminal = console(quiet=False)
    for sentence in about:
        terminal.print(sentence)
    terminal.print(table(_title(network, count), PAIRS, rows_of_pairs(symmetries, proof, count)))
    if symmetries.translations:
        terminal.print(table("", TRANSLATIONS, rows_of_translations(symmetries, proof)))
    for sentence in _sentences(network, symmetries, proof, count):
        terminal.print(sentence)


def _title(network: nn.Module, count: Count) -> str:
    return f"{type(network).__name__}, {count.parameters:,} parameters"


def _sentences(network: nn.Module, symmetries: Symmetries, proof: Proof, count: Count) -> Iterator[str]:
    sizes: dict[str, int] = {name: value.numel() for name, value in network.named_parameters()}
    yield f"Changes are relative to the output, whose own rounding noise is {proof.noise:.1e}; float64."
    yield (
        f"The symmetry group has {count.group:,} dimensions, {count.share:.2%} of the parameters "
        f"({count.pairs:,} of pairs, {count.translations:,} of translations)."
    )
    rest = sum(sizes[name] for name in symmetries.rest)
    yield f"In no pair: {len(symmetries.rest)} tensors, {rest:,} parameters (--json names them)."
    yield from (f"No symmetry: {refusal}" for refusal in symmetries.refused)
    yield from (f"Attention not recognised: {line}" for line in symmetries.unrecognised)


def _write_page(
    network: nn.Module, symmetries: Symmetries, proof: Proof, count: Count, about: list[str], report: Path
) -> None:
    from quotient_manifolds.cli.pages import inspect_page
    from quotient_manifolds.report import Fact, Table, render

    proved = sum(each.verdict == "proved" for each in (*proof.pairs, *proof.translations))
    facts = [
        Fact(f"{proved} of {len(proof.pairs) + len(proof.translations)}", "symmetries are proved."),
        Fact(f"{count.share:.2%}", f"of the parameters are redundant: {count.group:,} of {count.parameters:,}."),
    ]
    numeric = [False, False, False, False, True, True, True, True, False]
    tables = [Table("pairs", "Symmetric pairs", PAIRS, rows_of_pairs(symmetries, proof, count), numeric)]
    if symmetries.translations:
        rows = rows_of_translations(symmetries, proof)
        tables.append(Table("translations", "Translations", TRANSLATIONS, rows, [False, False, True, True, False]))
    notes = [*about, *_sentences(network, symmetries, proof, count)]
    title = f"Symmetries of {_title(network, count)}"
    write_text(report, render(inspect_page(title, facts, tables, notes, command_line())))


SEEN = ["output change", "one side only", "verdict"]
PAIRS = ["symmetric pair", "group", "G", "H", "largest s", "smallest s", *SEEN]
TRANSLATIONS = ["translation", "group", "output change", "uncompensated", "verdict"]


def rows_of_pairs(symmetries: Symmetries, proof: Proof, count: Count) -> list[list[str]]:
    """A row for every symmetric pair: where it is, its group, its factors, their product, and what the proof saw."""
    return [
        [*_factors(pair), f"{s.largest:.1e}", f"{s.smallest:.1e}", *_seen(proved)]
        for pair, proved, s in zip(symmetries.pairs, proof.pairs, count.conditioning, strict=True)
    ]


def rows_of_translations(symmetries: Symmetries, proof: Proof) -> list[list[str]]:
    """A row for every bias that can be moved without being noticed."""
    return [
        [shift.name, shift.group, *_seen(proved)]
        for shift, proved in zip(symmetries.translations, proof.translations, strict=True)
    ]


def _factors(pair: SymmetricPair) -> list[str]:
    return [pair.name, pair.group, f"{pair.n} x {pair.h}", f"{pair.m} x {pair.h}"]


def _seen(proved: PairProof) -> list[str]:
    verdict = f"{proved.verdict}: {proved.reason}" if proved.reason else proved.verdict
    return [f"{proved.change:.1e}", f"{proved.control:.1e}", verdict]
