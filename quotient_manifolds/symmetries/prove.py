"""Prove symmetries: move along the orbit and compare outputs; move one side only and see them change.

Everything runs in float64 on copies of the model's structure; the model itself is never touched. Models that cast to
float32 inside (softmax, norms) round there whatever their weights' dtype, so each model's rounding noise is measured,
not assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries.checks import (
    check_eval,
    check_loaded,
    check_model,
    check_symmetries,
    check_weights,
    generator_of,
)
from quotient_manifolds.symmetries.freedom import Freedom
from quotient_manifolds.symmetries.move import act, group_element, random_shift
from quotient_manifolds.symmetries.outputs import Evaluate, ModelOutputs
from quotient_manifolds.symmetries.pair import Params, SymmetricPair
from quotient_manifolds.symmetries.proof import PairProof, Proof
from quotient_manifolds.symmetries.propose import propose_symmetries
from quotient_manifolds.symmetries.sharded_outputs import ShardedOutputs
from quotient_manifolds.symmetries.symmetries import Symmetries
from quotient_manifolds.symmetries.translations import Translation

CONDITION = 10.0  # of the group elements by which the symmetries of a sharded model are proved


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
    replaced by noise, value biases shifted with the output bias making up for it. Freedoms are moved by random elements
    of log-scale log(condition) / 2, and as a control without what makes up for it.

    inputs: a dict for model(**inputs), a tuple for model(*inputs), or a tensor for model(inputs), or anything that
    evaluate(model, inputs) takes, where given. Two short sequences suffice. together: move everything at once first,
    which takes a handful of evaluations, and pair by pair only if that changes the output; all then share one verdict.
    double: evaluate in float64; else in the model's own precision, for functions that insist on it.

    ValueError in train mode, for weights that are no finite floating point numbers, and for outputs that are NaN, not
    repeatable or hold no floating point tensor.
    """
    check_model(model)
    symmetries = propose_symmetries(model, inputs, evaluate=evaluate) if symmetries is None else symmetries
    check_symmetries(symmetries)
    if trials < 1 or not conditions or min(conditions) < 1:
        raise ValueError(f"a proof needs trials >= 1 and conditions >= 1. Found {trials} and {conditions}.")
    if not symmetries.moved:
        return Proof((), 0.0, seed)
    check_weights(dict(model.named_parameters()), symmetries.moved)
    check_loaded(model)
    return _proof(ModelOutputs(model, inputs, evaluate, double), symmetries, seed, trials, conditions, together)


def _proof(
    outputs: ModelOutputs | ShardedOutputs,
    symmetries: Symmetries,
    seed: int,
    trials: int,
    conditions: tuple[float, ...],
    together: bool,
) -> Proof:
    generator = generator_of(seed)
    claims = [
        *(_Claim(pair.name, pair.group, pair.names, partial(_move_pair, pair)) for pair in symmetries.pairs),
        *(_Claim(shift.name, shift.group, shift.names, partial(_shift, shift)) for shift in symmetries.translations),
        *(_Claim(each.name, each.kind, each.names, partial(_moved, each)) for each in symmetries.freedoms),
    ]
    with torch.no_grad():
        noise = outputs.rounding_noise(symmetries.moved, generator)
        proofs: list[PairProof] = []
        if together:
            joint = _tried(_together(claims), outputs, noise, generator, trials, conditions[:1])
            if joint.holds:
                proofs = [replace(joint, pair=claim.name, group=claim.group) for claim in claims]
        if not proofs:
            proofs = [_tried(claim, outputs, noise, generator, trials, conditions) for claim in claims]
    pairs, shifts = len(symmetries.pairs), len(symmetries.translations)
    translations, freedoms = proofs[pairs : pairs + shifts], proofs[pairs + shifts :]
    return Proof(tuple(proofs[:pairs]), noise, seed, tuple(translations), tuple(freedoms))


def prove_on_sharded(
    model: nn.Module, evaluate: Evaluate, batch: Any, symmetries: Symmetries, *, seed: int = 0
) -> Proof:
    """Prove all symmetries of a sharded model at once on evaluate(model, batch), by about ten evaluations.

    It is moved in place and put back, on the whole batch and in its own precision: `ShardedOutputs`.
    """
    check_eval(model)
    check_symmetries(symmetries)
    if not symmetries.moved:
        return Proof((), 0.0, seed)
    outputs = ShardedOutputs(model, batch, evaluate, symmetries.moved)
    return _proof(outputs, symmetries, seed, 1, (CONDITION,), together=True)


def output_change(model: nn.Module, inputs: Any, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Compute the largest relative change of the output from parameters `before` to `after`, in float64.

    Each holds some or all of the model's parameters; the others are the model's own. `inputs` as for
    `prove_symmetries`.
    """
    with torch.no_grad():
        outputs = ModelOutputs(model, inputs)
        outputs.compare_with({name: value.detach() for name, value in before.items()})
        return outputs.change({name: value.detach().to(torch.float64, copy=True) for name, value in after.items()})


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
    moved = act(pair, group_element(pair, condition, generator), pair.read(params))
    pair.G.write(params, moved[:, : pair.n])
    if not control:
        pair.H.write(params, moved[:, pair.n :])


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


def _moved(freedom: Freedom, params: Params, condition: float, generator: torch.Generator, control: bool) -> None:
    freedom.move(params, generator, math.log(condition) / 2, control)


def _tried(
    claim: _Claim,
    outputs: ModelOutputs | ShardedOutputs,
    noise: float,
    generator: torch.Generator,
    trials: int,
    conditions: tuple[float, ...],
) -> PairProof:
    def change(condition: float, control: bool = False) -> float:
        params = outputs.copied(claim.names)
        claim.move(params, condition, generator, control)
        return outputs.change(params)

    changes = tuple((float(condition), max(change(condition) for _ in range(trials))) for condition in conditions)
    return PairProof.judged(claim.name, claim.group, changes, change(conditions[0], control=True), noise)
