"""Verify the symmetries of a sharded model by the change of its loss along them, compared with rounding noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.replica import private_batch
from quotient_manifolds.sharded import ShardedModel, Whole
from quotient_manifolds.symmetries import groups
from quotient_manifolds.symmetries.checks import check_eval, generator_of
from quotient_manifolds.symmetries.outputs import Evaluate
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.symmetries import Symmetries, check_symmetries
from quotient_manifolds.symmetries.verify import FINITE, SymmetryCheck, Verdict, Verification, astray

MARGIN = 1e3  # the largest change of an invariant loss, in units of rounding noise
STEP = 1e-6  # the relative step of the third differences that measure rounding
NEGLIGIBLE = 1e-9  # a change by this part of the control is rounding, too: badly scaled weights make the noise vary


def verify_sharded(
    model: nn.Module, evaluate: Evaluate, batch: Any, symmetries: Symmetries, *, seed: int = 0
) -> Verification:
    """Verify all symmetries of a sharded model at once on evaluate(model, batch), by about ten evaluations.

    Random elements of all groups act on the model in place, on the whole batch and in its own precision, and are undone
    (`ShardedOutputs`). If the loss changes, each group is tested by itself. In the result, slope is the change of the
    loss, and control its change under a perturbation of the same size outside the group.
    """
    check_eval(model)
    check_symmetries(symmetries)
    generator, acting = generator_of(seed), symmetries.every
    if not acting:
        return Verification((), seed)
    outputs = ShardedOutputs(model, batch, evaluate, symmetries.moved)
    with torch.no_grad():
        noise = outputs.rounding_noise(symmetries.moved, generator)

        def judged(chosen: Sequence[groups.Symmetry]) -> tuple[float, float, Verdict, str]:
            slope, control = _changes(outputs, chosen, generator)
            if not slope <= max(MARGIN * noise, NEGLIGIBLE * control):  # so that NaN fails
                return slope, control, "fails", "the loss changes along its orbit"
            if not control > MARGIN * noise:
                return slope, control, "inconclusive", "what its parameters contribute is lost in rounding noise"
            return slope, control, "holds", ""

        found = [judged(symmetries.groups)] * len(acting)
        if found[0][2] == "fails":
            found = [judged([each.symmetry]) for each in acting]
    checks = (SymmetryCheck(each.name, each.group, *said) for each, said in zip(symmetries.every, found, strict=True))
    return Verification(tuple(checks), seed)


def _changes(
    outputs: ShardedOutputs, chosen: Sequence[groups.Symmetry], generator: torch.Generator
) -> tuple[float, float]:
    """Return the changes of the loss under random elements of all groups, and under perturbations outside of them."""

    def change(control: bool) -> float:
        params = outputs.copied(dict.fromkeys(name for each in chosen for name in each.names))
        for each in chosen:
            moved: Mapping[str, Tensor] = each.moved(params, generator, FINITE)
            if control:
                moved = astray(each, params, moved, generator)
            for name in each.names:
                params[name] = moved[name]
        return outputs.change(params)

    return change(False), change(True)


class ShardedOutputs:
    """Evaluate the loss of a sharded model at other parameters, and restore the model.

    The model computes in its own precision. A product in half precision rounds its inputs, which dominates the noise.
    The loss is the mean over the processes. Raises ValueError if it is not finite or not repeatable.
    """

    def __init__(self, model: nn.Module, batch: Any, evaluate: Evaluate, moved: Iterable[str]) -> None:
        self._model, self._batch, self._evaluate = ShardedModel(model), batch, evaluate
        held, original = self._model.held(), self._model.original
        self._frozen = {name: held[name].clone() for name in moved if name not in original}
        self._saved = held | original | self._frozen
        self._precisions: set[torch.dtype] = set()
        hooks = [
            module.register_forward_hook(self._note) for module in model.modules() if isinstance(module, nn.Linear)
        ]
        try:
            self._reference = self._at({})
        finally:
            for hook in hooks:
                hook.remove()
        if not abs(self._reference) < float("inf"):
            raise ValueError(f"the loss of a model must be finite to verify its symmetries. Found {self._reference}.")
        if abs(self._at({}) - self._reference) > 1e-3 * abs(self._reference):
            raise ValueError("two evaluations on the same inputs differ: the model is random, nothing can be compared.")

    def copied(self, names: Iterable[str]) -> Params:
        """Return the parameters, gathered on access; the named ones are copies that may be changed."""
        moved = {name: self._saved[name].clone() for name in names}
        return Whole(self._saved | moved, self._model.layouts)

    def change(self, moved: Params) -> float:
        """Return the relative change of the loss."""
        parts = moved.parts() if isinstance(moved, Whole) else moved
        return abs(self._at(parts) - self._reference) / (abs(self._reference) or 1.0)

    def rounding_noise(self, names: Iterable[str], generator: torch.Generator) -> float:
        """Estimate the loss's rounding noise from third differences along three random directions.

        A smooth function's third difference is O(STEP^3), far below rounding; what remains is noise, of variance
        20 sigma^2. STEP exceeds float32's spacing, so casts to float32 inside the model are measured. If products are
        in half precision, the change of the loss counts, too, if all weights change by the spacing of half precision.
        """
        local = torch.Generator().manual_seed(int(torch.randint(2**31, (), generator=generator)) + self._model.rank)
        names = list(names)
        sizes = [self._third_difference(names, local) / 20**0.5 for _ in range(3)]
        for precision in self._precisions:
            noise = torch.finfo(precision).eps
            moved = {name: self._saved[name] * (1 + noise * _gaussian(self._saved[name], local)) for name in names}
            sizes.append(self.change(moved))
        return max(*sizes, max(torch.finfo(part.dtype).eps for part in self._saved.values()))

    def _third_difference(self, names: list[str], generator: torch.Generator) -> float:
        direction = {name: _gaussian(self._saved[name], generator) for name in names}
        total = self._reference
        for count, weight in ((1, -3.0), (2, 3.0), (3, -1.0)):
            total += weight * self._at(
                {name: self._saved[name] * (1 + count * STEP * z) for name, z in direction.items()}
            )
        return abs(total) / (abs(self._reference) or 1.0)

    def _at(self, moved: Params) -> float:
        with self._model.restored(self._frozen) as held:
            with torch.no_grad():
                for name, part in moved.items():
                    held[name].copy_(part)
            with torch.enable_grad():
                value = self._evaluate(self._model.model, private_batch(self._batch))
            return self._model.mean(value)

    def _note(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dtype.itemsize < 4:
            self._precisions.add(output.dtype)


def _gaussian(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)
