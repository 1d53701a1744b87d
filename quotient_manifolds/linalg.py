"""Factor small matrices in batches; nothing here knows of manifolds."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])

_CONDITION = 1e4
"""Up to which condition number a Gram matrix serves for a frame in float32."""

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


def length(x: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    """Compute |x| over these dimensions; no square of an entry overflows or underflows. Its gradient at 0 is 0."""
    limits = torch.finfo(x.dtype)
    largest = torch.linalg.vector_norm(x.detach(), ord=math.inf, dim=dim, keepdim=True).clamp(limits.tiny, limits.max)
    norm = largest * torch.linalg.vector_norm(x / largest, dim=dim, keepdim=True)
    return norm if keepdim else norm.squeeze(dim)


def rank_floor(n: int, m: int) -> float:
    """Return below which a singular value of G H^T, relative to the largest, is no more than rounding in float64."""
    return (n + m) * torch.finfo(torch.float64).eps


def singular_frame(G: Tensor, H: Tensor, eps: float = 0.0, dtype: torch.dtype = torch.float64) -> SingularFrame:
    """Compute the thin SVD of G H^T from QR factors of G and H: the condition number of G^T G would be squared.

    Computed and returned in float64 whatever the dtype of G and H: the singular values of a product spread over twice
    the digits of its factors. Those below `rank_floor` are raised to it, so that weights stay finite and the result
    depends on the orbit of (G, H) only; the largest entry in every column of `left` is positive. With `eps > 0` the
    triangular factors are those of G^T G + eps I and H^T H + eps I (QR of G stacked on sqrt(eps) I); `left` and `right`
    then have columns shorter than one. With `dtype` float32 all is as accurate as that takes: for well-conditioned
    factors, Gram matrices in float64 are, in a third of the time; `left` and `right` are then rounded already.

    Shapes: G (..., n, h), H (..., m, h), with n, m >= h, finite. Where a factor is singular the frame is not finite.
    """
    if dtype == torch.float32 and not eps and in_no_graph(G, H):
        R_G, R_H = gram_factor(G), gram_factor(H)
        if R_G is not None and R_H is not None:
            return _frame_in_single(G, H, R_G, R_H)
    (Q_G, R_G), (Q_H, R_H) = _qr(G.double(), eps), _qr(H.double(), eps)
    U, s, Vh = torch.linalg.svd(apart(R_G @ R_H.mT))
    left = Q_G @ U
    # Signs of singular vectors are rounding's choice; a rule makes all of the frame a function of G H^T.
    sign = _sign(left)
    left, U, V = left * sign, U * sign, Vh.mT * sign
    s = torch.maximum(s, rank_floor(G.shape[-2], H.shape[-2]) * s[..., :1].detach())
    to_left = torch.linalg.solve_triangular(R_G, U, upper=True)
    to_right = torch.linalg.solve_triangular(R_H, V, upper=True)
    return SingularFrame(left, Q_H @ V, s, to_left, to_right, U.mT @ R_G, V.mT @ R_H)


def gram_factor(G: Tensor) -> Tensor | None:
    """Compute the Cholesky factor R of G^T G in float64, upper triangular; None where it is not that of QR to 1e-8.

    Its error is that of rounding times the square of the condition number, the columns taken to length 1; so the
    factors of badly conditioned matrices are left to QR, for the whole batch.
    """
    gram = torch.cat([x.mT @ x for x in (piece.double() for piece in _pieces(G))])
    L, failed = torch.linalg.cholesky_ex(gram.reshape(*G.shape[:-2], *gram.shape[1:]))
    lengths, eye = torch.linalg.vector_norm(L, dim=-1), torch.eye(G.shape[-1], dtype=L.dtype, device=L.device)
    inverse = torch.linalg.solve_triangular(L / lengths[..., :, None], eye.expand_as(L), upper=False)
    condition = torch.linalg.matrix_norm(inverse) * G.shape[-1] ** 0.5
    return L.mT if bool(((failed == 0) & (condition < _CONDITION)).all()) else None


def _frame_in_single(G: Tensor, H: Tensor, R_G: Tensor, R_H: Tensor) -> SingularFrame:
    """Compute `singular_frame` from R_G and R_H: left = G to_left, in float64 and piece by piece, then rounded."""
    U, s, Vh = torch.linalg.svd(R_G @ R_H.mT)
    to_left = torch.linalg.solve_triangular(R_G, U, upper=True)
    left, right = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (G, H))
    sign = s.new_empty(*s.shape[:-1], 1, s.shape[-1])
    parts = (_pieces(x, of=G) for x in (G, to_left, left, sign))
    for x, on, out, signs in zip(*parts, strict=True):
        columns = x.double() @ on
        signs.copy_(_sign(columns))
        out.copy_(columns.mul_(signs))
    V, to_left = Vh.mT * sign, to_left * sign
    to_right = torch.linalg.solve_triangular(R_H, V, upper=True)
    for x, on, out in zip(*(_pieces(x, of=H) for x in (H, to_right, right)), strict=True):
        out.copy_(x.double() @ on)
    s = torch.maximum(s, rank_floor(G.shape[-2], H.shape[-2]) * s[..., :1])
    return SingularFrame(left, right, s, to_left, to_right, (U * sign).mT @ R_G, V.mT @ R_H)


def _pieces(x: Tensor, of: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return a batch of matrices, or what goes with a batch `of` them, in parts that are small in float64."""
    n, h = (x if of is None else of).shape[-2:]
    most = _CACHED if x.is_cpu else _LAUNCHED
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]).split(max(1, most // (n * h)))


def _sign(left: Tensor) -> Tensor:
    """Return the sign of the largest entry in every column. Shape (..., 1, h)."""
    top, bottom = left.detach().amax(-2, keepdim=True), left.detach().amin(-2, keepdim=True)
    return torch.where(top >= -bottom, 1.0, -1.0).to(left.dtype)


def relative_singular_values(G: Tensor, H: Tensor) -> Tensor:
    """Compute the singular values of G H^T over the largest, descending, in float64; 0 where the product is 0."""
    R_G, R_H = (torch.linalg.qr(part.detach().double(), mode="r").R for part in (G, H))
    s = torch.linalg.svdvals(R_G @ R_H.mT)
    return s / s[..., :1].clamp_min(torch.finfo(s.dtype).tiny)


def spectral_norm(a: Tensor) -> Tensor:
    """Compute the largest singular value of tall matrices (..., n, h), from a^T a in float64. Shape (...,)."""
    a = a.double()
    return torch.linalg.eigvalsh(a.mT @ a)[..., -1].clamp_min(0).sqrt()


def apart(core: Tensor, gap: float = 1e-8) -> Tensor:
    """Return the matrix; where its SVD is to be differentiated, with equal singular values moved apart by `gap`.

    The derivative of singular vectors divides by the differences of singular values. What is computed from a frame
    does not depend on the choice of vectors at a tie and is smooth there, so the change costs no more than its size.
    """
    if not core.requires_grad or core.shape[-1] == 1:
        return core
    with torch.no_grad():
        U, s, Vh = torch.linalg.svd(core)
        tied = ((s[..., :-1] - s[..., 1:]) < gap * s[..., :1] / 10).any(dim=-1)[..., None]
        steps = torch.arange(s.shape[-1] - 1, -1, -1, dtype=s.dtype, device=s.device)
        shift = U * torch.where(tied, gap * s[..., :1] * steps, 0.0)[..., None, :] @ Vh
    return core + shift


def in_no_graph(*tensors: Tensor) -> bool:
    """Tell whether nothing is differentiated, mapped or compiled here, so that code may look at values and write."""
    return (
        not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        and torch.autograd.forward_ad._current_level < 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.compiler.is_compiling()
    )


def _qr(G: Tensor, eps: float) -> tuple[Tensor, Tensor]:
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
