"""Find the symmetries of a model and name them: pairs, reparameterizations, and refused candidates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries.charges import find as charges
from quotient_manifolds.symmetries.charges.finder import Found
from quotient_manifolds.symmetries.checks import check_model, check_weights, named_if_empty
from quotient_manifolds.symmetries.dimensions import covered, dimensions, independent
from quotient_manifolds.symmetries.groups import (
    Gauge,
    IntoMean,
    Params,
    Part,
    Permutation,
    Rows,
    Symmetry,
    Torus,
    Translation,
)
from quotient_manifolds.symmetries.heads import heads_of
from quotient_manifolds.symmetries.idle import did_not_run, held, idle_like
from quotient_manifolds.symmetries.names import OF_TRANSLATIONS, Roles
from quotient_manifolds.symmetries.outputs import Evaluate
from quotient_manifolds.symmetries.pair import SymmetricPair
from quotient_manifolds.symmetries.pairing import Pairs, pairs_of
from quotient_manifolds.symmetries.reparameterization import Reparameterization
from quotient_manifolds.symmetries.scales import Scales
from quotient_manifolds.symmetries.symmetries import Refused, Symmetries, check_symmetries
from quotient_manifolds.symmetries.trace.record import Recording

_SKIPPED = "this use of the operation is not understood, so its inputs are held fixed"


def find_symmetries(
    model: nn.Module, batch: Any, *others: Any, evaluate: Evaluate | None = None, declared: Symmetries | None = None
) -> Symmetries:
    """Return the continuous symmetries of `model`, the parameters in no pair, and refused candidates.

    A pair (G, H) is two factors of which the model uses only the product: queries and keys, values and output, low-rank
    adapters, bottlenecks, neurons of a ReLU or beside a gate. Reparameterizations are the other symmetries: redundant
    biases, directions that no layer reads or no input reaches, gains of norms, rotations of the residual stream.
    Charges (inner products of generators with gradients) at generic points select the symmetries, and outputs must be
    invariant under a finite transformation by all of them. No assumptions on class names are made.

    batch, evaluate: as for `verify_symmetries`; give sequences of several tokens. Values of inputs are varied, and
    sizes, too, if the model accepts them. others: further inputs, which are varied likewise; give some if one batch
    does not run through all of the model.

    Parameters that run on none of the inputs (experts, heads of other tasks, a mask token) may use activations of the
    rest. A symmetry is kept only if it leaves the outputs of all modules without such a parameter unchanged, for
    arbitrary inputs of these modules.

    declared: known pairs (see `declare_pair`), which replace found pairs of the same parameters. A module used twice is
    found once, under the first name of its parameters. A model without pairs is not an error. TypeError for anything
    but a module. ValueError in train mode, if the model does not run on the inputs, and if a parameter has no values,
    is NaN or infinite, or is in a pair and quantized, sparse or complex.
    """
    found, params = _found(model, batch, others, evaluate, declared)
    symmetries = named(found, params, declared)
    idle = _idle(_recordings(found), params)
    return held(model, (batch, *others), symmetries, idle, evaluate) if idle else symmetries


def propose_symmetries(
    model: nn.Module, batch: Any, *, evaluate: Evaluate | None = None, declared: Symmetries | None = None
) -> Symmetries:
    """Return the symmetries that `find_symmetries` finds in one batch, without its check for idle parameters.

    For measures, which verify the symmetries on all of their batches. An idle parameter runs on no input. Only
    reparameterizations are refused, if an idle parameter is named like one of theirs.
    """
    found, params = _found(model, batch, (), evaluate, declared)
    symmetries, idle = named(found, params, declared), _idle(_recordings(found), params)
    reasons = {
        e.name: did_not_run(name) for e in symmetries.reparameterizations if (name := idle_like(idle, e.names, params))
    }
    return symmetries.refusing(reasons) if reasons else symmetries


def _recordings(found: Found) -> Sequence[Recording]:
    return () if found.finder is None else found.finder.points.recordings


def _idle(recordings: Sequence[Recording], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return masks of the entries of parameters that run on no input, flat, by name; parameters without any are absent.

    Rows of a table that are not looked up count as used, because a lookup treats all rows alike.
    """
    idle = {name: torch.ones(w.numel(), dtype=torch.bool) for name, w in params.items() if w.is_floating_point()}
    for recording in recordings:
        program = recording.program
        memories = [layout.memory for layout in program.layouts]
        owners = {memories[n]: name for n, name in program.parameters.items()}
        used = {n for o in program.operations for n in o.ins if {memories[m] for m in o.outs} - {memories[n]}}
        for number in (*used, *program.outputs):  # an operation that only returns a view does not count as a use
            layout = program.layouts[number]
            name = owners.get(layout.memory)
            if name in idle:
                flat = layout.of(torch.arange(layout.room)).reshape(-1)
                idle[name][flat[flat < len(idle[name])]] = False
        for name, first in recording.tied.items():
            if name in idle and first in idle:
                idle[name] = idle[first]
    return {name: each for name, each in idle.items() if bool(each.any())}


