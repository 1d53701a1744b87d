"""Factor small matrices in batches; nothing here knows of manifolds."""

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
"""What torch raises where a factorization fails, which its stubs do not export."""

_CONDITION, _ROUGH = 1e4, 30.0
"""Up to which condition number a Gram matrix in float64, and in float32, serves for a frame in float32."""

_CACHED, _LAUNCHED = 2**16, 2**24
"""How many numbers are worked on at a time: half a megabyte in float64 on processors, whose caches hold that, and 128
megabytes on accelerators, which many short kernels would keep waiting."""


def full_precision(function: _Function) -> _Function:
    """Run a function with autocast off, which is for networks: it would run algebra in half precision."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **options)
        with torch._C._DisableAutocast():  # that of every device
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
    """Hold the thin SVD G H^T = left diag(s) right^T, with the changes of basis that lead to it.

    `left = G @ to_left` and `G = left @ from_left` (so `from_left` is the inverse of `to_left`); `right` alike for H.
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
        """Return the frame of the same product at (left s^(1/2), right s^(1/2)), or at that times a sign."""
        root = self.s.sqrt()
        to, back = (sign * each.diag_embed() for each in (1 / root, root))
        return SingularFrame(self.left, self.right, self.s, to, to, back, back)


def solve(A: Tensor, B: Tensor, left: bool = True) -> Tensor:
    """Solve A X = B, or X A = B, by an LU factorization, with right derivatives of any order in both modes.

    Those of `torch.linalg.solve` are wrong where its derivative in forward mode is differentiated again (torch 2.13).
    """
    return torch.linalg.lu_solve(*torch.linalg.lu_factor(A), B, left=left)


def length(x: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    """Compute |x| over these dimensions; no square of an entry overflows or underflows. Its gradient at 0 is 0."""
    limits = torch.finfo(x.dtype)
    largest = torch.linalg.vector_norm(x.detach(), ord=math.inf, dim=dim, keepdim=True).clamp(limits.tiny, limits.max)
    norm = largest * torch.linalg.vector_norm(x / largest, dim=dim, keepdim=True)
    return norm if keepdim else norm.squeeze(dim)


def rank_floor(n: int, m: int) -> float:
    """Return below which a singular value of G H^T, relative to the largest, is no more than rounding in float64."""
    return (n + m) * torch.finfo(torch.float64).eps


def product_svd(G: Tensor, H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the thin SVD G H^T = left diag(s) right^T, of any rank and shape, without the n x m product.

    QR is accurate column by column, so columns whose lengths differ do not disturb each other. The largest entry in
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
    """Compute the thin SVD of G H^T from QR factors of G and H: the condition number of G^T G would be squared.

    Computed and returned in float64 whatever the dtype of G and H: the singular values of a product spread over twice
    the digits of its factors. Those below `rank_floor` are raised to it, so that weights stay finite and the result
    depends on the orbit of (G, H) only; the largest entry in every column of `left` is positive. With `eps > 0` the
    triangular factors are those of G^T G + eps I and H^T H + eps I (QR of G stacked on sqrt(eps) I); `left` and `right`
    then have columns shorter than one. With `dtype` float32 all is as accurate as that takes: for well-conditioned
    factors, Gram matrices in float64 are, in a third of the time; `left` and `right` are then rounded already.
    triangular: G and H are upper triangular (..., h, h), in float64, and their own factors.

    Shapes: G (..., n, h), H (..., m, h), with n, m >= h, finite. Where a factor is singular the frame is not finite:
    see `pair_frame`.
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
    # Signs of singular vectors are rounding's choice; a rule makes all of the frame a function of G H^T.
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
    """Compute `singular_frame` of a product of any rank, and which directions it lacks (..., h), bool.

    Let H have full rank and G not, as where G = 0. Of the orbit then the column span of H is left, and with a basis of
    it that H gives, the product is left diag(s) right^T with some s_i = 0. In these directions the metric is that of
    `mix`, which needs H alone for velocities of G: |xi_G|^2 = tr(H^T H xi_G^T xi_G), gradient g_G (H^T H)^-1. This is
    the limit of `mix`, while `inv` (every t < 1) has the limit 0 and would stay for ever. There xi_H = 0: its limit
    depends on how G comes to 0, and its gradient is 0. All of this commutes with the action of GL(h), which a
    pseudo-inverse of G^T G does not; with the roles exchanged alike. What lacks in both factors stays as it is: all
    gradients are 0 there. Where each factor lacks what only the other one has, no rule commutes with the action.

    In the frame that is: s_i = 1, so that all metrics are one; left_i = 0; velocities of G are measured as `mix` does,
    with to_left_i from H; those of H are not seen, to_right_i = 0.

    Lacking is s_i <= floor s_1 (`rank_floor` at least), and what rounding entries by `unit` (the epsilon of G at least)
    makes of 0: s_i <= 4 unit sum_j |G_j| |H_j| over columns. With `eps > 0` nothing lacks. In a graph the frame is that
    of `singular_frame`, and what lacks is for the caller to refuse.
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
    """Compute R = Q diag(sigma) Wh diag(lengths) from columns of length 1, sigma at rounding level made 0."""
    lengths = torch.linalg.vector_norm(R, dim=-2, keepdim=True)
    lengths = torch.where(lengths > 0, lengths, 1.0)
    Q, sigma, Wh = torch.linalg.svd(R / lengths)
    return Q, torch.where(sigma > rank_floor(*R.shape[-2:]), sigma, 0.0), Wh, lengths


def triangle(G: Tensor, rough: bool = False) -> Tensor:
    """Compute the upper triangular R (..., h, h), R^T R = G^T G, in float64: by Cholesky where that is QR's to 1e-8.

    Its error is that of rounding times the square of the condition number, the columns taken to length 1; so float64
    and what is badly conditioned in a batch are left to QR. Nothing is differentiated. rough: to 1e-4, which in float32
    takes a fifth of the time where factors are well-conditioned.
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
    """Return a bound of the spectral norm of square matrices, which is 1 for the identity.

    The smaller of the Frobenius norm, which alone would call orthonormal columns ill-conditioned from some h on, and
    the geometric mean of the norms 1 and inf.
    """
    size = a.abs()
    mean = (size.sum(-1).amax(-1) * size.sum(-2).amax(-1)).sqrt()
    return torch.minimum(mean, size.square().sum((-2, -1)).sqrt())


def _product(G: Tensor, basis: Tensor, sign: Tensor | None = None) -> Tensor:
    """Compute G basis in float64, piece by piece, rounded to float32; times `_sign`, if that is to be written."""
    out = torch.empty(G.shape, dtype=torch.float32, device=G.device)
    signs = () if sign is None else _pieces(sign, of=G)
    for i, (x, on, part) in enumerate(zip(_pieces(G), _pieces(basis, of=G), _pieces(out), strict=True)):
        columns = x.double() @ on
        part.copy_(columns.mul_(signs[i].copy_(_sign(columns))) if signs else columns)
    return out


def _pieces(x: Tensor, of: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return a batch of matrices, or what goes with a batch `of` them, in parts that are small in float64."""
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
    """Return the matrix; where its SVD is to be differentiated, with equal singular values moved apart by `gap`.

    The derivative of singular vectors divides by the differences of singular values. What is computed from a frame
    does not depend on the choice of vectors at a tie and is smooth there, so the change costs no more than its size.
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
