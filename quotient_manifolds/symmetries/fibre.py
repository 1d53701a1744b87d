"""Compute the dimension of all parameters with the same function: a rank, which needs no theory of symmetries.

Let J be the Jacobian of theta -> (f_theta(x_1), ..., f_theta(x_N)). At a generic theta, and with enough generic inputs,
the parameters with the same function as theta form a manifold of dimension P - rank J.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.batches import mapped, taken_apart, tensors_in
from quotient_manifolds.messages import Progress
from quotient_manifolds.replica import TrueGradients, attention_by_formula, private_batch, replica
from quotient_manifolds.symmetries.checks import check_list, check_loaded, check_model, check_weights, generator_of
from quotient_manifolds.symmetries.double_precision import DoublePrecision
from quotient_manifolds.symmetries.outputs import Evaluate, ModelOutputs, answer, doubled, floating
from quotient_manifolds.symmetries.reparameterization import gaussian, typical

MOST_PARAMETERS = 5_000  # the rows of J take a few hours above, all else less
BROKEN, WHOLE = 1e-2, 0.0  # the eps with which near symmetries are far from holding, and that with which they hold
ROUNDING = 1e-10  # relative to the largest singular value: what lies above is no rounding of float64
SMALLEST_GAP = 1e3
SHOWN = 3  # singular values on each side of the gap
STEP = 1e-6  # relative to the parameters, of differences
WRONG = 1e-4  # relative to J, of what differences are other than J says
ROWS = 256  # of J, computed at once at most


@dataclass(frozen=True)
class FibreDimension:
    """State the dimension of a fibre, and what the statement rests on.

    near: how many dimensions more there would be on these inputs if no norm had an eps; None where the model has no
    derivatives then. frozen: how many parameters were held fixed, because they ask for no gradient. rank_of_half: of
    the Jacobian of a random half of the inputs; where it equals the rank, the rank stands still. above, below: singular
    values of the Jacobian on both sides of the gap, relative to the largest, descending; gap: the ratio of the two at
    the gap. unreached: how many numbers of which parameters no output depends on, on these inputs: rows of tables that
    no input asks for, neurons that are never active; they are counted in the dimension. doubts: one sentence each for
    what speaks against the dimension. kernel: an orthonormal basis, (dimension, parameters), of the directions in which
    no output changes; columns are the numbers of the parameters that ask for gradients, in their order in the model.
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

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON, without the kernel."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "kernel"}

    def __str__(self) -> str:
        """Write the report, some lines of text."""
        near = f", and {self.dimension + self.near} if no norm had an eps" if self.near else ""
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
        return "\n".join(filter(None, lines))


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
    casts to, on copies of its structure. Rows of J come by reverse mode and are compressed to the triangle R of a QR
    decomposition, R^T R = J^T J, which keeps the singular values. The rank is where these fall furthest, to below 1e-10
    of the largest. With every eps of a norm raised to 1e-2, what only the eps breaks is broken by as much as any other
    direction, and P - rank J counts what holds exactly; with every eps 0 it counts what nearly holds, too.

    batches: inputs as for `verify_symmetries`. Those that the model treats one example at a time are split into
    examples, for a row of J costs a pass through its whole batch. They have P outputs at the least, better three
    times as many, repeated ones left out. `evaluate(model, batch)` may choose the outputs. progress: called with what
    is being computed, how much of it is finished, and the total.

    The result doubts itself where the inputs are too few (half of them, by chance, have a lower rank), where they are
    not generic (it grows with noise added to what tables of embeddings give), where there is no gap, where differences
    of the outputs are others than J says (`detach` or `no_grad` inside the model), and where parameters matter that
    have no derivatives (a choice by the largest score). It holds at this theta: at special ones, such as gains of 1 and
    biases of 0, it may differ from what holds almost everywhere.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 4, bias=False)).eval()
    >>> fibre_dimension(model, [torch.randn(1, 3) for _ in range(20)]).dimension  # GL(2) between the two layers
    4

    ValueError in train mode, for outputs that are random, NaN or do not depend on any parameter by autograd, for a
    model that changes its buffers, for weights that are no finite floating point numbers (quantised ones), without
    parameters or with more than 5,000 of them.
    """
    jacobian = Jacobian(model, evaluate, seed, progress)
    listed = distinct([each for batch in distinct(batches) for each in jacobian.examples(batch)])
    order = torch.randperm(len(listed), generator=torch.Generator().manual_seed(0)).tolist()
    halves = ([listed[index] for index in order[:end]] for end in (len(order) // 2, len(order)))
    return where_it_stands(jacobian, halves)[0]


def where_it_stands(jacobian: Jacobian, rounds: Iterable[list[Any]]) -> tuple[FibreDimension, list[Any]]:
    """Compute the dimension on the first list of batches that does not lift the rank, and return that list, too.

    rounds: lists that each begin with the one before.
    """
    used: list[Any] = []
    R, outputs, rank = jacobian.no_rows, 0, -1
    for batches in rounds:
        if len(batches) == len(used):
            continue
        if not used:
            ModelOutputs(jacobian.model, batches[:1], jacobian.evaluate).own()  # raises if they are random
        R, rows = jacobian.triangle(batches[len(used) :], above=R)
        of_half, outputs, used = rank, outputs + rows, batches
        s, rank, gap = _spectrum(R)
        if rank == of_half:
            break
    if not rank:
        raise ValueError(
            "the outputs must depend on parameters that ask for gradients. Found that they depend on none on these "
            "inputs, according to autograd: give other inputs, or a model without detach and no_grad inside."
        )
    if len(used) == 1:  # then half of its outputs
        of_half = _spectrum(torch.cat(list(jacobian.rows(used[0])))[: outputs // 2])[1]
    whole = jacobian.triangle(used, WHOLE)[0] if jacobian.found_eps else R
    near = rank - _spectrum(whole)[1] if bool(torch.isfinite(whole).all()) else None
    kernel = torch.linalg.svd(R).Vh[rank:]
    fibre = FibreDimension(
        dimension=len(kernel),
        near=near,
        parameters=R.shape[1],
        frozen=sum(w.numel() for w in jacobian.model.parameters() if not w.requires_grad),
        rank=rank,
        rank_of_half=of_half,
        above=tuple(s[max(0, rank - SHOWN) : rank].tolist()),
        below=tuple(s[rank : rank + SHOWN].tolist()),
        gap=gap,
        batches=len(used),
        outputs=outputs,
        unreached=dict(Counter(name for name, zero in zip(jacobian.columns, (R == 0).all(dim=0), strict=True) if zero)),
        doubts=(),
        kernel=kernel,
    )
    return replace(fibre, doubts=tuple(_doubts(fibre, jacobian, used, R))), used


def distinct(batches: Any) -> list[Any]:
    """Return the batches, repeated ones once, for these lift no rank."""
    check_list("batches", batches)
    found = {tuple((path, _content(leaf)) for path, leaf in taken_apart(batch)): batch for batch in batches}
    if not found:
        raise ValueError("a rank needs at least one batch of inputs. Found none.")
    return list(found.values())


def _content(leaf: Any) -> Any:
    return (*leaf.shape, *leaf.flatten().tolist()) if isinstance(leaf, Tensor) else id(leaf)


def _spectrum(R: Tensor) -> tuple[Tensor, int, float]:
    """Return the singular values relative to the largest, the rank, and the ratio of the values on both sides of it.

    The rank r maximises s_r / s_(r+1) over those with s_(r+1) below rounding; beyond the last there is machine epsilon.
    """
    if not bool(torch.isfinite(R).all()):
        raise ValueError("the derivatives of the outputs contain NaN or infinite values: the rank is undetermined.")
    s = torch.cat([torch.linalg.svdvals(R), R.new_zeros(max(0, R.shape[1] - len(R)))])
    s = s / s[0].clamp_min(torch.finfo(s.dtype).tiny)
    t = torch.cat([s, s.new_zeros(1)]).clamp_min(torch.finfo(s.dtype).eps / 4)
    ratio = torch.where(t[1:] < ROUNDING, t[:-1] / t[1:], 1.0)
    return s, int(ratio.argmax()) + 1 if bool(s.any()) else 0, float(ratio.max())


def _doubts(fibre: FibreDimension, jacobian: Jacobian, batches: Sequence[Any], R: Tensor) -> Iterator[str]:
    """Yield a sentence for each thing that speaks against the dimension."""
    if fibre.gap < SMALLEST_GAP:
        yield f"the singular values have no gap: where they are small they fall by a factor of {fibre.gap:.1f} at most"
    if fibre.rank_of_half < fibre.rank:  # as it is wherever the rows of J are independent
        few = f"a random half of them has rank {fibre.rank_of_half}, and all of them {fibre.rank}"
        yield f"inputs are too few: {few}; give more"
    if fibre.near is None:
        yield "near symmetries are undetermined: with an eps of 0 the derivatives are infinite"
    elif fibre.near < 0:
        yield "near symmetries are undetermined: with an eps of 0 other neurons are active and the rank is larger"
    tables = {id(w) for m in jacobian.model.modules() if isinstance(m, nn.Embedding) for w in m.parameters()}
    own = {name for name, w in jacobian.model.named_parameters() if id(w) in tables}
    others = torch.tensor([name not in own for name in jacobian.columns], device=R.device)
    if tables and bool(others.any()):
        noisy = jacobian.triangle(batches, noise=True)[0]
        grown = _spectrum(noisy[:, others])[1] - _spectrum(R[:, others])[1]
        if grown > 0:
            yield (
                f"inputs are not generic: with noise added to the embeddings the rank grows by {grown}, so the "
                "dimension holds on such inputs only; more different words or positions have to reach the layers"
            )
    if jacobian.is_wrong(batches[0], fibre.kernel):
        yield "the derivatives are not those of the outputs: autograd is told others inside the model (detach, no_grad)"
    if fibre.unreached and jacobian.jumps(batches, (R == 0).all(dim=0)):
        names = ", ".join(fibre.unreached)
        yield f"the outputs jump with {names}: something is chosen by it, or never active, on these inputs"


class Jacobian:
    """Differentiate all outputs of a model by the parameters that ask for gradients, in float64, on replicas."""

    def __init__(self, model: nn.Module, evaluate: Evaluate | None, seed: int, progress: Progress | None) -> None:
        check_model(model)
        check_loaded(model)
        own = dict(model.named_parameters())
        check_weights(own, own)
        self.params = {name: doubled(w.detach().clone()).requires_grad_() for name, w in own.items() if w.requires_grad}
        self.columns = [name for name, w in self.params.items() for _ in range(w.numel())]
        if not 0 < len(self.columns) <= MOST_PARAMETERS:
            raise ValueError(
                f"the dimension is computed for 1 to {MOST_PARAMETERS} parameters that ask for gradients. Found "
                f"{len(self.columns)}{': make a small model of the same kind.' if self.columns else '.'}"
            )
        self.model, self.evaluate, self.found_eps = model, evaluate or answer, False
        self.no_rows = next(iter(self.params.values())).new_zeros(0, len(self.columns))
        self._draw, self._progress = generator_of(seed), progress or (lambda what, finished, total: None)

    def triangle(
        self, batches: Sequence[Any], eps: float = BROKEN, *, noise: bool = False, above: Tensor | None = None
    ) -> tuple[Tensor, int]:
        """Return R (at most P, P) with R^T R = J^T J, and the number of rows of J.

        eps: of every norm. noise: is added to what tables of embeddings give. above: rows to put above those of J.
        """
        waiting, count = [self.no_rows if above is None else above], 0
        for index, batch in enumerate(batches):
            for J in self.rows(batch, eps, noise):
                waiting.append(J)
                count += len(J)
                if sum(map(len, waiting)) > 4 * len(self.columns):
                    waiting = [torch.linalg.qr(torch.cat(waiting), mode="r").R]
            self._progress(f"Jacobian, eps {eps:g}{', noise' * noise}", index + 1, len(batches))
        return torch.linalg.qr(torch.cat(waiting), mode="r").R, count

    def rows(self, batch: Any, eps: float = BROKEN, noise: bool = False) -> Iterator[Tensor]:
        """Yield the rows of J in order, some at a time, (any, P); where vmap cannot, they are computed one by one."""
        y, leaves = self.outputs(batch, self.params, eps, noise), list(self.params.values())
        y = y + 0 * sum(w.sum() for w in leaves)  # autograd refuses parameters that are not used

        def pulled(v: Tensor) -> Tensor:
            grads = torch.autograd.grad(y, leaves, v, retain_graph=True, is_grads_batched=v.ndim > 1)
            return torch.cat([g.reshape(*v.shape[:-1], -1) for g in grads], dim=-1)

        for places in torch.arange(len(y), device=y.device).split(ROWS):
            one_hot = F.one_hot(places, len(y)).to(y)
            try:
                J = pulled(one_hot)
            except RuntimeError:
                J = torch.stack([pulled(v) for v in one_hot])
            yield J

    def outputs(self, batch: Any, params: Mapping[str, Tensor], eps: float = BROKEN, noise: bool = False) -> Tensor:
        """Return all outputs at these parameters, (any,)."""
        copy = replica(self.model, params, doubled)
        before = {name: buffer.clone() for name, buffer in copy.named_buffers()}
        for table in (module for module in copy.modules() if noise and isinstance(module, nn.Embedding)):
            table.register_forward_hook(self._noisy)
        true, exact = TrueGradients(), DoublePrecision(eps)
        device = self.no_rows.device.type
        with torch.autocast(device, enabled=False), torch.enable_grad(), attention_by_formula(), true, exact:
            found = floating(self.evaluate(copy, private_batch(batch, doubled)))
            y = torch.cat([output.flatten() for output in found])
        self.found_eps |= exact.found_eps
        for name, buffer in copy.named_buffers():
            if name not in before or not torch.equal(buffer, before[name]):
                raise ValueError(f"the model changes its buffer {name!r} when it runs, so it has no one function.")
        return y

    def examples(self, batch: Any) -> list[Any]:
        """Return the examples of a batch, if all of its outputs are those of one example alone; else the batch."""
        sizes = {tensor.shape[:1] for tensor in tensors_in(batch)}
        count = sizes.pop()[0] if len(sizes) == 1 and () not in sizes else 1
        if count == 1:
            return [batch]
        found = [mapped(itemgetter(slice(at, at + 1)), batch) for at in range(count)]
        with contextlib.suppress(RuntimeError, ValueError, TypeError, LookupError, AssertionError):  # of user's code
            whole = self.outputs(batch, self.params).detach().sort().values
            alone = torch.cat([self.outputs(each, self.params).detach() for each in found]).sort().values
            if whole.shape == alone.shape and bool((whole - alone).abs().max() <= ROUNDING * whole.abs().max()):
                return found
        return [batch]

    def _noisy(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        noise = torch.randn(output.shape, generator=self._draw, dtype=output.dtype)
        return output + float(output.detach().std()) * noise.to(output.device)

    def is_wrong(self, batch: Any, kernel: Tensor) -> bool:
        """Return whether differences of the outputs are others than J says, along the kernel or across.

        Central differences are right to about 1e-9.
        """
        J, own = torch.cat([*self.rows(batch)]), self._own()
        along, across = (self._gaussian(n) for n in kernel.shape)
        for direction in (across, along @ kernel) if len(kernel) else (across,):
            step = STEP * own.norm() * direction / direction.norm()
            there, here = (self._at(batch, own + side * step) for side in (0.5, -0.5))
            if (there - here - J @ step).norm() > WRONG * (J @ (STEP * own.norm() * across / across.norm())).norm():
                return True
        return False

    def jumps(self, batches: Sequence[Any], zero: Tensor) -> bool:
        """Return whether outputs change if the parameters move, by about their size, that J says they do not need."""
        own = self._own()
        there = own + zero * typical(own) * self._gaussian(len(own))
        pairs = ((self._at(each, there), self._at(each, own)) for each in batches)
        return any(bool((y - x).abs().max() > ROUNDING * x.abs().max()) for y, x in pairs)

    def _own(self) -> Tensor:
        return torch.nn.utils.parameters_to_vector(self.params.values()).detach()

    def _gaussian(self, size: int) -> Tensor:
        return gaussian(self.no_rows, self._draw, size)

    def _at(self, batch: Any, numbers: Tensor) -> Tensor:
        """Return the outputs where the parameters are these numbers, one after the other."""
        parts = zip(self.params.items(), numbers.split([w.numel() for w in self.params.values()]), strict=True)
        return self.outputs(batch, {name: part.view_as(w) for (name, w), part in parts})
