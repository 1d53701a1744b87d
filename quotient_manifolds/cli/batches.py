"""Make the batches that a command measures on, and try the loss on them before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from quotient_manifolds.cli.errors import BadInput
from quotient_manifolds.cli.options import LANGUAGE
from quotient_manifolds.cli.subject import taking
from quotient_manifolds.load import DataSource, call_object
from quotient_manifolds.replica import private_batch, replica
from quotient_manifolds.sharpness import Loss

# What DataSource calls two options of the command line.
_RENAMED = {"draw": "seed", "examples": "max_examples"}

# What the inputs of a Hugging Face model may be called.
_KINDS_OF_INPUT = ("input_ids", "pixel_values", "input_values", "input_features")


def batches_from(
    data: str, settings: Mapping[str, Any], network: nn.Module, model: str, *, own_loss: bool
) -> tuple[list[Any], dict[str, Any], Sequence[str]]:
    """Return the batches of a file, or of a function.

    settings: by the option's name, those that are given. With the batches come how they were made, for the record,
    and what a reader of the numbers must know.
    """
    if ":" in data and not Path(data).exists():
        return _of_function(data, settings), {}, ()
    if not own_loss and settings.get("task") not in LANGUAGE:
        _check_classifier(model, network)
    source = DataSource(data, **{_RENAMED.get(name, name): value for name, value in settings.items()})
    taken = getattr(network, "main_input_name", None)
    if taken in _KINDS_OF_INPUT and taken != ("input_ids" if source.kind == "text" else "pixel_values"):
        what = "text" if source.kind == "text" else "images"
        raise BadInput(f"{model} ({type(network).__name__}) takes {taken}, but {data} holds {what}.")
    found = source.batches(network)
    record: dict[str, Any] = {"batch_size": source.batch_size, "examples": found.examples}
    if source.kind == "text":
        record |= {"max_length": found.max_length, "truncated": found.truncated}
    if source.is_language:
        record["task"] = source.task
    if source.seed is not None:
        record["draw"] = source.seed
    return list(found), record, found.notes


def _of_function(reference: str, settings: Mapping[str, Any]) -> list[Any]:
    if settings:
        name = next(iter(settings)).replace("_", "-")
        raise BadInput(f"--{name} means nothing for batches that {reference} makes; leave it out.")
    answer = call_object(reference, "a function that returns batches")
    listed = hasattr(answer, "__iter__") or hasattr(answer, "__getitem__")
    single = isinstance(answer, (Tensor, Mapping, str)) or not listed
    if single or (isinstance(answer, tuple) and answer and all(isinstance(each, Tensor) for each in answer)):
        raise BadInput(
            f"{reference} must return a list of batches, found one {type(answer).__name__}; put it into a list."
        )
    if not (batches := list(answer)):
        raise BadInput(f"{reference} must return at least one batch, found none.")
    return batches


def _check_classifier(model: str, network: nn.Module) -> None:
    """Refuse a model that is no classifier: cross-entropy of labelled examples is the loss of classifiers alone."""
    kind, config = type(network).__name__, getattr(network, "config", None)
    if kind.endswith(("ForCausalLM", "LMHeadModel")):
        raise BadInput(
            f"{model} is a causal language model ({kind}), whose loss is not that of labelled examples: give --task "
            "causal and text, or batches by --data package.module:function and --loss "
            "quotient_manifolds:next_token_cross_entropy."
        )
    classes = getattr(config, "num_labels", None)
    regression = getattr(config, "problem_type", None) == "regression" or classes == 1
    if kind.endswith("Classification") and regression:
        raise BadInput(
            f"Expected a classifier with at least 2 classes, found {classes} in {model} (a regression); give --loss."
        )
    if type(network).__module__.startswith("transformers.") and "Classification" not in kind:
        raise BadInput(
            f"Expected a classifier, found {model} ({kind}); give --task masked or seq2seq for such a language model, "
            "or --loss package.module:function, a function loss(model, batch)."
        )


def try_loss(network: nn.Module, loss: Loss, batches: Sequence[Any], data: str) -> None:
    """Evaluate the loss on every batch once. Raises BadInput for a batch that the model does not take.

    On copies, as measures do: a forward pass that writes must not change what is measured afterwards.
    """
    for index, batch in enumerate(batches):
        with torch.no_grad(), taking(network, f"batch {index} of {data}"):
            loss(replica(network, {}), private_batch(batch))


def like(batch: Any, parameter: Tensor) -> Any:
    """Return the batch on the device of a parameter, its floating-point tensors in the parameter's dtype."""

    def moved(value: Tensor) -> Tensor:
        return value.to(parameter) if value.is_floating_point() else value.to(parameter.device)

    return tree_map_only(Tensor, moved, dict(batch) if isinstance(batch, Mapping) else batch)


def distance(model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
    """Return the mean squared distance of the model's first output from targets: a loss for a model without a head."""
    inputs, targets = batch
    return F.mse_loss(first_output(_called(model, inputs)), targets)


def distance_batch(model: nn.Module, inputs: Any, seed: int) -> tuple[Any, Tensor]:
    """Return a batch for `distance`: the inputs, and standard Gaussian targets of the shape of the output."""
    with torch.no_grad():
        output = first_output(_called(replica(model, {}), private_batch(inputs)))  # a forward pass may write
    targets = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return inputs, targets.to(output)


def _called(model: nn.Module, inputs: Any) -> Any:
    """Return the model's answer to keywords, to several arguments, or to one."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def first_output(output: Any) -> Tensor:
    """Return the first floating-point tensor of a model's output."""
    if isinstance(output, Tensor):
        return output
    for value in output.values() if isinstance(output, Mapping) else output:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise TypeError(f"the model should return a floating-point tensor; found {type(output).__name__} without one")
