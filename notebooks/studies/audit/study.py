"""Audit every optimizer on a small BERT with adapters of rank 4."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.optim import orbit_audit
from quotient_manifolds.progress import Progress
from quotient_manifolds.report import Table
from quotient_manifolds.symmetries import Symmetries, find_symmetries
from quotient_manifolds.version import VERSION
from studies.audit.optimizers import Candidate, candidates
from studies.common import Saves, numbers

STEPS, MOVES, CONDITION = 60, 5, 100.0
BATCHES, BATCH_SIZE, WORDS, LENGTH, CLASSES = 3, 16, 60, 9, 3
PACKAGES = ("torch", "transformers", "peft", "pytorch_optimizer", "geoopt")


@final
@dataclass(frozen=True)
class Audited:
    """Hold what the audit of one optimizer found: drifts of all moves, the loss at the end, or why there is none.

    loss: of the first batch, after the run from the weights as they were; moved_losses: after those from moved ones.
    """

    optimizer: str
    source: str
    rate: float
    note: str
    drifts: tuple[float, ...] = ()
    loss: float | None = None
    moved_losses: tuple[float, ...] = ()
    failure: str = ""

    @property
    def drift(self) -> float:
        """Return the median over moves."""
        return statistics.median(self.drifts)


@final
@dataclass(frozen=True)
class AuditStudy(Saves):
    """Hold the audits of all optimizers. start: the loss before."""

    rows: tuple[Audited, ...]
    start: float
    pairs: int
    steps: int
    moves: int
    condition: float
    versions: dict[str, str]
    command: str
    version: str


@one_thread()
def run(out: Path, *, fast: bool, command: str, progress: Progress) -> AuditStudy:
    """Audit every optimizer in float64 and write OUT/audit.json; `fast`: two steps and one move."""
    model, batches = adapted_bert()
    symmetries = find_symmetries(model, {"input_ids": batches[0]["input_ids"]})
    steps, moves = (2, 1) if fast else (STEPS, MOVES)
    listed = candidates()
    rows: list[Audited] = []
    for index, candidate in enumerate(listed):
        progress("optimizers", index, len(listed))
        rows.append(_audited(candidate, model, batches, symmetries, steps, moves))
    progress("optimizers", len(listed), len(listed))
    with torch.no_grad():
        start = float(_loss(model, batches[0]))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    found = AuditStudy(
        rows=tuple(rows),
        start=start,
        pairs=sum(trained.issuperset(pair.names) for pair in symmetries.pairs),
        steps=steps,
        moves=moves,
        condition=CONDITION,
        versions={name: version(name) for name in PACKAGES},
        command=command,
        version=VERSION,
    )
    found.save(out / "audit.json")
    return found


def load(folder: Path) -> AuditStudy:
    """Read the record in a folder."""
    return AuditStudy.load(folder / "audit.json")


def tables(found: AuditStudy) -> list[Table]:
    """Return a row for every optimizer."""
    columns = ["Optimizer", "From", "Settings", "Learning rate", "Median drift", "Largest", "Final loss"]
    return [numbers("drifts", "", columns, [_cells(row) for row in found.rows], words=3)]


def _cells(row: Audited) -> list[str]:
    said = [row.optimizer, row.source, row.note, f"{row.rate:g}"]
    if row.failure or row.loss is None:
        return [*said, "", "", row.failure]
    return [*said, _size(row.drift), _size(max(row.drifts)), f"{row.loss:.3g}"]


def _size(drift: float) -> str:
    """Return a drift with two digits, and one that is rounding by its order of magnitude."""
    return f"{drift:.2g}" if drift >= 1e-4 else f"{drift:.0e}".replace("e-0", "e-")


def _audited(
    candidate: Candidate,
    model: nn.Module,
    batches: list[dict[str, Tensor]],
    symmetries: Symmetries,
    steps: int,
    moves: int,
) -> Audited:
    said = (candidate.name, candidate.source, candidate.rate, candidate.note)
    try:
        found = orbit_audit(
            lambda network: candidate.make(network, symmetries, candidate.rate),
            model,
            _loss,
            batches,
            steps=steps,
            symmetries=symmetries,
            condition=CONDITION,
            moves=moves,
        )
    except Exception as error:  # whatever others' optimizers raise is their row's reason
        return Audited(*said, failure=f"{type(error).__name__}: {error}".splitlines()[0])
    numbers = torch.tensor([*found.drifts, *found.moved_losses, found.loss])
    if not numbers.isfinite().all():
        return Audited(*said, failure="a run ended in numbers that are not finite")
    return Audited(*said, found.drifts, found.loss, found.moved_losses)


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
        batches = [
            {
                "input_ids": torch.randint(3, WORDS, (BATCH_SIZE, LENGTH)),
                "labels": torch.randint(CLASSES, (BATCH_SIZE,)),
            }
            for _ in range(BATCHES)
        ]
    return model, batches


def _loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss
