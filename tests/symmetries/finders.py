"""Run the finder of symmetries on an example, and measure what it finds and how false it is."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from quotient_manifolds.symmetries import fibre_dimension
from quotient_manifolds.symmetries.charges.find import find
from quotient_manifolds.symmetries.double_precision import DoublePrecision
from quotient_manifolds.symmetries.groups import Gauge, Symmetry, Translation
from quotient_manifolds.symmetries.outputs import call, floating
from tests.nets.sets import Example, varied

MORE = 4  # times as many batches are taken where they are too few for the rank
DENSE = 2_000  # parameters, at most, for a rank of all tangents
SAME = 1e-8  # relative changes below are rounding
SMALL = 1e-6  # outputs all of which are smaller may be rounding, and are compared with this
STEP = 0.3  # of random elements
RANK, NOTHING = 1e-9, 1e-10  # relative: singular values below are 0; tangents below move nothing
Row = dict[str, Any]


def measured(example: Example) -> Row:
    """Return what is found, its cost, and how false it is."""
    began = time.perf_counter()
    found = find(example.model, example.shown, example.evaluate)
    seconds = time.perf_counter() - began
    params = weights(example.model)
    small = sum(w.numel() for w in params.values()) <= DENSE
    return {
        "found": rank(found.symmetries, params) if small else sum(each.dimension(params) for each in found.symmetries),
        "seconds": seconds,
        "refused": len(found.refused),
        "passes": seconds / seconds_of_a_pass(example),
        "gap": f"{found.largest:.1e} | {found.smallest:.1e}",
        **falsity(example, moved_by(found.symmetries, params)),
    }


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters in float64."""
    return {name: w.detach().double() for name, w in model.named_parameters()}


def rank(symmetries: Sequence[Symmetry], params: Mapping[str, Tensor]) -> int:
    """Return how many dimensions the tangents of all generators span, each taken at length 1."""
    rows = []
    for each in symmetries:
        E = torch.eye(math.prod(each.shape), dtype=torch.float64).view(-1, *each.shape)
        along = each.tangent(params, each.algebra.project(E) if isinstance(each, Gauge) else E)
        parts = (along.get(name, w.new_zeros(len(E), *w.shape)) for name, w in params.items())
        rows.append(torch.cat([part.flatten(1) for part in parts], 1))
        sizes = rows[-1].norm(dim=1)
        rows[-1] = rows[-1][sizes > NOTHING * sizes.max()]
        rows[-1] = rows[-1] / rows[-1].norm(dim=1, keepdim=True)
    s = torch.linalg.svdvals(torch.cat(rows)) if rows else torch.zeros(1)
    return int((s > RANK * s[:1]).sum())


def moved_by(symmetries: Sequence[Symmetry], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters after a random element of each symmetry, translations first, for these depend on where."""
    draw, moved = torch.Generator().manual_seed(3), dict(params)
    for each in sorted(symmetries, key=lambda each: not isinstance(each, Translation)):
        moved = each.act(moved, each.element(draw, STEP))
    return moved


def seconds_of_a_pass(example: Example) -> float:
    """Return the least time of three forward and backward passes of the batch."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        outputs = floating((example.evaluate or call)(example.model, example.shown))
        sum(y.square().mean() for y in outputs if y.requires_grad).backward()  # type: ignore[union-attr]
        times.append(time.perf_counter() - began)
    example.model.zero_grad()
    return min(times)


def falsity(example: Example, moved: Mapping[str, Tensor]) -> Row:
    """Return the largest relative change of outputs on batches that the model takes, and on which it is.

    The model itself runs, in float64, casts to less lifted; outputs that are not finite must be the same.
    """
    model, changes = copy.deepcopy(example.model).double(), {}
    for name, batch in example.unseen.items():
        try:
            before = answers(model, weights(example.model), batch, example.evaluate)
        except Exception:  # of any model: not made for inputs of this size
            continue
        if sum(y.numel() for y in before) and all(bool(y.isnan().logical_not().all()) for y in before):
            after = answers(model, moved, batch, example.evaluate)
            changes[name] = max(map(change, before, after))
    if not changes:
        raise ValueError("an unseen input must be one that the model takes. Found none.")
    worst = max(changes, key=changes.__getitem__)
    return {"false": changes[worst], "worst": worst if changes[worst] > SAME else ""}


@torch.no_grad()
def answers(model: nn.Module, params: Mapping[str, Tensor], batch: Any, evaluate: Any) -> list[Tensor]:
    """Return all floating point outputs with these parameters."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return functional_call(model, dict(params), args, kwargs)

    with DoublePrecision(), sdpa_kernel(SDPBackend.MATH):
        return [y.double() for y in floating((evaluate or call)(called, widened(batch)))]


def widened(batch: Any) -> Any:
    """Return the batch in float64."""
    return torch.utils._pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, batch)


def change(before: Tensor, after: Tensor) -> float:
    """Return the largest difference over the largest number; infinite where infinities, NaN or shapes differ."""
    finite = before.isfinite()
    if before.shape != after.shape or not bool((after.isfinite() == finite).all()):
        return math.inf
    x, y = before[finite], after[finite]
    return float((y - x).abs().max()) / max(float(x.abs().max()), SMALL) if x.numel() else 0.0


def kernel(example: Example) -> int | str:
    """Return parameters minus the rank of the Jacobian; nothing where it is too large, or doubted."""
    if example.kernel is not None or not example.many:
        return "" if example.kernel is None else example.kernel
    batches = [*example.many]
    for seed in range(MORE):
        try:
            fibre = fibre_dimension(example.model, batches, evaluate=example.outputs)
        except Exception:  # of any model
            return ""
        if not any("too few" in doubt for doubt in fibre.doubts):
            return "" if fibre.doubts else fibre.dimension
        batches += [varied(batch, seed)["rows"] for batch in batches]
    return ""
