"""Are the symmetries true? Move along the orbit and compare outputs; move one side only and see them change.

Everything runs in float64 on copies of the model's structure; the model itself is never touched. Models that cast to
float32 inside (softmax, norms) round there whatever their weights' dtype, so each model's rounding noise is measured,
not assumed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from quotient_manifolds.replica import private_batch, replica, unchanged
from quotient_manifolds.symmetries.checks import (
    check_loaded,
    check_model,
    check_symmetries,
    check_weights,
    generator_of,
)
from quotient_manifolds.symmetries.find import find_symmetries
from quotient_manifolds.symmetries.move import act, group_element, random_shift
from quotient_manifolds.symmetries.pair import Params, SymmetricPair
from quotient_manifolds.symmetries.proof import PairProof, Proof
from quotient_manifolds.symmetries.symmetries import Symmetries
from quotient_manifolds.symmetries.translations import Translation

Evaluate = Callable[[nn.Module, Any], Any]
"""(model, inputs) -> whatever holds the floating point tensors to compare: an output, a loss."""

EXAMPLES, CONDITION = 2, 10.0  # of a batch on which a measure proves its symmetries


def prove_symmetries(
    model: nn.Module,
    inputs: Any,
    symmetries: Symmetries | None = None,
    *,
    seed: int = 0,
    trials: int = 1,
    conditions: tuple[float, ...] = (10.0, 1e3),
    evaluate: Evaluate | None = None,
    together: bool = False,
    double: bool = True,
) -> Proof:
    """Try every symmetry on the model: move along it and compare outputs, then move one side only and see them change.

    Output(G A^-1, H A^T) = Output(G, H) for random A of the given condition numbers, pair by pair, in float64. "Proved"
    is a pair that leaves the output alone to rounding, while its control does not. Translations likewise: key biases
    replaced by noise, value biases shifted with the output bias making up for it.

    inputs: a dict for model(**inputs), a tuple for model(*inputs), or a tensor for model(inputs), or anything that
    evaluate(model, inputs) takes, where given. Two short sequences suffice. together: move everything at once first,
    which takes a handful of evaluations, and pair by pair only if that changes the output; all then share one verdict.
    double: evaluate in float64; else in the model's own precision, for functions that insist on it.

    ValueError in train mode, for weights that are no finite floating point numbers, and for outputs that are NaN, not
    repeatable or hold no floating point tensor.
    """
    check_model(model)
    symmetries = find_symmetries(model) if symmetries is None else symmetries
    check_symmetries(symmetries)
    if trials < 1 or not conditions or min(conditions) < 1:
        raise ValueError(f"a proof needs trials >= 1 and conditions >= 1. Found {trials} and {conditions}.")
    if not symmetries.pairs and not symmetries.translations:
        return Proof((), 0.0, seed)
    check_weights(dict(model.named_parameters()), symmetries.moved)
    check_loaded(model)
    generator = generator_of(seed)
    claims = [
        *(_Claim(pair.name, pair.group, pair.names, partial(_move_pair, pair)) for pair in symmetries.pairs),
        *(_Claim(shift.name, shift.group, shift.names, partial(_shift, shift)) for shift in symmetries.translations),
    ]
    with torch.no_grad():
        run = _Run(model, inputs, evaluate, double)
        noise = _rounding_noise(run, symmetries, generator)
        proofs: list[PairProof] = []
        if together:
            joint = _tried(_together(claims), run, noise, generator, trials, conditions[:1])
            if joint.holds:
                proofs = [replace(joint, pair=claim.name, group=claim.group) for claim in claims]
        if not proofs:
            proofs = [_tried(claim, run, noise, generator, trials, conditions) for claim in claims]
    count = len(symmetries.pairs)
    return Proof(tuple(proofs[:count]), noise, seed, tuple(proofs[count:]))


def prove_on_batch(model: nn.Module, evaluate: Evaluate, batch: Any, symmetries: Symmetries, *, seed: int = 0) -> Proof:
    """Prove all symmetries at once on what a measure looks at, evaluate(model, batch), by about ten evaluations.

    In float64, unless the function insists on its own precision; on the first two examples, unless the batch cannot be
    cut. Raises what the function raises where nothing works.
    """
    prove = partial(
        prove_symmetries, symmetries=symmetries, seed=seed, conditions=(CONDITION,), evaluate=evaluate, together=True
    )
    inputs = [*_first_examples(batch), batch]
    for some, double in [(some, double) for double in (True, False) for some in inputs][:-1]:
        # a shape or a precision that the function does not take
        with contextlib.suppress(RuntimeError, TypeError, IndexError, KeyError, ValueError):
            return prove(model, some, double=double)
    return prove(model, batch, double=False)


def _first_examples(batch: Any) -> list[Any]:
    """Return [the first examples of the batch], if its tensors all have one leading size that is larger; else []."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors}
    if len(sizes) != 1 or max(sizes) <= EXAMPLES:
        return []
    return [tree_map_only(torch.Tensor, lambda tensor: tensor[:EXAMPLES], batch)]