def _found(
    model: nn.Module, batch: Any, others: Sequence[Any], evaluate: Evaluate | None, declared: Symmetries | None
) -> tuple[Found, dict[str, Tensor]]:
    check_model(model)
    params = {name: w.detach() for name, w in model.named_parameters()}
    check_weights(params, (name for name, w in params.items() if w.is_floating_point()))
    declared = Symmetries(()) if declared is None else declared
    check_symmetries(declared)
    check_weights(params, declared.moved)
    with named_if_empty(params):
        return charges.find(model, batch, evaluate, others=others), params


# ---- names


def named(found: Found, params: Mapping[str, Tensor], declared: Symmetries | None = None) -> Symmetries:
    """Convert found groups to named pairs and reparameterizations. declared: pairs that replace found ones.

    A declared pair replaces every found pair with which it shares a parameter.
    """
    known = () if declared is None else declared.pairs
    if found.finder is None:
        return Symmetries(known, _rest(params, known), _sentences(found), held=found.held)
    roles, own = Roles(found.finder.frame), {n: w.double() for n, w in params.items() if w.is_floating_point()}
    small = sum(w.numel() for w in own.values()) <= charges.SMALL
    symmetries = independent(found.symmetries, own) if small else found.symmetries
    scales = {k: Scales(each, k, roles) for k, each in enumerate(symmetries) if isinstance(each, Torus)}
    heads = [head for each in scales.values() for head in each.heads()]
    for k, each in enumerate(symmetries):
        heads += heads_of(each, k, roles) if isinstance(each, Gauge) else ()
    translations = [each for each in symmetries if isinstance(each, Translation)]
    every = pairs_of(heads, roles, _unreached(translations, own))
    names = {name for pair in known for name in pair.names}
    pairs = (*known, *(pair for pair in every.pairs if names.isdisjoint(pair.names)))
    called = {pair.name for pair in known}
    left = [*_translations(translations), *_others(symmetries, scales, every, roles)]
    groups = [each.symmetry for each in left]
    if small:
        sizes = dimensions([pair.gauge for pair in pairs], groups, own)
    else:  # groups found in wide networks do not overlap
        sizes = [0 if covered(each, groups) else each.dimension(own) for each in groups]
    free = _told_apart([replace(e, dimension=d) for e, d in zip(left, sizes, strict=True) if d])
    refused = (*(each for each in every.refused if each.name not in called), *_sentences(found))
    return Symmetries(pairs, _rest(params, pairs), refused, tuple(free), pairs[len(known) :], found.held)


def _rest(params: Mapping[str, Tensor], pairs: Sequence[SymmetricPair]) -> tuple[str, ...]:
    touched = {name for pair in pairs for name in pair.names}
    return tuple(name for name in params if name not in touched)


def _sentences(found: Found) -> tuple[Refused, ...]:
    """Return unsupported operations, and the candidates that charges or a finite transformation refute."""
    skipped = () if found.finder is None else found.finder.walk.skipped
    operations = (Refused(f"{module} {name}".strip(), "operation", _SKIPPED) for module, name in skipped)
    return (*operations, *(Refused("", "charge", sentence) for sentence in found.refused))


def _unreached(translations: Sequence[Translation], params: Params) -> list[tuple[Rows, int]]:
    """Return rows of parameters, each with the number of input directions that never occur."""
    parts = (part for each in translations if each.kind == "unreached" for part in each.parts)
    return [(part.rows, part.ranks(params)[1]) for part in parts]


