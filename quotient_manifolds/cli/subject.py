"""Make inputs that a model takes, and find its symmetries on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, get_args

from torch import nn

from quotient_manifolds.cli import common
from quotient_manifolds.load import call_object, example_inputs, load_symmetries, optional_inputs
from quotient_manifolds.load.small_copy import joined
from quotient_manifolds.messages import sentence
from quotient_manifolds.symmetries import Scope, Symmetries, find_symmetries, output_change

ALONE = "example inputs"

# What a model raises on inputs that it cannot take.
UNFIT = (RuntimeError, IndexError, KeyError, AttributeError, TypeError, NotImplementedError, AssertionError)


def symmetries_of(network: nn.Module, inputs: Any, asked: str | None, *others: Any) -> Symmetries:
    """Return what the function of the name `asked` declares, or what is found: all, or within that scope."""
    scopes: dict[str, Scope] = {scope: scope for scope in get_args(Scope)}
    wanted = asked or "all"
    if wanted in scopes:
        return find_symmetries(network, inputs, *others).within(scopes[wanted])
    return load_symmetries(wanted, network)


@contextmanager
def inputs_for(network: nn.Module, reference: str | None, *, seed: int) -> Iterator[Any]:
    """Yield the inputs that the function `reference` gives, or some made from the model's configuration.

    Say in one sentence if the model does not take them, inside.
    """
    if reference is not None:
        given = call_object(reference, "a function that returns inputs")
    else:
        try:
            given = example_inputs(network, seed=seed)
        except ValueError as error:
            raise common.BadInput(f"{str(error).rstrip('.')}, by --inputs package.module:function.") from error
    try:
        yield given
    except (*UNFIT, ValueError) as raised:
        cause = raised.__cause__ if isinstance(raised, ValueError) else raised  # what finding symmetries says of a run
        if not isinstance(cause, UNFIT):
            raise
        what = f"the inputs made from {reference or 'its configuration'}"
        raise common.BadInput(
            f"{type(network).__name__} does not take {what}: {sentence(cause)}; give others with --inputs."
        ) from raised


def all_inputs(network: nn.Module, references: Sequence[str], *, seed: int) -> dict[str, Any]:
    """Return inputs by what they are: of these functions, and made from the configuration with what is optional.

    Of what is made, all that the model takes; there has to be some if there is no function.
    """
    found = {}
    for reference in references or (None,):
        with inputs_for(network, reference, seed=seed) as given:
            output_change(network, given, {}, {})
            found[ALONE if reference is None else f"the inputs of {reference}"] = given
    made: dict[str, Any] = {}
    with suppress(*UNFIT, ValueError):
        made = examples(network, seed=seed)
    for name, inputs in made.items():
        with suppress(*UNFIT, ValueError):
            output_change(network, inputs, {}, {})
            found[name] = inputs
    return found


def examples(network: nn.Module, *, seed: int, draws: int = 1) -> dict[str, Any]:
    """Return example inputs, of all draws in one batch, by what they are: alone, and with each optional one."""
    drawn: list[dict[str, Any]] = []
    for number in range(seed, seed + draws):
        plain = example_inputs(network, seed=number)
        optional = optional_inputs(network, plain, seed=number)
        drawn.append(
            {ALONE: plain, **{f"example inputs with {name}": {**plain, name: optional[name]} for name in optional}}
        )
    return {name: joined([each[name] for each in drawn]) for name in drawn[0]}
