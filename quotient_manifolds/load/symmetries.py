"""Symmetries by name: a function of the user's that declares those of a model."""

from __future__ import annotations

import torch
from torch import nn

from quotient_manifolds.load.models import call_object
from quotient_manifolds.symmetries import Symmetries


def load_symmetries(reference: str, model: nn.Module) -> Symmetries:
    """Return what the function `package.module:function` declares of the model, checked against its parameters.

    The function is called with the model and returns its `Symmetries`. ValueError, in one sentence, where there is no
    such function, where it raises or returns anything else, and where a pair or a translation names a parameter that
    the model does not have, or reads it in a shape that it does not have. Whether the symmetries are true is for
    `prove_symmetries` to say.
    """
    declared = call_object(reference, "a function of the model that returns its Symmetries", model)
    if not isinstance(declared, Symmetries):
        raise ValueError(
            f"{reference} must return quotient_manifolds.Symmetries, as find_symmetries does, but it returned "
            f"an object of type {type(declared).__name__}."
        )
    shapes = {name: torch.empty(value.shape, device="meta") for name, value in model.named_parameters()}
    unknown = [name for name in declared.moved if name not in shapes]
    if unknown:
        raise ValueError(
            f"{reference} declares a symmetry of the parameter {unknown[0]!r}, which {type(model).__name__} does not "
            "have; names are those of model.named_parameters()."
        )
    try:
        for pair in declared.pairs:
            pair.write(shapes, pair.read(shapes))
        for shift in declared.translations:
            shift.remove(shapes)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"{reference} declares a symmetry that does not fit {type(model).__name__}: {error}"
        ) from error
    return declared
