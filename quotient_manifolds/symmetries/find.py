"""Find the symmetries of a model in one recorded run of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from quotient_manifolds.messages import first_line
from quotient_manifolds.symmetries.canonical import find_freedoms
from quotient_manifolds.symmetries.checks import check_eval, check_loaded, check_model, check_symmetries, check_weights
from quotient_manifolds.symmetries.detect import looks_like_attention
from quotient_manifolds.symmetries.freedom import Freedom
from quotient_manifolds.symmetries.norm_constant import find_norm_constants
from quotient_manifolds.symmetries.norm_scale import NormScale
from quotient_manifolds.symmetries.outputs import Evaluate, first_examples
from quotient_manifolds.symmetries.pair import QUERY_KEY, VALUE_OUTPUT
from quotient_manifolds.symmetries.symmetries import Match, Refused, Symmetries
from quotient_manifolds.symmetries.trace import Trace
from quotient_manifolds.symmetries.traced_pairs import find_pairs

RUN_ERRORS = (RuntimeError, TypeError, LookupError, ValueError, AttributeError, AssertionError, ArithmeticError)


def find_symmetries(
    model: nn.Module, batch: Any, *, evaluate: Evaluate | None = None, declared: Symmetries | None = None
) -> Symmetries:
    """Return the symmetries of `model`, the parameters in no pair, and what is refused, from one run on the batch.

    The operations of the run tell: pairs (G, H) of which the model uses only the product (queries and keys, values and
    output, low-rank adapters, bottlenecks, neurons of a ReLU or next to a gate), the translations of their biases, and
    the freedoms, what norms and the streams they read leave free. So no class need be known. They are proposals, for
    `prove_symmetries` or a measure to bear out.

    batch: inputs as `prove_symmetries` takes them, `evaluate` likewise. Sequences of several tokens that go everywhere:
    what does not run on them is not seen. The first two examples are used, or all where experts would be idle else, in
    float64. declared: pairs (see `declare_pair`) and translations that are known, in the place of what is found of the
    same parameters.

    A module used twice is found once, under the first name of its parameters. A model without attention may have no
    pairs, which is no error. `unrecognised` lists modules that have the names of attention, and of which nothing was
    found or refused.
    TypeError for anything but a module. ValueError in train mode, where the model does not run on the batch, and where
    a parameter has no values, is NaN or infinite, or is in a pair and quantised, sparse or complex.
    """
    check_model(model)
    check_eval(model)
    check_loaded(model)
    params = dict(model.named_parameters())
    check_weights(params, (name for name, w in params.items() if w.is_floating_point()))
    declared = Symmetries(()) if declared is None else declared
    check_symmetries(declared)
    check_weights(params, declared.moved)
    found, freedoms, refused = _traced(model, batch, evaluate, declared)
    touched = {name for pair in found.pairs for name in pair.names}
    check_weights(params, touched)
    rest = tuple(name for name in params if name not in touched)
    unrecognised = _unfollowed(dict(model.named_modules()), found)
    return Symmetries(found.pairs, rest, unrecognised, (*found.refused, *refused), found.translations, freedoms)


def _traced(
    model: nn.Module, batch: Any, evaluate: Evaluate | None, declared: Symmetries
) -> tuple[Match, tuple[Freedom, ...], tuple[Refused, ...]]:
    """Return the pairs and the freedoms in a recorded run on the first examples or all, and what else is refused."""
    *first, whole = (*first_examples(batch), batch)
    for some in first:
        try:
            trace = Trace(model, some, evaluate)
        except RUN_ERRORS:  # a loss may insist on the size of the batch
            continue
        match, freedoms, refused = _found_in(trace, declared)
        touched = [pair.names for pair in match.pairs] + [each.names for each in freedoms]
        if not any(trace.idle_like(names) for names in touched):
            return match, freedoms, refused
    try:
        trace = Trace(model, whole, evaluate)
    except RUN_ERRORS as error:
        said = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        raise ValueError(
            f"{type(model).__name__} must run on the inputs, in float64, to show its symmetries; it raises {said}."
        ) from error
    match, freedoms, refused = _found_in(trace, declared)
    idle = {each: name for each in freedoms if (name := trace.idle_like(each.names))}
    why = "did not run, and may be part of it: give inputs that go everywhere"
    unsure = (Refused(each.name, each.kind, f"{name} {why}") for each, name in idle.items())
    return match, tuple(each for each in freedoms if each not in idle), (*refused, *unsure)


def _found_in(trace: Trace, declared: Symmetries) -> tuple[Match, tuple[Freedom, ...], tuple[Refused, ...]]:
    """Return pairs, freedoms and what else is refused: all of it, if an operation is called as nobody thought of."""
    match, freedoms, refused = Match(), tuple[Freedom, ...](), tuple[Refused, ...]()
    try:
        match = find_pairs(trace)
    except RUN_ERRORS as error:
        refused = (_not_understood("pairs", error),)
    match = match.beside(declared)
    try:
        freedoms, others = find_freedoms(trace, {name for pair in match.pairs for name in pair.names})
    except RUN_ERRORS as error:
        return match, (), (*refused, _not_understood("norm", error))
    return match, _with_constants(trace, match, freedoms), (*refused, *others)


def _not_understood(kind: str, error: Exception) -> Refused:
    return Refused("the model", kind, f"what it computes is not understood: {first_line(error)}")


def _with_constants(trace: Trace, match: Match, found: tuple[Freedom, ...]) -> tuple[Freedom, ...]:
    """Return the freedoms with the constants of keys and values; those of values go on to biases that are folded later.

    They are folded next to the norms.
    """
    norms = [index for index, each in enumerate(found) if isinstance(each, NormScale)]
    constants = find_norm_constants(trace, match.pairs, found) if norms else ()
    after = max(norms, default=-1) + 1
    return (*found[:after], *constants, *found[after:])


def _unfollowed(modules: Mapping[str, nn.Module], found: Match) -> tuple[str, ...]:
    """Return the innermost modules that look like attention and of which nothing is found or refused."""
    kinds = (QUERY_KEY, VALUE_OUTPUT)
    owners = {name.rpartition(".")[0] for pair in found.pairs if pair.kind in kinds for name in pair.names}
    owners |= {each.name.removesuffix(each.kind).rstrip() for each in found.refused if each.kind in kinds}
    looks = {name for name, module in modules.items() if looks_like_attention(module)}
    settled = {owner for owner in owners if owner in modules}
    settled |= {above for owner in settled for above in _lineage(owner) if above in looks}
    around = {above for name in settled for above in _lineage(name)}  # a block is called after its attention
    open_ = [name for name in modules if name in looks - around and settled.isdisjoint(_lineage(name))]
    outer = {above for name in open_ for above in _lineage(name) if above != name}
    return tuple(f"{name or '(the model)'} ({type(modules[name]).__name__})" for name in open_ if name not in outer)


def _lineage(name: str) -> Iterator[str]:
    """Yield the name of a module and of all modules around it, the model's "" last."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name
