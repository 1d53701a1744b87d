"""Load what a command works on by its name: the model, inputs that it takes, and its symmetries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, get_args

from torch import nn

from quotient_manifolds.cli.errors import BadInput, is_out_of_memory, place_in_users_code
from quotient_manifolds.load import call_object, example_inputs, load_model, load_symmetries, optional_inputs
from quotient_manifolds.load.small_copy import joined
from quotient_manifolds.messages import first_line
from quotient_manifolds.symmetries import Scope, Symmetries, find_symmetries, output_change

ALONE = "example inputs"

# What a model raises on inputs that it cannot take.
UNFIT = (RuntimeError, IndexError, KeyError, AttributeError, TypeError, NotImplementedError, AssertionError)


def model_named(source: str) -> nn.Module:
    """Return the model at `source`, in eval mode, with numbers in it."""
    network = load_model(source)
    if not any(True for _ in network.parameters()):
        raise BadInput(f"{source} ({type(network).__name__}) has no parameters.")
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        if tensor.is_meta:
            raise BadInput(f"{source}: {name} is on the device meta, where it has no numbers; load the weights first.")
        if tensor.is_inference():
            raise BadInput(
                f"{source}: {name} was made in torch.inference_mode(), which no gradient can be taken of; make the "
                "model outside of it."
            )
    return network


def described(network: nn.Module, source: str) -> list[str]:
    """Return what must be known of the model besides its name: of an adapter, its name and its base."""
    configs = getattr(network, "peft_config", None)
    if not isinstance(configs, Mapping):
        return []
    active = getattr(network, "active_adapters", None) or [getattr(network, "active_adapter", None)]
    said = []
    for name, config in configs.items():
        kind = getattr(getattr(config, "peft_type", None), "value", "adapter")
        state = "" if name in (active() if callable(active) else active) else ", switched off"
        base = getattr(config, "base_model_name_or_path", None) or "a base without a name"
        said.append(f"{source} is an adapter of peft: {name} ({kind}{state}) on {base}.")
    return said


def symmetries_of(network: nn.Module, inputs: Any, asked: str | None, *others: Any) -> Symmetries:
    """Return what the function of the name `asked` declares, or what is found: all, or within that scope."""
    scopes: dict[str, Scope] = {scope: scope for scope in get_args(Scope)}
    wanted = asked or "all"
    if wanted in scopes:
        return find_symmetries(network, inputs, *others).within(scopes[wanted])
    return load_symmetries(wanted, network)


def all_inputs(network: nn.Module, references: Sequence[str], *, seed: int) -> dict[str, Any]:
    """Return inputs by what they are: of these functions, and made from the configuration with what is optional.

    Of what is made, all that the model takes; it has to take what is made without anything optional if there is no
    function.
    """
    found = {}
    made: dict[str, Any] = {}
    if not references or hasattr(getattr(network, "config", None), "get_text_config"):
        with suppress(*(BadInput,) * bool(references)), inputs_for(network, None, seed=seed) as given:
            output_change(network, given, {}, {})
            made = examples(network, seed=seed)
    for name, inputs in made.items():
        with suppress(*UNFIT, ValueError):
            output_change(network, inputs, {}, {})
            found[name] = inputs
    for reference in references:
        with inputs_for(network, reference, seed=seed) as given:
            output_change(network, given, {}, {})
            found[f"the inputs of {reference}"] = given
    return found


@contextmanager
def inputs_for(network: nn.Module, reference: str | None, *, seed: int, length: int = 16) -> Iterator[Any]:
    """Yield the inputs that the function `reference` gives, or some made from the model's configuration.

    Say in one sentence if the model does not take them, inside.
    """
    kind, config = type(network).__name__, getattr(network, "config", None)
    if reference is not None:
        given = call_object(reference, "a function that returns inputs")
    elif config is not None and not hasattr(config, "get_text_config"):
        raise BadInput(
            f"No example inputs can be made for {kind}, whose config is of type {type(config).__name__} and not a "
            "Hugging Face configuration: give inputs by --inputs package.module:function."
        )
    else:
        try:
            given = example_inputs(network, seed=seed, length=length)
        except ValueError as error:
            raise BadInput(f"{str(error).rstrip('.')}, by --inputs package.module:function.") from error
    what = f"the inputs made from {reference or 'its configuration'}"
    with taking(network, what, cure="; give others with --inputs"):
        yield given


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


@contextmanager
def taking(network: nn.Module, what: str, *, cure: str = "") -> Iterator[None]:
    """Say in one sentence that the model does not take `what`, with the line of the user's code where it showed."""
    try:
        yield
    except (*UNFIT, ValueError) as raised:
        error = raised.__cause__ if isinstance(raised, ValueError) else raised  # what finding symmetries says of a run
        if not isinstance(error, UNFIT) or is_out_of_memory(error):
            raise
        place = place_in_users_code(error)
        said = f"{type(error).__name__}: {first_line(error).rstrip('.')}{f' ({place})' if place else ''}"
        raise BadInput(f"{type(network).__name__} does not take {what}: {said}{cure}.") from error
