"""Evaluate a model as a function of its parameters, on a copy of its structure; the model itself is never changed.

`torch.func.functional_call` swaps parameters on the user's own modules and restores them afterwards. That fails if a
module is used twice, if an interrupt comes in between, if two threads measure one model, or if the model writes its own
weights. A replica avoids these problems. It is made for one evaluation, with the given tensors and private copies of
all others, and then discarded.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from quotient_manifolds.batches import mapped

Module = TypeVar("Module", bound=nn.Module)
Cast = Callable[[Tensor], Tensor]

_SWITCHES = threading.RLock()


@contextmanager
def attention_by_formula() -> Iterator[None]:
    """Compute attention by its formula inside the block, in one thread at a time.

    The switch is global to the process, so one of two concurrent threads could restore the wrong state.
    """
    with _SWITCHES, sdpa_kernel(SDPBackend.MATH):
        yield


def unchanged(tensor: Tensor) -> Tensor:
    """Return the tensor itself, as the identity cast."""
    return tensor


def replica(
    model: Module, params: Mapping[str, Tensor], cast: Cast = unchanged, buffers: Mapping[str, Tensor] | None = None
) -> Module:
    """Return a copy of the model's structure that computes with `params` in place of the parameters of these names.

    The copy holds the tensors of `params` themselves, wherever the model uses the parameter (tied or twice), so
    gradients reach them. All other parameters and buffers are cloned, then cast. So a forward pass, or a hook, can only
    write to the copy, or to `params`, which the caller must own. Names are from `model.named_parameters()`. buffers:
    likewise, by names from `model.named_buffers()`.

    Raises ValueError for a name that the model lacks, and for a model that cannot be copied. Then `copy.deepcopy`
    fails (on locks or generators), or returns a model with the old parameters (of scripted modules).
    """
    own = dict(model.named_parameters())
    if unknown := [name for name in params if name not in own]:
        raise ValueError(f"{type(model).__name__} has no parameter {unknown[0]}")
    memo: dict[int, Any] = {id(w): params[name] if name in params else _private(w, cast) for name, w in own.items()}
    given = buffers or {}
    memo |= {
        id(own): given[name] if name in given else cast(own.detach().clone()) for name, own in model.named_buffers()
    }
    copied = _copied(model, memo, cast)
    held = {id(w) for module in copied.modules() for w in module._parameters.values()}
    if lost := [name for name in params if id(params[name]) not in held]:
        raise ValueError(
            f"A copy of the model must compute with the parameters it is given. {type(model).__name__} copies itself "
            f"in a way of its own, which keeps {lost[0]}; pass the plain module in it (before scripting or wrapping)"
        )
    return copied


def twin(model: Module) -> Module:
    """Return an independent copy of the model, as `copy.deepcopy`, but also of tensors that autograd made.

    Raises ValueError for a model that cannot be copied.
    """
    return _copied(model, {}, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))


def differing_tensors(here: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ in values or shape, or that only one side has (such as buffers)."""
    return [
        name
        for name in dict.fromkeys((*here, *there))
        if name not in here or name not in there or not _equal(here[name], there[name])
    ]


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same numbers, in any dtype and layout; NaN equals NaN."""
    x, y = (each.detach().to_dense() if each.layout != torch.strided else each.detach() for each in (one, other))
    if x.shape != y.shape:
        return False
    x, y = (each.float() if each.is_floating_point() and each.dtype.itemsize < 2 else each for each in (x, y))
    y = y.to(x.device)
    return bool(((x == y) | ((x != x) & (y != y))).all())


def _copied(model: Module, memo: dict[int, Any], cast: Cast) -> Module:
    # Most of the ten hook dictionaries of a module are empty, and `deepcopy` would copy each of them slowly.
    held = (each for module in model.modules() for each in vars(module).values())
    memo |= {id(each): type(each)() for each in held if type(each) in (dict, OrderedDict) and not each}
    try:
        with _PrivateTensors(cast):
            return copy.deepcopy(model, memo)
    except Exception as error:  # an attribute may be anything, such as a lock, an open file or a Python module
        raise ValueError(
            f"A model must be copyable, for a copy of it is what changes. Found that copy.deepcopy of "
            f"{type(model).__name__} fails with {type(error).__name__}: {' '.join(str(error).split())}; keep such "
            f"attributes outside of the model"
        ) from error


def private_batch(batch: Any, cast: Cast = unchanged) -> Any:
    """Return the batch with every tensor that `mapped` finds in it cloned, then cast.

    A model that writes to its inputs, such as one that begins with `ReLU(inplace=True)`, then writes to a copy.
    """
    return mapped(lambda tensor: cast(tensor.detach().clone()), batch)


def _private(w: Tensor, cast: Cast) -> Tensor:
    """Clone and cast a parameter that is not replaced; a parameter of a special class (quantized) is shared."""
    if type(w) is not nn.Parameter:
        return w
    return nn.Parameter(cast(w.detach().clone()), requires_grad=w.requires_grad)


class TrueGradients(TorchFunctionMode):
    """Give embeddings their true gradient; torch would set the row of the padding token to zero."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.embedding, torch.embedding):
            kept = ("input", "weight", "indices", "max_norm", "norm_type")
            args, kwargs = args[:2], {name: value for name, value in kwargs.items() if name in kept}
        return func(*args, **kwargs)


class _PrivateTensors(TorchFunctionMode):
    """Let `copy.deepcopy` clone tensors that are neither parameters nor buffers, also those that autograd made.

    torch refuses to copy the latter, which old weight norm and pruning keep as attributes. A clone stays in the graph
    of the original, which shows that a loss with such a tensor depends on the original model.
    """

    def __init__(self, cast: Cast) -> None:
        super().__init__()
        self._cast = cast

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = self._cast(tensor.clone())
        return memo[id(tensor)]


def parameter_reached(value: Tensor, model: nn.Module) -> str | None:
    """Return the name of a parameter of this very model that gradients of `value` would reach; None if there is none.

    A value computed by a replica reaches none. The graph is traversed once.
    """
    names = {id(w): name for name, w in model.named_parameters()}
    seen: set[Any] = set()
    waiting = [value.grad_fn]
    if value.grad_fn is None:
        return names.get(id(value))
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # only nodes that accumulate gradients have it
        if id(leaf) in names:
            return names[id(leaf)]
        waiting.extend(following for following, _ in node.next_functions)
    return None
