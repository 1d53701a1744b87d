"""What a command works on: a model, its batches and its loss by name, tried before anything is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from quotient_manifolds.cli.blame import place_in_users_code
from quotient_manifolds.cli.options import BadInput
from quotient_manifolds.load import DataSource, call_object, example_inputs, first_line, load_model, load_object
from quotient_manifolds.replica import private_batch, replica
from quotient_manifolds.sharpness import Loss, cross_entropy

# What a model raises on inputs that it cannot take.
UNFIT = (RuntimeError, IndexError, KeyError, AttributeError, TypeError, NotImplementedError, AssertionError)


@dataclass(frozen=True)
class Data:
    """Batches; settings: how they were made, for the record; notes: what a reader of the numbers must know."""

    batches: list[Any]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def model_named(source: str) -> nn.Module:
    """Return the model at `source`, in eval mode, with numbers in it."""
    network = load_model(_expanded(source)).eval()
    tensors = [*network.named_parameters(), *network.named_buffers()]
    if not any(True for _ in network.parameters()):
        raise BadInput(f"{source} ({type(network).__name__}) has no parameters.")
    for name, tensor in tensors:
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


def inputs_of(network: nn.Module, reference: str | None, *, seed: int, length: int = 16) -> Any:
    """Return the inputs that the function `reference` gives, or some made from the model's configuration."""
    if reference is not None:
        return call_object(reference, "a function that returns inputs")
    kind, config = type(network).__name__, getattr(network, "config", None)
    if config is not None and not hasattr(config, "get_text_config"):
        raise BadInput(
            f"No example inputs can be made for {kind}, whose config is of type {type(config).__name__} and not a "
            "Hugging Face configuration: give inputs by --inputs package.module:function."
        )
    try:
        return example_inputs(network, seed=seed, length=length)
    except ValueError as error:
        raise BadInput(f"{str(error).rstrip('.')}, by --inputs package.module:function.") from error


@contextmanager
def taking(network: nn.Module, reference: str | None) -> Iterator[None]:
    """What a model raises on inputs it cannot take is one sentence, with the line of the user's where it arose."""
    try:
        yield
    except UNFIT as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        place = place_in_users_code(error)
        raise BadInput(
            f"{type(network).__name__} does not take the inputs made from {reference or 'its configuration'}: "
            f"{type(error).__name__}: {first_line(error).rstrip('.')}{f' ({place})' if place else ''}; give others "
            "with --inputs."
        ) from error


def loss_named(reference: str | None) -> Loss:
    """Return cross-entropy, or the function that is named."""
    return cross_entropy if reference is None else load_object(reference, "a function loss(model, batch)")


def batches_from(data: str, settings: Mapping[str, Any], network: nn.Module, model: str, *, own_loss: bool) -> Data:
    """Return the batches of a file, of a folder of images, or of a function."""
    if ":" in data and not Path(data).exists():
        return _of_function(data, settings)
    if not own_loss:
        _check_classifier(model, network)
    path = _expanded(data)
    if "tokenizer" in settings:
        settings = {**settings, "tokenizer": _expanded(settings["tokenizer"])}
    source = DataSource(path, **settings)
    wanted, keyword = (
        getattr(network, "main_input_name", None),
        "input_ids" if source.kind == "text" else "pixel_values",
    )
    if wanted in ("input_ids", "pixel_values", "input_values", "input_features") and wanted != keyword:
        what = "text" if source.kind == "text" else "images"
        raise BadInput(f"{model} ({type(network).__name__}) takes {wanted}, but {data} holds {what}.")
    classes = getattr(getattr(network, "config", None), "num_labels", None)
    found = source.batches(network)
    if isinstance(classes, int) and type(network).__name__.endswith("Classification"):
        source.check(classes)
    count = sum(_rows(batch) for batch in found)
    record: dict[str, Any] = {"batch_size": source.batch_size, "examples": count}
    if source.kind == "text":
        record["max_length"] = getattr(found, "max_length", source.max_length)
        record["truncated"] = getattr(found, "truncated", None)
    if source.seed is not None:
        record["draw"] = source.seed
    return Data(list(found), record, tuple(getattr(found, "notes", ())))


def _of_function(reference: str, settings: Mapping[str, Any]) -> Data:
    if settings:
        name = {"seed": "draw", "max_examples": "examples"}.get(next(iter(settings)), next(iter(settings)))
        raise BadInput(f"--{name.replace('_', '-')} means nothing for batches that {reference} makes; leave it out.")
    answer = call_object(reference, "a function that returns batches")
    single = isinstance(answer, (Tensor, Mapping, str)) or (
        isinstance(answer, tuple) and bool(answer) and all(isinstance(each, Tensor) for each in answer)
    )
    try:
        batches = [] if single else list(answer)
    except TypeError:
        single, batches = True, []
    if single:
        raise BadInput(
            f"{reference} must return a list of batches, found one {type(answer).__name__}; put it into a list."
        )
    if not batches:
        raise BadInput(f"{reference} must return at least one batch, found none.")
    return Data(batches)


def _check_classifier(model: str, network: nn.Module) -> None:
    """Cross-entropy of labelled examples is the loss of classifiers alone."""
    kind, config = type(network).__name__, getattr(network, "config", None)
    if kind.endswith(("ForCausalLM", "LMHeadModel")):
        raise BadInput(
            f"{model} is a causal language model ({kind}), whose loss is not that of labelled examples: give batches "
            "by --data package.module:function and --loss quotient_manifolds:next_token_cross_entropy, or measure it "
            "in Python with qm.next_token_cross_entropy."
        )
    classes = getattr(config, "num_labels", None)
    regression = getattr(config, "problem_type", None) == "regression" or classes == 1
    if kind.endswith("Classification") and regression:
        raise BadInput(
            f"Expected a classifier with at least 2 classes, found {classes} in {model} (a regression); give --loss."
        )
    if type(network).__module__.startswith("transformers.") and "Classification" not in kind:
        raise BadInput(
            f"Expected a classifier, found {model} ({kind}); give --loss package.module:function, a function "
            "loss(model, batch), for other models."
        )


def try_loss(network: nn.Module, loss: Loss, batches: Sequence[Any], data: str) -> None:
    """Evaluate the loss on every batch once; what a model raises on batches it cannot take is one sentence.

    On copies, as measures do: a forward pass that writes must not change what is measured afterwards.
    """
    for index, batch in enumerate(batches):
        try:
            with torch.no_grad():
                loss(replica(network, {}), private_batch(batch))
        except UNFIT as error:
            if type(error).__name__ == "OutOfMemoryError":
                raise
            place = place_in_users_code(error)
            raise BadInput(
                f"{type(network).__name__} does not take batch {index} of {data}: {type(error).__name__}: "
                f"{first_line(error).rstrip('.')}{f' ({place})' if place else ''}."
            ) from error


def _rows(batch: Any) -> int:
    return next((int(leaf.shape[0]) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 0)


def _expanded(path: str) -> str:
    """Return the path with ~ or ~user replaced by their home."""
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError:
        raise BadInput(f"{path} begins with a user that this machine does not know.") from None
