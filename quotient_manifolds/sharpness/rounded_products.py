"""Warn where weights move by less than the products see: they lie on the grid to which products round them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from quotient_manifolds.sharded import plain_name
from quotient_manifolds.symmetries import Params

Precisions = dict[str, torch.dtype]


@contextmanager
def precisions_noted(model: nn.Module) -> Iterator[Precisions]:
    """Yield a dict that is filled as the model runs: measured matrices whose modules return half precision, and which.

    That is what autocast does to them, and mixed precision of sharded models.
    """
    found: Precisions = {}
    names = {id(w): plain_name(name) for name, w in model.named_parameters() if w.requires_grad and w.ndim > 1}
    hooks = []
    for module in model.modules():
        own = [names[id(w)] for w in module._parameters.values() if id(w) in names]

        def note(module: nn.Module, inputs: object, output: object, own: list[str] = own) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(first, Tensor) and first.is_floating_point() and first.dtype.itemsize < 4:
                found.update(dict.fromkeys(own, first.dtype))

        if own:
            hooks.append(module.register_forward_hook(note))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def warn_of_rounding(point: Params, precisions: Precisions) -> None:
    """Warn if a matrix lies on the grid of the precision that its products have: a small move is rounded away.

    Weights that were trained in float32 lie anywhere between its points, and their moves survive on average.
    """
    for name, half in precisions.items():
        w = point.get(name)
        if w is not None and bool(w.any()) and torch.equal(w.to(half).to(w.dtype), w):
            warnings.warn(
                f"Small moves of {name} are lost in rounding, and the value may be far off: products with it are in "
                f"{half}, and all of its numbers lie on the grid of that type, as those of a checkpoint in half "
                f"precision do; measure without autocast or mixed precision",
                stacklevel=2,
            )
            return
