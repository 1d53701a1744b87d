"""Optimize symmetric pairs on their quotient, and all other parameters as an optimizer of torch does."""

from __future__ import annotations

import abc
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.check import check_number, check_one_of
from quotient_manifolds.geometry.pair_block import PairBatch, in_batches
from quotient_manifolds.geometry.parameters import check_whole, scales_outside
from quotient_manifolds.linalg import full_precision
from quotient_manifolds.manifolds import METRICS
from quotient_manifolds.optim.step import Point, applied
from quotient_manifolds.symmetries import Params, SymmetricPair, Symmetries
from quotient_manifolds.symmetries.symmetries import check_symmetries

Closure = Callable[[], Any]

Parameters = Iterable[tuple[str, Tensor]] | Iterable[Mapping[str, Any]]
"""Named parameters, as `model.named_parameters()` gives them, or groups of them with their own settings."""

CLIPPED, WARNED = 1e-5, 2  # how close to 1 a clipped norm is; how many in a row are no coincidence
_OF_EVERY_GROUP = ("params", "param_names", "pairs", "initial_lr", "foreach", "capturable", "differentiable", "fused")
"""Other keys of a group: schedulers write one of them, and the others select how parameters in no pair are stepped."""


@dataclass
class Job:
    """Hold the step of a batch of pairs with the same number of steps, before anything is written."""

    batch: PairBatch
    group: dict[str, Any]
    steps: int
    point: Point
    gradient: Tensor  # (heads, n + m, h), as M H and M^T G
    kept: dict[str, Tensor]  # the state before the step
    memory: dict[str, Tensor] = field(default_factory=dict)  # the state after the step


NAMED = "params must be named parameters: give model.named_parameters(), or groups of such"


