"""Check the labels and outputs of a cross-entropy by their values, for models of any class."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from quotient_manifolds.sharded import from_all, is_sharded
from quotient_manifolds.symmetries.example_inputs import without_adapters
from quotient_manifolds.symmetries.outputs import RUN_ERRORS, relative_change

IGNORED = -100  # torch's and Hugging Face's label for "does not count"
TOKENS = ("input_ids", "decoder_input_ids")  # Hugging Face's names of the tokens that a model takes
SAME = 64  # units of the logits' precision, at most 1e-3 of the largest logit: parallel sums differ by less
SUM = 0.01  # sums of probabilities in half precision differ from 1 by less

CAUSAL, PROBABILITIES = "causal", "probabilities"
ALL_CHECKS = (CAUSAL, PROBABILITIES)
_DONE: ContextVar[set[str] | None] = ContextVar("_DONE", default=None)

Logits = Callable[[nn.Module, Any], Tensor]
"""(model, inputs) -> logits"""


@contextmanager
def data_checks(done: Collection[str] = ()) -> Iterator[None]:
    """Make each check at most once inside, and skip those in `done`. Outside, every call of a loss makes all checks."""
    token = _DONE.set(set(done))
    try:
        yield
    finally:
        _DONE.reset(token)


def warn_of_probabilities(outputs: Tensor) -> None:
    """Warn if outputs (..., classes) are probabilities: in 0 ... 1, with sum 1, and not all of them 0 or 1."""
    outputs = outputs.detach()
    if (
        not _due(PROBABILITIES) or not outputs.numel() or hasattr(outputs, "full_tensor")
    ):  # a sharded tensor has parts on other processes
        return
    least, largest = (float(end) for end in outputs.aminmax())
    if not 0 <= least <= largest <= 1 or bool(((outputs.sum(-1) - 1).abs() > SUM).any()):
        return
    if bool(((outputs > 0) & (outputs < 1)).any()):
        _finish(PROBABILITIES)
        warnings.warn(
            "A cross-entropy must get logits. Found probabilities (all outputs lie in 0 ... 1 with sum 1), of which it "
            "takes the softmax once more, so its value is another one; leave out the softmax at the end of the model, "
            "or return its logarithm",
            stacklevel=2,
        )


def check_in_place(model: nn.Module, inputs: Any, labels: Tensor, logits: Logits) -> None:
    """Raise ValueError if the labels (rows, tokens) that count are input tokens, and the model is causal.

    A causal model predicts the next token at every position, but these labels are the tokens that it was just given.
    Costs two or three calls of `logits` with one row, and none if the labels differ from the input tokens.
    """
    if labels.ndim != 2 or not _due(CAUSAL):
        return
    given, counted = _by_name(inputs), labels != IGNORED
    known = [name for name in TOKENS if name in given] or list(given)[:1]  # custom models take tokens first
    name = next((name for name in known if _copied(given[name], labels, counted)), None)
    sharded = is_sharded(model)
    # Processes that share a model call it together or not at all; outside a measure some may never get here.
    if (_DONE.get() is None or not all(from_all(name is not None))) if sharded else name is None:
        return
    causal = _is_causal(model, given, name, counted, logits)
    if any(from_all(causal)) if sharded else causal:
        kind = type(without_adapters(getattr(model, "_orig_mod", model))).__name__
        raise ValueError(
            f"The model of cross_entropy must predict the labels where they are. Found {kind}, which predicts the next "
            f"token (no token changes an earlier logit), with its input tokens as labels; use "
            f"next_token_cross_entropy, or a loss of your own"
        )
    _finish(CAUSAL)


def _due(check: str) -> bool:
    """Return whether to check: not twice, and not if tensors have no values (under vmap, tracing, compilation)."""
    visible = torch._C._functorch.peek_interpreter_stack() is None and not torch.compiler.is_compiling()
    return visible and check not in (_DONE.get() or ())


def _finish(check: str) -> None:
    if (done := _DONE.get()) is not None:
        done.add(check)


def _by_name(inputs: Any) -> dict[Any, Any]:
    """Return the arguments that a model is called with, by name or position."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    return dict(enumerate(inputs if isinstance(inputs, tuple) else (inputs,)))


def _copied(tokens: Any, labels: Tensor, counted: Tensor) -> bool:
    """Return whether all labels that count equal these tokens, and some row has at least two of them."""
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.shape != labels.shape:
        return False
    return bool(((tokens == labels) | ~counted).all()) and bool((counted.sum(-1) > 1).any())


def _is_causal(model: nn.Module, given: Mapping[Any, Any], name: Any, counted: Tensor, logits: Logits) -> bool:
    """Return whether other tokens change no logit before them, but do change the logits at and after the last one.

    So a model that treats every token alone is not causal: its labels may well be its inputs. Several tokens are
    changed, because the model may ignore the first or the last as padding.
    """
    row = int((counted.sum(-1) > 1).nonzero()[0])
    places = counted[row].nonzero().flatten()
    last = int(places[-1])
    for some, at in _narrowed(given, row, len(counted)):
        try:
            before = _row(model, some, at, logits)
            own = some[name][at, places]
            others = _exchanged(own, before.shape[-1])
            behind = _row(model, _with_tokens(some, name, at, places[1:], others[1:]), at, logits)
            first = int(places[1:][(own != others)[1:]][0])
            if relative_change([behind[:first]], [before[:first]]) > min(SAME * torch.finfo(before.dtype).eps, 1e-3):
                return False
            ahead = _row(model, _with_tokens(some, name, at, places[:-1], others[:-1]), at, logits)
            return not torch.equal(ahead[last:], before[last:])
        except RUN_ERRORS:  # a row may have any number of pictures
            continue
    return False


def _with_tokens(given: Mapping[Any, Any], name: Any, row: int, places: Tensor, tokens: Tensor) -> dict[Any, Any]:
    """Return arguments with other tokens at these positions of a row."""
    changed = given[name].clone()
    changed[row, places] = tokens
    return {**given, name: changed}


def _narrowed(given: Mapping[Any, Any], row: int, rows: int) -> Iterator[tuple[Mapping[Any, Any], int]]:
    """Yield arguments that contain a row, and its index: first the row alone, if all tensors have `rows`; then all."""
    if all(leaf.ndim and len(leaf) == rows for leaf in tree_leaves(dict(given)) if isinstance(leaf, Tensor)):
        yield tree_map_only(Tensor, lambda leaf: leaf[row : row + 1].clone(), dict(given)), 0
    yield given, row


def _row(model: nn.Module, given: Mapping[Any, Any], row: int, logits: Logits) -> Tensor:
    """Return the logits (tokens, classes) of one row, NaN as 0; repeated calls agree, also in training mode."""
    inputs = given if all(isinstance(name, str) for name in given) else tuple(given.values())
    devices = {w.device for w in model.parameters() if w.is_cuda} if model.training else ()
    with torch.no_grad(), torch.random.fork_rng(list(devices), enabled=model.training):
        if model.training:
            torch.manual_seed(0)
        found = logits(model, inputs)[row]
    return found.masked_fill(found.isnan(), 0.0)


def _exchanged(tokens: Tensor, classes: int) -> Tensor:
    """Swap the last token with the nearest different one, wherever the two occur.

    All others are kept: they may stand for pictures, whose number must not change.
    """
    last = tokens[-1]
    others = tokens[tokens != last]
    other = others[-1] if len(others) else (last + 1) % classes
    return torch.where(tokens == last, other, torch.where(tokens == other, last, tokens))
