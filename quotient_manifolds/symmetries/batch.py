"""The proof a measure asks for: does its own loss, on its own batch, stay the same along the orbit?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from quotient_manifolds.symmetries.find import Symmetries
from quotient_manifolds.symmetries.prove import Evaluate, Proof, prove_symmetries

EXAMPLES = 2
CONDITION = 10.0


def prove_on_batch(model: nn.Module, evaluate: Evaluate, batch: Any, symmetries: Symmetries, *, seed: int = 0) -> Proof:
    """The proof of all symmetries at once, on evaluate(model, batch): about ten evaluations of two examples.

    In float64, unless the function insists on its own precision; on the whole batch, unless it can be cut to its first
    examples. Raises what the function raises where nothing works.
    """
    attempts = [(inputs, double) for double in (True, False) for inputs in (*_first_examples(batch), batch)]
    for inputs, double in attempts[:-1]:
        try:
            return _proof(model, evaluate, inputs, symmetries, seed, double)
        except (RuntimeError, TypeError, IndexError, KeyError, ValueError):  # a shape or a precision it does not take
            continue
    return _proof(model, evaluate, *attempts[-1][:1], symmetries, seed, attempts[-1][1])


def _proof(model: nn.Module, evaluate: Evaluate, inputs: Any, symmetries: Symmetries, seed: int, double: bool) -> Proof:
    return prove_symmetries(
        model,
        inputs,
        symmetries,
        seed=seed,
        conditions=(CONDITION,),
        evaluate=evaluate,
        together=True,
        double=double,
    )


def _first_examples(batch: Any) -> list[Any]:
    """[the first examples of the batch], if its tensors all have one leading size that is larger; else []."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors}
    if len(sizes) != 1 or max(sizes) <= EXAMPLES:
        return []
    return [tree_map_only(torch.Tensor, lambda tensor: tensor[:EXAMPLES], batch)]