def output_change(model: nn.Module, inputs: Any, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Compute the largest relative change of the output from parameters `before` to `after`, in float64.

    Each holds some or all of the model's parameters; the others are the model's own. `inputs` as for
    `prove_symmetries`.
    """
    with torch.no_grad():
        run = _Run(model, inputs, None, True)
        run.params |= {name: value.detach().double() for name, value in before.items()}
        run.outputs = run.at({})
        return run.change({name: value.detach().double() for name, value in after.items()})


# ---- what is tried


@dataclass(frozen=True)
class _Claim:
    """Claim that a move keeps the output: its name and group, the parameters it touches, and the move.

    move: (params to write into, condition, generator, control) moves along the orbit, or as the control one side only.
    """

    name: str
    group: str
    names: tuple[str, ...]
    move: Callable[[Params, float, torch.Generator, bool], None]


def _together(claims: Iterable[_Claim]) -> _Claim:
    claims = list(claims)

    def all_at_once(params: Params, condition: float, generator: torch.Generator, control: bool) -> None:
        for claim in claims:
            claim.move(params, condition, generator, control)

    return _Claim("all", "", tuple(dict.fromkeys(name for claim in claims for name in claim.names)), all_at_once)


def _move_pair(
    pair: SymmetricPair, params: Params, condition: float, generator: torch.Generator, control: bool
) -> None:
    x = pair.read(params)
    moved = act(pair, group_element(pair, condition, generator), x)
    pair.write(params, torch.cat([moved[..., : pair.n, :], x[..., pair.n :, :]], dim=-2) if control else moved)


def _shift(
    translation: Translation, params: Params, condition: float, generator: torch.Generator, control: bool
) -> None:
    c = random_shift(translation, params, generator) * condition**0.5
    if control and translation.output is None:  # whatever else the keys are moved by is seen
        keys = translation.factor.read(params)
        noise = torch.randn(keys.shape, generator=generator, dtype=torch.float64).to(keys.device)
        translation.factor.write(params, keys + noise * keys.std())
    else:
        translation.shift(params, c, compensate=not control)


def _tried(
    claim: _Claim,
    run: _Run,
    noise: float,
    generator: torch.Generator,
    trials: int,
    conditions: tuple[float, ...],
) -> PairProof:
    def change(condition: float, control: bool = False) -> float:
        params = {name: run.params[name].clone() for name in claim.names}
        claim.move(params, condition, generator, control)
        return run.change(params)

    changes = tuple((float(condition), max(change(condition) for _ in range(trials))) for condition in conditions)
    return PairProof.judged(claim.name, claim.group, changes, change(conditions[0], control=True), noise)


# ---- how outputs are compared


def _answer(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


class _Run:
    """Evaluate the model as a function of float64 parameters on one input, and compare with its own parameters."""

    def __init__(self, model: nn.Module, inputs: Any, evaluate: Evaluate | None, double: bool) -> None:
        training = [name or "the model" for name, module in model.named_modules() if module.training]
        if training:
            raise ValueError(f"a proof needs eval mode. Found {training[0]!r} in train mode: call model.eval() first.")
        self._model, self._evaluate = model, evaluate or _answer
        self._cast = _double if double else unchanged
        self._inputs = inputs
        self.params: Params = {name: self._cast(value.detach()) for name, value in model.named_parameters()}
        moved = next((value.dtype for value in self.params.values() if value.is_floating_point()), torch.float64)
        self.precision = torch.float64 if double else moved
        self.outputs = self.at({})
        if not self.outputs:
            raise ValueError("the model's output holds no floating point tensor that could be compared.")
        if any(bool(torch.isnan(output).any()) for output in self.outputs):
            raise ValueError("the model's output on these inputs contains NaN: nothing can be compared.")
        if self.change({}) > 1e-6:
            raise ValueError("two evaluations on the same inputs differ: the model is random, nothing can be compared.")

    def at(self, moved: Params) -> list[Tensor]:
        """Return the floating point outputs with some parameters replaced."""
        params = {name: value.clone() for name, value in (self.params | moved).items()}
        model = replica(self._model, params, self._cast)  # fresh, for a forward pass may write to it
        with torch.enable_grad():  # a loss may differentiate inside itself; the parameters ask for no graph
            outputs = _floating(self._evaluate(model, private_batch(self._inputs, self._cast)))
        return [output.detach() for output in outputs]

    def change(self, moved: Params) -> float:
        """Return the largest change of an output entry, relative to the largest finite entry of its tensor."""
        return max(
            (_relative(new - old, old, same=new == old) for new, old in zip(self.at(moved), self.outputs, strict=True)),
            default=0.0,
        )


def _rounding_noise(run: _Run, symmetries: Symmetries, generator: torch.Generator, step: float = 1e-6) -> float:
    """Estimate the output's rounding noise, from third differences along a random direction of all pairs' parameters.

    A smooth function's third difference is O(step^3), far below rounding; what remains is noise, of variance
    20 sigma^2. The step exceeds float32's spacing, so casts to float32 inside the model show. At least that of
    the parameters' precision. A few numbers are too small a sample: then the largest of three directions counts.
    """
    few = sum(output.numel() for output in run.outputs) < 30
    sizes = [_third_difference(run, symmetries.moved, generator, step) for _ in range(3 if few else 1)]
    return max(max(sizes) / 20**0.5, torch.finfo(run.precision).eps)


def _third_difference(run: _Run, names: Iterable[str], generator: torch.Generator, step: float) -> float:
    direction = {name: _noise_like(run.params[name], generator) for name in names}
    third = list(run.outputs)
    for count, weight in ((1, -3.0), (2, 3.0), (3, -1.0)):
        at = run.at({name: run.params[name] * (1 + count * step * noise) for name, noise in direction.items()})
        third = [total + weight * value for total, value in zip(third, at, strict=True)]
    sizes = [_relative(value, old, same=~torch.isfinite(old)) for value, old in zip(third, run.outputs, strict=True)]
    return max(sizes)


def _noise_like(value: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)


def _relative(difference: Tensor, reference: Tensor, same: Tensor) -> float:
    """Return max |difference| / max |reference|, entries marked `same` (such as equal infinities) left out."""
    finite = reference[torch.isfinite(reference)]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    difference = difference.masked_fill(same, 0.0).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    change = float(difference.max()) if difference.numel() else 0.0
    return change / size if size > 0 else change


def _double(value: Tensor) -> Tensor:
    """Return a floating point tensor in float64, any other as it is."""
    return value.double() if value.is_floating_point() else value


def _floating(output: Any) -> list[Tensor]:
    """Return the floating point tensors of a tensor, tuple, list or mapping (as ModelOutput is); no caches."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        return [tensor for item in output.values() for tensor in _floating(item)]
    if isinstance(output, (list, tuple)):
        return [tensor for item in output for tensor in _floating(item)]
    return []
