"""Propose symmetries of a model: what the operations of one recorded run leave free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from quotient_manifolds.symmetries.checks import (
    ModelError,
    check_eval,
    check_inputs,
    check_loaded,
    check_model,
    check_weights,
    named_if_empty,
)
from quotient_manifolds.symmetries.outputs import Evaluate, first_examples
from quotient_manifolds.symmetries.symmetries import Refused, Symmetries, check_symmetries
from quotient_manifolds.symmetries.wires.gauges import Gauge
from quotient_manifolds.symmetries.wires.pairs import pairs_of
from quotient_manifolds.symmetries.wires.permutations import Permutation, permutations
from quotient_manifolds.symmetries.wires.record import digest
from quotient_manifolds.symmetries.wires.records import reparameterizations
from quotient_manifolds.symmetries.wires.run import Run, recorded


def propose_symmetries(
    model: nn.Module, batch: Any, *, evaluate: Evaluate | None = None, declared: Symmetries | None = None
) -> Symmetries:
    """Return what `find_symmetries` has of one batch, though parameters that do not run on it may depend on it.

    For a measure, which verifies it on all batches of its own. Reparameterizations alone are refused, where an idle
    parameter is named like one of theirs, and so the first two examples suffice unless such a one is idle there.
    """
    return _proposed(model, batch, evaluate, declared)[0]


def _proposed(
    model: nn.Module, batch: Any, evaluate: Evaluate | None, declared: Symmetries | None = None
) -> tuple[Symmetries, Run]:
    """Return what is proposed, and the run that showed it."""
    for found, trace in proposals(model, batch, evaluate, declared):
        idle = {each.name: trace.idle_like(each.names) for each in found.every}
        if not any(idle.values()):
            return found, trace
    refused = {each.name: did_not_run(name) for each in found.reparameterizations if (name := idle[each.name])}
    return found.refusing(refused), trace


@final
@dataclass(frozen=True, eq=False)
class Structure:
    """Hold the symmetries of an architecture, found in a run of one model for all models that compute alike.

    digest: of the operations of that run, and the values of inputs and constants; see `Run`. trained: by the name of
    each parameter whether it requires a gradient. whole: the run was one on all examples of the batch.
    """

    symmetries: Symmetries
    digest: str
    trained: Mapping[str, bool]
    whole: bool

    @classmethod
    def of(cls, model: nn.Module, batch: Any, evaluate: Evaluate) -> Structure:
        """Find the symmetries of a model, as `propose_symmetries` does."""
        symmetries, run = _proposed(model, batch, evaluate)
        return cls(symmetries, run.digest, _trained(model), run.inputs is batch)

    def serves(self, model: nn.Module, batch: Any, evaluate: Evaluate) -> bool:
        """Return whether another model does the same operations on the same examples, with other weights.

        Not one with a gain of 0, which weights that follow cannot undo.
        """
        if self.trained != _trained(model):
            return False
        for some in [batch] if self.whole else first_examples(batch):
            try:
                if digest(recorded(model, some, evaluate)) != self.digest:
                    return False
            except ModelError:
                return False
            params = {name: w.detach() for name, w in model.named_parameters()}
            gauges = (each for each in self.symmetries.reparameterizations if isinstance(each, Gauge))
            return not any(each.is_singular(params) for each in gauges)
        return False


def _trained(model: nn.Module) -> dict[str, bool]:
    return {name: w.requires_grad for name, w in model.named_parameters()}


def did_not_run(name: str) -> str:
    """Return why a symmetry is refused that a parameter may depend on which did not run."""
    return f"{name} did not run, and may be part of it: give inputs that go everywhere"


def proposals(
    model: nn.Module, batch: Any, evaluate: Evaluate | None, declared: Symmetries | None
) -> Iterator[tuple[Symmetries, Run]]:
    """Yield what a recorded run leaves free, and the run: one on the first examples, if these run, and one on all."""
    check_model(model)
    params = dict(model.named_parameters())
    check_weights(params, (name for name, w in params.items() if w.is_floating_point()))
    declared = Symmetries(()) if declared is None else declared
    check_symmetries(declared)
    check_weights(params, declared.moved)
    with named_if_empty(params):
        for run in _runs(model, batch, evaluate):
            yield _found_in(run, declared, model), run


def find_permutations(model: nn.Module, batch: Any, *, evaluate: Evaluate | None = None) -> tuple[Permutation, ...]:
    """Return the units of a model that may change places: neurons, heads, experts, channels of a stream.

    Those that the model treats alike by the operations of one run, on whatever inputs: it computes the same with its
    parameters permuted. Channels that a continuous group mixes are left out, as are units that a parameter may depend
    on which did not run. Takes what `find_symmetries` takes, and raises what it raises.
    """
    for run in _runs(model, batch, evaluate):
        found = permutations(run.walk)
        if not any(run.idle_like(each.names) for each in found):
            return found
    return tuple(each for each in found if not run.idle_like(each.names))


def _runs(model: nn.Module, batch: Any, evaluate: Evaluate | None) -> Iterator[Run]:
    """Yield a run on the first examples, if these run, and one on all."""
    check_model(model)
    check_eval(model)
    check_loaded(model)
    check_inputs(batch)
    for some in first_examples(batch):
        try:
            run = Run(model, some, evaluate)
        except ModelError:  # a loss may insist on the size of the batch
            continue
        yield run
    yield Run(model, batch, evaluate)


def _found_in(run: Run, declared: Symmetries, model: nn.Module) -> Symmetries:
    """Return what a run leaves free."""
    params = dict(model.named_parameters())
    why = "this use of the operation is not understood, so its inputs are held fixed"
    unknown = [Refused(f"{module} {name}".strip(), "operation", why) for module, name in run.walk.unknown]
    run.walk.forget_run()
    found = pairs_of(run.walk, run.constants)
    known = {pair.name for pair in declared.pairs}
    traced = tuple(pair for pair in found.pairs if set(declared.moved).isdisjoint(pair.names))
    pairs = (*declared.pairs, *traced)
    refused = (each for each in found.refused if each.name not in known)
    free = reparameterizations(run.walk, found.bundles, pairs, run.constants)
    singular = [each for each in free if isinstance(each, Gauge) and each.is_singular(params)]
    why = "a gain of its norm is 0, so that no weight that follows can undo it"
    unknown += [Refused(each.name, each.kind, why) for each in singular]
    free = [each for each in free if each not in singular]
    run.constants.forget()
    run.walk.forget()
    touched = {name for pair in pairs for name in pair.names}
    check_weights(params, touched)
    rest = tuple(name for name in params if name not in touched)
    return Symmetries(pairs, rest, (*refused, *unknown), tuple(free), traced)
