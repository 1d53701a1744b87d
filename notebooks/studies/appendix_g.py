"""Redo the ablations of the paper's Appendix G on the models of a zoo: other balls, and relative flatness."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from quotient_manifolds.compare import read_spec
from quotient_manifolds.files import write_text
from quotient_manifolds.geometry import Euclidean, Geometry, KnownSymmetries, Quotient, TangentSpace
from quotient_manifolds.load import load_checkpoint
from quotient_manifolds.manifolds.arguments import require_vector
from quotient_manifolds.manifolds.horizontal import HorizontalSpace, Linearised, PullBack, Rows
from quotient_manifolds.progress import Progress
from quotient_manifolds.replica import private_batch
from quotient_manifolds.sharpness import BatchResult, Measure, WorstCase, cross_entropy
from quotient_manifolds.sharpness.losses import IGNORED, inputs_and_labels
from quotient_manifolds.sharpness.measure import KnownAscents
from quotient_manifolds.sharpness.objective import BatchObjective, scalar
from quotient_manifolds.symmetries import Evaluate

METHODS = ("closed", "loop")
_NOTHING = 1e-300  # an eps that changes no digit, but keeps the point where it is in its orbit


def measure_zoo(
    out: Path, zoo: Path, *, layer: str, radius: float, steps: int, progress: Progress | None = None
) -> Path:
    """Measure the ablations on every checkpoint of ZOO/zoo.yaml and ZOO/*/zoo.yaml; return OUT/appendix_g.csv.

    The file has a row for each checkpoint and is written after each, so that a run goes on where another stopped.
    """
    out.mkdir(parents=True, exist_ok=True)
    file, columns = out / "appendix_g.csv", [each.label for each in ablations(layer, radius, steps)]
    rows = list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8")))) if file.exists() else []
    done = {(row["zoo"], row["checkpoint"]) for row in rows}
    specs = sorted([*zoo.glob("zoo.yaml"), *zoo.glob("*/zoo.yaml")])
    if not specs:
        raise ValueError(f"There must be a zoo.yaml in {zoo} or in its folders. Found none; run its study first")
    for path in specs:
        spec = read_spec(path)
        for place, each in enumerate(spec.checkpoints):
            if progress is not None:
                progress(f"Appendix G, {path.parent.name}", place, len(spec.checkpoints))
            if (path.parent.name, each.name) in done:
                continue
            model, known = load_checkpoint(each).eval(), KnownSymmetries()
            batches = list(spec.data.batches(model, each))
            found = [one.of(model, cross_entropy, batches, known).mean for one in ablations(layer, radius, steps)]
            values = dict(zip(columns, map(repr, found), strict=True))
            rows.append({"zoo": path.parent.name, "checkpoint": each.name, **values})
            text = io.StringIO()
            writer = csv.DictWriter(text, ["zoo", "checkpoint", *columns], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            write_text(file, text.getvalue())
    return file


def ablations(layer: str, radius: float, steps: int) -> list[Measure]:
    """Return worst cases in the ball of adaptive sharpness around each quotient, and the relative flatness."""
    balls = [WorstCase(AdaptiveNorm(Quotient(metric)), radius, steps=steps) for metric in ("inv", "mix")]
    return [*balls, RelativeFlatness(layer)]


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

    def at(self, model: nn.Module) -> TangentSpace:
        return self._relative(replace(self.quotient, eps=self.quotient.eps or _NOTHING).at(model))

    def around(self, model: nn.Module) -> TangentSpace:
        return self._relative(self.quotient.around(model))

    def over(self, model: object) -> NoReturn:
        raise ValueError("The adaptive norm takes whole models. Found a sharded one")

    def verified(
        self, model: nn.Module, loss: Evaluate, batches: Sequence[Any], known: KnownSymmetries | None = None
    ) -> Geometry:
        verified = self.quotient.verified(model, loss, batches, known)
        assert isinstance(verified, Quotient)
        return AdaptiveNorm(verified)

    @property
    def group(self) -> tuple[str, ...]:
        return self.quotient.group

    def to_dict(self) -> dict[str, Any]:
        """Return kind and settings in plain JSON types."""
        return {**self.quotient.to_dict(), "norm": "adaptive"}

    def _relative(self, space: TangentSpace) -> TangentSpace:
        blocks = []
        for block in space.pairs:
            relative = RelativeSpace(block.space)
            blocks.append(replace(block, space=relative, _linearised=relative.linearised(block.order)))
        return TangentSpace(space._point, space.scale, tuple(blocks))


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

    def linearised(self, order: str) -> Linearised:
        linearise_inner = self.space.linearised(order)  # which is fast, where autograd through all of it is not

        def linearise(z: Tensor, out: Rows) -> PullBack:
            pull_back_inner = linearise_inner(self._velocity(z), out)

            def pull_back(egrad: Rows, into: Tensor) -> None:
                pull_back_inner(egrad, into)
                with torch.enable_grad():  # the velocity is linear in z: its derivative at 0 is that everywhere
                    leaf = torch.zeros_like(self.point, requires_grad=True)
                    velocity = self.space.coordinates(self.vector(leaf))
                into.copy_(torch.autograd.grad(velocity, leaf, into)[0])

            return pull_back

        return linearise

    def _step(self, z: Tensor, order: str) -> Tensor:
        return self.space._step(self._velocity(z), order)

    def _exact(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.space._exact(self._velocity(z))

    def _velocity(self, z: Tensor) -> Tensor:
        return self.space.project(self.space.coordinates(self.vector(z)))


@final
@dataclass(frozen=True)
class RelativeFlatness(Measure):
    """Compute the relative flatness of one linear layer (Petzka et al., 2021), which is larger the sharper the loss is.

    kappa = sum over rows s, s' of <w_s, w_s'> tr H_ss' for the weight W of an nn.Linear, its bias left out.

    H_ss' is the block of the loss's Hessian with respect to rows s and s'. method "closed": for a layer whose output
    are the logits of a mean cross-entropy, E[|phi|^2 (sum_c p_c |w_c|^2 - |sum_c p_c w_c|^2)] with phi the layer's
    input and p the softmax of its output, one forward pass. "loop": any linear layer and loss, rows x columns backward
    passes, for small layers and for checking. By Euclidean derivatives: it has no other geometry.

    Invariant along the orbits of symmetries that leave this layer's weight and input alone, as those of attention
    leave a classifier's head; and under scaling of the layer against the one before it.

    Raises ValueError if the loss is not the mean cross-entropy of the layer's output ("closed") or the layer's weight
    is shared with another module. Source: Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.
    """

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
