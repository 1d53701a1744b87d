"""Measure how far runs of an optimizer from different points of one orbit drift apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.check import check_integer, check_number
from quotient_manifolds.replica import differing_tensors, twin
from quotient_manifolds.sharpness.losses import Loss, check_loss, inputs_in
from quotient_manifolds.sharpness.prepared_model import listed
from quotient_manifolds.symmetries import Params, Symmetries, find_symmetries
from quotient_manifolds.symmetries.checks import check_model, generator_of
from quotient_manifolds.symmetries.outputs import answer, floating
from quotient_manifolds.symmetries.representatives import group_element

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
"""A function that makes an optimizer for a model, such as `lambda model: torch.optim.AdamW(model.parameters())`."""


@final
@dataclass(frozen=True)
class OrbitAudit:
    """Hold the distances between an optimizer's run from the original weights and its runs from transformed weights.

    drifts: for every transformation |f - f'| / |f - f_0|, with f and f' the outputs after the two runs, and f_0 the
    outputs before training. 1 is the distance covered by training; not finite if a run ended so. starts:
    |f_0 - f_0'| / |f_0|, due to rounding. loss, moved_losses: the final loss on the first batch, of the original run
    and of the runs from transformed weights. precision: of the weights that were transformed. rounding: the drift of a
    run from weights that were transformed and transformed back, due to rounding alone. buffers: the largest
    |b - b'| / |b| over the runs from transformed weights, by name, for buffers that differ at the end, such as running
    statistics.
    """

    optimizer: str
    drifts: tuple[float, ...]
    starts: tuple[float, ...]
    loss: float
    moved_losses: tuple[float, ...]
    precision: str
    rounding: float
    buffers: Mapping[str, float] = field(default_factory=dict)

    @property
    def drift(self) -> float:
        """Return the median drift; drifts that are not finite count as infinite."""
        return statistics.median(each if math.isfinite(each) else math.inf for each in self.drifts)

    def __str__(self) -> str:
        rows = zip(self.starts, self.drifts, self.moved_losses, strict=True)
        lines = [f"{start:14.1e}  {drift:14.1e}  {loss:.6g}" for start, drift, loss in rows]
        head = (
            f"{self.optimizer} in {self.precision}: median drift {self.drift:.1e} of the distance trained, rounding "
            f"explains {self.rounding:.1e}; loss {self.loss:.6g}"
        )
        apart = ", ".join(f"{name} by {change:.1e}" for name, change in self.buffers.items())
        said = [f"buffers that differ at the end: {apart}"] if apart else []
        return "\n".join([head, "  at the start  after training  loss", *lines, *said])


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
    seed: int = 0,
) -> OrbitAudit:
    """Train copies of a model from several points of its orbit, and compare the resulting functions.

    Every copy but the first starts from weights transformed by random elements of the groups of all pairs, with the
    given condition number: A = U diag(s) V^T with s log-spaced; scalars lie between condition^-1/2 and condition^1/2.
    All copies compute the same function at first. Each is trained by an optimizer of its own, on the same batches in
    the same order, with the same random numbers. The model is not changed.

    make_optimizer: see `MakeOptimizer`; it may close over `symmetries`. Steps are `optimizer.step(closure)`, so that
    optimizers with several passes, such as `SAM`, are audited too. loss: loss(model, batch) returns a scalar. steps: by
    default one per batch; batches are repeated for more steps. symmetries: their pairs are transformed, by default
    those found in the first batch; pairs with frozen parameters are left out. The outputs of the model on the inputs of
    all batches are compared.

    In float64, an optimizer that does not depend on the representative has drifts at rounding level. In float32,
    training amplifies the rounding of transformed weights, `starts`. One more copy, transformed by the first elements
    and back, measures this: `OrbitAudit.rounding`.

    Raises ValueError if there is no pair to transform, or if training does not change the outputs.
    """
    of_torch = isinstance(make_optimizer, type) and issubclass(make_optimizer, torch.optim.Optimizer)
    if of_torch or not callable(make_optimizer):
        kind = getattr(make_optimizer, "__name__", type(make_optimizer).__name__)
        raise TypeError(f"make_optimizer must be a function of the model, as lambda model: {kind}(model.parameters())")
    check_model(model)
    check_loss(loss)
    check_integer("moves", moves, 1)
    check_number("condition", condition, positive=True)
    generator, given = generator_of(seed), listed(batches)
    steps = len(given) if steps is None else steps
    check_integer("steps", steps, 1)
    found = find_symmetries(twin(model).eval(), inputs_in(given[0])) if symmetries is None else symmetries
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    pairs = [pair for pair in found.pairs if trained.issuperset(pair.names)]
    if not pairs:
        raise ValueError(f"{type(model).__name__} must have a symmetric pair that is trained, to move. Found none")

    def run(model: nn.Module) -> tuple[str, Tensor, Tensor, float]:
        """Return the name of the optimizer, the outputs before and after training, and the final loss."""
        torch.manual_seed(seed)
        optimizer = make_optimizer(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"make_optimizer must return an optimizer. Found {type(optimizer).__name__}: return it")
        before = _outputs(model, given)
        for step in range(steps):
            batch = given[step % len(given)]

            def closure(batch: Any = batch) -> float:
                optimizer.zero_grad()
                value = loss(model, batch)
                value.backward()
                return float(value.detach())

            optimizer.step(closure)
        with torch.no_grad():
            return type(optimizer).__name__, before, _outputs(model, given), float(loss(model, given[0]))

    runs, ends = [], list[Params]()
    elements = [[group_element(pair, condition, generator) for pair in pairs] for _ in range(moves)]
    back = [A.reciprocal() if A.ndim == 1 else torch.linalg.inv(A) for A in elements[0]]
    for acting in ((), *((each,) for each in elements), (elements[0], back)):
        network = twin(model)
        params = {name: p.detach() for name, p in network.named_parameters()}
        for pair, A in ((pair, A) for each in acting for pair, A in zip(pairs, each, strict=True)):
            pair.write(params, pair.act(A, pair.read(params)))
        with torch.random.fork_rng():  # keeps the caller's random state
            runs.append(run(network))
        ends.append(dict(network.named_buffers()))
    names, befores, afters, losses = zip(*runs, strict=True)
    travelled = float(torch.linalg.vector_norm(afters[0] - befores[0]))
    if travelled == 0:
        raise ValueError("training must change the outputs. Found no change: take more steps or another lr")
    size = float(torch.linalg.vector_norm(befores[0])) or 1.0
    *drifts, rounding = (float(torch.linalg.vector_norm(after - afters[0])) / travelled for after in afters[1:])
    starts = (float(torch.linalg.vector_norm(before - befores[0])) / size for before in befores[1:-1])
    kinds = {str(model.get_parameter(name).dtype).removeprefix("torch.") for pair in pairs for name in pair.names}
    ran = tuple(drifts), tuple(starts), losses[0], losses[1:-1]
    return OrbitAudit(names[0], *ran, " and ".join(sorted(kinds)), rounding, _apart(*ends[:-1]))


def _apart(first: Params, *others: Params) -> dict[str, float]:
    """Return the largest relative change of each buffer in which others differ from the first."""
    found = dict[str, float]()
    for other in others:
        for name in differing_tensors(first, other):
            change = math.inf
            if name in first and name in other and first[name].shape == other[name].shape:
                b, difference = first[name].double(), other[name].double() - first[name].double()
                change = float(torch.linalg.vector_norm(difference) / (torch.linalg.vector_norm(b) or 1))
            found[name] = max(found.get(name, 0.0), change)
    return found


def _outputs(model: nn.Module, batches: list[Any]) -> Tensor:
    """Return the outputs for all batches in one vector, in eval mode and float64."""
    model = twin(model).eval()
    with torch.no_grad():
        parts = [part for batch in batches for part in floating(answer(model, inputs_in(batch)))]
    return torch.cat([part.detach().double().flatten() for part in parts])
