"""Minimize the loss after the first step of ascent: sharpness-aware minimization in any geometry."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn

from quotient_manifolds.check import check_number
from quotient_manifolds.geometry import Geometry, as_geometry
from quotient_manifolds.geometry.parameters import measured_parameters
from quotient_manifolds.sharpness.ball import BALLS
from quotient_manifolds.symmetries.checks import check_model

Closure = Callable[[], Any]


@final
class SAM(torch.optim.Optimizer):
    """Step an optimizer along the gradients at w + xi, with |xi| = radius and xi the steepest ascent from w.

    xi is the first step of the ascent that measures worst-case sharpness, in the same coordinates. `Euclidean()` gives
    SAM (Foret et al., arXiv 2010.01412). `Adaptive(0.01)` has the ball of ASAM (Kwon et al., arXiv 2102.11600) for all
    parameters alike, including biases. `Quotient("mix", symmetries=...)` follows the second-order geodesic of every
    pair (or the one set by `geodesic`), and treats all other weights as `Adaptive` does. Its steps do not depend on the
    representative of a pair if the steps of the base do not: use `QuotientSGD` or `QuotientAdam`.

    base: the optimizer; its groups, state and `state_dict` are shared. model: the model whose parameters the base
    steps. radius: in the geometry's norm; parameters that the base does not step are not perturbed. Both passes update
    buffers, such as running statistics. The geometry must be given its symmetries
    (`symmetries=find_symmetries(model, batch)`). Only their pairs are quotiented out, at the current weights.

    A step, `step(closure)`, takes two passes. The closure sets gradients to zero, computes the loss (of all
    micro-batches, if there are several) and calls backward. With a gradient scaler, or in a custom loop, run the second
    pass in `with sam.perturbed():`, and step the base afterwards.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        model: nn.Module,
        *,
        geometry: Geometry | str | float = "euclidean",
        radius: float,
    ) -> None:
        geometry = as_geometry(geometry)
        check_number("radius", radius)
        check_model(model)
        if not isinstance(base, torch.optim.Optimizer):
            raise TypeError(f"base must be an optimizer, as torch.optim.SGD(model.parameters()). Found {base!r}")
        self.base, self._model, self._geometry, self.radius = base, model, geometry, float(radius)
        own = {id(p) for p in model.parameters()}
        if any(id(p) not in own for group in base.param_groups for p in group["params"]):
            raise ValueError("base must step parameters of the model. Found some that are none of its: make it anew")
        measured_parameters(model)  # raises if they cannot be measured
        geometry.tangent_space_in_place(model)
        super().__init__(base.param_groups, base.defaults)
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("base", "_model", "_geometry", "radius")}
        return {**super().__getstate__(), **own}

    def _share(self) -> None:
        """Share the groups and the state of the base, also if the base has replaced them."""
        self.param_groups, self.state = self.base.param_groups, self.base.state

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Make one step, and return the closure's result at the weights before it."""
        if closure is None:
            raise ValueError(
                "a step takes two passes, so step(closure) needs a closure that computes the loss and gradients; or "
                "put the second pass into `with sam.perturbed():` and call base.step()"
            )
        with torch.enable_grad():
            loss = closure()
            with self.perturbed():
                closure()
        self.base.step()
        return loss

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """Move the weights to w + xi by their current gradients; on every exit restore w, bit for bit.

        The weights stay at w if all gradients are 0, or if one is not finite, as may happen with a scaled loss: there
        is no direction of ascent.
        """
        self._share()
        params = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        kept = {name: p.detach().clone() for name, p in params.items()}
        try:
            with torch.no_grad():
                self._rise({name: p.detach() for name, p in params.items()})
            yield
        finally:
            with torch.no_grad():
                for name, p in params.items():
                    p.copy_(kept[name])

    def _rise(self, params: dict[str, torch.Tensor]) -> None:
        """Move the parameters to the end of the first step of ascent, if there is one."""
        stepped = {id(p) for group in self.base.param_groups for p in group["params"]}
        named = dict(self._model.named_parameters())
        grads = {name: named[name].grad if id(named[name]) in stepped else None for name in params}
        grads = {name: None if grad is None else grad.to_dense() for name, grad in grads.items()}
        if not all(grad is None or bool(grad.isfinite().all()) for grad in grads.values()):
            return
        space = self._geometry.tangent_space_in_place(self._model)
        z = space.gradient(grads)
        length = BALLS[space.norm](self.radius).length(z)
        if not math.isfinite(length):
            raise ValueError(
                f"the gradient must be finite in the coordinates of {self._geometry.name}. Found NaN or infinity: "
                "leave out pairs that lack rank (Symmetries.without)"
            )
        if length and space.norm == "linf":
            space.move({key: block.sign() for key, block in z.items()}, params, times=self.radius)
        elif length:
            space.move(z, params, times=self.radius / length)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base."""
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of another base of this kind."""
        self.base.load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base."""
        if hasattr(self, "param_groups") and self.param_groups is self.base.param_groups:
            self.base.add_param_group(param_group)
        else:
            super().add_param_group(param_group)
