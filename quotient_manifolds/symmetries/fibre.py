"""Compute the dimension of the set of parameters with the same function from a rank, without a theory of symmetries.

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

MOST_PARAMETERS = 5_000  # above this the rows of J take a few hours
BROKEN, WHOLE = 1e-2, 0.0  # the eps that breaks near symmetries clearly, and the eps with which they hold exactly
ROUNDING = 1e-10  # relative to the largest singular value; rounding in float64 stays below
SMALLEST_GAP = 1e3
SHOWN = 3  # singular values reported on each side of the gap
STEP = 1e-6  # the step of finite differences, relative to the parameters
WRONG = 1e-4  # the largest deviation of finite differences from J, relative to J
ROWS = 256  # the most rows of J that are computed at once


@dataclass(frozen=True)
class FibreDimension:
    """State the dimension of a fibre (the set of parameters with the same function), with the evidence.

    near: how many more dimensions the fibre would have on these inputs if no norm had an eps; None if the model is not
    differentiable then. frozen: the number of parameters held fixed, because they do not require gradients.
    rank_of_half: the rank of the Jacobian of a random half of the inputs; the rank has converged if the two are equal.
    above, below: singular values of the Jacobian on both sides of the gap, relative to the largest, descending. gap:
    the ratio of the two singular values at the gap. unreached: by parameter, the number of entries on which no output
    depends on these inputs, such as unused rows of tables and inactive neurons; they count in the dimension. doubts:
    one sentence for each reason to doubt the dimension. kernel: an orthonormal basis, (dimension, parameters), of the
    kernel of the Jacobian; columns are the entries of parameters that require gradients, in model order.
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
        """Return the report as a few lines of text."""
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

    P counts the parameters that require gradients, a tied one once. All is computed in float64 on copies of the model,
    even if the model casts to other types. Rows of J are computed in reverse mode and compressed to the triangular
    factor R of a QR decomposition, R^T R = J^T J, which preserves the singular values. The rank is at the largest drop
    of the singular values to below 1e-10 of the largest. First, every eps of a norm is raised to 1e-2, so that
    symmetries that only eps breaks are clearly broken, and P - rank J counts exact symmetries. With every eps 0, it
    counts near symmetries, too.

    batches: inputs as for `verify_symmetries`. Batches whose examples are independent are split into examples, because
    a row of J costs a pass through its whole batch. Give at least P outputs, better three times as many; repeated
    batches are left out. evaluate: `evaluate(model, batch)` may select the outputs. progress: called with a
    description of the current step, the amount finished, and the total.

    The result lists doubts if inputs are too few (a random half has a lower rank), if they are not generic (the rank
    grows with noise on the outputs of embeddings), if there is no gap, if finite differences of the outputs disagree
    with J (`detach` or `no_grad` inside the model), and if outputs depend on parameters without derivatives (such as a
    choice by the largest score). The dimension holds at this theta: at special values, such as gains of 1 and biases
    of 0, it may differ from its value almost everywhere.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 4, bias=False)).eval()
    >>> fibre_dimension(model, [torch.randn(1, 3) for _ in range(20)]).dimension  # GL(2) between the two layers
    4

    ValueError in train mode, for outputs that are random, NaN or do not depend on any parameter by autograd, for a
    model that changes its buffers, for weights that are not finite floating point numbers (such as quantized ones),
    and for a model without parameters or with more than 5,000.
    """
    jacobian = Jacobian(model, evaluate, seed, progress)
    listed = distinct([each for batch in distinct(batches) for each in jacobian.examples(batch)])
    order = torch.randperm(len(listed), generator=torch.Generator().manual_seed(0)).tolist()
    halves = ([listed[index] for index in order[:end]] for end in (len(order) // 2, len(order)))
    return where_it_stands(jacobian, halves)[0]


def where_it_stands(jacobian: Jacobian, rounds: Iterable[list[Any]]) -> tuple[FibreDimension, list[Any]]:
    """Compute the dimension from the first list of batches that does not raise the rank; return it and the list.

    rounds: increasing lists of batches, each of which starts with the previous one.
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
    if len(used) == 1:  # one batch cannot be halved, so use half of its outputs
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
    """Return the batches without repetitions, which do not raise the rank."""
    check_list("batches", batches)
    found = {tuple((path, _content(leaf)) for path, leaf in taken_apart(batch)): batch for batch in batches}
    if not found:
        raise ValueError("a rank needs at least one batch of inputs. Found none.")
    return list(found.values())


def _content(leaf: Any) -> Any:
    return (*leaf.shape, *leaf.flatten().tolist()) if isinstance(leaf, Tensor) else id(leaf)


def _spectrum(R: Tensor) -> tuple[Tensor, int, float]:
    """Return the singular values relative to the largest, the rank, and the ratio of singular values at the gap.

    The rank r maximizes s_r / s_(r+1) subject to s_(r+1) < ROUNDING. Values are clamped below at machine epsilon / 4,
    which also follows the last one.
    """
    if not bool(torch.isfinite(R).all()):
        raise ValueError("the derivatives of the outputs contain NaN or infinite values: the rank is undetermined.")
    s = torch.cat([torch.linalg.svdvals(R), R.new_zeros(max(0, R.shape[1] - len(R)))])
    s = s / s[0].clamp_min(torch.finfo(s.dtype).tiny)
    t = torch.cat([s, s.new_zeros(1)]).clamp_min(torch.finfo(s.dtype).eps / 4)
    ratio = torch.where(t[1:] < ROUNDING, t[:-1] / t[1:], 1.0)
    return s, int(ratio.argmax()) + 1 if bool(s.any()) else 0, float(ratio.max())


def _doubts(fibre: FibreDimension, jacobian: Jacobian, batches: Sequence[Any], R: Tensor) -> Iterator[str]:
    """Yield a sentence for each reason to doubt the dimension."""
    if fibre.gap < SMALLEST_GAP:
        yield f"the singular values have no gap: where they are small they fall by a factor of {fibre.gap:.1f} at most"
    if fibre.rank_of_half < fibre.rank:  # true whenever the rows of J are independent
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
    """Compute the Jacobian of all outputs in the parameters that require gradients, in float64, on replicas."""

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

        eps: the eps of every norm. noise: whether to add noise to the outputs of embeddings. above: rows to stack on J.
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
        """Yield the rows of J in order, in blocks (any, P), computed one by one if vmap fails."""
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
        """Return the single examples of a batch, if they have the same outputs alone; else the batch itself."""
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
        """Return whether finite differences of the outputs disagree with J, along the kernel or in a random direction.

        Central differences are accurate to about 1e-9.
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
        """Return whether outputs change under large changes of the entries with zero columns in J.

        zero: bool (parameters,), these entries. They are changed by about the typical size of parameters.
        """
        own = self._own()
        there = own + zero * typical(own) * self._gaussian(len(own))
        pairs = ((self._at(each, there), self._at(each, own)) for each in batches)
        return any(bool((y - x).abs().max() > ROUNDING * x.abs().max()) for y, x in pairs)

    def _own(self) -> Tensor:
        return torch.nn.utils.parameters_to_vector(self.params.values()).detach()

    def _gaussian(self, size: int) -> Tensor:
        return gaussian(self.no_rows, self._draw, size)

    def _at(self, batch: Any, numbers: Tensor) -> Tensor:
        """Return the outputs at the parameters given as one vector."""
        parts = zip(self.params.items(), numbers.split([w.numel() for w in self.params.values()]), strict=True)
        return self.outputs(batch, {name: part.view_as(w) for (name, w), part in parts})
