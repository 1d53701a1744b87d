"""Evaluate a model as a function of its parameters, and compare its outputs at different parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.batches import mapped, tensors_in
from quotient_manifolds.replica import TrueGradients, private_batch, replica
from quotient_manifolds.symmetries.checks import check_eval, running
from quotient_manifolds.symmetries.double_precision import DoublePrecision
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.reparameterization import gaussian

Evaluate = Callable[[nn.Module, Any], Any]
"""(model, inputs) -> any structure with the floating point tensors to compare, such as an output or a loss."""

# The code of a model and its operations may raise any of these.
RUN_ERRORS = (RuntimeError, TypeError, LookupError, ValueError, AttributeError, AssertionError, ArithmeticError)

EXAMPLES = 2  # examples of a batch that suffice to show which operations a model does
REPEATED = 1e-6  # the relative change between two evaluations above which a model is random


class ModelOutputs:
    """Evaluate evaluate(model, batch) on every batch as a function of parameters, on replicas.

    Computed in float64 or, if the function does not run in float64, in the model's own type, but at least float32; see
    `precision`. Parameters that are not given are the model's own; buffers may be given, too. first: the number of the
    first batch, for messages.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], evaluate: Evaluate | None = None, first: int = 0
    ) -> None:
        self.model, self.evaluate, self.batches, self.first = model, evaluate or answer, batches, first
        types = {w.dtype for w in model.parameters() if w.is_floating_point()}
        least = min(types, key=lambda dtype: dtype.itemsize, default=torch.float64)
        self._narrow = torch.promote_types(least, torch.float32)
        self._type = torch.float64
        self._own: dict[int, list[Tensor]] = {}

    @property
    def precision(self) -> float:
        """Return machine epsilon of the dtype of the computation."""
        return torch.finfo(self._type).eps

    def params(self) -> Params:
        """Return copies of the model's parameters, in float64 if they are floating point numbers."""
        own = ((name, w.detach()) for name, w in self.model.named_parameters())
        return {name: w.to(torch.float64 if w.is_floating_point() else w.dtype, copy=True) for name, w in own}

    def own(self, index: int = 0) -> list[Tensor]:
        """Return the floating point outputs on batch `index`.

        Raises ValueError in train mode, for NaN, and unless two evaluations agree.
        """
        if index not in self._own:
            check_eval(self.model)
            outputs, again = ([each.detach() for each in self.at({}, index)] for _ in range(2))
            shapes = [each.shape for each in outputs]
            if any(bool(output.isnan().any()) for output in outputs):
                raise ValueError("the model's output on these inputs contains NaN: nothing can be compared.")
            if [each.shape for each in again] != shapes or not relative_change(again, outputs) <= REPEATED:
                raise ValueError(
                    "two evaluations on the same inputs differ: the model is random, nothing can be compared."
                )
            self._own[index] = outputs
        return self._own[index]

    def change(self, params: Params, index: int = 0) -> float:
        """Return the `relative_change` of outputs at these parameters, which the run may write to."""
        own = self.own(index)
        with torch.no_grad():
            return relative_change(self.at(params, index), own)

    def noise(self, params: Mapping[str, Tensor] | None = None, index: int = 0) -> float:
        """Estimate the relative rounding error of outputs, by rounding the (given or own) parameters at random."""
        generator, start = torch.Generator().manual_seed(0), self.params() | dict(params or {})
        with torch.no_grad():
            there = self.at({name: w.clone() for name, w in start.items()}, index)
            near = [self.at(rounded(start, self.precision, generator), index) for _ in range(2)]
        return max(*(relative_change(each, there) for each in near), self.precision)

    def value(self, params: Params, index: int) -> float:
        """Return the output on batch `index` as one number: several are contracted with a fixed random vector."""
        return float(_number(self.at(params, index)).detach())

    def own_value(self, index: int) -> float:
        """Return `value` at the model's own parameters."""
        known = self._own.get(index)
        return float(_number(self.at({}, index) if known is None else known).detach())

    def gradient(self, params: Params, names: Collection[str], index: int) -> Params:
        """Return the gradient of `value` on batch `index` in the named parameters, in float64."""
        leaves = {name: params[name].detach().requires_grad_() for name in names}
        if not (value := _number(self.at(params | leaves, index))).requires_grad:
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        grads = torch.autograd.grad(value, [*leaves.values()], materialize_grads=True)
        return {name: g.double() for name, g in zip(leaves, grads, strict=True)}

    def at(self, params: Params, index: int = 0) -> list[Tensor]:
        """Return the floating point outputs with these parameters, which the run may write to."""
        if self._type == torch.float64:
            try:
                return self._run(params, index, torch.float64)
            except RUN_ERRORS:
                if index or self._narrow == torch.float64:  # if the first batch ran in float64, this batch is at fault
                    raise
        outputs = self._run(params, index, self._narrow)
        self._type = self._narrow
        return outputs

    def _run(self, params: Params, index: int, dtype: torch.dtype) -> list[Tensor]:
        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        others = ((name, w.detach()) for name, w in self.model.named_parameters() if name not in params)
        given = {name: w.to(dtype if w.is_floating_point() else w.dtype, copy=True) for name, w in others}
        # The function may call requires_grad_() on a parameter in place, which must not affect the caller's tensor.
        given |= {name: cast(w if w.requires_grad else w.detach()) for name, w in params.items()}
        held = {name: given.pop(name) for name, _ in self.model.named_buffers() if name in given}
        copy = replica(self.model, given, cast, held)
        batch = private_batch(self.batches[index], cast)
        precise = DoublePrecision() if dtype == torch.float64 else contextlib.nullcontext()
        with torch.inference_mode(False), torch.enable_grad(), TrueGradients(), precise:
            outputs = floating(self.evaluate(copy, batch))
        check_outputs(outputs)
        return outputs


