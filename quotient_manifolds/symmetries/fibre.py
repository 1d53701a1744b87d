"""Compute the dimension of all parameters with the same function: a rank, which needs no theory of symmetries.

Let J be the Jacobian of theta -> (f_theta(x_1), ..., f_theta(x_N)). At a generic theta, and with enough generic inputs,
the parameters with the same function as theta form a manifold of dimension P - rank J.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from quotient_manifolds.messages import Progress
from quotient_manifolds.symmetries.checks import check_loaded, check_model, check_weights, generator_of
from quotient_manifolds.symmetries.jacobian import Jacobian
from quotient_manifolds.symmetries.outputs import Evaluate, ModelOutputs, answer

MOST_PARAMETERS = 5_000  # the rows of J take a few hours above, all else less
BROKEN, WHOLE = 1e-2, 0.0  # the eps with which near symmetries are far from holding, and that with which they hold
ROUNDING = 1e-10  # relative to the largest singular value: what lies above is no rounding of float64
SMALLEST_GAP = 1e3
SHOWN = 3  # singular values on each side of the gap
STEP = 1e-6  # relative to the parameters, to see outputs move or not


@dataclass(frozen=True)
class FibreDimension:
    """State the dimension of a fibre, and what the statement rests on.

    near: how many dimensions more there would be on these inputs if no norm had an eps; None where the model has no
    derivatives then.
    frozen: how many parameters were held fixed, because they ask for no gradient. rank_of_half: of the Jacobian of a
    random half of the inputs; where it equals the rank, the rank stands still. above, below: singular values of the
    Jacobian on both sides of the gap, relative to the largest, descending; gap: the ratio of the two at the gap.
    unreached: how many numbers of which parameters no output depends on, on these inputs: rows of tables that no input
    asks for, neurons that are never active; they are counted in the dimension. doubts: one sentence each for what
    speaks against the dimension. kernel: an orthonormal basis, (dimension, parameters), of the directions in which no
    output changes; columns are the numbers of the parameters that ask for gradients, in their order in the model.
    """

    dimension: int
    near: int | None
    parameters: int
    frozen: int
    rank: int
    rank_of_half: int
    above: tuple[float, ...]
    below: tuple[float, ...]
    gap: float
    batches: int
    outputs: int
    unreached: Mapping[str, int]
    doubts: tuple[str, ...]
    kernel: Tensor = field(repr=False, compare=False)

    @property
    def certain(self) -> bool:
        """Return whether nothing speaks against the dimension."""
        return not self.doubts

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON (an infinite gap is None), without the kernel."""
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "kernel"}
        return {**plain, "gap": self.gap if math.isfinite(self.gap) else None, "certain": self.certain}

    def __str__(self) -> str:
        """Write the report, some lines of text."""
        near = f", and {self.near} near, which only the eps of norms breaks" if self.near else ""
        above, below = (" ".join(f"{value:.1e}" for value in side) or "none" for side in (self.above, self.below))
        names = ", ".join(f"{name} ({count})" for name, count in self.unreached.items())
        lines = [
            *(f"inconclusive: {doubt}" for doubt in self.doubts),
            f"dimension of the fibre: {self.dimension}{near}",
            f"{self.parameters} parameters, less the rank {self.rank} of the Jacobian of {self.outputs} outputs",
            f"singular values around the gap: {above} | {below}, a ratio of {self.gap:.0e}",
            f"{self.frozen} frozen parameters are held fixed and not counted" * bool(self.frozen),
            f"no output depends on {sum(self.unreached.values())} numbers, which are counted: {names}" * bool(names),
        ]
        return "\n".join(line for line in lines if line)


