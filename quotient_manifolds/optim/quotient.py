"""Optimize symmetric pairs on their quotient, and all other parameters as an optimizer of torch does."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.geometry.parameters import scales_outside
from quotient_manifolds.linalg import full_precision
from quotient_manifolds.manifolds import METRICS
from quotient_manifolds.optim.frame import Both
from quotient_manifolds.optim.pairs import PairBatch, Parameters, is_optimized, listed
from quotient_manifolds.optim.step import Point
from quotient_manifolds.symmetries import SymmetricPair, Symmetries

Closure = Callable[[], Any]

_OF_EVERY_GROUP = ("params", "param_names", "initial_lr", "foreach", "capturable", "differentiable", "fused")
"""What a group may say besides: schedulers write one of these, and the others choose how parameters of no pair go."""


class Job:
    """Hold what a step makes of one batch of pairs, computed before anything is written."""

    def __init__(self, batch: PairBatch, group: Mapping[str, Any], gradient: Both) -> None:
        G, H = batch.factors()
        self.batch, self.group, self.gradient = batch, group, gradient
        self.point = Point(G, H, METRICS[group["metric"]], batch.complex)
        self.width = G.shape[-1]
        self.memory: dict[str, Both] = {}
        self.end: Both = (G, H)


class QuotientOptimizer(torch.optim.Optimizer, abc.ABC):
    """Step along gradients of the product G H^T of every pair, in a metric that its group leaves alone.

    Two runs from two points of one orbit of the pairs' groups so compute the same functions, step by step, up to
    rounding. What is particular to an optimizer is `_direction`, what it makes of gradients, and `_plain`, the
    optimizer of torch that moves the elements in no pair.
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
        if not isinstance(symmetries, Symmetries):
            found = type(symmetries).__name__
            raise TypeError(f"symmetries must be Symmetries, as find_symmetries returns them. Found {found}")
        if max_norm is not None and not 0 < max_norm < math.inf:
            raise ValueError(f"max_norm must be a positive number or None. Found {max_norm!r}")
        groups = [dict(group) if isinstance(group, Mapping) else group for group in listed(params)]
        self._symmetries, self._max_norm = symmetries, max_norm
        self._plain = plain([torch.zeros(1)], **defaults)  # refuses what is no setting of it
        self._settings = frozenset((*defaults, "metric", *_OF_EVERY_GROUP))
        self._ready = False
        super().__init__(groups, self._plain.defaults | {"metric": metric})
        self._ready = True
        self._batches = self._batched()

    @abc.abstractmethod
    def _direction(self, job: Job) -> Both:
        """Return the direction of a step in orthonormal coordinates, and write to `job.memory` what to remember."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of named parameters, as torch's optimizers do; a pair has to be in one group as a whole.

        Raises ValueError for settings that steps of pairs do not use.
        """
        for name, value in param_group.items():
            default = name in self._plain.defaults and self._plain.defaults[name] == value
            if name not in self._settings and not default:
                known = ", ".join(sorted(self._settings.difference(_OF_EVERY_GROUP)))
                raise ValueError(f"settings of a group must be among {known}. Found {name} = {value!r}")
        super().add_param_group(param_group)
        if self._ready:
            try:
                self._batches = self._batched()
            except ValueError:
                self.param_groups.pop()
                raise

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Make one step, and return what the closure returns, if one is given.

        Pairs of which no parameter has a gradient stay, as parameters without one do. Raises ValueError, with nothing
        changed, for a gradient that is NaN, infinite or sparse, and for a pair of which only some parameters have one.
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
            self._batches = self._batched()  # something was frozen since, or is no more
        self._check_gradients()
        jobs = [Job(batch, self.param_groups[index], batch.gradients()) for index, batch in self._with_gradients()]
        if self._max_norm is not None:
            self._clip(jobs, self._max_norm)
        for job in jobs:
            self._compute(job)
        with self._outside_pairs():
            step: Any = type(self._plain).step
            step = step.__wrapped__ if getattr(step, "hooked", False) else step  # hooks are called for this optimizer
            step(self._plain)
        for job in jobs:
            job.batch.write(*job.end)
            for name, values in job.memory.items():
                job.batch.remember(self.state, name, values)
            job.batch.counted(self.state)

    def _compute(self, job: Job) -> None:
        """Find where a batch of pairs goes, and bring what is remembered of gradients there."""
        group = job.group
        if group.get("maximize"):
            job.gradient = (-job.gradient[0], -job.gradient[1])
        lr = float(group["lr"])
        shrink = 1 - lr * float(group["weight_decay"])
        job.end = job.point.moved(self._direction(job), lr, shrink)
        if "gradient" in job.memory:
            job.memory["gradient"] = job.point.carried(job.memory["gradient"], job.end)

    def _clip(self, jobs: list[Job], limit: float) -> None:
        """Shorten all gradients together to a norm that is the same along orbits, if theirs is larger."""
        sizes = [torch.linalg.vector_norm(z) for job in jobs for z in job.point.coordinates(job.gradient)]
        outside = self._gradients_outside()
        sizes += torch._foreach_norm(outside) if outside else []
        factor = limit / (float(torch.stack([size.double().cpu() for size in sizes]).norm()) + 1e-6) if sizes else 1.0
        if factor < 1:
            torch._foreach_mul_([p.grad for _, p in self._named() if p.grad is not None], factor)
            for job in jobs:
                job.gradient = (job.gradient[0] * factor, job.gradient[1] * factor)

    def _gradients_outside(self) -> list[Tensor]:
        """Return the gradients of all parameters that no pair owns entirely, 0 where one owns elements of them."""
        grads = {name: p.grad for name, p in self._named() if p.grad is not None and name not in self._owned}
        for _, batch in self._batches:
            for pair in batch.pairs:
                if shared := [name for name in pair.names if name in grads]:
                    own = {name: grads.get(name, batch.params[name].detach()).clone() for name in pair.names}
                    pair.write(own, torch.zeros_like(pair.read(own)))
                    grads |= {name: own[name] for name in shared}
        return list(grads.values())

    @contextmanager
    def _outside_pairs(self) -> Iterator[None]:
        """Let the plain optimizer see this one's groups and state, and no gradient of what pairs own entirely."""
        self._plain.param_groups, self._plain.state = self.param_groups, self.state
        owned = self._owned
        hidden = [(p, p.grad) for name, p in self._named() if name in owned]
        try:
            for p, _ in hidden:
                p.grad = None
            yield
        finally:
            for p, grad in hidden:
                p.grad = grad

    def _with_gradients(self) -> list[tuple[int, PairBatch]]:
        """Return the batches whose parameters have gradients, or raise ValueError for one that has them in part."""
        found: list[tuple[int, PairBatch]] = []
        for index, batch in self._batches:
            grads = {name: batch.params[name].grad for name in batch.names}
            missing = [name for name, grad in grads.items() if grad is None]
            if not missing:
                found.append((index, batch))
            elif len(missing) < len(grads):
                found.extend((index, part) for part in self._split(batch, set(missing)))
        return found

    def _split(self, batch: PairBatch, missing: set[str]) -> list[PairBatch]:
        """Return the pairs of a batch one by one that have gradients; ValueError for one that has them in part."""
        parts = []
        for pair in batch.pairs:
            without = [name for name in pair.names if name in missing]
            if without and len(without) < len(pair.names):
                raise ValueError(
                    f"all parameters of the pair {pair.name!r} must have a gradient, or none. Found that "
                    f"{without[0]} has none: if a module was replaced or frozen since, "
                    "make a new optimizer from the model as it is now"
                )
            if not without:
                parts.append(PairBatch((pair,), batch.params))
        return parts

    def _check_gradients(self) -> None:
        named = [(name, p.grad) for name, p in self._named() if p.grad is not None]
        if sparse := [name for name, grad in named if grad.layout != torch.strided]:
            raise ValueError(f"gradients must be dense. Found a sparse one of {sparse[0]}: make its layer sparse=False")
        if not named:
            return
        sizes = torch._foreach_norm([grad for _, grad in named])
        finite = torch.stack([size.float().to(sizes[0].device) for size in sizes]).isfinite().tolist()
        for (name, grad), fine in zip(named, finite, strict=True):
            if not fine and not bool(grad.isfinite().all()):  # a norm may overflow where no entry does
                raise ValueError(
                    f"gradients must be finite. Found that of {name} holds NaN or infinity, and nothing was changed: "
                    "skip this batch, or take a smaller lr"
                )

    def _with_requirement(self) -> frozenset[str]:
        """Return the parameters of pairs that require a gradient."""
        return frozenset(name for name, p in self._of_pairs.items() if p.requires_grad)

    def _named(self) -> list[tuple[str, Tensor]]:
        groups = self.param_groups
        return [each for g in groups for each in zip(g["param_names"], g["params"], strict=True)]

    def _batched(self) -> list[tuple[int, PairBatch]]:
        """Return the pairs to optimize in batches of one shape, each with the index of its group."""
        place: dict[str, int] = {}
        for index, group in enumerate(self.param_groups):
            if group["metric"] not in METRICS:
                raise ValueError(f"metric must be one of {', '.join(METRICS)}. Found {group['metric']!r}")
            if "param_names" not in group:
                raise ValueError(
                    "params must be named, for pairs name theirs: give model.named_parameters(), or groups of such"
                )
            place |= dict.fromkeys(group["param_names"], index)
        params = dict(self._named())
        named = {name for pair in self._symmetries.pairs for name in pair.names}
        if named and named.isdisjoint(params):
            raise ValueError(
                f"symmetries must be of the model whose parameters these are. Found no name like "
                f"{min(named)!r}, but {next(iter(params))!r}, say: take names and symmetries from one module, the one "
                "inside of any wrapper"
            )
        self._of_pairs = {name: params[name] for name in named if name in params}
        chosen = [pair for pair in self._symmetries.pairs if is_optimized(pair, params, place)]
        self._trained = self._with_requirement()  # only now: what is refused is refused again
        trained = {name: p.detach() for name, p in params.items()}
        outside = scales_outside(chosen, trained)  # refuses pairs that share elements
        self._owned = {name for pair in chosen for name in pair.names if name not in outside}
        batches: dict[tuple[Any, ...], list[SymmetricPair]] = {}
        for pair in chosen:
            p = params[pair.names[0]]
            shape = (place[pair.names[0]], pair.n, pair.m, pair.h, pair.acts, p.dtype, p.device)
            batches.setdefault(shape, []).append(pair)
        return [(shape[0], PairBatch(tuple(pairs), params)) for shape, pairs in batches.items()]

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("_symmetries", "_max_norm", "_plain", "_ready", "_settings")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._batches = self._batched()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's optimizers do, with the names of all pairs, also those without steps so far."""
        return {**super().state_dict(), "pairs": [pair.name for pair in self._symmetries.pairs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of an optimizer of the same model; ValueError, with nothing changed, if it is of another.

        What is remembered of pairs has their names and shapes.
        """
        pairs = {pair.name: pair for pair in self._symmetries.pairs}
        kind = type(self).__name__
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            missing = {*self.defaults, "param_names"} - saved.keys()
            if missing or own["param_names"] != saved["param_names"]:
                found = f"groups without {min(missing)!r}" if missing else "groups with other parameters"
                raise ValueError(f"the state must be that of a {kind} of the same model. Found {found}")
        if other := pairs.keys() ^ state_dict.get("pairs", ()):
            which = "that the state lacks" if min(other) in pairs else "only in the state"
            raise ValueError(
                f"the state must be that of a {kind} with the same pairs. Found a pair {which}, {min(other)!r}: make "
                "the optimizer with the symmetries it had"
            )
        for name, kept in state_dict["state"].items():
            if not isinstance(name, str):
                continue
            pair = pairs[name]
            if any(
                value.shape[:2] != (pair.heads, {"G": pair.n, "H": pair.m}[key[-1]])
                or value.shape[2] not in (1, pair.h)
                for key, value in kept.items()
                if value.ndim
            ):
                raise ValueError(
                    f"the state must be that of a {kind} of the same model. Found another shape of the pair {name!r}"
                )
        super().load_state_dict(state_dict)


def combined(a: Both, factor: float, b: Both, other: float | Tensor) -> Both:
    """Return factor a + other b."""
    return a[0] * factor + b[0] * other, a[1] * factor + b[1] * other
