"""Compute the relative flatness of one linear layer (Petzka et al., NeurIPS 2021)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from quotient_manifolds.geometry import Euclidean, Geometry
from quotient_manifolds.progress import Progress
from quotient_manifolds.replica import private_batch
from quotient_manifolds.sharpness.losses import IGNORED, Loss, inputs_and_labels
from quotient_manifolds.sharpness.measure import KnownAscents, Measure
from quotient_manifolds.sharpness.objective import BatchObjective, scalar
from quotient_manifolds.sharpness.result import BatchResult, Result

METHODS = ("closed", "loop")


@final
@dataclass(frozen=True)
class RelativeFlatness(Measure):
    """Compute kappa of one linear layer, see `relative_flatness`, by Euclidean derivatives: no other geometry fits."""

    name: ClassVar[str] = "relative flatness"

    geometry: Geometry = field(default=Euclidean(), init=False)
    layer: str
    method: Literal["closed", "loop"] = "closed"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}. Found {self.method!r}")

    def ticks(self, model: nn.Module) -> int:
        return _linear(model, self.layer).weight.numel() + 1 if self.method == "loop" else 1

    def compute(self, objective: BatchObjective, ascents: KnownAscents) -> BatchResult:
        weight = _linear(objective.model, self.layer).weight.detach()
        if self.method == "loop":
            base, value = _loop(objective, f"{self.layer}.weight", weight)
            return BatchResult(value, base, forward_passes=1, backward_passes=weight.numel() + 1)
        base, value = _closed(objective, self.layer, weight)
        objective.tick()
        return BatchResult(value, base, forward_passes=1, backward_passes=0)


def relative_flatness(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    layer: str,
    method: Literal["closed", "loop"] = "closed",
    progress: Progress | None = None,
) -> Result:
    """Compute the relative flatness of one linear layer (Petzka et al., 2021), which is larger the sharper the loss is.

    kappa = sum over rows s, s' of <w_s, w_s'> tr H_ss' for the weight W of an nn.Linear, its bias left out.

    H_ss' is the block of the loss's Hessian with respect to rows s and s'. method "closed": for a layer whose output
    are the logits of a mean cross-entropy, E[|phi|^2 (sum_c p_c |w_c|^2 - |sum_c p_c w_c|^2)] with phi the layer's
    input and p the softmax of its output, one forward pass. "loop": any linear layer and loss, rows x columns backward
    passes, for small layers and for checking.

    Invariant along the orbits of symmetries that leave this layer's weight and input alone, as those of attention
    leave a classifier's head; and under scaling of the layer against the one before it.

    Raises ValueError if the loss is not the mean cross-entropy of the layer's output ("closed") or the layer's weight
    is shared with another module, and as `worst_case_sharpness` does. progress counts forward or backward passes.

    Source: Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.
    """
    return RelativeFlatness(layer, method, progress=progress).of(model, loss, batches)


def _closed(objective: BatchObjective, layer: str, weight: Tensor) -> tuple[float, float]:
    """Return the loss and kappa from one forward pass: for cross-entropy the logits' Hessian is diag(p) - p p^T."""
    seen: list[tuple[Tensor, Tensor]] = []

    def look(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append((inputs[0].detach(), output.detach()))

    model, loss = objective.replica({})
    model.get_submodule(layer).register_forward_hook(look)
    with torch.no_grad():
        base = float(scalar(loss(model, private_batch(objective.batch, objective.cast))))
    if len(seen) != 1:
        raise ValueError(
            f"The layer must be called once in a forward pass. Found {len(seen)} calls on batch {objective.index}"
        )
    phi, logits = (tensor.flatten(0, -2) for tensor in seen[0])  # (examples, rows), (examples, classes)
    labels = inputs_and_labels(objective.batch)[1].flatten()
    same = logits.shape[0] == labels.shape[0]
    expected = float(nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED)) if same else float("nan")
    if not abs(expected - base) <= 64 * torch.finfo(logits.dtype).eps * max(1.0, abs(base)):
        raise ValueError(
            f"The closed form holds for the mean cross-entropy of the layer's output. Found a loss of {base:.6g} on "
            f"batch {objective.index}, where that is {expected:.6g}; use method='loop'"
        )
    labelled = labels != IGNORED
    phi, p, w = phi[labelled].double(), logits[labelled].double().softmax(-1), weight.double()
    scatter = p @ (w**2).sum(dim=1) - ((p @ w) ** 2).sum(dim=1)
    return base, float(((phi**2).sum(dim=1) * scatter).mean())


def _loop(objective: BatchObjective, name: str, weight: Tensor) -> tuple[float, float]:
    """Return the loss and kappa by the definition: one row of the Hessian for every element of the weight."""
    leaf = weight.clone().requires_grad_()
    gram = (weight @ weight.mT).double()
    total = 0.0
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels of attention have no second derivative
        value = objective.differentiable_loss({name: leaf})
        (slope,) = torch.autograd.grad(value, leaf, create_graph=True, materialize_grads=True)
        objective.tick()
        for row in range(weight.shape[0]):
            for column in range(weight.shape[1]):
                if slope.requires_grad:
                    (second,) = torch.autograd.grad(slope[row, column], leaf, retain_graph=True, materialize_grads=True)
                    total += float(gram[row] @ second[:, column].double())
                objective.tick()
    return float(value.detach()), total


def _linear(model: nn.Module, layer: str) -> nn.Linear:
    linear = dict(model.named_modules()).get(layer)
    if not isinstance(linear, nn.Linear):
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise ValueError(f"layer must name an nn.Linear of the model. Found {layer!r}; it has {', '.join(linears)}")
    owners = [
        name for name, module in model.named_modules() for w in module.parameters(recurse=False) if w is linear.weight
    ]
    if len(owners) > 1:
        raise ValueError(f"The weight of {layer} must be its own. It is shared by {', '.join(owners)}")
    return linear