class QuotientOptimizer(torch.optim.Optimizer, abc.ABC):
    """Step along gradients of the product G H^T of every pair, in a metric that is invariant under its group.

    So two runs from two points of one orbit of the pairs' groups compute the same functions, step by step, up to
    rounding. A subclass defines `_direction`, which turns gradients into a direction, and `_plain`, the optimizer of
    torch for elements in no pair. The state of a pair is stored under its name.
    """

    def __init__(
        self,
        params: Parameters,
        symmetries: Symmetries | Any,
        defaults: dict[str, Any],
        plain: Callable[..., torch.optim.Optimizer],
        *,
        metric: str,
        max_norm: float | None,
    ) -> None:
        check_symmetries(symmetries)
        if max_norm is not None:
            check_number("max_norm", max_norm, positive=True)
        if isinstance(params, (torch.nn.Module, Tensor)) or not isinstance(params, Iterable):
            raise TypeError(f"{NAMED}. Found {type(params).__name__}")
        groups: list[Any] = [dict(each) if isinstance(each, Mapping) else each for each in params]
        self._symmetries, self._max_norm = symmetries, max_norm
        self._plain = plain([torch.zeros(1)], **defaults)  # raises for settings it does not have
        self._settings, self._clipped = {*defaults, "metric"}, 0
        super().__init__(groups, self._plain.defaults | {"metric": metric})
        self._batches = self._batched()

    @property
    def _state(self) -> MutableMapping[Any, Any]:
        return self.state

    @abc.abstractmethod
    def _direction(self, job: Job) -> Tensor:
        """Return the direction of a step in orthonormal coordinates, and write the new state to `job.memory`."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of named parameters, as torch's optimizers do; a pair must be in one group as a whole.

        Raises ValueError for unknown settings.
        """
        for name, value in param_group.items():
            default = name in self._plain.defaults and self._plain.defaults[name] == value
            if not (default or name in self._settings or name in _OF_EVERY_GROUP):
                known = ", ".join(sorted(self._settings))
                raise ValueError(f"settings of a group must be among {known}. Found {name} = {value!r}")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        names = set(group.get("param_names", ()))
        group["pairs"] = [pair.name for pair in self._symmetries.pairs if not names.isdisjoint(pair.names)]
        if hasattr(self, "_batches"):  # after the constructor
            try:
                self._batches = self._batched()
            except ValueError:
                self.param_groups.pop()
                raise

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Make one step, and return the closure's result, if one is given.

        Pairs none of whose parameters has a gradient do not change. Raises ValueError, with nothing changed, if a
        gradient is NaN, infinite or sparse, or if only some parameters of a pair have one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @full_precision
    def _step(self) -> None:
        if self._trained != self._with_requirement():
            self._batches = self._batched()  # parameters were frozen or unfrozen since
        self._check_gradients()
        params = {name: p.detach() for name, p in self._of_pairs.items()}
        jobs = [job for index, batch in self._batches for job in self._jobs(self.param_groups[index], batch, params)]
        if self._max_norm is not None:
            self._clip(jobs, self._max_norm)
        ends = [self._end(job) for job in jobs]
        with self._outside_pairs():
            step: Any = type(self._plain).step
            step = step.__wrapped__ if getattr(step, "hooked", False) else step  # hooks are called for this optimizer
            step(self._plain)
        for job, end in zip(jobs, ends, strict=True):
            job.batch.write(end, params)
            self._remember(job)

    def _jobs(self, group: dict[str, Any], batch: PairBatch, params: Params) -> Iterator[Job]:
        """Yield jobs for the pairs of a batch that have gradients; pairs with the same number of steps share a job."""
        grads = {name: grad for name in batch.names if (grad := self._of_pairs[name].grad) is not None}
        ages: dict[int, list[SymmetricPair]] = {}
        for pair in batch.pairs:
            missing = [name for name in pair.names if name not in grads]
            if not missing:
                ages.setdefault(int(self._state.get(pair.name, {}).get("step", 0)), []).append(pair)
            elif len(missing) < len(pair.names):
                raise ValueError(
                    f"all parameters of the pair {pair.name!r} must have a gradient, or none. Found that {missing[0]} "
                    "has none: if a module was replaced or frozen since, make a new optimizer from the model as it is"
                )
        for steps, pairs in ages.items():
            part = batch if len(pairs) == len(batch.pairs) else PairBatch(tuple(pairs))
            first = part.pairs[0]
            x, gradient = (part.read(each) for each in (params, grads))
            x, gradient = (each.to(torch.promote_types(x.dtype, torch.float32)) for each in (x, gradient))
            point = Point(x, first.n, METRICS[group["metric"]], first.acts == "GL(1, C)")
            kept = {name: self._recalled(part, name, x) for name in self._state.get(first.name, {}) if name != "step"}
            if (turn := point.to_balanced()) is not None:  # the product and its gradient are unchanged
                point = Point(applied(x.double(), point.n, turn).to(x.dtype), point.n, point.t, point.complex)
                back = turn[::-1]
                gradient = applied(gradient.double(), point.n, back).to(x.dtype)
                if "gradient" in kept:
                    kept["gradient"] = applied(kept["gradient"].double(), point.n, back).to(x.dtype)
            yield Job(part, group, steps, point, gradient, kept)

    def _end(self, job: Job) -> Tensor:
        """Return the new factors of a batch of pairs, and transport remembered gradients there."""
        lr = float(job.group["lr"])
        shrink = 1 - lr * float(job.group["weight_decay"])
        z = self._direction(job)
        end, on = job.point.stepped(z, lr, shrink)
        if "gradient" in job.memory:
            job.memory["gradient"] = job.point.carried(job.memory["gradient"], z, on, shrink)
        return end

    def _recalled(self, batch: PairBatch, name: str, like: Tensor) -> Tensor:
        """Return the state of this name of all pairs, (heads of all, n + m, columns)."""
        parts = [self._state[pair.name][name] for pair in batch.pairs]
        whole, begins = parts[0]._base, accumulate(batch.heads, initial=0)
        if whole is None or len(whole) != len(like):
            return torch.cat(parts).to(like)
        same = (
            p._base is whole and p.storage_offset() == b * whole.stride(0) for p, b in zip(parts, begins, strict=False)
        )
        return (whole if all(same) else torch.cat(parts)).to(like)  # whole: as split after the last step

    def _remember(self, job: Job) -> None:
        step = torch.tensor(job.steps + 1.0)
        parts = zip(*(value.split(job.batch.heads) for value in job.memory.values()), strict=True)
        for pair, own in zip(job.batch.pairs, parts if job.memory else repeat(()), strict=False):
            # The dict is new, because another optimizer may have been given this one's state.
            self._state[pair.name] = {**dict(zip(job.memory, own, strict=True)), "step": step}

    def _clip(self, jobs: list[Job], limit: float) -> None:
        """Scale all gradients together down to a norm that is constant along orbits, if theirs is larger."""
        sizes = [torch.linalg.vector_norm(job.point.coordinates(job.gradient)) for job in jobs]
        for name, p in self._named():
            if p.grad is not None and name not in self._owned:
                outside = self._outside.get(name)
                sizes.append(torch.linalg.vector_norm(p.grad if outside is None else p.grad * outside))
        factor = limit / (math.hypot(*map(float, sizes)) + 1e-6)
        if factor < 1:
            torch._foreach_mul_([p.grad for _, p in self._named() if p.grad is not None], factor)
            for job in jobs:
                job.gradient = job.gradient * factor

    @contextmanager
    def _outside_pairs(self) -> Iterator[None]:
        """Give the plain optimizer this one's groups and state, and hide gradients of what pairs own entirely."""
        self._plain.param_groups, self._plain.state = self.param_groups, self.state
        hidden = [(p, p.grad) for name, p in self._of_pairs.items() if name in self._owned]
        try:
            for p, _ in hidden:
                p.grad = None
            yield
        finally:
            for p, grad in hidden:
                p.grad = grad

    def _check_gradients(self) -> None:
        named = [(name, p.grad) for name, p in self._named() if p.grad is not None]
        if sparse := [name for name, grad in named if grad.layout != torch.strided]:
            raise ValueError(f"gradients must be dense. Found a sparse one of {sparse[0]}: make its layer sparse=False")
        if not named:
            return
        sizes = torch._foreach_norm([grad for _, grad in named])
        numbers = torch.stack([size.float().to(sizes[0].device) for size in sizes]).tolist()
        self._warn_of_clipping(math.hypot(*numbers))
        finite = [math.isfinite(size) for size in numbers]
        for (name, grad), fine in zip(named, finite, strict=True):
            if not fine and not bool(grad.isfinite().all()):  # a norm may overflow although no entry does
                raise ValueError(
                    f"gradients must be finite. Found that of {name} holds NaN or infinity, and nothing was changed: "
                    "skip this batch, or take a smaller lr"
                )

    def _warn_of_clipping(self, size: float) -> None:
        """Warn once if the gradients have norm 1 at two steps in a row, as if a trainer had clipped them to 1."""
        clipped = abs(size - 1) < CLIPPED and len(self._of_pairs) > 0
        self._clipped = self._clipped + 1 if clipped else min(self._clipped, WARNED) * (self._clipped >= WARNED)
        if clipped and self._clipped == WARNED:
            warnings.warn(
                "gradients were clipped to norm 1 before the step, so the run depends on how pairs are factored: give "
                "max_norm= to the optimizer instead, and max_grad_norm=0 to Hugging Face's TrainingArguments, whose "
                "default is 1.0",
                stacklevel=5,
            )

    def _with_requirement(self) -> set[str]:
        return {name for name, p in self._of_pairs.items() if p.requires_grad}

    def _named(self) -> list[tuple[str, Tensor]]:
        groups = self.param_groups
        return [each for g in groups for each in zip(g["param_names"], g["params"], strict=True)]

    def _batched(self) -> list[tuple[int, PairBatch]]:
        """Return the pairs to optimize in batches of one shape, each with the index of its group."""
        place: dict[str, int] = {}
        for index, group in enumerate(self.param_groups):
            check_one_of("metric", group["metric"], METRICS)
            if "param_names" not in group:
                raise ValueError(f"{NAMED}. Found no names")
            place |= dict.fromkeys(group["param_names"], index)
        params = dict(self._named())
        named = {name for pair in self._symmetries.pairs for name in pair.names}
        if named and named.isdisjoint(params):
            raise ValueError(
                f"symmetries must be of the model whose parameters these are. Found {min(named)!r} there and "
                f"{next(iter(params))!r} here: take names and symmetries from one module, the one inside of any wrapper"
            )
        self._of_pairs = {name: params[name] for name in named if name in params}
        required = self._with_requirement()
        chosen = check_whole(self._symmetries.pairs, required)
        for pair in chosen:
            _require_one_place(pair, params, place)
        self._trained = required  # set only now, so that a refused pair is refused again
        ones = {name: torch.ones_like(params[name]) for pair in chosen for name in pair.names}
        self._outside = scales_outside(chosen, ones)  # raises if pairs share elements
        self._owned = ones.keys() - self._outside.keys()

        def apart(pair: SymmetricPair) -> tuple[object, ...]:
            p = params[pair.names[0]]
            return place[pair.names[0]], p.dtype, p.device

        return [(place[batch.pairs[0].names[0]], batch) for batch in in_batches(chosen, apart)]

    def __getstate__(self) -> dict[str, Any]:
        own = ("_clipped", "_symmetries", "_max_norm", "_plain", "_settings")
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._batches = self._batched()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer of the same model; ValueError, with nothing changed, if it is of another.

        The state of pairs must have their names and shapes.
        """
        kind = type(self).__name__
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            missing = {*self.defaults, "param_names", "pairs"} - saved.keys()
            if missing or own["param_names"] != saved["param_names"]:
                found = f"groups without {min(missing)!r}" if missing else "groups with other parameters"
                raise ValueError(f"the state must be that of a {kind} of the same model. Found {found}")
            if other := {*own["pairs"]} ^ {*saved["pairs"]}:
                raise ValueError(
                    f"the state must be that of a {kind} with the same pairs. Found a pair in one of both only, "
                    f"{min(other)!r}: make the optimizer with the symmetries it had"
                )
        for pair in self._symmetries.pairs:
            rows, kept = (pair.heads, pair.n + pair.m), state_dict["state"].get(pair.name, {})
            shapes = {name: (*rows, pair.h if name == "gradient" else 1) for name in kept if name != "step"}
            if any(kept[name].shape != shape for name, shape in shapes.items()):
                raise ValueError(
                    f"the state must be that of a {kind} of the same model. Found another shape of {pair.name!r}"
                )
        super().load_state_dict(state_dict)


def _require_one_place(pair: SymmetricPair, params: Params, place: Mapping[str, int]) -> None:
    """Raise ValueError if a pair cannot be read as one tensor, or has more columns than rows."""
    kinds = {f"{params[name].dtype} on {params[name].device}" for name in pair.names}
    if len({place[name] for name in pair.names}) > 1:
        reason = f"in one group of parameters. Found {', '.join(pair.names)} in several: put them together"
    elif len(kinds) > 1:
        reason = f"on one device in one dtype. Found {' and '.join(sorted(kinds))}: move it"
    elif pair.h > min(pair.n, pair.m):
        reason = f"of no more columns than rows. Found {pair.h} x {min(pair.n, pair.m)}: take a smaller rank"
    else:
        return
    raise ValueError(f"the pair {pair.name!r} must be {reason}, or pass symmetries without it (Symmetries.without)")
