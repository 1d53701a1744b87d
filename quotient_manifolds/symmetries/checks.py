"""Check the arguments of this package's functions, and raise one-sentence errors."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.batches import tensors_in
from quotient_manifolds.messages import first_line


class ModelError(ValueError):
    """State in one sentence where and why a model does not run on its inputs."""


@contextmanager
def running(model: nn.Module, hint: str = "") -> Iterator[None]:
    """Turn an exception in the code of a model into a ModelError that names the module and the operation."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        names, where, operation = {id(each): name for name, each in model.named_modules()}, "", ""
        for frame, _ in traceback.walk_tb(error.__traceback__):
            module, func = frame.f_locals.get("self"), frame.f_locals.get("func")
            if isinstance(module, nn.Module) and id(module) in names:
                name = names[id(module)]
                where, operation = f"module {name!r} ({type(module).__name__})" if name else "its forward", ""
            elif isinstance(func, torch._ops.OpOverload):
                operation = operation or f"{func.overloadpacket.__name__} in "
        said = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        raise ModelError(
            f"{type(model).__name__} must run on the inputs to show its symmetries. "
            f"Found that {operation}{where or 'its code'} raises {said}{hint}"
        ) from error


@contextmanager
def named_if_empty(params: Mapping[str, Tensor]) -> Iterator[None]:
    """Turn an error of torch into a ValueError that names a parameter without elements, if there is one.

    Most such parameters do no harm, so they are not refused beforehand.
    """
    try:
        yield
    except (RuntimeError, ArithmeticError, LookupError) as error:
        empty = next((name for name, w in params.items() if not w.numel()), None)
        if empty is None:
            raise
        raise ValueError(
            f"Parameters must have elements. Found {empty} of shape {tuple(params[empty].shape)}, with which no "
            "symmetries can be found; leave it out of the model"
        ) from error


def check_model(model: Any) -> None:
    """Raise TypeError for anything but a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module. Found {_type(model)}.")


def check_eval(model: nn.Module) -> None:
    """Raise ValueError naming the first module in train mode."""
    for name, module in model.named_modules():
        if module.training:
            found = f"{name or 'the model itself'} ({type(module).__name__})"
            raise ValueError(f"The model must be in eval mode. Found {found} in train mode; call model.eval() first.")


def check_inputs(batch: Any) -> None:
    """Raise ValueError for sparse or nested tensors, on which no run can be recorded."""
    for each in tensors_in(batch):
        if each.is_nested or each.layout != torch.strided:
            kind = "a nested one: pad it" if each.is_nested else "a sparse one: call to_dense() on it"
            raise ValueError(f"inputs must be dense tensors. Found {kind} first.")


def check_list(name: str, given: Any) -> None:
    """Raise TypeError for anything but a list of inputs, such as a single batch passed by mistake."""
    if isinstance(given, (Tensor, Mapping, str)) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a list of inputs. Found one {type(given).__name__}: wrap it in a list.")


def check_parameters(params: Any) -> None:
    """Raise TypeError for anything but a mapping from names to tensors."""
    if not isinstance(params, Mapping):
        raise TypeError(f"params must be a torch.nn.Module or its named parameters as a dict. Found {_type(params)}.")
    strange = [name for name, value in params.items() if not isinstance(value, Tensor)]
    if strange:
        raise TypeError(f"params must be tensors by name. Found {_type(params[strange[0]])} for {strange[0]!r}.")


def generator_of(seed: Any) -> torch.Generator:
    """Return a generator with this seed; ValueError unless it is a 64-bit integer."""
    try:
        number = operator.index(seed)
    except TypeError:
        number = 2**64
    if isinstance(seed, bool) or not -(2**63) <= number < 2**64:
        raise ValueError(f"seed must be an integer of 64 bits. Found {seed!r}.")
    return torch.Generator().manual_seed(number)


def check_loaded(model: nn.Module) -> None:
    """Raise ValueError naming the first parameter or buffer that has no values."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    absent = next((name for name, value in tensors if value.is_meta), None)
    if absent is not None:
        raise ValueError(f"{absent!r} must have values. Found it on the meta device: load the weights first.")


def check_weights(params: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Raise ValueError naming the first of `names` that is absent or is not a dense tensor of finite floats."""
    for name in names:
        if name not in params:
            raise ValueError(
                f"params must hold {name!r}, which a symmetry moves. Found none: take both from one model."
            )
        if problem := _problem(params[name]):
            raise ValueError(f"parameter {name!r} must {problem}")


@contextmanager
def fitting() -> Iterator[None]:
    """Turn an error of torch into a ValueError that parameters do not have the shapes that the symmetries expect."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        raise ValueError(
            f"params must have the shapes of the model whose symmetries these are. Found that {first_line(error)}"
        ) from error


def _problem(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"be a tensor. Found {_type(value)}."
    if isinstance(value, nn.parameter.UninitializedParameter):
        return "have a shape. Found none yet: run the model once first."
    if value.is_meta:
        return "have values. Found it on the meta device: load the weights first."
    if value.layout != torch.strided:
        return f"be a dense tensor. Found a sparse one ({value.layout}): call to_dense() on it first."
    if value.is_quantized or not (value.is_floating_point() or value.is_complex()):
        return f"be of floating point. Found {value.dtype}: dequantise the model first."
    if value.is_complex():
        return f"be real. Found {value.dtype}: no symmetry is known of complex weights."
    if value.dtype.itemsize < 2:
        return f"have at least 16 bits. Found {value.dtype}: cast the model to float32 first."
    if value.numel() and not bool(torch.isfinite(torch.stack(value.detach().aminmax())).all()):  # NaN is both
        return "be finite. Found NaN or infinity: the weights are broken."
    return ""


def _type(value: Any) -> str:
    return f"an object of type {type(value).__name__}"
