"""Quotient manifolds of neural network symmetries, and sharpness that is invariant under these symmetries.

In docstrings, [paper] is da Silva, Dangel, Oore, "Hide & Seek: Transformer Symmetries Obscure Sharpness & Riemannian
Geometry Finds It", arXiv 2505.05409.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from quotient_manifolds.version import VERSION as __version__

if TYPE_CHECKING:  # for type checkers and editors; at run time `__getattr__` finds the same objects on first use
    from quotient_manifolds import pymanopt as pymanopt  # not in __all__: `import *` would hide the library's name
    from quotient_manifolds.callbacks import SAMTrainerMixin, SharpnessCallback
    from quotient_manifolds.geometry import Adaptive, Euclidean, Quotient
    from quotient_manifolds.load import DataSource, load_model
    from quotient_manifolds.manifolds import DiagonalQuotient, FixedRankQuotient, Recipe, RotaryQuotient
    from quotient_manifolds.merge import merge_adapters
    from quotient_manifolds.optim import SAM, QuotientAdam, QuotientSGD, orbit_audit
    from quotient_manifolds.orbit import (
        RoundingError,
        Sparsity,
        align,
        descend_orbit,
        loss_along_path,
        same_function,
    )
    from quotient_manifolds.sharpness import (
        AutoPGD,
        Result,
        average_case_sharpness,
        cross_entropy,
        gradient_norm,
        hessian_trace,
        legacy_sharpness,
        next_token_cross_entropy,
        suggest_radius,
        top_eigenvalue,
        worst_case_profile,
        worst_case_sharpness,
    )
    from quotient_manifolds.symmetries import (
        Symmetries,
        balance,
        count_symmetries,
        declare_pair,
        example_inputs,
        find_symmetries,
        random_representative,
        verify_symmetries,
    )

# fmt: off
__all__ = [
    "SAM", "Adaptive", "AutoPGD", "DataSource", "DiagonalQuotient", "Euclidean", "FixedRankQuotient", "Quotient",
    "QuotientAdam", "QuotientSGD", "Recipe", "Result", "RotaryQuotient", "RoundingError", "SAMTrainerMixin",
    "SharpnessCallback", "Sparsity", "Symmetries", "__version__", "align", "average_case_sharpness", "balance",
    "count_symmetries", "cross_entropy", "declare_pair", "descend_orbit", "example_inputs", "find_symmetries",
    "gradient_norm", "hessian_trace", "legacy_sharpness", "load_model", "loss_along_path", "merge_adapters",
    "next_token_cross_entropy", "orbit_audit", "random_representative", "same_function", "suggest_radius",
    "top_eigenvalue", "verify_symmetries", "worst_case_profile", "worst_case_sharpness",
]
# fmt: on


_ROOMS = ("manifolds", "symmetries", "geometry", "sharpness", "load", "optim", "merge", "orbit", "callbacks")
"""Modules with public names, from the lowest to the highest, which imports the others; the last needs transformers."""

if not TYPE_CHECKING:  # with it, a type checker would accept every name

    def __getattr__(name: str) -> object:
        """Import a public name or a module of the package on first use, so that importing the package is fast.

        So `quotient_manifolds.pymanopt` needs no separate import. For a name that only a module defines, the
        AttributeError says which.
        """
        if name not in __all__ and name[0] != "_" and importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        instead = ""
        for room in () if name[0] == "_" else _ROOMS if name in __all__ else _ROOMS[:-1]:
            module = importlib.import_module(f"{__name__}.{room}")
            if name in module.__all__ and name in __all__:
                globals()[name] = getattr(module, name)
                return globals()[name]
            instead = f"{room}.{name}" if name in module.__all__ else instead
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{f'; use {instead}' if instead else ''}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