def _number(outputs: Sequence[Tensor]) -> Tensor:
    """Return a single number unchanged, and the inner product of several with a fixed random vector."""
    if sum(output.numel() for output in outputs) == 1:
        return torch.cat([output.reshape(-1) for output in outputs])[0].double()
    generator = torch.Generator().manual_seed(0)
    weights = (gaussian(each, generator) for each in outputs)
    finite = (each.double().nan_to_num(0.0, 0.0, 0.0) for each in outputs)  # equal infinities carry no information
    return torch.stack([(w * x).sum() for w, x in zip(weights, finite, strict=True)]).sum()


def rounded(params: Mapping[str, Tensor], precision: float, generator: torch.Generator) -> Params:
    """Return parameters with each number rounded up or down at random, by the relative size `precision`."""

    def near(w: Tensor) -> Tensor:
        return w * (1 + precision * gaussian(w, generator).sign()) if w.is_floating_point() else w.clone()

    return {name: near(w) for name, w in params.items()}


def output_change(model: nn.Module, inputs: Any, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Compute the largest relative change of the output from parameters `before` to `after`, in float64.

    before, after: some or all of the model's parameters; the others are the model's own. inputs: as for
    `verify_symmetries`.
    """
    outputs = ModelOutputs(model, [inputs])
    outputs.own()
    with torch.no_grad():
        there, here = (
            outputs.at({name: value.detach().to(torch.float64, copy=True) for name, value in params.items()})
            for params in (after, before)
        )
    return relative_change(there, here)


def first_examples(batch: Any) -> list[Any]:
    """Return [the first examples of the batch] if all its tensors share a leading size above `EXAMPLES`; else []."""
    sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors_in(batch)}
    if len(sizes) != 1 or max(sizes) <= EXAMPLES:
        return []
    return [mapped(lambda tensor: tensor[:EXAMPLES], batch)]


def check_outputs(outputs: Sequence[Tensor]) -> None:
    """Raise ValueError unless there are numbers that can be compared."""
    if not outputs:
        raise ValueError("the model's output holds no floating point tensor that could be compared.")
    if not any(output.numel() for output in outputs):
        raise ValueError("the model's output on these inputs is empty: nothing can be compared.")


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model on inputs: model(**mapping), model(*tuple) or model(inputs)."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def answer(model: nn.Module, inputs: Any) -> Any:
    """Call a model on inputs. Raises ModelError if the model raises anything."""
    hint = f"; it is called as {_called(inputs)}: give what the model takes, without targets, or evaluate="
    with running(model, hint):
        return call(model, inputs)


def _called(inputs: Any) -> str:
    """Describe the call of a model on inputs, for messages."""
    if isinstance(inputs, Mapping):
        return f"model(**inputs), with {', '.join(map(str, inputs))}"
    if isinstance(inputs, tuple):
        return f"model(*inputs), with {len(inputs)} arguments"
    return f"model(inputs), with one argument, a {type(inputs).__name__}"


def relative_change(new: Sequence[Tensor], old: Sequence[Tensor]) -> float:
    """Return the largest change of an entry, relative to the largest finite entry of its tensor."""
    pairs = zip(new, old, strict=True)
    return max((_relative(one - other, other, same=one == other) for one, other in pairs), default=0.0)


def _relative(difference: Tensor, reference: Tensor, same: Tensor) -> float:
    """Return max |difference| / max |reference|, entries marked `same` (such as equal infinities) left out."""
    finite = reference[torch.isfinite(reference)]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    difference = difference.masked_fill(same, 0.0).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    change = float(difference.max()) if difference.numel() else 0.0
    return change / size if size > 0 else change


def doubled(value: Tensor) -> Tensor:
    """Return a floating point tensor in float64, any other as it is."""
    return value.double() if value.is_floating_point() else value


def floating(output: Any) -> list[Tensor]:
    """Return the floating point tensors among `tensors(output)`."""
    return [tensor for tensor in tensors(output) if tensor.is_floating_point()]


def tensors(output: Any) -> list[Tensor]:
    """Return the tensors of a tensor, tuple, list, mapping (as ModelOutput is) or dataclass; no caches."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [tensor for item in output.values() for tensor in tensors(item)]
    if isinstance(output, (list, tuple)):
        return [tensor for item in output for tensor in tensors(item)]
    if is_dataclass(output) and not isinstance(output, type):
        return [tensor for each in fields(output) for tensor in tensors(getattr(output, each.name))]
    return []
