"""Query which derivatives of tensors are being taken, and compute on plain values beneath all transforms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

_Function = TypeVar("_Function", bound=Callable[..., Any])
_functorch = torch._C._functorch


def _layers(x: Tensor) -> Iterator[Tensor]:
    """Yield the tensor, then the tensor inside each wrapper of `torch.func`, the plain tensor last."""
    yield x
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
        yield x


def differentiated(*tensors: Tensor | None) -> bool:
    """Return whether a derivative with respect to any of the tensors may be taken, in reverse or in forward mode.

    This covers graphs, dual tensors, and every level of the transforms of `torch.func`. A constant inside a transform
    may count, too.
    """
    reverse, forward = torch.is_grad_enabled(), forward_ad._current_level >= 0
    for x in tensors:
        if x is None:
            continue
        if reverse and x.requires_grad:
            return True
        if not _functorch.is_functorch_wrapped_tensor(x):
            if forward and forward_ad.unpack_dual(x).tangent is not None:
                return True
            continue
        *wrapped, plain = _layers(x)
        if forward or (reverse and plain.requires_grad) or any(map(_functorch.is_gradtrackingtensor, wrapped)):
            return True
    return False


def transformed() -> bool:
    """Return whether the current code runs inside a transform of `torch.func`."""
    return _functorch.peek_interpreter_stack() is not None


def in_no_graph(*tensors: Tensor | None) -> bool:
    """Return whether nothing is differentiated, mapped or compiled, so that code may read values and write in place."""
    return not torch.compiler.is_compiling() and not transformed() and not differentiated(*tensors)


def has_values(x: Tensor) -> bool:
    """Return whether Python code may read single entries, as it may not under `torch.func.vmap`."""
    return not any(map(_functorch.is_batchedtensor, _layers(x)))


def values(x: Tensor) -> Tensor:
    """Return the plain tensor below all transforms; under `torch.func.vmap` its shape includes mapped dimensions."""
    while _functorch.is_functorch_wrapped_tensor(x):  # `_layers` without the cost of a generator
        x = _functorch.get_unwrapped(x)
    return x


def primal(x: Tensor) -> Tensor:
    """Return a tensor saved for forward mode without the tangent being propagated; other levels keep their tangents."""
    return x if _functorch.is_batchedtensor(x) else forward_ad.unpack_dual(x).primal


def outer_derivatives() -> AbstractContextManager[Any]:
    """Let outer transforms differentiate the `jvp` of a `torch.autograd.Function`, in which torch disables them."""
    return cast("AbstractContextManager[Any]", forward_ad._set_fwd_grad_enabled(True))


def on_values(refusal: str | None = None) -> Callable[[_Function], _Function]:
    """Let a function of tensors compute on their values, below every transform, and refuse its derivative.

    The first dimension of all tensors, arguments and results, is a common batch, whose entries must be independent.
    Under `torch.func.vmap`, the mapped dimension is joined with it. A derivative that reaches the results, backward or
    forward, raises NotImplementedError with the sentence `refusal`. Without `refusal` the results are constants, with
    derivative 0.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            tensors = [x for x in args if isinstance(x, Tensor)]
            if refusal is not None and in_no_graph(*tensors):
                return function(*args)
            if refusal is not None or not all(map(has_values, tensors)):
                return _OnValues.apply(function, refusal, *args)
            with torch.no_grad():
                return _detached(function(*map(_detached, args)))

        return cast(_Function, run)

    return decorate


def _detached(found: Any) -> Any:
    if isinstance(found, tuple):
        return tuple(map(_detached, found))
    return found.detach() if isinstance(found, Tensor) else found


def one_batch(info: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> list[Any]:
    """Join the dimension that `torch.func.vmap` maps over with the first dimension of every tensor."""
    joined = []
    for x, dim in zip(args, in_dims, strict=True):
        if isinstance(x, Tensor):
            front = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            x = front.flatten(0, 1)
        joined.append(x)
    return joined


def many_batches(info: Any, results: Any) -> tuple[Any, Any]:
    """Undo `one_batch`; return results and their mapped dimensions, as the vmap of a `torch.autograd.Function` must."""
    size = info.batch_size
    if isinstance(results, Tensor):
        return results.unflatten(0, (size, len(results) // max(size, 1))), 0
    return tuple(many_batches(info, y)[0] for y in results), (0,) * len(results)


class _OnValues(torch.autograd.Function):
    @staticmethod
    def forward(function: Callable[..., Any], refusal: str | None, *args: Any) -> Any:
        return function(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.refusal, ctx.count = inputs[1], len(inputs)
        ctx.results = None if isinstance(output, Tensor) else len(output)
        ctx.set_materialize_grads(False)
        if ctx.refusal is None:
            ctx.mark_non_differentiable(*([output] if isinstance(output, Tensor) else output))

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> Any:
        if ctx.refusal is not None and any(slope is not None for slope in slopes):
            raise NotImplementedError(ctx.refusal)
        return (None,) * ctx.count

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        if ctx.refusal is not None and any(tangent is not None for tangent in tangents):
            raise NotImplementedError(ctx.refusal)
        return None if ctx.results is None else (None,) * ctx.results

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], function: Any, refusal: Any, *args: Any) -> Any:
        return many_batches(info, _OnValues.apply(function, refusal, *one_batch(info, in_dims[2:], args)))
