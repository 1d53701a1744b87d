"""Factor small matrices in batches, independently of manifolds."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from quotient_manifolds.derivatives import differentiated, in_no_graph

_Function = TypeVar("_Function", bound=Callable[..., Any])

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
"""The error that torch raises if a factorization fails; torch's stubs do not export it."""

_CONDITION, _ROUGH = 1e4, 30.0
"""Largest condition numbers of a factor for which a Gram matrix in float64, or in float32, gives a float32 frame."""

_CACHED, _LAUNCHED = 2**16, 2**24
"""Numbers in a piece of work: half a megabyte in float64 on processors, to fit into caches, and 128 megabytes on
accelerators, which are slow with many short kernels."""


def full_precision(function: _Function) -> _Function:
    """Run a function with autocast off, which would run linear algebra in half precision."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **options)
        with torch._C._DisableAutocast():  # for every device
            return function(*args, **options)

    return cast(_Function, run)


class FullPrecision:
    """Run the public methods of all subclasses in `full_precision`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, member in list(vars(cls).items()):
            if inspect.isfunction(member) and not name.startswith("_"):
                setattr(cls, name, full_precision(member))


class SingularFrame(NamedTuple):
    """Hold the thin SVD G H^T = left diag(s) right^T, with the changes of basis between factors and singular vectors.

    `left = G @ to_left` and `G = left @ from_left`, so `from_left` is the inverse of `to_left`; `right` likewise for H.
    """

    left: Tensor  # (..., n, h)
    right: Tensor  # (..., m, h)
    s: Tensor  # (..., h), descending
    to_left: Tensor  # (..., h, h)
    to_right: Tensor  # (..., h, h)
    from_left: Tensor  # (..., h, h)
    from_right: Tensor  # (..., h, h)

    def to(self, dtype: torch.dtype) -> SingularFrame:
        """Return the frame in another precision."""
        return SingularFrame(*(part.to(dtype) for part in self))

    def balanced(self, sign: Tensor | float = 1.0) -> SingularFrame:
        """Return the frame of the same product at the factors sign * (left s^(1/2), right s^(1/2))."""
        root = self.s.sqrt()
        to, back = (sign * each.diag_embed() for each in (1 / root, root))
        return SingularFrame(self.left, self.right, self.s, to, to, back, back)


def solve(A: Tensor, B: Tensor, left: bool = True) -> Tensor:
    """Solve A X = B, or X A = B, by an LU factorization, with correct derivatives of any order in both modes.

    Derivatives of the forward-mode derivative of `torch.linalg.solve` are wrong (torch 2.13).
    """
    return torch.linalg.lu_solve(*torch.linalg.lu_factor(A), B, left=left)


