"""Train adapters, one run for every optimizer, learning rate, rank, start and seed.

The classifier has AdamW's steps in all of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
from joblib import cpu_count
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.load import load_model
from quotient_manifolds.load.text import LabeledText
from quotient_manifolds.load.tokens import encoded
from quotient_manifolds.messages import Progress
from quotient_manifolds.optim import QuotientAdam
from quotient_manifolds.symmetries import Symmetries, find_symmetries
from studies.audit import adapter_pairs, factors_of
from studies.common import Record, pretrained_encoder, resume
from studies.sentiment import share_of_rate
from studies.zoos.data import fetched, read_sentences

# ---- film reviews and the layers above

LONGEST = 20  # tokens of a sentence, at most
BELOW = 4  # layers that are frozen, of 6
WIDTH, CLASSES = 384, 2
TARGETS = ["query", "key", "value", "dense"]  # every matrix of a layer has an adapter


@final
@dataclass(frozen=True)
class Reviews:
    """Hold the output of the frozen layers (N, T, 384), which tokens there are (N, T), and classes (N,)."""

    hidden: Tensor
    mask: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, rows: Any) -> Reviews:
        """Return some of the sentences, without the columns that are padding only."""
        mask = self.mask[rows]
        length = int(mask.sum(1).max())
        return Reviews(self.hidden[rows][:, :length], mask[:, :length], self.labels[rows])

    def loss(self, model: nn.Module) -> Tensor:
        """Compute the mean cross-entropy of a model."""
        return nn.functional.cross_entropy(model(self.hidden, self.mask), self.labels)


@cache
@torch.no_grad()
def read_reviews(archive: Path, sizes: tuple[int, ...]) -> tuple[Reviews, ...]:
    """Return parts of so many film reviews. Raises ValueError if too few are there."""
    sentences = read_sentences(archive, pretrained_encoder(), LONGEST)["films"]
    if len(sentences) < sum(sizes):
        raise ValueError(f"films must have {sum(sizes)} clear and short sentences. Found {len(sentences)}")
    texts = [LabeledText(each.text, None, each.label) for each in sentences[: sum(sizes)]]
    bert = _encoder()
    (batch,), _ = encoded(texts, pretrained_encoder(), bert.config, len(texts), LONGEST)
    labels = torch.tensor([each.label for each in texts])
    hidden = torch.cat(
        [
            bert(**{name: value[rows] for name, value in batch.items()}, output_hidden_states=True).hidden_states[BELOW]
            for rows in torch.arange(len(texts)).split(64)
        ]
    )
    every = Reviews(hidden, batch["attention_mask"], labels)
    return tuple(every.at(rows) for rows in torch.arange(len(texts)).split(list(sizes)))


@cache
def _encoder() -> Any:
    return load_model(pretrained_encoder()).eval()


@final
class Upper(nn.Module):
    """Map the output of the frozen layers, and masks, to logits (N, 2); the classifier is drawn anew."""

    def __init__(self) -> None:
        super().__init__()
        encoder = _encoder()
        self.layer = copy.deepcopy(encoder.encoder.layer[BELOW:])
        self.pooler = copy.deepcopy(encoder.pooler)
        self.classifier = nn.Linear(WIDTH, CLASSES)
        nn.init.normal_(self.classifier.weight, std=0.02)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return logits."""
        out = torch.zeros(mask.shape).masked_fill(mask == 0, -math.inf)[:, None, None]
        for layer in self.layer:
            hidden = layer(hidden, out)
        logits: Tensor = self.classifier(self.pooler(hidden))
        return logits


# ---- what a run ends with

LOST: Final[Record] = {"validation": None, "test": None, "error": None}
"""The outcome of a run that left the finite numbers."""


