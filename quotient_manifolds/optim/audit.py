"""Tell how far an optimizer's runs from different points of one orbit drift apart."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from quotient_manifolds.sharpness.losses import Loss, inputs_and_labels
from quotient_manifolds.symmetries import SymmetricPair, Symmetries, find_symmetries
from quotient_manifolds.symmetries.move import act, group_element
from quotient_manifolds.symmetries.outputs import answer, floating

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
"""Makes an optimizer of the model it is given, such as `lambda model: torch.optim.AdamW(model.parameters())`."""

Outputs = Callable[[nn.Module, Any], Any]


@final
@dataclass(frozen=True)
class OrbitAudit:
    """Hold how far runs of an optimizer from moved weights ended from the run of the weights as they were.

    drifts: for every move |f - f'| / |f - f_0| with f and f' the outputs after both runs and f_0 those before: 1 is as
    far as training went; not finite where a run ended so. starts: |f_0 - f_0'| / |f_0|, which is rounding. loss,
    moved_losses: the first batch's loss at the end, of the run and of those from moved weights.
    """

    optimizer: str
    drifts: tuple[float, ...]
    starts: tuple[float, ...]
    loss: float
    moved_losses: tuple[float, ...]

    @property
    def drift(self) -> float:
        """Return the median drift; what is not finite counts as infinite."""
        return statistics.median(each if math.isfinite(each) else math.inf for each in self.drifts)


def orbit_audit(
    make_optimizer: MakeOptimizer,
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    steps: int | None = None,
    symmetries: Symmetries | None = None,
    condition: float = 100.0,
    moves: int = 3,
    outputs: Outputs | None = None,
    seed: int = 0,
) -> OrbitAudit:
    """Train copies of a model from several points of its orbit, and compare the functions that come out.

    Every copy but the first starts from weights moved by random elements of the groups of all pairs, of the given
    condition: A = U diag(s) V^T with s log-spaced, numbers from condition^-1/2 to condition^1/2. All compute the same
    function then, and are trained by an optimizer that is made for each, on the same batches in the same order, with
    the same random numbers. The model is not changed.

    make_optimizer: see `MakeOptimizer`; it may close over `symmetries`. Steps are `optimizer.step(closure)`, so that
    optimizers of several passes, such as `SAM`, are audited too. loss: loss(model, batch), a scalar. steps: by default
    one a batch; they begin again when the batches are used up. symmetries: whose pairs are moved, by default those
    found in the first batch; pairs with frozen parameters stay. outputs: what is compared, outputs(model, batch), by
    default what the model returns for the inputs of all batches.

    In float64 an optimizer that does not see the representative has drifts at rounding level; in float32 what is
    rounded when weights move, `starts`, is amplified by training.
    ValueError where there is no pair to move, and for outputs that do not change in training.
    """
    listed = list(batches)
    if not listed:
        raise ValueError("batches must hold at least one batch to train on. Found none")
    steps = len(listed) if steps is None else steps
    found = find_symmetries(copy.deepcopy(model).eval(), _inputs(listed[0])) if symmetries is None else symmetries
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    pairs = [pair for pair in found.pairs if trained.issuperset(pair.names)]
    if not pairs:
        raise ValueError(f"{type(model).__name__} must have a symmetric pair that is trained, to move. Found none")
    outputs = outputs or (lambda network, batch: answer(network, _inputs(batch)))
    generator = torch.Generator().manual_seed(seed)
    runs = []
    for index in range(1 + moves):
        network = copy.deepcopy(model)
        if index:
            _move(network, pairs, condition, generator)
        with torch.random.fork_rng():  # the caller's random numbers stay
            runs.append(_run(network, make_optimizer, loss, listed, steps, outputs, seed))
    first, *others = runs
    travelled = float(torch.linalg.vector_norm(first.after - first.before))
    if travelled == 0:
        raise ValueError("training must change the outputs. Found no change: take more steps or another lr")
    size = float(torch.linalg.vector_norm(first.before)) or 1.0
    drifts = (float(torch.linalg.vector_norm(other.after - first.after)) / travelled for other in others)
    starts = (float(torch.linalg.vector_norm(other.before - first.before)) / size for other in others)
    moved_losses = tuple(other.loss for other in others)
    return OrbitAudit(first.optimizer, tuple(drifts), tuple(starts), first.loss, moved_losses)


class _Run(NamedTuple):
    optimizer: str
    before: Tensor
    after: Tensor
    loss: float


def _run(
    model: nn.Module, make: MakeOptimizer, loss: Loss, batches: list[Any], steps: int, outputs: Outputs, seed: int
) -> _Run:
    torch.manual_seed(seed)
    optimizer = make(model)
    before = _seen(model, batches, outputs)
    for step in range(steps):
        batch = batches[step % len(batches)]

        def closure(batch: Any = batch) -> float:
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            return float(value.detach())

        optimizer.step(closure)
    with torch.no_grad():
        last = float(loss(model, batches[0]))
    return _Run(type(optimizer).__name__, before, _seen(model, batches, outputs), last)


def _seen(model: nn.Module, batches: list[Any], outputs: Outputs) -> Tensor:
    """Return the outputs for all batches in one vector, in eval mode and float64."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        parts = [part for batch in batches for part in floating(outputs(model, batch))]
    return torch.cat([part.detach().double().flatten() for part in parts])


def _move(model: nn.Module, pairs: list[SymmetricPair], condition: float, generator: torch.Generator) -> None:
    params = {name: p.detach() for name, p in model.named_parameters()}
    for pair in pairs:
        pair.write(params, act(pair, group_element(pair, condition, generator), pair.read(params)))


def _inputs(batch: Any) -> Any:
    """Return what the model is called with: a batch of inputs and targets without its targets."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key != "labels"}
    return inputs_and_labels(batch)[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch
