"""Moving a model along its symmetry orbit: new parameters, the same function."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from quotient_manifolds.manifolds import FixedRankQuotient
from quotient_manifolds.symmetries.find import Symmetries
from quotient_manifolds.symmetries.pair import Params, SymmetricPair, check_weights


def random_move(
    model_or_params: nn.Module | Mapping[str, Tensor], symmetries: Symmetries, *, scale: float = 1.0, seed: int = 0
) -> Params:
    """(G A^-1, H A^T) with A = scale x Gaussian for every head of every pair: all named parameters, as new tensors.

    Computed in float64 and cast back to each parameter's dtype. ValueError for weights without values, NaN or infinite,
    and for a scale so extreme that moved weights overflow. [paper, the invariance test of Sec. 6.2, ICML version]
    """
    if not 0 < scale < float("inf"):
        raise ValueError(f"the scale of a random move is a positive number. Found {scale}.")
    stored = dict(model_or_params.named_parameters()) if isinstance(model_or_params, nn.Module) else model_or_params
    check_weights(stored, symmetries.names)
    moved = {name: value.detach().clone() for name, value in stored.items()}
    generator = torch.Generator().manual_seed(seed)
    for pair in symmetries.pairs:
        A = scale * torch.randn(pair.heads, pair.h, pair.h, generator=generator, dtype=torch.float64)
        pair.write(moved, act(pair, A, pair.read(moved)))
    overflown = [name for name in symmetries.names if not bool(torch.isfinite(moved[name]).all())]
    if overflown:
        raise ValueError(
            f"moving {overflown[0]!r} by A = {scale:g} x Gaussian overflows {moved[overflown[0]].dtype}: "
            "choose a scale nearer 1 or a wider dtype."
        )
    return moved


def act(pair: SymmetricPair, A: Tensor, x: Tensor) -> Tensor:
    """(G A^-1, H A^T) for a point x (heads, n + m, h) of any dtype, in float64; A (heads, h, h)."""
    return FixedRankQuotient(pair.n, pair.m).action(A.to(x.device), x.double())


def group_element(pair: SymmetricPair, condition: float, generator: torch.Generator) -> Tensor:
    """A = U diag(s) V', (heads, h, h) in float64: U, V random orthogonal, s log-spaced around 1 to the condition."""
    shape = (pair.heads, pair.h, pair.h)
    U, _ = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64))
    V, _ = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64))
    if pair.h == 1:  # one number has no condition: scale by it instead
        return U * condition**0.5
    exponents = torch.linspace(-0.5, 0.5, pair.h, dtype=torch.float64)
    return U * condition**exponents @ V.mT