@torch.no_grad()
def outcome(model: nn.Module, validation: Reviews, test: Reviews) -> Record:
    """Return the losses (nats) on what choices are made by and on the test set, and the error there.

    The short reviews are read first.
    """
    found: Record = {}
    for name, reviews in (("validation", validation), ("test", test)):
        parts = [reviews.at(rows) for rows in reviews.mask.sum(1).argsort().split(64)]
        order = reviews.mask.sum(1).argsort().argsort()
        logits = torch.cat([model(part.hidden, part.mask) for part in parts])[order]
        found[name] = float(nn.functional.cross_entropy(logits, reviews.labels))
    found["error"] = float((logits.argmax(1) != test.labels).double().mean())
    return found if math.isfinite(found["validation"]) and math.isfinite(found["test"]) else LOST


# ---- optimizers and runs

PACKAGES = ("torch", "transformers", "peft", "pytorch_optimizer")
BATCH = 16
HEAD_RATE = 1e-3
LORA_PLUS = 16.0  # the rate of B over that of A which its paper proposes

Make = Callable[[nn.Module, Symmetries, float], Optimizer]


def _lora_plus(model: nn.Module, symmetries: Symmetries, rate: float) -> Optimizer:
    pairs = adapter_pairs(model)
    groups = [{"params": [A for A, _ in pairs], "lr": rate}, {"params": [B for _, B in pairs], "lr": LORA_PLUS * rate}]
    return AdamW(groups, weight_decay=0.0)


def _preconditioned(model: nn.Module, symmetries: Symmetries, rate: float) -> Optimizer:
    from peft.optimizers import create_riemannian_optimizer

    adapted: Any = model
    made = create_riemannian_optimizer(adapted, AdamW, lr=rate, weight_decay=0.0)
    factors = {id(p) for p in factors_of(model)}
    for group in made.param_groups:  # it takes all that is trained
        group["params"] = [p for p in group["params"] if id(p) in factors]
    return made


def _lora_rite(model: nn.Module, symmetries: Symmetries, rate: float) -> Optimizer:
    import pytorch_optimizer as third

    made: Optimizer = third.LoRARite(factors_of(model), lr=rate)
    return made


def _plain(kind: Any) -> Make:
    return lambda model, symmetries, rate: kind(factors_of(model), lr=rate, weight_decay=0.0)


def _quotient(metric: Any) -> Make:
    def make(model: nn.Module, symmetries: Symmetries, rate: float) -> Optimizer:
        named = [(name, p) for name, p in model.named_parameters() if "lora_" in name]
        return QuotientAdam(named, symmetries, lr=rate, metric=metric)

    return make


ADAMW, OURS = "AdamW", "QuotientAdam, mix"
CANDIDATES: Final[dict[str, tuple[str, float, Make]]] = {
    ADAMW: ("torch", 3.16e-3, _plain(AdamW)),
    "LoRA+": ("AdamW of torch, B 16 times as fast as A", 3.16e-4, _lora_plus),
    "preconditioned AdamW": ("peft", 3.16e-3, _preconditioned),
    "LoRA-RITE": ("pytorch_optimizer", 1e-3, _lora_rite),
    "Muon": ("torch", 1e-2, _plain(torch.optim.Muon)),
    OURS: ("quotient_manifolds", 1e-3, _quotient("mix")),
    "QuotientAdam, inv": ("quotient_manifolds", 1e-3, _quotient("inv")),
}
"""Who wrote an optimizer, the middle of its learning rates, and how it is made."""


def adapted_layers(rank: int, scale: float, seed: int) -> nn.Module:
    """Return the upper layers, frozen but for the classifier and an adapter B A of every matrix of theirs.

    B = 0 and A is drawn as peft does, and then multiplied by `scale`, which leaves the function as it is.
    """
    import peft

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        rest: dict[str, Any] = {"exclude_modules": r".*pooler.*", "modules_to_save": ["classifier"]}
        lora = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS, **rest)
        layers: Any = Upper()
        model: nn.Module = peft.get_peft_model(layers, lora).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_A" in name:
                p.mul_(scale)
    return model


