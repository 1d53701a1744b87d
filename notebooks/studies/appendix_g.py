"""Redo the ablations of the paper's Appendix G on the models of a zoo: other balls, and relative flatness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, final

import pandas as pd
import torch
from torch import Tensor, nn

from quotient_manifolds import cross_entropy, worst_case_sharpness
from quotient_manifolds.compare import read_spec
from quotient_manifolds.files import write_text
from quotient_manifolds.geometry import Geometry, KnownSymmetries, Quotient, TangentSpace
from quotient_manifolds.load import load_checkpoint
from quotient_manifolds.manifolds.horizontal import HorizontalSpace, require_vector
from quotient_manifolds.messages import Progress
from quotient_manifolds.sharpness.data_checks import IGNORED
from quotient_manifolds.sharpness.losses import inputs_and_labels
from quotient_manifolds.symmetries import Evaluate
from quotient_manifolds.symmetries.horizontal import Horizontal
from studies.common import Record, resume

_NOTHING = 1e-300  # an eps that changes no digit, but keeps the point where it is in its orbit


def measure_zoo(
    out: Path, zoo: Path, *, layer: str, radius: float, steps: int, progress: Progress | None = None
) -> Path:
    """Measure the ablations on every checkpoint of ZOO/zoo.yaml and ZOO/*/zoo.yaml; return OUT/appendix_g.csv.

    A run goes on where another stopped, from OUT/rows.
    """
    specs = sorted([*zoo.glob("zoo.yaml"), *zoo.glob("*/zoo.yaml")])
    if not specs:
        raise ValueError(f"There must be a zoo.yaml in {zoo} or in its folders. Found none; run its study first")
    settings: dict[str, Any] = {"layer": layer, "radius": radius, "steps": steps}
    cells = {
        f"{path.parent.name} {each.name}": partial(_row, path, each.name, settings)
        for path in specs
        for each in read_spec(path).checkpoints
    }
    rows = resume(out / "rows", cells, what="Appendix G", settings=settings, progress=progress)
    write_text(out / "appendix_g.csv", pd.DataFrame(rows).to_csv(index=False))
    return out / "appendix_g.csv"


def _row(path: Path, name: str, settings: dict[str, Any]) -> Record:
    spec = read_spec(path)
    (checkpoint,) = (each for each in spec.checkpoints if each.name == name)
    model = load_checkpoint(checkpoint).eval()
    batches = list(spec.data.batches(model, checkpoint))
    return {"zoo": path.parent.name, "checkpoint": name, **ablations(model, batches, **settings)}


def ablations(model: nn.Module, batches: Sequence[Any], *, layer: str, radius: float, steps: int) -> dict[str, float]:
    """Return worst cases in the ball of adaptive sharpness around each quotient, and relative flatness, by name."""
    found = {
        f"{metric}, adaptive norm": worst_case_sharpness(
            model, cross_entropy, batches, geometry=AdaptiveNorm(Quotient(metric)), radius=radius, steps=steps
        ).mean
        for metric in ("inv", "mix")
    }
    flatness = [relative_flatness(model, batch, layer) for batch in batches]
    return found | {"relative flatness": sum(flatness) / len(flatness)}


@torch.no_grad()
def relative_flatness(model: nn.Module, batch: Any, layer: str) -> float:
    """Compute the relative flatness of the last linear layer (Petzka et al., 2021): larger where the loss is sharper.

    kappa = sum over rows s, s' of <w_s, w_s'> tr H_ss' for the weight W of an nn.Linear, its bias left out; H_ss' is
    the block of the loss's Hessian with respect to rows s and s'. For the mean cross-entropy of the layer's output
    that is E[|phi|^2 (sum_c p_c |w_c|^2 - |sum_c p_c w_c|^2)], with phi the layer's input and p the softmax of its
    output: one forward pass.

    Invariant along the orbits of symmetries that leave this layer's weight and input alone, as those of attention
    leave a classifier's head; and under scaling of the layer against the one before it.

    Raises ValueError if the layer is no nn.Linear, is not called once, or if its output are not the logits.
    Source: Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.
    """
    linear = dict(model.named_modules()).get(layer)
    if not isinstance(linear, nn.Linear):
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise ValueError(f"layer must name an nn.Linear of the model. Found {layer!r}; it has {', '.join(linears)}")
    seen: list[tuple[Tensor, Tensor]] = []
    hook = linear.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    try:
        loss = float(cross_entropy(model, batch))
    finally:
        hook.remove()
    if len(seen) != 1:
        raise ValueError(f"{layer} must be called once in a forward pass. Found {len(seen)} calls")
    phi, logits = (tensor.flatten(0, -2) for tensor in seen[0])  # (examples, rows), (examples, classes)
    labels = inputs_and_labels(batch)[1].flatten()
    same = logits.shape[0] == labels.shape[0]
    expected = float(nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED)) if same else torch.nan
    if not abs(expected - loss) <= 64 * torch.finfo(logits.dtype).eps * max(1.0, abs(loss)):
        raise ValueError(f"The loss must be the mean cross-entropy of the output of {layer}. Found {loss:.6g}")
    labelled = labels != IGNORED
    phi, p, w = phi[labelled].double(), logits[labelled].double().softmax(-1), linear.weight.double()
    scatter = p @ (w**2).sum(dim=1) - ((p @ w) ** 2).sum(dim=1)
    return float(((phi**2).sum(dim=1) * scatter).mean())


