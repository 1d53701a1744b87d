"""The optimizers that are audited, each with one learning rate, without weight decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

import geoopt
import torch
from torch import Tensor, nn

from quotient_manifolds.geometry import Euclidean, Quotient
from quotient_manifolds.manifolds import FixedRankQuotient
from quotient_manifolds.optim import SAM, QuotientAdam, QuotientSGD
from quotient_manifolds.symmetries import Symmetries

Make = Callable[[nn.Module, Symmetries, float], torch.optim.Optimizer]

SAM_RADIUS = 0.05


@final
@dataclass(frozen=True)
class Candidate:
    """Name an optimizer, say who wrote it, and make it of a model and its symmetries at its learning rate."""

    name: str
    source: str
    rate: float
    make: Make
    note: str = ""


@final
class Together(torch.optim.Optimizer):
    """Step several optimizers of one model at the gradients of one pass."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([p for part in parts for group in part.param_groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> Any:
        """Call the closure once, then step every part; some of them take no closure themselves."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


@final
class OnManifolds(torch.optim.Optimizer):
    """Step every adapter as one `ManifoldParameter` by geoopt's RiemannianAdam, and copy the points out."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]], lr: float) -> None:
        self.pairs = list(pairs)
        self.points = [
            geoopt.ManifoldParameter(
                torch.cat([B.detach(), A.detach().mT]), manifold=FixedRankQuotient(B.shape[0], A.shape[1], "mix")
            )
            for A, B in self.pairs
        ]
        self.below = geoopt.optim.RiemannianAdam(self.points, lr=lr)
        super().__init__([p for pair in self.pairs for p in pair], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step the points, and copy them into the factors."""
        for (A, B), point in zip(self.pairs, self.points, strict=True):
            assert A.grad is not None
            assert B.grad is not None
            point.grad = torch.cat([B.grad, A.grad.mT])
        self.below.step()
        for (A, B), point in zip(self.pairs, self.points, strict=True):
            B.copy_(point[: B.shape[0]])
            A.copy_(point[B.shape[0] :].mT)


def candidates() -> list[Candidate]:
    """Return all optimizers of the table, in its order."""
    import pytorch_optimizer as third

    torchs, thirds, pefts, ours = "torch", "pytorch_optimizer", "peft", "quotient_manifolds"
    rest = "the head's bias by AdamW"
    return [
        Candidate("AdamW", torchs, 1e-2, _plain(torch.optim.AdamW, weight_decay=0.0)),
        Candidate("SGD", torchs, 0.1, _plain(torch.optim.SGD, momentum=0.9), "momentum 0.9"),
        Candidate("Adafactor", torchs, 0.1, _plain(torch.optim.Adafactor, weight_decay=0.0)),
        Candidate("Muon", torchs, 2e-2, _muon, rest),
        Candidate("Lion", thirds, 2e-3, _plain(third.Lion)),
        Candidate(
            "Shampoo", thirds, 0.1, _plain(third.ScalableShampoo, **_SHAMPOO), "ScalableShampoo, anew at each step"
        ),
        Candidate("SOAP", thirds, 1e-2, _plain(third.SOAP, weight_decay=0.0)),
        Candidate("Muon", thirds, 2e-2, _third_muon, rest),
        Candidate(
            "LoRA-RITE",
            thirds,
            1e-2,
            _lora_rite(update_skipping=0.0, clip_unmagnified_grad=0.0),
            "skipping of updates and clipping off; the head by AdamW",
        ),
        Candidate("LoRA-RITE", thirds, 1e-2, _lora_rite(), "as it comes; the head by AdamW"),
        Candidate("preconditioned AdamW", pefts, 1e-2, _preconditioned(torch.optim.AdamW, weight_decay=0.0)),
        Candidate("preconditioned SGD", pefts, 0.1, _preconditioned(torch.optim.SGD, momentum=0.9), "momentum 0.9"),
        Candidate(
            "preconditioned SGD",
            pefts,
            0.1,
            _preconditioned(torch.optim.SGD, momentum=0.0, reg=0.0),
            "no momentum, no damping (reg=0)",
        ),
        Candidate("RiemannianAdam", "geoopt", 1e-2, _on_manifolds, "on `FixedRankQuotient`, mix; the head by AdamW"),
        Candidate("SAM over AdamW", ours, 1e-2, _sam, f"Euclidean, radius {SAM_RADIUS:g}"),
        Candidate("SAM over QuotientAdam", ours, 1e-2, _geodesic_sam, f"geodesic, mix, radius {SAM_RADIUS:g}"),
        Candidate("QuotientSGD", ours, 0.1, _quotient(QuotientSGD, momentum=0.9), "mix, momentum 0.9"),
        Candidate("QuotientAdam", ours, 1e-2, _quotient(QuotientAdam), "mix"),
        Candidate("QuotientAdam", ours, 1e-3, _quotient(QuotientAdam, metric="inv"), "inv"),
    ]


# As it comes the preconditioner starts at step 25 and is computed anew every 1000 steps: 60 steps would hardly see it.
_SHAMPOO: dict[str, Any] = {"weight_decay": 0.0, "start_preconditioning_step": 2, "preconditioning_compute_steps": 1}


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adapter_pairs(model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Return (A, B) of every adapter."""
    found = _trained(model)
    return [(p, found[name.replace("lora_A", "lora_B")]) for name, p in found.items() if "lora_A" in name]


def _head(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    head = [p for name, p in _trained(model).items() if "lora_" not in name]
    return torch.optim.AdamW(head, lr=rate, weight_decay=0.0)


def _plain(kind: Any, **options: Any) -> Make:
    return lambda model, symmetries, rate: kind(_trained(model).values(), lr=rate, **options)


def _quotient(kind: Any, **options: Any) -> Make:
    return lambda model, symmetries, rate: kind(model.named_parameters(), symmetries, lr=rate, **options)


def _muon(model: nn.Module, symmetries: Symmetries, rate: float) -> torch.optim.Optimizer:
    matrices, others = by_dimension(model)
    return Together(
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.0), torch.optim.AdamW(others, lr=1e-2, weight_decay=0.0)
    )


def _third_muon(model: nn.Module, symmetries: Symmetries, rate: float) -> torch.optim.Optimizer:
    import pytorch_optimizer as third

    matrices, others = by_dimension(model)
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return third.Muon(groups, lr=rate, adamw_lr=1e-2)


def by_dimension(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    trained = list(_trained(model).values())
    return [p for p in trained if p.ndim == 2], [p for p in trained if p.ndim != 2]


def _lora_rite(**options: Any) -> Make:
    def make(model: nn.Module, symmetries: Symmetries, rate: float) -> torch.optim.Optimizer:
        import pytorch_optimizer as third

        factors = [p for pair in adapter_pairs(model) for p in pair]  # it wants A, B, A, B, ...
        return Together(third.LoRARite(factors, lr=rate, **options), _head(model, 1e-2))

    return make


def _preconditioned(kind: Any, **options: Any) -> Make:
    def make(model: nn.Module, symmetries: Symmetries, rate: float) -> torch.optim.Optimizer:
        from peft.optimizers import create_riemannian_optimizer

        adapted: Any = model
        return Together(create_riemannian_optimizer(adapted, kind, lr=rate, **options))

    return make


def _on_manifolds(model: nn.Module, symmetries: Symmetries, rate: float) -> torch.optim.Optimizer:
    return Together(OnManifolds(adapter_pairs(model), rate), _head(model, 1e-2))


def _sam(model: nn.Module, symmetries: Symmetries, rate: float) -> torch.optim.Optimizer:
    below = torch.optim.AdamW(_trained(model).values(), lr=rate, weight_decay=0.0)
    return SAM(below, model, geometry=Euclidean(), radius=SAM_RADIUS)


def _geodesic_sam(model: nn.Module, symmetries: Symmetries, rate: float) -> torch.optim.Optimizer:
    below = QuotientAdam(model.named_parameters(), symmetries, lr=rate)
    return SAM(below, model, geometry=Quotient("mix", symmetries=symmetries), radius=SAM_RADIUS)