def length(x: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    """Compute |x| over the dimensions `dim`, without overflow or underflow of squares; its gradient at 0 is 0."""
    limits = torch.finfo(x.dtype)
    largest = torch.linalg.vector_norm(x.detach(), ord=math.inf, dim=dim, keepdim=True).clamp(limits.tiny, limits.max)
    norm = largest * torch.linalg.vector_norm(x / largest, dim=dim, keepdim=True)
    return norm if keepdim else norm.squeeze(dim)


def rank_floor(n: int, m: int) -> float:
    """Return the threshold below which a singular value of G H^T, relative to the largest, is float64 rounding."""
    return (n + m) * torch.finfo(torch.float64).eps


def product_svd(G: Tensor, H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the thin SVD G H^T = left diag(s) right^T, of any rank and shape, without the n x m product.

    QR is accurate column by column, so columns of very different lengths do not reduce accuracy. The largest entry in
    every column of `left` is positive. Shapes: G (..., n, h), H (..., m, h); s has min(n, m, h) values, descending.
    """
    (Q_G, R_G), (Q_H, R_H) = torch.linalg.qr(G), torch.linalg.qr(H)
    U, s, Vh = torch.linalg.svd(R_G @ R_H.mT, full_matrices=False)
    left = Q_G @ U
    sign = _sign(left)
    return left * sign, s, Q_H @ (Vh.mT * sign)


def singular_frame(
    G: Tensor, H: Tensor, eps: float = 0.0, dtype: torch.dtype = torch.float64, *, triangular: bool = False
) -> SingularFrame:
    """Compute the thin SVD of G H^T from QR factors of G and H, as G^T G would square the condition number.

    The frame is in float64 for any dtype of G and H, because the singular values of a product span twice as many digits
    as its factors. Singular values below `rank_floor` are raised to it, so that weights stay finite and the result
    depends only on the orbit of (G, H). The largest entry in every column of `left` is positive.

    With `eps > 0` the triangular factors belong to G^T G + eps I and H^T H + eps I (QR of G stacked on sqrt(eps) I);
    `left` and `right` then have columns shorter than one. With `dtype` float32 the frame is only accurate to float32:
    Gram matrices in float64 suffice for well-conditioned factors, in a third of the time, and `left` and `right` are
    rounded. triangular: G and H are upper triangular (..., h, h), in float64, and serve as their own QR factors.

    Shapes: G (..., n, h), H (..., m, h), with n, m >= h, finite. For a singular factor the frame is not finite: see
    `pair_frame`.
    """
    single = dtype == torch.float32 and not eps and in_no_graph(G, H)
    if triangular:
        R_G, R_H = G, H
    elif single:
        R_G, R_H = triangle(G), triangle(H)
    else:
        (Q_G, R_G), (Q_H, R_H) = _qr(G.double(), eps), _qr(H.double(), eps)
    U, s, Vh = torch.linalg.svd(apart(R_G @ R_H.mT))
    to_left = torch.linalg.solve_triangular(R_G, U, upper=True)
    # Rounding determines the signs of singular vectors. A sign rule makes `left` and `right` functions of G H^T.
    if single:
        sign = torch.empty_like(U[..., :1, :])
        left = _product(G, to_left, sign)
    else:
        left = U if triangular else Q_G @ U
        sign = _sign(left)
        left = left * sign
    to_left, U, V = to_left * sign, U * sign, Vh.mT * sign
    to_right = torch.linalg.solve_triangular(R_H, V, upper=True)
    right = _product(H, to_right) if single else V if triangular else Q_H @ V
    s = torch.maximum(s, rank_floor(G.shape[-2], H.shape[-2]) * s[..., :1].detach())
    return SingularFrame(left, right, s, to_left, to_right, U.mT @ R_G, V.mT @ R_H)


def pair_frame(
    G: Tensor,
    H: Tensor,
    eps: float = 0.0,
    dtype: torch.dtype = torch.float64,
    floor: float = 0.0,
    unit: float = 0.0,
    *,
    triangular: bool = False,
) -> tuple[SingularFrame, Tensor]:
    """Compute `singular_frame` of a product of any rank, and a mask (..., h) of the directions that it lacks.

    Let H have full rank and G lower rank, such as G = 0. The orbit still determines the column span of H. In a basis of
    it, given by H, the product is left diag(s) right^T with some s_i = 0. In these directions the metric is the one of
    `mix`, which needs only H for velocities of G: |xi_G|^2 = tr(H^T H xi_G^T xi_G), gradient g_G (H^T H)^-1. This is
    the limit of `mix`. The limit of the gradient of `inv` (every t < 1) is 0, so training would never leave. In these
    directions xi_H = 0: its limit depends on how G approaches 0, and the gradient in H is 0.

    The rule commutes with the action of GL(h), unlike a pseudo-inverse of G^T G, and also applies with G and H
    exchanged. Directions missing in both factors do not change, because all gradients are 0 there. If each factor lacks
    directions that only the other has, no rule commutes with the action.

    In the frame, s_i = 1, so that all metrics agree, and left_i = 0. Velocities of G are measured as in `mix`, with
    to_left_i from H, and velocities of H are ignored, to_right_i = 0.

    A direction is missing if s_i <= floor s_1 (floor at least `rank_floor`), or if s_i can result from rounding entries
    by `unit` (at least the epsilon of G): s_i <= 4 unit sum_j |G_j| |H_j| over columns. With `eps > 0` no direction is.
    In a graph this returns the frame of `singular_frame`, and the caller must refuse missing directions.
    """
    frame = singular_frame(G, H, eps, dtype, triangular=triangular)
    if eps:
        return frame, torch.zeros_like(frame.s, dtype=torch.bool)
    floor, unit = max(floor, rank_floor(G.shape[-2], H.shape[-2])), max(unit, torch.finfo(G.dtype).eps)
    lengths = torch.linalg.vector_norm(frame.from_left, dim=-2) * torch.linalg.vector_norm(frame.from_right, dim=-2)
    lost = ~(frame.s > torch.maximum(floor * frame.s[..., :1], 4 * unit * lengths.sum(-1, keepdim=True)))
    lower = lost.any(dim=-1)
    if not in_no_graph(G, H) or not bool(lower.any()):
        return frame, lost
    there, lost[lower] = _lower_rank(G[lower].double(), H[lower].double(), floor, 4 * unit)
    frame = SingularFrame(*(part.clone() for part in frame))
    for part, new in zip(frame, there, strict=True):
        part[lower] = new.to(part.dtype)
    return frame, lost


def _lower_rank(G: Tensor, H: Tensor, floor: float, unit: float) -> tuple[SingularFrame, Tensor]:
    """Compute the frame of `pair_frame` in the basis of the factor of higher rank. Shapes G (k, n, h), H (k, m, h)."""
    (Q_G, R_G), (Q_H, R_H) = _qr(G), _qr(H)
    swap = (_scaled_svd(R_G)[1] > 0).sum(-1) > (_scaled_svd(R_H)[1] > 0).sum(-1)
    swap = swap[:, None, None]
    A, B = torch.where(swap, R_H, R_G), torch.where(swap, R_G, R_H)  # B gives the basis
    Q, sigma, Wh, lengths = _scaled_svd(B)
    inverse = torch.where(sigma > 0, 1 / sigma, 0.0)
    coordinates = sigma[..., :, None] * Wh * lengths  # B = Q coordinates
    U, s, Vh = torch.linalg.svd(A @ coordinates.mT)
    noise = unit * (torch.linalg.vector_norm(A, dim=-2) * torch.linalg.vector_norm(B, dim=-2)).sum(-1, keepdim=True)
    lost = ~(s > torch.maximum(floor * s[..., :1], noise))
    s = torch.where(lost, 1.0, s)
    row, column = lost[..., None, :], lost[..., :, None]
    back, to = Vh @ coordinates, (Wh.mT / lengths.mT * inverse[..., None, :]) @ Vh.mT
    one = U.masked_fill(row, 0.0), back.mT / s[..., None, :], to.mT * s[..., :, None]  # vectors, to them, from them
    two = Q @ Vh.mT, to.masked_fill(row, 0.0), back.masked_fill(column, 0.0)
    left, to_left, from_left = (torch.where(swap, b, a) for a, b in zip(one, two, strict=True))
    right, to_right, from_right = (torch.where(swap, a, b) for a, b in zip(one, two, strict=True))
    return SingularFrame(Q_G @ left, Q_H @ right, s, to_left, to_right, from_left, from_right), lost


def _scaled_svd(R: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute R = Q diag(sigma) Wh diag(lengths) from columns of length 1; sigma at rounding level becomes 0."""
    lengths = torch.linalg.vector_norm(R, dim=-2, keepdim=True)
    lengths = torch.where(lengths > 0, lengths, 1.0)
    Q, sigma, Wh = torch.linalg.svd(R / lengths)
    return Q, torch.where(sigma > rank_floor(*R.shape[-2:]), sigma, 0.0), Wh, lengths


def triangle(G: Tensor, rough: bool = False) -> Tensor:
    """Compute the upper triangular R (..., h, h), R^T R = G^T G, in float64, by Cholesky if it agrees with QR to 1e-8.

    The error of Cholesky is rounding times the squared condition number of G with columns scaled to length 1. So QR is
    used for float64 and for ill-conditioned members of a batch. No derivatives. rough: agree to 1e-4, which in float32
    takes a fifth of the time for well-conditioned factors.
    """
    if G.dtype == torch.float64:
        return torch.linalg.qr(G, mode="r").R
    h = G.shape[-1]
    grams = [(G.mT @ G).double()] if rough else [x.mT @ x for x in (piece.double() for piece in _pieces(G))]
    L, failed = torch.linalg.cholesky_ex(torch.cat(grams).reshape(*G.shape[:-2], h, h))
    lengths, eye = torch.linalg.vector_norm(L, dim=-1), torch.eye(h, dtype=L.dtype, device=L.device)
    scaled = L / lengths[..., :, None]
    inverse = torch.linalg.solve_triangular(scaled, eye.expand_as(L), upper=False)
    condition = _spectral_bound(scaled).clamp_max(h**0.5) * _spectral_bound(inverse)
    poor = (failed != 0) | ~(condition < (_ROUGH if rough else _CONDITION))
    if bool(poor.any()):
        L[poor] = triangle(G[poor] if rough else G[poor].double()).mT
    return L.mT


def _spectral_bound(a: Tensor) -> Tensor:
    """Return an upper bound on the spectral norm of square matrices that is 1 for the identity.

    It is the smaller of the Frobenius norm and the geometric mean of the 1-norm and the inf-norm. The Frobenius norm
    alone would call orthonormal columns ill-conditioned for large h.
    """
    size = a.abs()
    mean = (size.sum(-1).amax(-1) * size.sum(-2).amax(-1)).sqrt()
    return torch.minimum(mean, size.square().sum((-2, -1)).sqrt())


def _product(G: Tensor, basis: Tensor, sign: Tensor | None = None) -> Tensor:
    """Compute G basis in float64, piece by piece, rounded to float32; with `sign`, write `_sign` there and apply it."""
    out = torch.empty(G.shape, dtype=torch.float32, device=G.device)
    signs = () if sign is None else _pieces(sign, of=G)
    for i, (x, on, part) in enumerate(zip(_pieces(G), _pieces(basis, of=G), _pieces(out), strict=True)):
        columns = x.double() @ on
        part.copy_(columns.mul_(signs[i].copy_(_sign(columns))) if signs else columns)
    return out


def _pieces(x: Tensor, of: Tensor | None = None) -> tuple[Tensor, ...]:
    """Split a batch of matrices, or of companions of the matrices `of`, into parts that are small in float64."""
    n, h = (x if of is None else of).shape[-2:]
    most = _CACHED if x.is_cpu else _LAUNCHED
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]).split(max(1, most // (n * h)))


def _sign(left: Tensor) -> Tensor:
    """Return the sign of the largest entry in every column. Shape (..., 1, h)."""
    top, bottom = left.detach().amax(-2, keepdim=True), left.detach().amin(-2, keepdim=True)
    return torch.where(top >= -bottom, 1.0, -1.0).to(left.dtype)


def spectral_norm(a: Tensor) -> Tensor:
    """Compute the largest singular value of tall matrices (..., n, h), from a^T a in float64. Shape (...,)."""
    a = a.double()
    return torch.linalg.eigvalsh(a.mT @ a)[..., -1].clamp_min(0).sqrt()


def apart(core: Tensor, gap: float = 1e-8) -> Tensor:
    """Return the matrix; if its SVD may be differentiated, equal singular values are separated by `gap`.

    The derivative of singular vectors divides by differences of singular values. Functions of a frame are smooth at a
    tie and do not depend on the choice of vectors, so the error is of the order of the perturbation.
    """
    if core.shape[-1] == 1 or not differentiated(core):
        return core
    U, s, Vh = torch.linalg.svd(core.detach())
    tied = ((s[..., :-1] - s[..., 1:]) < gap * s[..., :1] / 10).any(dim=-1)[..., None]
    steps = torch.arange(s.shape[-1] - 1, -1, -1, dtype=s.dtype, device=s.device)
    return core + U * torch.where(tied, gap * s[..., :1] * steps, 0.0)[..., None, :] @ Vh


def _qr(G: Tensor, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """Compute Q (..., n, h) and upper triangular R with G = Q R and R^T R = G^T G + eps I."""
    n, h = G.shape[-2:]
    if eps:
        ridge = eps**0.5 * torch.eye(h, dtype=G.dtype, device=G.device).expand(*G.shape[:-2], h, h)
        G = torch.cat([G, ridge], dim=-2)
    Q, R = torch.linalg.qr(G)
    return Q[..., :n, :], R


def product_gap(G1: Tensor, H1: Tensor, G2: Tensor, H2: Tensor) -> Tensor:
    """Compute |G1 H1^T - G2 H2^T| (Frobenius) in O((n + m) h^2), without the n x m products. Shape (...,)."""
    R_G = torch.linalg.qr(torch.cat([G1, -G2], dim=-1), mode="r").R
    R_H = torch.linalg.qr(torch.cat([H1, H2], dim=-1), mode="r").R
    return length(R_G @ R_H.mT, (-2, -1))
