"""Quotient manifolds of neural network symmetries, and sharpness that does not change along them."""

from __future__ import annotations

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient, TangentSpace
from quotient_manifolds.load import example_inputs, load_model, read_text_labels, tokenised_batches
from quotient_manifolds.manifolds import (
    GEODESICS,
    METRICS,
    DiagonalQuotient,
    FixedRankQuotient,
    GeodesicError,
    HorizontalSpace,
    QuotientManifold,
    Recipe,
    RotaryQuotient,
    ScaleQuotient,
    TranslationQuotient,
)
from quotient_manifolds.sharpness import AutoPGD, Measurement, cross_entropy, worst_case_sharpness
from quotient_manifolds.symmetries import (
    Proof,
    SymmetricPair,
    Symmetries,
    Translation,
    balance,
    count_symmetries,
    find_symmetries,
    prove_symmetries,
    random_move,
)
from quotient_manifolds.version import VERSION as __version__

__all__ = [
    "GEODESICS",
    "METRICS",
    "Adaptive",
    "AutoPGD",
    "DiagonalQuotient",
    "Euclidean",
    "FixedRankQuotient",
    "GeodesicError",
    "Geometry",
    "HorizontalSpace",
    "Measurement",
    "Proof",
    "Quotient",
    "QuotientManifold",
    "Recipe",
    "RotaryQuotient",
    "ScaleQuotient",
    "SymmetricPair",
    "Symmetries",
    "TangentSpace",
    "Translation",
    "TranslationQuotient",
    "__version__",
    "balance",
    "count_symmetries",
    "cross_entropy",
    "example_inputs",
    "find_symmetries",
    "load_model",
    "prove_symmetries",
    "random_move",
    "read_text_labels",
    "tokenised_batches",
    "worst_case_sharpness",
]
