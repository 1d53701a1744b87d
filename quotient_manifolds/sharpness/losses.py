"""Compute losses of a model on a batch. Any callable loss(model, batch) -> scalar tensor can serve as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.sharpness.data_checks import IGNORED, check_in_place, warn_of_probabilities
from quotient_manifolds.symmetries.outputs import call

Loss = Callable[[nn.Module, Any], Tensor]


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Compute the mean cross-entropy of a classifier.

    batch: (inputs, targets), with inputs a tensor, a tuple (positional) or a dict (keywords); or a dict with "labels",
    whose other entries are the model's keywords (Hugging Face). The model returns logits (..., classes), or a mapping
    or tuple that contains them. Labels are class indices of shape (...); -100 marks labels that do not count. They are
    not shifted: raises ValueError if they are the input tokens of a causal model, in which no token changes an earlier
    logit; use `next_token_cross_entropy` for it. Warns if the outputs are probabilities already.
    """
    logits, labels = _in_place(model, batch)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def check_loss(loss: Any) -> None:
    """Raise TypeError unless a loss can be called as loss(model, batch): torch's losses take outputs and targets."""
    name = getattr(loss, "__name__", type(loss).__name__)
    of_torch = getattr(loss, "__module__", None) == F.__name__ or loss is getattr(torch._C._nn, name, ...)
    if isinstance(loss, nn.modules.loss._Loss) or of_torch:
        instead = "quotient_manifolds.cross_entropy" if "cross" in name.lower() else "a function of your own"
        raise TypeError(
            f"A loss must be called as loss(model, batch). Found torch's {name}, which takes outputs and targets; use "
            f"{instead}, or lambda model, batch: {name}(model(batch[0]), batch[1])"
        )
    if not callable(loss):
        raise TypeError(f"A loss must be callable as loss(model, batch). Found {type(loss).__name__}")


def next_token_cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Compute the mean cross-entropy of a causal language model: the logits at t against the token at t + 1.

    batch: a dict of the model's keywords with "labels", or (inputs, labels) with inputs as for `cross_entropy`. Labels
    have the shape (batch, tokens) and are unshifted, as in Hugging Face; -100 marks tokens that do not count. Without
    "labels" they are the `input_ids` that the `attention_mask` keeps, except those right after padding. The first token
    of a sequence is never predicted. The loss is computed in the precision of the logits, at least float32, and equals
    the loss that Hugging Face's causal models return for the same labels.

    >>> model = nn.Embedding(3, 3)  # logits of the next token from the last one
    >>> _ = nn.init.eye_(model.weight)
    >>> next_token_cross_entropy(model, (torch.tensor([[0, 1, 1]]), torch.tensor([[0, 1, -100]])))  # -log(1 / (2 + e))
    tensor(1.5514, grad_fn=<NllLossBackward0>)
    """
    logits, labels = _next_tokens(model, batch)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def _next_tokens(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return logits (..., tokens - 1, vocabulary) and the labels (..., tokens - 1) that they predict."""
    if isinstance(batch, Mapping) and "labels" not in batch:
        if "input_ids" not in batch:
            raise ValueError(f'A dict batch needs "labels" or "input_ids". Found {sorted(map(str, batch))}')
        labels, mask = batch["input_ids"], batch.get("attention_mask")
        if mask is not None:
            unseen = mask == 0
            # A token is predicted at the one before it, and logits at padding predict nothing.
            labels = labels.masked_fill(unseen | torch.cat([unseen[..., :1], unseen[..., :-1]], dim=-1), IGNORED)
        batch = {**batch, "labels": labels}
    logits, labels = _logits_and_labels(model, batch)
    if logits.ndim < 3 or logits.shape[-2] < 2:
        raise ValueError(
            f"Next tokens need logits of shape (batch, tokens, vocabulary) with at least 2 tokens. Found "
            f"{tuple(logits.shape)}"
        )
    return logits[..., :-1, :], labels[..., 1:]


def _in_place(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return logits (..., classes) and the labels (...) at their positions; ValueError if these are of next tokens."""
    logits, labels = _logits_and_labels(model, batch)
    check_in_place(model, inputs_and_labels(batch)[0], labels, _logits)
    return logits, labels


def counted_logits(model: nn.Module, batch: Any, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the logits (n, classes) and labels (n,) of all labels that count; of next tokens if `causal`."""
    logits, labels = (_next_tokens if causal else _in_place)(model, batch)
    counted = labels != IGNORED
    return logits[counted], labels[counted]


def inputs_in(batch: Any) -> Any:
    """Return the inputs of the model: a batch without its labels or targets."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key != "labels"}
    return batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch


def inputs_and_labels(batch: Any) -> tuple[Any, Tensor]:
    """Return the inputs of the model and the labels; ValueError or TypeError for a batch without labels."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise ValueError(
                f'A dict batch must have "labels" beside the keywords of the model. Found {sorted(map(str, batch))}; '
                f"give (inputs, targets), such as ({', '.join(f'batch[{key!r}]' for key in [*batch][:2])})"
            )
        return inputs_in(batch), batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise TypeError(
        f'Cross-entropies take batches (inputs, targets) or dicts with "labels". Found {type(batch).__name__}; '
        f"for other batches pass your own loss(model, batch)"
    )


def logits_of(output: Any) -> Tensor:
    """Return the logits in a model's output: a tensor, a mapping with "logits", or a tuple that begins with them."""
    if isinstance(output, Mapping):
        if "logits" not in output:
            raise ValueError(f'The model\'s output needs "logits". Found {sorted(map(str, output))}; pass a loss')
        output = output["logits"]
    elif isinstance(output, (tuple, list)):
        output = output[0]
    if not isinstance(output, Tensor):
        raise TypeError(f"The model must return logits, a tensor. Found {type(output).__name__}; pass your own loss")
    return output


def _logits_and_labels(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return logits (..., classes) in at least float32, and the labels (...); TypeError or ValueError for bad ones."""
    inputs, labels = inputs_and_labels(batch)
    logits = _logits(model, inputs)
    # A loss in half precision would have only two digits.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if logits.shape[-1:] == (1,):
        raise ValueError(
            "A cross-entropy needs logits of at least 2 classes. Found one logit, for which it is 0 whatever the model "
            "computes; use a loss of your own, with torch's binary_cross_entropy_with_logits for two classes"
        )
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"Labels must have the shape of the logits without their last axis, {tuple(logits.shape[:-1])}. "
            f"Found {tuple(labels.shape)}"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"Labels must be class indices (integers). Found {labels.dtype}")
    counted, classes = labels[labels != IGNORED], logits.shape[-1]
    if counted.numel() and not (int(counted.min()) >= 0 and int(counted.max()) < classes):
        wrong = int(counted.min()) if int(counted.min()) < 0 else int(counted.max())
        raise ValueError(f"Labels must lie in 0 ... {classes - 1}, as the model has {classes} classes. Found {wrong}")
    warn_of_probabilities(logits)
    return logits, labels.long()  # torch's losses take few types of integers


def _logits(model: nn.Module, inputs: Any) -> Tensor:
    return logits_of(call(model, inputs))
