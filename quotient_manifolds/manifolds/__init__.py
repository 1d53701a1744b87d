"""Provide quotient manifolds of neural-network symmetries, as `geoopt.Manifold` subclasses."""

import sys
import types
import warnings

if sys.flags.optimize > 1:  # geoopt 0.5.1 edits docstrings when it is imported, and `python -OO` drops them
    _docutils = types.ModuleType("geoopt.docutils")
    _docutils.insert_docs = lambda *_: lambda function: function  # type: ignore[attr-defined]
    sys.modules.setdefault(_docutils.__name__, _docutils)

with warnings.catch_warnings():
    # geoopt 0.5.1 scripts its helpers when it is first imported, which is here; torch 2.13 deprecates that
    warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated", DeprecationWarning)
    import geoopt  # noqa: F401

from quotient_manifolds.manifolds.columns import DiagonalQuotient, RotaryQuotient
from quotient_manifolds.manifolds.fixed_rank import FixedRankQuotient
from quotient_manifolds.manifolds.horizontal import GEODESICS, METRICS, GeodesicError, HorizontalSpace, Metric
from quotient_manifolds.manifolds.quotient import QuotientManifold
from quotient_manifolds.manifolds.recipe import Recipe
from quotient_manifolds.manifolds.vectors import ScaleQuotient, TranslationQuotient

__all__ = [
    "GEODESICS",
    "METRICS",
    "DiagonalQuotient",
    "FixedRankQuotient",
    "GeodesicError",
    "HorizontalSpace",
    "Metric",
    "QuotientManifold",
    "Recipe",
    "RotaryQuotient",
    "ScaleQuotient",
    "TranslationQuotient",
]
