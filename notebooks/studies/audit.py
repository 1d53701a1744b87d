"""How far optimizers drift apart that start at different points of one orbit: a small BERT with adapters of rank 4.

Every optimizer has one learning rate, and no weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, final

import geoopt
import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.geometry import Euclidean, Quotient
from quotient_manifolds.manifolds import FixedRankQuotient
from quotient_manifolds.messages import Progress
from quotient_manifolds.optim import SAM, QuotientAdam, QuotientSGD, orbit_audit
from quotient_manifolds.symmetries import Symmetries, find_symmetries
from studies.common import Record, Tables, power

STEPS, MOVES, CONDITION = 60, 5, 100.0
BATCHES, BATCH_SIZE, WORDS, LENGTH, CLASSES = 3, 16, 60, 9, 3
HEAD_RATE = 1e-2  # of what is no matrix or no adapter, where an optimizer is for those alone
PACKAGES = ("torch", "transformers", "peft", "pytorch_optimizer", "geoopt")
SAM_RADIUS = 0.05

Make = Callable[..., Optimizer]
"""Return an optimizer of a model, with its symmetries and a learning rate."""


class Candidate(NamedTuple):
    """Hold an optimizer: its name, who wrote it, its learning rate, how it is made, and a note."""

    name: str
    source: str
    rate: float
    make: Make
    note: str = ""


@final
class Together(Optimizer):
    """Step several optimizers of one model at the gradients of one pass."""

    def __init__(self, *parts: Optimizer) -> None:
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
class OnManifolds(Optimizer):
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


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adapter_pairs(model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Return (A, B) of every adapter."""
    found = _trained(model)
    return [(p, found[name.replace("lora_A", "lora_B")]) for name, p in found.items() if "lora_A" in name]


def factors_of(model: nn.Module) -> list[nn.Parameter]:
    """Return A, B, A, B, ... of all adapters."""
    return [p for pair in adapter_pairs(model) for p in pair]


def _plain(kind: Any, **options: Any) -> Make:
    return lambda model, symmetries, rate: kind(_trained(model).values(), lr=rate, **options)


def _quotient(kind: Any, **options: Any) -> Make:
    return lambda model, symmetries, rate: kind(model.named_parameters(), symmetries, lr=rate, **options)


def _muon(kind: Any) -> Make:
    """Return a Muon of the matrices, and AdamW for the rest."""

    def make(model: nn.Module, symmetries: Symmetries, rate: float) -> Optimizer:
        trained = list(_trained(model).values())
        matrices, others = ([p for p in trained if (p.ndim == 2) == matrix] for matrix in (True, False))
        if kind is Muon:
            return Together(Muon(matrices, lr=rate, weight_decay=0.0), AdamW(others, lr=HEAD_RATE, weight_decay=0.0))
        groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
        made: Optimizer = kind(groups, lr=rate, adamw_lr=HEAD_RATE)
        return made

    return make


def _with_head(make: Callable[[nn.Module, float], Optimizer]) -> Make:
    """Return an optimizer of the adapters, and AdamW for the head."""

    def both(model: nn.Module, symmetries: Symmetries, rate: float) -> Optimizer:
        head = [p for name, p in _trained(model).items() if "lora_" not in name]
        return Together(make(model, rate), AdamW(head, lr=HEAD_RATE, weight_decay=0.0))

    return both


def _preconditioned(kind: Any, **options: Any) -> Make:
    def make(model: nn.Module, symmetries: Symmetries, rate: float) -> Optimizer:
        from peft.optimizers import create_riemannian_optimizer

        adapted: Any = model
        return Together(create_riemannian_optimizer(adapted, kind, lr=rate, **options))

    return make


def _sam(below: Make, geometry: Callable[[Symmetries], Any]) -> Make:
    return lambda model, symmetries, rate: SAM(
        below(model, symmetries, rate), model, geometry=geometry(symmetries), radius=SAM_RADIUS
    )