def _translations(translations: Sequence[Translation]) -> Iterator[Reparameterization]:
    """Yield translations as reparameterizations, joined if they have one kind, the same parameters, and one column."""
    made: dict[tuple[object, ...], Reparameterization] = {}
    for k, each in enumerate(translations):
        one = Reparameterization(each, OF_TRANSLATIONS[each.kind], 0)
        about = (one.kind, one.names)
        both = _together(made[about].symmetry, each) if about in made else None
        if both is None:
            made[(*about, k) if about in made else about] = one
        else:
            made[about] = replace(one, symmetry=both)
    yield from made.values()


def _together(one: Symmetry, other: Translation) -> Translation | None:
    """Merge two translations of the same parameters, if their unknowns are columns and share no entry; else None."""
    if not isinstance(one, Translation) or one.shape[1] != 1 or other.shape[1] != 1:
        return None
    if len(one.parts) != len(other.parts):
        return None
    parts = []
    for a, b in zip(one.parts, other.parts, strict=True):
        plain = all(part.right is None or _is_one(part.right) for part in (a, b))
        simple = all(part.left is None or isinstance(part.left, Tensor) for part in (a, b))
        simple &= all(not isinstance(x, Tensor) for part in (a, b) for x in (part.rows.scale, part.rows.offset))
        same = simple and (a.rows.name, a.rows.scale, a.rows.columns) == (b.rows.name, b.rows.scale, b.rows.columns)
        if not (plain and same) or a.rows.meets(b.rows):
            return None
        rows = Rows.at(a.rows.name, a.rows.shape, torch.cat([a.rows.places, b.rows.places]), scale=a.rows.scale)
        lefts = (torch.eye(len(part.rows), dtype=torch.float64) if part.left is None else part.left for part in (a, b))
        parts.append(Part(rows, torch.block_diag(*lefts), a.right))
    return Translation(tuple(parts), one.kind)


def _is_one(factor: object) -> bool:
    return isinstance(factor, Tensor) and bool((factor == 1).all())


def _others(
    symmetries: Sequence[Symmetry], scales: Mapping[int, Scales], pairs: Pairs, roles: Roles
) -> Iterator[Reparameterization]:
    """Yield scales, then groups that mix channels, unless they are part of a pair."""
    for k, several in scales.items():
        for torus, kind, name in several.groups({scale for number, scale in pairs.origins if number == k}):
            yield Reparameterization(torus, kind, 0, lead=name)
    named = {*scales, *(k for k, each in enumerate(symmetries) if isinstance(each, Translation))}
    turns = [(k, each) for k, each in enumerate(symmetries) if k not in named and (k, -1) not in pairs.origins]
    for _, each in sorted(turns, key=lambda each: _is_mean(each[1])):
        if isinstance(each, Gauge):
            yield Reparameterization(each, roles.mixing(each), 0)
        else:
            yield Reparameterization(each, "hidden change of basis", 0)


def _is_mean(symmetry: Symmetry) -> bool:
    return isinstance(symmetry, Gauge) and isinstance(symmetry.algebra, IntoMean)


def _told_apart(several: Sequence[Reparameterization]) -> list[Reparameterization]:
    """Number reparameterizations with equal labels, so that names are unique."""
    count, told = Counter[str](), []
    for each in several:
        count[each.label] += 1
        told.append(replace(each, number=count[each.label]))
    return told


# ---- permutations


def find_permutations(model: nn.Module, batch: Any, *, evaluate: Evaluate | None = None) -> tuple[Permutation, ...]:
    """Return the permutations of units of a model: neurons, heads, experts, channels of the residual stream.

    Outputs are invariant under one random permutation of all units, at other weights and on inputs of other sizes.
    Buffers with one number per unit are permuted, too, and so are channels that a continuous group mixes. Units on
    which an idle parameter may depend are left out. Arguments and errors are as for `find_symmetries`.
    """
    points = charges.points_of(model, batch, evaluate, 0)
    params = {name: w.detach() for name, w in model.named_parameters()}
    idle = _idle(points.recordings, params)
    return tuple(each for each in charges.permutations_at(points) if not idle_like(idle, each.names, params))