@cache
def symmetries_of(rank: int) -> Symmetries:
    """Return the symmetries of adapted layers, which are the same whatever the weights."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randn(2, 7, WIDTH, generator=generator), torch.ones(2, 7)
    return find_symmetries(adapted_layers(rank, 1.0, 0), words)


class Cell(NamedTuple):
    """Hold what runs that differ by their seed alone have in common; scale: of A at the start, where B = 0."""

    optimizer: str
    rank: int
    scale: float
    rate: float
    steps: int
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return a name for a file."""
        said = self.optimizer.replace(", ", "-").replace(" ", "-")
        return f"{said}-rank{self.rank}-scale{self.scale:g}-rate{self.rate:.2e}-steps{self.steps}-{len(self.seeds)}"


@one_thread()
def train_cell(cell: Cell, archive: Path, sizes: tuple[int, ...]) -> Record:
    """Make all runs of a cell; an outcome for each seed."""
    parts = read_reviews(archive, sizes)
    return {"cell": cell._asdict(), "outcomes": [_trained(cell, seed, *parts) for seed in cell.seeds]}


def _trained(cell: Cell, seed: int, training: Reviews, validation: Reviews, test: Reviews) -> Record:
    model = adapted_layers(cell.rank, cell.scale, seed)
    head = [p for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
    symmetries = symmetries_of(cell.rank)
    made = [CANDIDATES[cell.optimizer][2](model, symmetries, cell.rate), AdamW(head, lr=HEAD_RATE, weight_decay=0.0)]
    schedules = [LambdaLR(each, lambda step: share_of_rate(step, cell.steps)) for each in made]
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))
    for step in range(cell.steps):
        first = step * BATCH % len(order)
        loss = training.at(order[first : first + BATCH]).loss(model)
        if not bool(loss.isfinite()):
            return LOST
        loss.backward()
        try:
            for each in made:
                each.step()
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined] # as of factorisations of what is not finite
            return LOST
        except ValueError as error:
            if "finite" not in str(error):
                raise
            return LOST  # ours refuses what others step to
        for each, schedule in zip(made, schedules, strict=True):
            each.zero_grad()
            schedule.step()
    return outcome(model, validation, test)


# ---- the study


@final
@dataclass(frozen=True)
class Plan:
    """Hold what is run. sizes: sentences to train on, to choose by, to test on; rates: over the middle one.

    Starts other than the usual one are at `middle_rank`, of the first `moved_seeds` seeds.
    """

    sizes: tuple[int, int, int] = (1600, 300, 900)
    ranks: tuple[int, ...] = (2, 16, 64)
    middle_rank: int = 16
    moved: tuple[float, ...] = (1 / 16, 16.0)
    moved_seeds: int = 3
    rates: tuple[float, ...] = tuple(float(f"{10 ** (power / 2):.3g}") for power in range(-3, 4))
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    steps: int = 100

    def cells(self) -> list[Cell]:
        """Return the cells of equal steps."""
        starts = [(rank, 1.0, self.seeds) for rank in self.ranks]
        starts += [(self.middle_rank, scale, self.seeds[: self.moved_seeds]) for scale in self.moved]
        return [
            Cell(name, rank, scale, float(f"{middle * over:.3g}"), self.steps, seeds)
            for rank, scale, seeds in starts
            for over in self.rates
            for name, (_, middle, _) in CANDIDATES.items()
        ]


FAST: Final = Plan(
    sizes=(16, 8, 16), ranks=(2,), middle_rank=2, moved=(16.0,), moved_seeds=1, rates=(1.0,), seeds=(1, 2),
    steps=2,
)  # fmt: skip
"""Two steps of everything, to try the code."""


def run(out: Path, *, fast: bool, progress: Progress) -> Record:
    """Make all runs; OUT/runs has a file for each cell, from which a run continues."""
    plan, archive, workers = (FAST if fast else Plan()), fetched(), 1 if fast else cpu_count()
    settings = [plan.sizes, BATCH, HEAD_RATE, LORA_PLUS]
    runs = {cell.name: partial(train_cell, cell, archive, plan.sizes) for cell in plan.cells()}
    found = resume(out / "runs", runs, what="adapters", settings=settings, workers=workers, progress=progress)
    return {"plan": asdict(plan), "trained": found, "versions": {name: version(name) for name in PACKAGES}}
