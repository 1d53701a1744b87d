"""Tell in what precision a model computes where that is less than what it is stored in, and warn of what is lost."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.sharded import plain_name
from quotient_manifolds.symmetries import Params

_HALF = (torch.float16, torch.bfloat16)


@final
@dataclass
class Precisions:
    """Hold what was seen in half precision while a model ran.

    products: measured matrices, by plain name, whose modules return half precision. outputs: what the model returned.
    """

    products: dict[str, torch.dtype] = field(default_factory=dict)
    outputs: set[torch.dtype] = field(default_factory=set)

    def of(self, loss: torch.dtype) -> float:
        """Return machine epsilon of a loss of this type: that of the outputs it comes from, where theirs is coarser."""
        return max(torch.finfo(dtype).eps for dtype in (loss, *self.outputs))


@contextmanager
def precisions_noted(model: nn.Module) -> Iterator[Precisions]:
    """Yield what is filled as the model runs: which of its measured matrices and outputs are in half precision.

    That is what autocast does to them, and mixed precision of sharded models. An output counts unless autocast is still
    on when the model returns: losses are then computed in float32 from the start. A matrix counts where the module that
    holds it has no modules inside, or is attention of torch; others may only add what they hold.
    """
    found = Precisions()
    names = {id(w): plain_name(name) for name, w in model.named_parameters() if w.requires_grad and w.ndim > 1}

    def note_products(own: list[str], module: nn.Module, inputs: object, output: Any) -> None:
        first = _first(output)
        if first is not None and first.dtype in _HALF:
            found.products.update(dict.fromkeys(own, first.dtype))

    def note_output(module: nn.Module, inputs: object, output: Any) -> None:
        first = _first(output)  # the logits, or the loss that the model computed of them
        if first is not None and first.dtype in _HALF and not _in_autocast(first.device.type):
            found.outputs.add(first.dtype)

    hooks = [model.register_forward_hook(note_output)]
    for module in model.modules():  # no hook where nothing is noted: it would turn torch's fast paths off
        own = [names[id(w)] for w in module._parameters.values() if id(w) in names]  # before hooks gather them
        if own and (not module._modules or isinstance(module, nn.MultiheadAttention)):
            hooks.append(module.register_forward_hook(partial(note_products, own)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _first(output: Any) -> Tensor | None:
    """Return the first floating point tensor in what a module returned."""
    values = output.values() if isinstance(output, Mapping) else output
    values = values if isinstance(output, (Mapping, tuple, list)) else [output]
    return next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)


def _in_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def warn_of_rounding(point: Params, precisions: Precisions) -> None:
    """Warn if a matrix lies on the grid of the precision that its products have: a small move is rounded away.

    Weights that were trained in float32 lie anywhere between its points, and their moves survive on average. Nothing
    is told of a matrix that is mostly zero, as diagonal ones are: they lie on every grid.
    """
    plain = {plain_name(name): w for name, w in point.items()}
    for name, half in precisions.products.items():
        w = plain.get(name)
        if w is not None and 2 * int(w.count_nonzero()) > w.numel() and torch.equal(w.to(half).to(w.dtype), w):
            warnings.warn(
                f"Small moves of {name} are lost in rounding, and the value may be far off: products with it are in "
                f"{half}, and all of its numbers lie on the grid of that type, as those of a checkpoint in half "
                f"precision do; measure without autocast or mixed precision",
                stacklevel=2,
            )
            return
