"""Compute how much a model's outputs change from some parameters to others, and how much of that is rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from quotient_manifolds.replica import private_batch, replica, unchanged
from quotient_manifolds.symmetries.checks import check_eval
from quotient_manifolds.symmetries.pair import Params

Evaluate = Callable[[nn.Module, Any], Any]
"""(model, inputs) -> whatever holds the floating point tensors to compare: an output, a loss."""

EXAMPLES = 2  # of a batch, which show what a model computes
STEP = 1e-6  # relative, of the third differences that show rounding


class ModelOutputs:
    """Evaluate a model as a function of its parameters on one input, and compare with what its own parameters give.

    In float64, or without `double` in the model's own precision. Raises ValueError in train mode, and for outputs that
    are empty, NaN, not repeatable or hold no floating point tensor.
    """

    def __init__(self, model: nn.Module, inputs: Any, evaluate: Evaluate | None = None, double: bool = True) -> None:
        check_eval(model)
        self._model, self._evaluate = model, evaluate or answer
        self._cast = doubled if double else unchanged
        self._inputs = inputs
        # As they are: float64 copies, each twice as large as a model, are made when they are needed and dropped then.
        self.params: Params = {name: value.detach() for name, value in model.named_parameters()}
        moved = next((value.dtype for value in self.params.values() if value.is_floating_point()), torch.float64)
        self.precision = torch.float64 if double else moved
        self.outputs = self.at({})
        check_outputs(self.outputs)
        if any(bool(torch.isnan(output).any()) for output in self.outputs):
            raise ValueError("the model's output on these inputs contains NaN: nothing can be compared.")
        if self.change({}) > 1e-6:
            raise ValueError("two evaluations on the same inputs differ: the model is random, nothing can be compared.")

    def at(self, moved: Params) -> list[Tensor]:
        """Return the floating point outputs with some parameters replaced, by tensors that the run may write to."""
        params = {
            name: self._private(name) if moved.get(name, own) is own else moved[name]
            for name, own in self.params.items()
        }
        model = replica(self._model, params, self._cast)  # fresh, for a forward pass may write to it
        with torch.enable_grad():  # a loss may differentiate inside itself; the parameters ask for no graph
            outputs = floating(self._evaluate(model, private_batch(self._inputs, self._cast)))
        return [output.detach() for output in outputs]

    def copied(self, names: Iterable[str]) -> Params:
        """Return the parameters, those of these names as copies that may be moved and run with, once."""
        return self.params | {name: self._private(name) for name in names}

    def _private(self, name: str) -> Tensor:
        own = self.params[name]
        cast = self._cast(own)
        return own.clone() if cast is own else cast

    def compare_with(self, params: Params) -> None:
        """Compare, from here on, with what these parameters give."""
        self.params |= params
        self.outputs = self.at({})

    def change(self, moved: Params) -> float:
        """Return the largest change of an output entry, relative to the largest finite entry of its tensor."""
        return max(
            (_relative(new - old, old, same=new == old) for new, old in zip(self.at(moved), self.outputs, strict=True)),
            default=0.0,
        )

    def rounding_noise(self, names: Iterable[str], generator: torch.Generator) -> float:
        """Estimate the outputs' rounding noise, from third differences along a random direction of these parameters.

        A smooth function's third difference is O(STEP^3), far below rounding; what remains is noise, of variance
        20 sigma^2. The step exceeds float32's spacing, so casts to float32 inside the model show. At least that of
        the parameters' precision. A few numbers are too small a sample: then the largest of three directions counts.
        """
        few = sum(output.numel() for output in self.outputs) < 30
        sizes = [self._third_difference(names, generator) for _ in range(3 if few else 1)]
        return max(max(sizes) / 20**0.5, torch.finfo(self.precision).eps)

    def _along(self, name: str, step: float, direction: Tensor) -> Tensor:
        own = self._private(name)
        return own.addcmul_(own, direction.to(own.dtype), value=step)

    def _third_difference(self, names: Iterable[str], generator: torch.Generator) -> float:
        direction = {}
        for name in names:
            value = self.params[name]
            noise = torch.randn(value.shape, generator=generator, dtype=self.precision).to(value.device, value.dtype)
            direction[name] = noise
        third = list(self.outputs)
        for count, weight in ((1, -3.0), (2, 3.0), (3, -1.0)):
            at = self.at({name: self._along(name, count * STEP, along) for name, along in direction.items()})
            third = [total + weight * value for total, value in zip(third, at, strict=True)]
        infinite = [~torch.isfinite(old) for old in self.outputs]
        return max(map(_relative, third, self.outputs, infinite))


def output_change(model: nn.Module, inputs: Any, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Compute the largest relative change of the output from parameters `before` to `after`, in float64.

    Each holds some or all of the model's parameters; the others are the model's own. `inputs` as for
    `verify_symmetries`.
    """
    with torch.no_grad():
        outputs = ModelOutputs(model, inputs)
        outputs.compare_with({name: value.detach() for name, value in before.items()})
        return outputs.change({name: value.detach().to(torch.float64, copy=True) for name, value in after.items()})


def first_examples(batch: Any) -> list[Any]:
    """Return [the first examples of the batch], if its tensors all have one leading size that is larger; else []."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors}
    if len(sizes) != 1 or max(sizes) <= EXAMPLES:
        return []
    return [tree_map_only(torch.Tensor, lambda tensor: tensor[:EXAMPLES], batch)]


def check_outputs(outputs: Sequence[Tensor]) -> None:
    """Raise ValueError unless there are numbers that can be compared."""
    if not outputs:
        raise ValueError("the model's output holds no floating point tensor that could be compared.")
    if not any(output.numel() for output in outputs):
        raise ValueError("the model's output on these inputs is empty: nothing can be compared.")


def answer(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def called(inputs: Any) -> str:
    """Return how `answer` calls a model."""
    if isinstance(inputs, Mapping):
        return f"model(**inputs), with {', '.join(map(str, inputs))}"
    if isinstance(inputs, tuple):
        return f"model(*inputs), with {len(inputs)} arguments"
    return f"model(inputs), with one argument, a {type(inputs).__name__}"


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
    """Return the floating point tensors of a tensor, tuple, list or mapping (as ModelOutput is); no caches."""
    return [tensor for tensor in tensors(output) if tensor.is_floating_point()]


def tensors(output: Any) -> list[Tensor]:
    """Return the tensors of a tensor, tuple, list or mapping (as ModelOutput is); no caches."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [tensor for item in output.values() for tensor in tensors(item)]
    if isinstance(output, (list, tuple)):
        return [tensor for item in output for tensor in tensors(item)]
    return []
