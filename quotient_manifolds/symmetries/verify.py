"""Verify symmetries on whole batches, by one backward pass each: an invariant loss has no slope along orbits.

If L(g w) = L(w) for every g of a group, then the charges <grad L(w), xi(w)> of all its generators xi vanish (Noether).
A charge is a sum over entries of parameters, and is compared with the sum of its absolute summands. If these summands
are rounding noise, too, the batch is inconclusive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from quotient_manifolds.linalg import LinAlgError
from quotient_manifolds.messages import text_table
from quotient_manifolds.symmetries import groups
from quotient_manifolds.symmetries.canonical import canonical
from quotient_manifolds.symmetries.checks import (
    check_eval,
    check_list,
    check_loaded,
    check_model,
    check_weights,
    generator_of,
)
from quotient_manifolds.symmetries.discovery import find_symmetries
from quotient_manifolds.symmetries.outputs import Evaluate, ModelOutputs, rounded
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.reparameterization import gaussian, typical
from quotient_manifolds.symmetries.symmetries import Symmetries, check_symmetries

ROUNDING = 64.0  # machine epsilons by which an invariant loss may change, per unit of its condition number
VANISHING = 1e-9  # a charge counts as 0 up to this part of the sum of its absolute summands
UNSURE = 1e3  # this many machine epsilons replace VANISHING if they are larger
CONTROL = 3.0  # summands below this multiple of rounding leave a batch inconclusive
JITTER = 1e-2  # the size of a random change of all parameters, relative to their typical size
NOTHING = 1e-12  # a parameter of at most this typical size was set to 0, up to rounding
FINITE = 0.5  # the size of the tried element of the whole group, in the exponent

Begin = Callable[[Symmetries, Params], Params]
"""(symmetries, parameters) -> parameters of the same function; it may return the given tensors."""

Verdict = Literal["unused", "inconclusive", "holds", "fails"]
VERDICTS: tuple[Verdict, ...] = ("unused", "inconclusive", "holds", "fails")  # over batches, the last of these wins


@final
@dataclass(frozen=True)
class SymmetryCheck:
    """Record the result of the check of one symmetry over all batches.

    slope: the largest charge of a generator over all batches, relative to the sum of its absolute summands. control:
    the largest such sum, relative to rounding noise; a batch on which it is at most `CONTROL` is inconclusive. For a
    sharded model, slope is the change of the loss under a random group element, and control its change under a
    perturbation of the same size outside the group. verdict: "unused" if the function does not depend on the
    parameters at all.
    """

    name: str
    group: str
    slope: float = 0.0
    control: float = 0.0
    verdict: Verdict = "unused"
    reason: str = ""

    def on(self, slope: float, control: float, verdict: Verdict, reason: str) -> SymmetryCheck:
        """Return this check merged with the result of another batch."""
        worse = VERDICTS.index(verdict) > VERDICTS.index(self.verdict)
        verdict, reason = (verdict, reason) if worse else (self.verdict, self.reason)
        return replace(
            self, slope=max(slope, self.slope), control=max(control, self.control), verdict=verdict, reason=reason
        )


@final
@dataclass(frozen=True)
class Verification:
    """Store the checks of all symmetries, in the order of `Symmetries.every`.

    losses: the loss of the unchanged model on every batch. tolerances: the change of each loss that rounding can
    explain elsewhere on the orbit. precision: machine epsilon of these losses.
    """

    checks: tuple[SymmetryCheck, ...]
    seed: int = 0
    losses: tuple[float, ...] = ()
    tolerances: tuple[float, ...] = ()
    precision: float = torch.finfo(torch.float64).eps

    @property
    def all_hold(self) -> bool:
        """Return whether at least one symmetry holds and every other holds or is unused."""
        return {check.verdict for check in self.checks} in ({"holds"}, {"holds", "unused"})

    @property
    def failed(self) -> dict[str, str]:
        """Return the reasons why symmetries fail or are inconclusive, by name."""
        return {check.name: check.reason for check in self.checks if check.verdict in ("fails", "inconclusive")}

    def holding(self, symmetries: Symmetries) -> Symmetries:
        """Return `symmetries` without those that fail or are inconclusive; unused ones are kept."""
        return symmetries.without(self.failed)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        checks = [asdict(check) for check in self.checks]
        return {"checks": checks, "precision": self.precision, "seed": self.seed, "all_hold": self.all_hold}

    def __str__(self) -> str:
        if not self.checks:
            return "no symmetries to verify"
        rows = [
            (each.name, each.group, f"{each.slope:.1e}", f"{each.control:.1e}", ": ".join(filter(None, said)))
            for each in self.checks
            for said in [(each.verdict, each.reason)]
        ]
        return text_table(("symmetry", "group", "slope", "control", "verdict"), rows)


def verify_symmetries(
    model: nn.Module,
    inputs: Any,
    symmetries: Symmetries | None = None,
    *,
    others: Sequence[Any] = (),
    evaluate: Evaluate | None = None,
    seed: int = 0,
) -> Verification:
    """Verify every symmetry by itself and all of them together, on the inputs and the others.

    An invariant function has no slope along orbits: the charges of all generators, their inner products with its
    gradient, vanish (Noether's theorem), although their summands do not. Charges are computed near the canonical
    representative, at parameters perturbed by 1 %, so that no number is 0, 1 or equal to another by chance. One random
    element of the whole group must also leave the function unchanged, which refutes actions that are correct only to
    first order. A symmetry "holds", "fails", is "unused" if the function does not depend on its parameters at all, or
    is "inconclusive" if all summands are rounding noise.

    inputs: a dict for model(**inputs), a tuple for model(*inputs), a tensor for model(inputs), or, if evaluate is
    given, any argument of evaluate(model, inputs). Two short sequences suffice. others: a list of further inputs.
    symmetries: by default the symmetries found in a run on the inputs. Computed on copies of the model in float64, or
    in the model's own precision if the function does not run in float64.

    ValueError in train mode, for weights that are not finite floating point numbers, and for outputs that are NaN, not
    repeatable or contain no floating point tensor.
    """
    check_model(model)
    check_list("others", others)
    symmetries = find_symmetries(model, inputs, evaluate=evaluate) if symmetries is None else symmetries
    check_symmetries(symmetries)
    generator_of(seed)
    if not symmetries.moved:
        return Verification((), seed)
    check_loaded(model)
    check_weights(dict(model.named_parameters()), symmetries.moved)
    losses = ModelOutputs(model, (inputs, *others), evaluate)
    for index in range(1 + len(others)):
        losses.own(index)
    found, params = _verified(losses, symmetries, seed), losses.params()
    zero = {each.name for each in symmetries.pairs if not (each.G.read(params).any() and each.H.read(params).any())}
    unseen: dict[str, Any] = {"verdict": "inconclusive", "reason": "one side is 0: moving it alone changes nothing"}
    checks = (replace(c, **unseen) if c.name in zero and c.verdict == "holds" else c for c in found.checks)
    return replace(found, checks=tuple(checks))


def verify_on_batches(
    model: nn.Module,
    evaluate: Evaluate,
    batches: Sequence[Any],
    symmetries: Symmetries,
    *,
    seed: int = 0,
    begin: Begin | None = None,
    first: int = 0,
) -> Verification:
    """Verify the symmetries of a loss that is known to be repeatable, as `verify_symmetries` does, for a measure.

    Costs a forward and backward pass and two forward passes in float64 on every batch, more if a change may be
    rounding. A pair may hold even if one of its sides is 0. Passes on the errors of `evaluate`.

    begin: (symmetries, params) -> parameters of the same function, at which a measure starts. The random element of
    the whole group then acts on these; ValueError if the loss differs there. first: the number of the first batch.
    """
    check_eval(model)
    check_loaded(model)
    check_weights(dict(model.named_parameters()), symmetries.moved)
    return _verified(ModelOutputs(model, batches, evaluate, first), symmetries, seed, begin)


def _verified(losses: ModelOutputs, symmetries: Symmetries, seed: int, begin: Begin | None = None) -> Verification:
    names = sorted(symmetries.moved)
    checks = {each.name: SymmetryCheck(each.name, each.group) for each in symmetries.every}
    indices, there = range(len(losses.batches)), list[float]()
    with torch.no_grad():
        values = tuple(losses.own_value(index) for index in indices)
        params = losses.params()
        if begin is not None:
            with contextlib.suppress(ValueError, LinAlgError):  # a false symmetry may have no canonical representative
                params = begin(symmetries, params)
                moved = _acted(symmetries.groups, params, seed)
                there = [losses.value(moved, index) for index in indices]
                del moved
        if not there:
            # For ill-conditioned factors, or columns of different sizes, a change by 1 % is large for the function.
            with contextlib.suppress(ValueError, LinAlgError):
                params = canonical(symmetries.groups, params).params
        params = jittered({name: w.clone() for name, w in params.items()}, seed)
    tolerances = list[float]()
    for index, value in zip(indices, values, strict=True):
        grads = losses.gradient(params, names, index)
        rounding = ROUNDING * losses.precision * max(1.0, _condition(grads, params))
        for each in symmetries.every:
            if checks[each.name].verdict != "fails":
                slope, control, verdict = _judged(each.symmetry, params, grads, losses.precision, rounding)
                if verdict == "fails" and _is_cut_off(losses, each.symmetry, params, seed, index):
                    verdict = "holds"
                reason = _REASONS[verdict].format(losses.first + index)
                checks[each.name] = checks[each.name].on(slope, control, verdict, reason)
        tolerances.append(_told(rounding + ROUNDING * losses.precision * abs(value), losses.precision, value))
        del grads
    del params
    known = Verification(tuple(checks.values()), seed, values, tuple(tolerances), losses.precision)
    changes = [abs(after - before) for after, before in zip(there, values, strict=False)]
    if changes and not known.failed and all(each <= most for each, most in zip(changes, tolerances, strict=True)):
        return known
    with torch.no_grad():
        return _together(losses, symmetries, known, begin)


_REASONS: dict[Verdict, str] = {
    "holds": "",
    "unused": "",
    "fails": "the output on batch {} changes along its orbit",
    "inconclusive": "what its parameters contribute is lost in rounding on all batches",
}


def _acted(chosen: Iterable[groups.Symmetry], params: Params, seed: int) -> Params:
    """Act on the parameters with a random element of each group, one after another."""
    generator = torch.Generator().manual_seed(seed)
    for each in chosen:
        params = each.moved(params, generator, FINITE)
    return params


def changed_by(
    model: nn.Module,
    evaluate: Evaluate,
    batches: Sequence[Any],
    move: Callable[[Params], Params],
    known: Verification,
    *,
    first: int = 0,
) -> str:
    """Return a description of the first batch whose loss differs at the parameters move(w), in float64; "" if none.

    first: the number of the first batch.
    """
    with torch.no_grad():
        return _changed(ModelOutputs(model, batches, evaluate, first), move, known)


def _judged(
    symmetry: groups.Symmetry, params: Params, grads: Params, precision: float, rounding: float
) -> tuple[float, float, Verdict]:
    """Compare charges with the sums of their absolute summands. rounding: the rounding error of the loss.

    Return the largest ratio of a charge to its sum, the largest sum relative to rounding, and the verdict.
    """
    vanishing = min(max(VANISHING, UNSURE * precision), 0.1)
    charge, size = symmetry.charge(params, grads)
    most = float(size.max()) if size.numel() else 0.0
    if most <= rounding / ROUNDING:
        return 0.0, 0.0, "unused"  # the summands are below the last digit of the loss, which ignores these parameters
    slope, control = float((charge.abs() / size.clamp(min=rounding / vanishing)).max()), most / rounding
    if not slope <= vanishing:  # so that NaN fails
        return slope, control, "fails"
    return slope, control, "holds" if control > CONTROL else "inconclusive"


def _is_cut_off(losses: ModelOutputs, symmetry: groups.Symmetry, params: Params, seed: int, index: int) -> bool:
    """Return whether a random group element leaves the loss unchanged, so that the slope is due to detach or no_grad.

    A perturbation of the same size outside the group must change the loss by more than rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        moved = symmetry.moved(params, generator, FINITE)
        value, control = (losses.value(each, index) for each in (moved, astray(symmetry, params, moved, generator)))
        before, noise = losses.value(params, index), max(_noise(losses, each, index) for each in (params, moved))
        rounding = ROUNDING * max(noise, losses.precision * abs(before))
    return abs(value - before) <= rounding and abs(control - before) > CONTROL * rounding


def astray(
    symmetry: groups.Symmetry, before: Mapping[str, Tensor], after: Mapping[str, Tensor], generator: torch.Generator
) -> Params:
    """Return parameters changed by as much as a group element does, but with random signs, so outside the group."""

    def signed(w: Tensor, moved: Tensor) -> Tensor:
        return w + (moved - w) * gaussian(w, generator).sign().to(w.dtype)

    return {**before, **{name: signed(before[name], after[name]) for name in symmetry.names}}


def _condition(grads: Params, params: Params) -> float:
    """Return sum_i |w_i dL/dw_i|, a first-order bound on the change of the loss per relative change of the weights."""
    return sum(float((g * params[name].detach()).abs_().sum()) for name, g in grads.items())


def jittered(params: Params, seed: int) -> Params:
    """Add Gaussian noise to all parameters in place, 1 % of their typical size (of 1 for parameters that are 0)."""
    generator = torch.Generator().manual_seed(seed)
    for w in params.values():
        if w.is_floating_point():
            size = typical(w)
            w.add_(gaussian(w, generator), alpha=JITTER * (size if size > NOTHING else 1.0))
    return params


def _together(losses: ModelOutputs, symmetries: Symmetries, known: Verification, begin: Begin | None) -> Verification:
    """Act with random elements of all groups; if the output changes, mark those as failing that change it alone."""
    left = known.holding(symmetries)
    if not left.every:
        return known

    def changed(chosen: Iterable[groups.Symmetry]) -> str:
        return _changed(losses, lambda params: _acted(chosen, params, known.seed), known)

    if all_ := changed(left.groups):
        alone = {each.name: changed([each.symmetry]) for each in left.every}
        false = {
            name: f"acting with one of its elements changes the output: {found}"
            for name, found in alone.items()
            if found
        }
        if not false:
            raise ValueError(
                f"The output must not change under all symmetries together, each of which leaves it alone. Found "
                f"{all_}; pass symmetries= without some of them"
            )
        checks = (replace(c, verdict="fails", reason=false[c.name]) if c.name in false else c for c in known.checks)
        return _together(losses, symmetries, replace(known, checks=tuple(checks)), begin)
    if begin is not None and (found := _changed(losses, partial(begin, left), known)):
        raise ValueError(canonical_changes(found))
    return known


def canonical_changes(found: str) -> str:
    """Return the error message for a loss that differs at the point at which a measure starts."""
    return (
        f"The loss must be the same at the canonical point of the orbit. Found {found}; use Adaptive(), "
        "or pass symmetries= without these"
    )


def _changed(losses: ModelOutputs, move: Callable[[Params], Params], known: Verification) -> str:
    moved = move(losses.params())
    for index, (before, tolerance) in enumerate(zip(known.losses, known.tolerances, strict=True)):
        after = losses.value(moved, index)
        if abs(after - before) <= tolerance:
            continue
        # Far from the canonical representative both the loss and the group action are worse conditioned than near it.
        noise = max(_noise(losses, moved, index), *(_noise(losses, losses.params(), index, on) for on in (_stay, move)))
        rounding = _told(tolerance + ROUNDING * noise, known.precision, before)
        if not abs(after - before) <= rounding:  # so that NaN counts as a change
            where = f"on batch {losses.first + index}, where rounding explains {rounding:.1e}"
            return f"{after!r} in place of {before!r} {where}"
    return ""


def _told(rounding: float, precision: float, value: float) -> float:
    """Return the change of a loss that rounding may explain, at most the loss of three quarters of its digits."""
    return min(rounding, precision**0.25 * max(1.0, abs(value)))


def _stay(params: Params) -> Params:
    return params


def _noise(losses: ModelOutputs, params: Params, index: int, move: Callable[[Params], Params] = _stay) -> float:
    """Return the change of the loss after a move if all parameters are rounded up or down at random before it."""
    generator = torch.Generator().manual_seed(0)

    near = [move(rounded(params, losses.precision, generator)) for _ in range(2)]
    value = losses.value(move(params), index)
    return max(abs(losses.value(each, index) - value) for each in near)