def fibre_dimension(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    evaluate: Evaluate | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> FibreDimension:
    """Compute the dimension of {theta' : f_theta' = f_theta}, as P - rank J, J the Jacobian of all outputs.

    P counts the parameters that ask for gradients, a tied one once. All is computed in float64, whatever the model
    casts to, on copies of its structure. Rows of J come by reverse mode, some at a time, and are compressed to the
    triangle R of a QR decomposition: it keeps the singular values, where J^T J loses those below the root of rounding.
    The rank is where the singular values fall furthest, to below 1e-10 of the largest.

    Exact and near: with every eps of a norm raised to 1e-2, what only the eps breaks is broken by as much as any other
    direction, and P - rank J counts the exact ones; with every eps 0 it counts the near ones too.

    batches: inputs as `prove_symmetries` takes them, best one example each: a row costs a pass through its whole batch.
    They have P outputs at the least, better three times as many, repeated ones left out. `evaluate(model, batch)` may
    choose the outputs.
    progress: called with what is being computed, how much of it is finished, and the total.

    The result doubts itself where the inputs are too few (half of them, by chance, have a lower rank), where they are
    not generic (it grows with noise added to what tables of embeddings give), where there is no gap, and where the
    outputs do move along the kernel of J (`detach` or `no_grad` inside the model). It holds at this theta: at special
    ones, such as gains of 1 and biases of 0, it may differ from what holds almost everywhere.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 4, bias=False)).eval()
    >>> fibre_dimension(model, [torch.randn(1, 3) for _ in range(20)]).dimension  # GL(2) between the two layers
    4

    ValueError in train mode, for outputs that are random, NaN or do not depend on any parameter by autograd, for a
    model that changes its buffers, for weights that are no finite floating point numbers (quantised ones), without
    parameters or with more than 5,000 of them.
    """
    listed = _distinct(batches)
    order = torch.randperm(len(listed), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = [listed[index] for index in order]
    rounds = (shuffled[: len(shuffled) // 2], shuffled) if len(shuffled) > 1 else (shuffled,)
    return grown_fibre(model, rounds, evaluate=evaluate, seed=seed, progress=progress)[0]


def grown_fibre(
    model: nn.Module,
    rounds: Iterable[list[Any]],
    *,
    evaluate: Evaluate | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[FibreDimension, list[Any]]:
    """Compute the dimension on the first of some lists that does not lift the rank, and return that list, too.

    rounds: lists of batches, each the one before and about as many more, or none. All else is as for `fibre_dimension`.
    """
    remaining = iter(rounds)
    used = next(remaining)
    jacobian = _prepared(model, used[0], evaluate, seed, progress)
    R, outputs = jacobian.triangle(used, BROKEN)
    (s, rank, gap), of_half = _gap(R), 0
    for more in remaining:
        if len(more) == len(used):
            continue
        R, count = jacobian.triangle(more[len(used) :], BROKEN, above=R)
        of_half, used, outputs = rank, more, outputs + count
        s, rank, gap = _gap(R)
        if of_half == rank:
            break
    if len(used) == 1:  # half of its outputs, then
        of_half = _gap(jacobian.triangle(used, BROKEN, part=0.5)[0])[1]
    t = (s / s[0].clamp_min(torch.finfo(s.dtype).tiny)).tolist()
    near, kernel = _near(jacobian, used, R, rank), torch.linalg.svd(R).Vh[rank:]
    silent = (R == 0).all(dim=0).tolist()
    fibre = FibreDimension(
        dimension=R.shape[1] - rank,
        near=near,
        parameters=R.shape[1],
        frozen=sum(w.numel() for w in model.parameters() if not w.requires_grad),
        rank=rank,
        rank_of_half=of_half,
        above=tuple(t[max(0, rank - SHOWN) : rank]),
        below=tuple(t[rank : rank + SHOWN]),
        gap=gap,
        batches=len(used),
        outputs=outputs,
        unreached=dict(Counter(name for name, zero in zip(jacobian.columns, silent, strict=True) if zero)),
        doubts=tuple(_doubts(gap, rank, of_half, near, _grows(jacobian, used, R), _moves(jacobian, used[0], kernel))),
        kernel=kernel,
    )
    return fibre, used


def _distinct(batches: Any) -> list[Any]:
    """Return the batches, repeated ones once, for these lift no rank."""
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise TypeError(f"batches are a list of inputs. Found {type(batches).__name__}; one alone goes in a list.")
    distinct = {tuple(map(_content, tree_leaves(batch))): batch for batch in batches}
    if not distinct:
        raise ValueError("a rank needs at least one batch of inputs. Found none.")
    return list(distinct.values())


def _content(leaf: Any) -> Any:
    return (*leaf.shape, *leaf.flatten().tolist()) if isinstance(leaf, Tensor) else id(leaf)


def _prepared(
    model: nn.Module, batch: Any, evaluate: Evaluate | None, seed: int, progress: Progress | None
) -> Jacobian:
    check_model(model)
    check_loaded(model)
    own = dict(model.named_parameters())
    check_weights(own, own)
    size = sum(w.numel() for w in own.values() if w.requires_grad)
    if not 0 < size <= MOST_PARAMETERS:
        raise ValueError(
            f"the dimension is computed for 1 to {MOST_PARAMETERS} parameters that ask for gradients. Found {size}"
            f"{': make a small model of the same kind.' if size else '.'}"
        )
    ModelOutputs(model, batch, evaluate, double=False)  # raises where they are random or no numbers
    return Jacobian(model, evaluate or answer, generator_of(seed), progress)


def _gap(R: Tensor) -> tuple[Tensor, int, float]:
    """Return the singular values, the rank, and the ratio of the values on both sides of it.

    The rank r maximises s_r / s_(r+1) over those with s_(r+1) below rounding; beyond the last there is machine epsilon.
    """
    if not bool(torch.isfinite(R).all()):
        raise ValueError("the derivatives of the outputs contain NaN or infinite values: no rank can be told.")
    s = torch.cat([torch.linalg.svdvals(R), R.new_zeros(max(0, R.shape[1] - len(R)))])
    if float(s[0]) == 0:
        return s, 0, math.inf
    t = torch.cat([s / s[0], s.new_zeros(1)]).clamp_min(torch.finfo(s.dtype).eps / 4)
    ratio = torch.where(t[1:] < ROUNDING, t[:-1] / t[1:], 1.0)
    rank = int(ratio.argmax()) + 1
    return s, rank, float(ratio[rank - 1])


def _near(jacobian: Jacobian, batches: Sequence[Any], R: Tensor, rank: int) -> int | None:
    """Return how much the rank falls with every eps 0; None where derivatives are infinite then."""
    whole = jacobian.triangle(batches, WHOLE)[0] if jacobian.found_eps else R
    return rank - _gap(whole)[1] if bool(torch.isfinite(whole).all()) else None


def _grows(jacobian: Jacobian, batches: Sequence[Any], R: Tensor) -> int:
    """Return how much the rank for all other parameters grows where tables of embeddings give anything at all."""
    tables = {id(w) for m in jacobian.model.modules() if isinstance(m, nn.Embedding) for w in m.parameters()}
    own = {name for name, w in jacobian.model.named_parameters() if id(w) in tables}
    others = torch.tensor([name not in own for name in jacobian.columns], device=R.device)
    if not tables or not bool(others.any()):
        return 0
    noisy = jacobian.triangle(batches, BROKEN, noise=True)[0]
    return _gap(noisy[:, others])[1] - _gap(R[:, others])[1]


def _moves(jacobian: Jacobian, batch: Any, kernel: Tensor) -> bool:
    """Return whether the outputs move to first order along the kernel of J, as they do where gradients are cut off.

    A step t along the kernel moves them by O(t^2), and along a random direction by O(t).
    """
    own = [w.detach() for w in jacobian.params.values()]
    size = torch.cat([w.flatten() for w in own]).norm()

    def moved(direction: Tensor) -> Tensor:
        steps = (STEP * size * direction / direction.norm()).split([w.numel() for w in own])
        there = {name: w + t.view_as(w) for name, w, t in zip(jacobian.params, own, steps, strict=True)}
        return jacobian.outputs(batch, there, BROKEN) - jacobian.outputs(batch, jacobian.params, BROKEN)

    along, across = (torch.randn(n, generator=jacobian.generator, dtype=kernel.dtype) for n in kernel.shape)
    along, across = along.to(kernel.device) @ kernel, across.to(kernel.device)
    return len(kernel) > 0 and bool(moved(along).norm() > 1e-2 * moved(across).norm())


def _doubts(gap: float, rank: int, of_half: int, near: int | None, grown: int, moves: bool) -> Iterator[str]:
    """Yield a sentence for each thing that speaks against a dimension."""
    if gap < SMALLEST_GAP:
        yield f"the singular values have no gap: where they are small they fall by a factor of {gap:.1f} at the most"
    if of_half < rank:  # as it is wherever the rows of J are independent
        yield f"inputs are too few: a random half of them has rank {of_half}, and all of them {rank}"
    if near is None:
        yield "near symmetries cannot be told: with an eps of 0 the derivatives are infinite"
    elif near < 0:
        yield "near symmetries cannot be told: with an eps of 0 other neurons are active and the rank is larger"
    if grown > 0:
        yield (
            f"inputs are not generic: with noise added to the embeddings the rank grows by {grown}, so the dimension "
            "holds on such inputs only; more different words or positions have to reach the layers"
        )
    if moves:
        yield "the outputs move where their gradients are zero: some are cut off inside the model (detach, no_grad)"
