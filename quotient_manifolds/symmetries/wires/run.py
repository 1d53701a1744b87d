"""Run a model once and walk through what it computes, at parameters without coincidences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.replica import private_batch, replica, unchanged
from quotient_manifolds.symmetries.checks import ModelError
from quotient_manifolds.symmetries.outputs import Evaluate, answer, check_outputs, doubled, floating
from quotient_manifolds.symmetries.wires import rules  # noqa: F401  fills the table of rules
from quotient_manifolds.symmetries.wires.constants import Constants
from quotient_manifolds.symmetries.wires.generic import Generic
from quotient_manifolds.symmetries.wires.record import Recording, digest, record
from quotient_manifolds.symmetries.wires.walk import Walk

_NUMBER = re.compile(r"\.\d+(?=\.)")  # of a layer, or of one of several experts


class Run:
    """Hold the walk through one run of a model, and what of its parameters did not run.

    In the model's own precision, or in float64 where it does not run on the inputs in its own. Raises ModelError where
    it runs in neither.
    """

    def __init__(self, model: nn.Module, inputs: Any, evaluate: Evaluate | None = None) -> None:
        own = {name: w.detach() for name, w in model.named_parameters()}
        self.params: Mapping[str, Tensor] = own
        self.inputs = inputs
        recording = recorded(model, inputs, evaluate)
        self.digest = digest(recording)
        self.walk = Walk(recording, Generic(own))
        self.constants = Constants(self.walk)
        self._ran = dict(self.walk.ran)

    @cached_property
    def idle(self) -> dict[str, Tensor]:
        """Return where in a parameter, flat, the numbers are that did not run, by the names of those that have such.

        No operation used them, as happens to branches and to experts that are stacked in one parameter. Rows of a
        table that are not looked up have run: what does one thing with one row does it with another.
        """
        found = {}
        for name, w in self.params.items():
            taken = self._ran.get(name, [])
            if any(each.layout.is_meta and each.layout.numel() == w.numel() for each in taken):
                continue
            idle = torch.ones(w.numel(), dtype=torch.bool)
            for each in taken:
                idle[each.narrowed().index().reshape(-1)] = False
            if bool(idle.any()):
                found[name] = idle
        return found

    def idle_like(self, names: Iterable[str]) -> str:
        """Return an idle parameter that may do what one of these does elsewhere; "" if none is.

        One of the same path but for a number, as experts have, a matrix of a module beside it, as branches are, or one
        that multiplies the state of the only token there is.
        """
        kinds = {_NUMBER.sub(".*", f".{name}.") for name in names}
        homes = {_home(name) for name in names}
        for name in sorted(self.idle):
            matrix = self.params[name].numel() > self.params[name].shape[-1:].numel()
            alike = _NUMBER.sub(".*", f".{name}.") in kinds or (matrix and _home(name) in homes)
            if alike or name in self.walk.at_zeros:
                return name
        return ""


def recorded(model: nn.Module, inputs: Any, evaluate: Evaluate | None = None) -> Recording:
    """Return the recording of a run. Raises ModelError as `Run` does."""
    evaluate = evaluate or answer

    def outputs(model: nn.Module, given: Any) -> list[Tensor]:
        return floating(evaluate(model, given))

    own = {name: w.detach() for name, w in model.named_parameters()}
    try:
        recording = record(replica(model, own), private_batch(inputs, unchanged), outputs)
    except ModelError as error:
        try:  # inputs may be of another precision than the weights
            recording = record(replica(model, {}, doubled), private_batch(inputs, doubled), outputs)
        except ModelError:
            raise error from error.__cause__
    try:
        check_outputs(recording.outputs)
    except ValueError as error:
        raise ModelError(str(error)) from None
    return recording


def _home(name: str) -> str:
    """Return the path of the module in which a parameter's module stands."""
    return name.rpartition(".")[0].rpartition(".")[0]
