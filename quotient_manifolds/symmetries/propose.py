"""Propose symmetries of a model: what the operations of one recorded run leave free."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from quotient_manifolds.messages import first_line
from quotient_manifolds.symmetries.checks import check_eval, check_loaded, check_model, check_symmetries, check_weights
from quotient_manifolds.symmetries.detect import looks_like_attention
from quotient_manifolds.symmetries.exchanges import find_exchanges
from quotient_manifolds.symmetries.freedom import Freedom
from quotient_manifolds.symmetries.linear_scale import LinearScale, find_linear_scales
from quotient_manifolds.symmetries.logits import find_logit_shifts
from quotient_manifolds.symmetries.neuron_scale import find_neuron_scales
from quotient_manifolds.symmetries.norm_constant import find_norm_constants
from quotient_manifolds.symmetries.norm_scale import NormScale
from quotient_manifolds.symmetries.norms import find_norms
from quotient_manifolds.symmetries.outputs import Evaluate, first_examples
from quotient_manifolds.symmetries.pair import QUERY_KEY, VALUE_OUTPUT
from quotient_manifolds.symmetries.post_norm import UnseenDirection
from quotient_manifolds.symmetries.rotations import find_rotations
from quotient_manifolds.symmetries.score_shifts import find_score_shifts
from quotient_manifolds.symmetries.streams import find_head_means, find_means
from quotient_manifolds.symmetries.symmetries import Match, Refused, Symmetries
from quotient_manifolds.symmetries.trace import Trace
from quotient_manifolds.symmetries.traced_pairs import find_pairs
from quotient_manifolds.symmetries.weight_length import find_weight_lengths

RUN_ERRORS = (RuntimeError, TypeError, LookupError, ValueError, AttributeError, AssertionError, ArithmeticError)


def propose_symmetries(
    model: nn.Module, batch: Any, *, evaluate: Evaluate | None = None, declared: Symmetries | None = None
) -> Symmetries:
    """Return what `find_symmetries` has of one batch, though parameters that do not run on it may depend on it.

    For a measure, which verifies it on all batches of its own. Freedoms alone are refused, where an idle parameter is
    named like one of theirs, and so the first two examples suffice unless such a one is idle there.
    """
    for found, trace in proposals(model, batch, evaluate, declared):
        idle = {each.name: trace.idle_like(each.names) for each in found.every if each not in found.translations}
        if not any(idle.values()):
            return found
    return found.refusing({each.name: did_not_run(name) for each in found.freedoms if (name := idle[each.name])})


def did_not_run(name: str) -> str:
    """Return why a symmetry is refused that a parameter may depend on which did not run."""
    return f"{name} did not run, and may be part of it: give inputs that go everywhere"


def proposals(
    model: nn.Module, batch: Any, evaluate: Evaluate | None, declared: Symmetries | None
) -> Iterator[tuple[Symmetries, Trace]]:
    """Yield what a recorded run leaves free, and the run: one on the first examples, if these run, and one on all."""
    check_model(model)
    check_eval(model)
    check_loaded(model)
    params = dict(model.named_parameters())
    check_weights(params, (name for name, w in params.items() if w.is_floating_point()))
    declared = Symmetries(()) if declared is None else declared
    check_symmetries(declared)
    check_weights(params, declared.moved)
    for some in first_examples(batch):
        try:
            trace = Trace(model, some, evaluate)
        except RUN_ERRORS:  # a loss may insist on the size of the batch
            continue
        yield _found_in(trace, declared, model), trace
    trace = recorded(model, batch, evaluate)
    yield _found_in(trace, declared, model), trace


def recorded(model: nn.Module, batch: Any, evaluate: Evaluate | None) -> Trace:
    """Return the run on a batch. Raises ValueError, in one sentence, where the model does not run on it."""
    try:
        return Trace(model, batch, evaluate)
    except RUN_ERRORS as error:
        said = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        raise ValueError(
            f"{type(model).__name__} must run on the inputs, in float64, to show its symmetries; it raises {said}."
        ) from error


def find_freedoms(
    trace: Trace, moved: Collection[str] | None = None
) -> tuple[tuple[Freedom, ...], tuple[Refused, ...]]:
    """Return what is free in a recorded computation, in the order in which it is folded, and what is not, and why.

    moved: the parameters of symmetric pairs, if these are known. These are proposals: what the recorded inputs do not
    reach is not seen. `canonical` tries each of them.
    """
    scaled = list(find_linear_scales(trace))
    found, refused = find_norms(trace, [each.scale for each in scaled])
    scales = [norm for norm in found if isinstance(norm, (NormScale, LinearScale))]
    means = list(find_means(trace, [each for each in scaled if each.scale in found]))
    unseen = [one for each in found if isinstance(each, (NormScale, UnseenDirection)) for one in each.unseen]
    found += [*means, *find_head_means(trace, unseen), *find_exchanges(trace, means)]
    found += [*find_logit_shifts(trace, found), *find_score_shifts(trace)]
    rotations = list(find_rotations(trace, scales, found, moved))
    found += [each for each in rotations if isinstance(each, Freedom)]
    refused += [each for each in rotations if isinstance(each, Refused)]
    found += [*find_neuron_scales(trace, moved or ()), *find_weight_lengths(trace)]
    return tuple(found), tuple(refused)


def _found_in(trace: Trace, declared: Symmetries, model: nn.Module) -> Symmetries:
    """Return what a run leaves free; all of it is refused if an operation is called as nobody thought of."""
    match, freedoms, refused = Match(), tuple[Freedom, ...](), tuple[Refused, ...]()
    try:
        match = find_pairs(trace)
    except RUN_ERRORS as error:
        refused = (_not_understood("pairs", error),)
    match = match.beside(declared)
    params, touched = dict(model.named_parameters()), {name for pair in match.pairs for name in pair.names}
    check_weights(params, touched)
    try:
        freedoms, others = find_freedoms(trace, touched)
    except RUN_ERRORS as error:
        others = (_not_understood("norm", error),)
    freedoms = _with_constants(trace, match, freedoms)
    rest = tuple(name for name in params if name not in touched)
    unrecognised = _unfollowed(dict(model.named_modules()), match)
    refused = (*match.refused, *refused, *others)
    return Symmetries(match.pairs, rest, unrecognised, refused, match.translations, freedoms)


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