@final
@dataclass(frozen=True)
class AdaptiveNorm(Geometry):
    """Measure in a quotient whose ball is that of adaptive sharpness, |xi / w| <= radius on all elements.

    The horizontal part of xi is the velocity of the metric's geodesic, and nothing is invariant. With geodesic "first"
    besides, both are off: adaptive sharpness up to terms of the second order in the radius, those of the vertical part
    of xi, which is left out. [paper, App. G]
    """

    quotient: Quotient

    @property
    def name(self) -> str:
        return f"{self.quotient.name.removesuffix(')')}, adaptive norm)"

    def tangent_space(self, model: nn.Module, known: KnownSymmetries | None = None) -> TangentSpace:
        return self._relative(replace(self.quotient, eps=self.quotient.eps or _NOTHING).tangent_space(model, known))

    def tangent_space_in_place(self, model: nn.Module) -> TangentSpace:
        return self._relative(self.quotient.tangent_space_in_place(model))

    def sharded_space(self, model: object) -> NoReturn:
        raise ValueError("The adaptive norm takes whole models. Found a sharded one")

    def verified(
        self, model: nn.Module, loss: Evaluate, batches: Sequence[Any], known: KnownSymmetries | None = None
    ) -> Geometry:
        verified = self.quotient.verified(model, loss, batches, known)
        assert isinstance(verified, Quotient)
        return AdaptiveNorm(verified)

    def horizontal(self, model: nn.Module, space: TangentSpace, known: KnownSymmetries) -> Horizontal | None:
        return self.quotient.horizontal(model, space, known)

    def failing(
        self, model: nn.Module, loss: Evaluate, batch: Any, index: int, known: KnownSymmetries
    ) -> Mapping[str, str]:
        return self.quotient.failing(model, loss, batch, index, known)

    def without(self, failed: Mapping[str, str], asked: Geometry) -> Geometry:
        return AdaptiveNorm(self.quotient.without(failed, asked))

    @property
    def group(self) -> tuple[str, ...]:
        return self.quotient.group

    def to_dict(self) -> dict[str, Any]:
        """Return kind and settings in plain JSON types."""
        return {**self.quotient.to_dict(), "norm": "adaptive"}

    def _relative(self, space: TangentSpace) -> TangentSpace:
        blocks = tuple(replace(block, space=RelativeSpace(block.space)) for block in space.pairs)
        return TangentSpace(space._point, space.scale, blocks)


@final
class RelativeSpace(HorizontalSpace):
    """Represent another space in the coordinates of adaptive sharpness, |z|^2 = sum (xi / x)^2; entries 0 stay out.

    A geodesic is that of the other space with the horizontal part of xi = x z as its velocity. The norm of z is no
    quotient metric and changes along the orbit: an ablation [paper, App. G].
    """

    def __init__(self, space: HorizontalSpace) -> None:
        super().__init__(space.point, ndim=len(space.dims))
        self.space = space

    def coordinates(self, eta: Tensor) -> Tensor:
        require_vector(self.point, eta, len(self.dims))
        return eta / torch.where(self.point != 0, self.point, torch.inf)

    def vector(self, z: Tensor) -> Tensor:
        return z * self.point

    def covector(self, egrad: Tensor) -> Tensor:
        require_vector(self.point, egrad, len(self.dims))
        return egrad * self.point

    def project(self, z: Tensor) -> Tensor:
        """Set z to 0 where the entry of the point is 0 and cannot move; vertical vectors stay, which move nothing."""
        return z * (self.point != 0)

    def relative_speed(self, z: Tensor) -> Tensor:
        return self.space.relative_speed(self._velocity(z))

    def _step(self, z: Tensor, order: str) -> Tensor:
        return self.space._step(self._velocity(z), order)

    def _exact(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.space._exact(self._velocity(z))

    def _velocity(self, z: Tensor) -> Tensor:
        return self.space.project(self.space.coordinates(self.vector(z)))