def candidates() -> list[Candidate]:
    """Return all optimizers of the table, in its order."""
    import pytorch_optimizer as third

    rite = _with_head(lambda model, rate: third.LoRARite(factors_of(model), lr=rate))
    switched_off: Any = {"update_skipping": 0.0, "clip_unmagnified_grad": 0.0}
    unskipped = _with_head(lambda model, rate: third.LoRARite(factors_of(model), lr=rate, **switched_off))
    manifolds = _with_head(lambda model, rate: OnManifolds(adapter_pairs(model), rate))
    # As released the preconditioner starts at step 25 and is computed anew every 1000 steps: 60 would hardly use it.
    shampoo: Any = {"weight_decay": 0.0, "start_preconditioning_step": 2, "preconditioning_compute_steps": 1}
    plain, theirs, adapters, ours = "torch", "pytorch_optimizer", "peft", "quotient_manifolds"
    adamw, adam = _plain(AdamW, weight_decay=0.0), _quotient(QuotientAdam)
    anew, rest, radius = "ScalableShampoo, anew at each step", "the head's bias by AdamW", f"radius {SAM_RADIUS:g}"
    sam = _sam(adamw, lambda symmetries: Euclidean())
    geodesic_sam = _sam(adam, lambda symmetries: Quotient("mix", symmetries=symmetries))
    damped, undamped = _preconditioned(SGD, momentum=0.9), _preconditioned(SGD, momentum=0.0, reg=0.0)
    return [
        Candidate("AdamW", plain, 1e-2, adamw),
        Candidate("SGD", plain, 0.1, _plain(SGD, momentum=0.9), "momentum 0.9"),
        Candidate("Adafactor", plain, 0.1, _plain(Adafactor, weight_decay=0.0)),
        Candidate("Muon", plain, 2e-2, _muon(Muon), rest),
        Candidate("Lion", theirs, 2e-3, _plain(third.Lion)),
        Candidate("Shampoo", theirs, 0.1, _plain(third.ScalableShampoo, **shampoo), anew),
        Candidate("SOAP", theirs, 1e-2, _plain(third.SOAP, weight_decay=0.0)),
        Candidate("Muon", theirs, 2e-2, _muon(third.Muon), rest),
        Candidate("LoRA-RITE", theirs, 1e-2, unskipped, "skipping of updates and clipping off; the head by AdamW"),
        Candidate("LoRA-RITE", theirs, 1e-2, rite, "as it comes; the head by AdamW"),
        Candidate("preconditioned AdamW", adapters, 1e-2, _preconditioned(AdamW, weight_decay=0.0)),
        Candidate("preconditioned SGD", adapters, 0.1, damped, "momentum 0.9"),
        Candidate("preconditioned SGD", adapters, 0.1, undamped, "no momentum, no damping (reg=0)"),
        Candidate("RiemannianAdam", "geoopt", 1e-2, manifolds, "on `FixedRankQuotient`, mix; the head by AdamW"),
        Candidate("SAM over AdamW", ours, 1e-2, sam, f"Euclidean, {radius}"),
        Candidate("SAM over QuotientAdam", ours, 1e-2, geodesic_sam, f"geodesic, mix, {radius}"),
        Candidate("QuotientSGD", ours, 0.1, _quotient(QuotientSGD, momentum=0.9), "mix, momentum 0.9"),
        Candidate("QuotientAdam", ours, 1e-2, adam, "mix"),
        Candidate("QuotientAdam", ours, 1e-3, _quotient(QuotientAdam, metric="inv"), "inv"),
    ]  # fmt: skip


# ---- the study


@one_thread()
def run(out: Path, *, fast: bool, progress: Progress) -> Record:
    """Audit every optimizer in float64; `fast`: some of them, two steps and one move.

    A row holds the drifts of all moves and the losses of the first batch, after the run from the weights as they were
    (loss) and after those from moved ones, or why there are none (failure).
    """
    model, batches = adapted_bert()
    symmetries = find_symmetries(model, {"input_ids": batches[0]["input_ids"]})
    steps, moves = (2, 1) if fast else (STEPS, MOVES)
    listed = candidates()[:: 6 if fast else 1]
    rows = []
    for index, each in enumerate(listed):
        progress("optimizers", index, len(listed))
        said = {"optimizer": each.name, "source": each.source, "rate": each.rate, "note": each.note}
        make = partial(each.make, symmetries=symmetries, rate=each.rate)
        asked: Any = {"steps": steps, "symmetries": symmetries, "condition": CONDITION, "moves": moves}
        try:
            found = orbit_audit(make, model, _loss, batches, **asked)
            if not np.isfinite([*found.drifts, *found.moved_losses, found.loss]).all():
                raise ArithmeticError("a run ended in numbers that are not finite")
            rows.append(said | {"drifts": found.drifts, "loss": found.loss, "moved_losses": found.moved_losses})
        except Exception as error:  # whatever others' optimizers raise is their row's reason
            rows.append(said | {"failure": f"{type(error).__name__}: {error}".splitlines()[0]})
    with torch.no_grad():
        start = float(_loss(model, batches[0]))
    pairs = sum({*_trained(model)}.issuperset(pair.names) for pair in symmetries.pairs)
    settings = {"start": start, "pairs": pairs, "steps": steps, "moves": moves, "condition": CONDITION}
    versions = {name: version(name) for name in PACKAGES}
    return {"rows": rows, **settings, "versions": versions}


def tables(record: Record) -> Tables:
    """Return a row for every optimizer."""
    columns = ["Optimizer", "From", "Settings", "Learning rate", "Median drift", "Largest", "Final loss"]
    rows = []
    for row in record["rows"]:
        found = ["", "", row.get("failure", "")]
        if not found[2]:
            found = [_size(float(np.median(row["drifts"]))), _size(max(row["drifts"])), f"{row['loss']:.3g}"]
        rows.append([row["optimizer"], row["source"], row["note"], f"{row['rate']:g}", *found])
    return {"drifts": pd.DataFrame(rows, columns=columns)}


def _size(drift: float) -> str:
    """Return a drift with two digits, and one that is rounding by its order of magnitude."""
    return f"{drift:.2g}" if drift >= 1e-4 else power(drift)


def adapted_bert() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Return a BERT with random weights, frozen, whose adapters' B is not zero, and random sentences with labels."""
    import peft
    import transformers

    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_labels": CLASSES, "initializer_range": 0.1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.BertConfig(**sizes)
        lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=4, target_modules=["query", "value"])
        model = peft.get_peft_model(transformers.BertForSequenceClassification(config), lora).double().eval()
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.1)
        batches = []
        for _ in range(BATCHES):
            words = torch.randint(3, WORDS, (BATCH_SIZE, LENGTH))
            batches.append({"input_ids": words, "labels": torch.randint(CLASSES, (BATCH_SIZE,))})
    return model, batches


def _loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss
