"""Verify symmetries on whole batches, by one backward pass each: an invariant loss has no slope along orbits.

If L(g w) = L(w) for every g of a group, then <grad L(w), xi(w)> = 0 for every generator xi of its action (Noether). The
control is what one parameter, or one side, contributes to that product: where it is 0, too, the batch shows nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from quotient_manifolds.replica import private_batch, replica
from quotient_manifolds.symmetries.checks import check_eval, check_loaded, check_weights
from quotient_manifolds.symmetries.double_precision import DoublePrecision
from quotient_manifolds.symmetries.freedom import gaussian, together, typical
from quotient_manifolds.symmetries.move import balance
from quotient_manifolds.symmetries.outputs import Evaluate, floating
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.propose import RUN_ERRORS
from quotient_manifolds.symmetries.symmetries import Symmetries
from quotient_manifolds.symmetries.tangents import Action, actions

ROUNDING = 64.0  # units of machine epsilon by which an unchanged loss may change, for each unit of its condition
ORTHOGONAL = 1e-7  # of the length of the summands: generators are differences, right to about 1e-10
UNSURE = 1e3  # times machine epsilon, where that is more
CONTROL = 3.0  # times what counts as orthogonal: where one side contributes less, a batch shows nothing
JITTER = 1e-2  # relative, of all parameters
NOTHING = 1e-12  # what is left of a parameter that was brought to 0
FINITE = 0.5  # the size of the element of the whole group that is tried, in the exponent

Verdict = Literal["holds", "fails", "inconclusive", "unused"]


@final
@dataclass(frozen=True)
class Verified:
    """Hold what the batches say of symmetries.

    failed: why a symmetry, by its name, is none, or is not known to be one. losses, tolerances: of every batch the loss
    of the model as it is, and how far rounding may take it elsewhere on the orbit. precision: machine epsilon of these
    losses.
    """

    failed: Mapping[str, str]
    losses: tuple[float, ...]
    tolerances: tuple[float, ...]
    precision: float


@final
class BatchLosses:
    """Evaluate evaluate(model, batch) on every batch as a function of float64 parameters, on replicas.

    In float64, or where the function does not take that in the model's own type, but at least float32; `precision`
    tells. What holds several numbers counts as their product with a fixed random vector.
    """

    def __init__(self, model: nn.Module, evaluate: Evaluate, batches: Sequence[Any]) -> None:
        self.model, self.evaluate, self.batches = model, evaluate, batches
        types = {w.dtype for w in model.parameters() if w.is_floating_point()}
        least = min(types, key=lambda dtype: dtype.itemsize, default=torch.float64)
        self._own = torch.promote_types(least, torch.float32)
        self._type = torch.float64

    @property
    def precision(self) -> float:
        """Return machine epsilon of the type that is computed in."""
        return torch.finfo(self._type).eps

    def params(self) -> Params:
        """Return copies of the model's parameters, in float64 where they are floating point numbers."""
        own = ((name, w.detach()) for name, w in self.model.named_parameters())
        return {name: w.to(torch.float64 if w.is_floating_point() else w.dtype, copy=True) for name, w in own}

    def value(self, params: Params, index: int) -> float:
        """Return the loss on batch `index`."""
        return float(self._at(params, index).detach())

    def gradient(self, params: Params, names: Collection[str], index: int) -> Params:
        """Return the gradient of the loss on batch `index` in the parameters of these names, in float64."""
        leaves = {name: params[name].detach().requires_grad_() for name in names}
        if not (value := self._at(params | leaves, index)).requires_grad:
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        grads = torch.autograd.grad(value, [*leaves.values()], materialize_grads=True)
        return {name: g.double() for name, g in zip(leaves, grads, strict=True)}

    def _at(self, params: Params, index: int) -> Tensor:
        if self._type == torch.float64:
            try:
                return self._run(params, index, torch.float64)
            except RUN_ERRORS:
                if index or self._own == torch.float64:  # where the first batch ran, it is this one
                    raise
        self._type = self._own
        return self._run(params, index, self._own)

    def _run(self, params: Params, index: int, dtype: torch.dtype) -> Tensor:
        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        copy = replica(self.model, {name: cast(w) for name, w in params.items()}, cast)
        batch = private_batch(self.batches[index], cast)
        precise = DoublePrecision() if dtype == torch.float64 else contextlib.nullcontext()
        with torch.inference_mode(False), torch.enable_grad(), _TrueGradients(), precise:
            outputs = floating(self.evaluate(copy, batch))
        if not outputs:
            raise ValueError("the model's output must hold floating point tensors: found none that could be compared.")
        if sum(output.numel() for output in outputs) == 1:
            return torch.cat([output.reshape(-1) for output in outputs])[0].double()
        generator = torch.Generator().manual_seed(0)
        weights = (torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in outputs)
        finite = (each.double().nan_to_num(0.0, 0.0, 0.0) for each in outputs)  # equal infinities say nothing
        return torch.stack([(w.to(x.device) * x).sum() for w, x in zip(weights, finite, strict=True)]).sum()


class _TrueGradients(TorchFunctionMode):
    """Give embeddings the derivative of their values, of which torch zeroes the row of the padding token."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.embedding, torch.embedding):
            args = args[:2]
            kwargs = {name: value for name, value in kwargs.items() if name in ("input", "weight", "indices")}
        return func(*args, **kwargs)


def verify_on_batches(
    model: nn.Module, evaluate: Evaluate, batches: Sequence[Any], symmetries: Symmetries, *, seed: int = 0
) -> Verified:
    """Verify every symmetry by itself and all of them together, on every batch, whole.

    Two points tell. Near the canonical representative, all parameters moved off by 1 % so that nothing is 0, 1 or equal
    by chance: a symmetry fails there if |<grad L, xi>| is more than rounding of its summands for a random generator xi,
    or if the loss depends on its parameters and yet one side of it alone changes nothing on any batch. (Where the loss
    does not depend on them at all, on any batch, there is nothing to see, and nothing to lose.) And at the parameters
    themselves: there the loss on every batch must stay the same, to 64 units in the last place of its summands, under
    one random element of the whole group; symmetries fail of which an element alone changes it.

    One forward and backward pass and two forward passes in float64 on every batch. Raises ValueError in train mode,
    for weights that are no finite floating point numbers, what the function raises, and if the loss changes under all
    symmetries together though under none alone.
    """
    check_eval(model)
    check_loaded(model)
    check_weights(dict(model.named_parameters()), symmetries.moved)
    losses = BatchLosses(model, evaluate, batches)
    claimed = actions(symmetries)
    names = sorted({name for action in claimed for name in action.names})
    verdicts: dict[str, set[Verdict]] = {action.name: set() for action in claimed}
    failed, tolerances = dict[str, str](), list[float]()
    # Of ill-conditioned factors, or columns of different sizes, 1 % is anything but small for what they compute.
    params = jittered(balance(losses.params(), symmetries), seed)
    for index in range(len(batches)):
        grads = losses.gradient(params, names, index)
        rounding = ROUNDING * losses.precision * max(1.0, _condition(grads, params))
        for action in claimed:
            if action.name not in failed:
                verdict = _verdict(action, params, grads, seed + index, losses.precision, rounding)
                if verdict == "fails" and _is_cut_off(losses, action, params, seed, index):
                    verdict = "holds"
                verdicts[action.name].add(verdict)
                if verdict == "fails":
                    failed[action.name] = f"the loss on batch {index} changes along its orbit"
        tolerances.append(rounding)
        del grads
    del params
    unseen = (name for name, said in verdicts.items() if "inconclusive" in said and not said & {"holds", "fails"})
    failed |= dict.fromkeys(unseen, "moving one side of it alone does not change the loss on any batch")
    with torch.no_grad():
        params = losses.params()
        values = tuple(losses.value(params, index) for index in range(len(batches)))
        tolerances = [
            each + ROUNDING * losses.precision * abs(value) for each, value in zip(tolerances, values, strict=True)
        ]
        known = Verified(failed, values, tuple(tolerances), losses.precision)
        return _together(losses, symmetries, known, seed)


def changed_by(
    model: nn.Module, evaluate: Evaluate, batches: Sequence[Any], move: Callable[[Params], Params], known: Verified
) -> str:
    """Say on which batch the loss is another one at the parameters move(w), in float64; "" if on none."""
    with torch.no_grad():
        return _changed(BatchLosses(model, evaluate, batches), move, known)


def _verdict(action: Action, params: Params, grads: Params, seed: int, precision: float, rounding: float) -> Verdict:
    """Compare <grad L, xi> with what one parameter, or one side, contributes to it; rounding: what the loss has."""
    orthogonal = min(max(ORTHOGONAL, UNSURE * precision), 0.1)
    slope, parts, size = _along(action.tangent(params, seed), grads)
    if slope <= orthogonal * size and parts > CONTROL * max(orthogonal * size, rounding):
        return "holds"
    control, _, other = _along(action.tangent(params, seed, control=True), grads)
    if max(size, other) <= rounding / ROUNDING:
        return "unused"  # a unit in the last place of the loss: it does not depend on these parameters
    rounding = max(orthogonal * max(size, other), rounding)
    if not slope <= rounding:  # NaN is no rounding
        return "fails"
    return "holds" if control > CONTROL * rounding else "inconclusive"


def _is_cut_off(losses: BatchLosses, action: Action, params: Params, seed: int, index: int) -> bool:
    """Return whether a random element leaves the loss alone, so that gradients were cut off (detach, no_grad) instead.

    Moving one side of it alone must change the loss, by more than rounding.
    """
    with torch.no_grad():
        values, noise = [], 0.0
        for control in (False, True):
            moved = {**params, **{name: params[name].clone() for name in action.names}}
            action.act(moved, torch.Generator().manual_seed(seed), FINITE, control)
            values.append(losses.value(moved, index))
            noise = max(noise, 0.0 if control else _noise(losses, moved, index))
        before = losses.value(params, index)
        rounding = ROUNDING * max(noise, _noise(losses, params, index), losses.precision * abs(before))
    return abs(values[0] - before) <= rounding and abs(values[1] - before) > CONTROL * rounding


def _along(xi: Params, grads: Params) -> tuple[float, float, float]:
    """Return |<grad, xi>|, the largest contribution of a parameter to it, and the length of all its summands."""
    products = [grads[name] * direction for name, direction in xi.items()]
    sums = torch.stack([each.sum() for each in products])
    size = torch.stack([torch.linalg.vector_norm(each) for each in products]).norm()
    return abs(float(sums.sum())), float(sums.abs().max()), float(size)


def _condition(grads: Params, params: Params) -> float:
    """Return sum_i |w_i dL/dw_i|: what a relative change of the weights can change the loss by."""
    return sum(float((g * params[name].detach()).abs_().sum()) for name, g in grads.items())


def jittered(params: Params, seed: int) -> Params:
    """Move all parameters off, in place, by Gaussians of 1 % of their typical size, which is 1 where they are 0."""
    generator = torch.Generator().manual_seed(seed)
    for w in params.values():
        if w.is_floating_point():
            size = typical(w)
            w.add_(gaussian(w, generator), alpha=JITTER * (size if size > NOTHING else 1.0))
    return params


def _together(losses: BatchLosses, symmetries: Symmetries, known: Verified, seed: int) -> Verified:
    """Try one random element of all groups together; if the loss changes, those fail whose own element changes it."""
    left = symmetries.without(known.failed)

    def said(chosen: Iterable[Action]) -> str:
        def act(params: Params) -> Params:
            generator = torch.Generator().manual_seed(seed)
            for action in chosen:
                action.act(params, generator, FINITE, False)
            return params

        return _changed(losses, act, known)

    joined = replace(left, freedoms=tuple(together(left.freedoms)))
    if not left.every or not (all_ := said(actions(joined))):
        return known
    alone = {action.name: said([action]) for action in actions(left)}
    false = {
        name: f"acting with one of its elements changes the loss: {found}" for name, found in alone.items() if found
    }
    if not false:
        raise ValueError(
            f"The loss must not change under all symmetries together, each of which leaves it alone. Found {all_}; "
            f"pass symmetries= without some of them"
        )
    return _together(losses, symmetries, replace(known, failed={**known.failed, **false}), seed)


def _changed(losses: BatchLosses, move: Callable[[Params], Params], known: Verified) -> str:
    moved = move(losses.params())
    for index, (before, tolerance) in enumerate(zip(known.losses, known.tolerances, strict=True)):
        after = losses.value(moved, index)
        if abs(after - before) <= tolerance:
            continue
        # Far from the canonical representative the loss is worse conditioned than near it, and so is the way there.
        noise = max(_noise(losses, moved, index), *(_noise(losses, losses.params(), index, on) for on in (_stay, move)))
        rounding = tolerance + ROUNDING * noise
        if not abs(after - before) <= rounding:  # NaN is no rounding
            return f"{after!r} in place of {before!r} on batch {index}, where rounding explains {rounding:.1e}"
    return ""


def _stay(params: Params) -> Params:
    return params


def _noise(losses: BatchLosses, params: Params, index: int, move: Callable[[Params], Params] = _stay) -> float:
    """Return how far the loss after a move goes if all parameters are rounded up or down at random before it."""
    generator = torch.Generator().manual_seed(0)

    def rounded(w: Tensor) -> Tensor:
        return w * (1 + losses.precision * gaussian(w, generator).sign()) if w.is_floating_point() else w.clone()

    near = [move({name: rounded(w) for name, w in params.items()}) for _ in range(2)]
    value = losses.value(move(params), index)
    return max(abs(losses.value(each, index) - value) for each in near)
