"""Merge adapters that were trained on sentences of different sources, and see how the merged model does on each.

The upper layers of the encoder are frozen; their classifier is trained on all sources first, and frozen then. Every
source has an adapter, trained from B = 0 by AdamW. They are merged with equal weights, once as they were trained and
once with the first of them written in another way, (B Z^-1, Z A), which changes nothing that it computes.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.merge import merge_adapters
from studies.audit import adapter_pairs
from studies.training.adapters import BATCH
from studies.training.outcome import logits_of
from studies.training.reviews import TARGETS, Reviews, read_reviews, upper_layers

SOURCES: Final = ("films", "products", "tweets")
RANK = 16
RATE, HEAD_RATE = 1e-3, 1e-3
CONDITION = 10.0  # of Z
OURS, NOTHING, OWN = "merge_adapters", "no adapter", "the source's own adapter"
METHODS: Final = (OURS, "svd", "linear", "ties")  # but for ours, combinations of peft's add_weighted_adapter


@final
@dataclass(frozen=True)
class Size:
    """Hold sentences of a source to train on and to test on; steps of 16 for the classifier and for an adapter."""

    training: int = 800
    test: int = 400
    head_steps: int = 60
    steps: int = 50


@final
@dataclass(frozen=True)
class Score:
    """Hold the means over sources of the test loss (nats) and of the error.

    moved: the loss where the first adapter was written in another way; None where nothing is merged.
    """

    method: str
    loss: float
    error: float
    moved: float | None = None


@final
@dataclass(frozen=True)
class Merge:
    """Say which seed draws the classifier, the adapters and the order of the sentences."""

    seed: int
    size: Size

    @property
    def name(self) -> str:
        """Return a name for a file."""
        return f"merge-{self.seed}-steps{self.size.steps}"


@final
@dataclass(frozen=True)
class Mixed:
    """Hold the scores of a seed, without adapter, of the source's own, and of every way to merge."""

    merge: Merge
    scores: tuple[Score, ...]


@one_thread()
def merge_seed(merge: Merge, archive: Path, sizes: tuple[int, ...]) -> Mixed:
    """Train, merge and score. sizes: of other parts of the study, of no use here."""
    seed, size = merge.seed, merge.size
    parts = {source: read_reviews(archive, (size.training, size.test), source) for source in SOURCES}
    base = _with_head(seed, {source: part[0] for source, part in parts.items()}, size.head_steps)
    tests = {source: part[1] for source, part in parts.items()}
    adapted, own = _adapted(base, seed), []
    for place, source in enumerate(SOURCES):
        adapted.set_adapter(source)
        _train(adapted, parts[source][0], size.steps, 10 * seed + place)
        own.append(_score(adapted, {source: tests[source]}))
    scores = [Score(NOTHING, *_score(base, tests)), Score(OWN, *_mean(own))]
    other = copy.deepcopy(adapted)
    _rewrite(other, SOURCES[0], seed)
    for method in METHODS:
        plain, moved = (_score(_merged(copy.deepcopy(model), base, method), tests) for model in (adapted, other))
        scores.append(Score(method, *plain, moved[0]))
    return Mixed(merge, tuple(scores))


def _with_head(seed: int, parts: dict[str, Reviews], steps: int) -> nn.Module:
    """Return the upper layers with a classifier that was trained on all sources in turn; all of it is frozen."""
    model: Any = upper_layers(seed)
    model.requires_grad_(False)
    model.classifier.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.classifier.parameters(), lr=HEAD_RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        _step(model, optimizer, parts[SOURCES[step % len(SOURCES)]], generator)
    return model.requires_grad_(False)


def _adapted(base: nn.Module, seed: int) -> Any:
    """Return a copy of the base with an adapter for every source, named after it."""
    import peft

    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, exclude_modules=r".*pooler.*")
    layers: Any = copy.deepcopy(base)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = peft.get_peft_model(layers, config, adapter_name=SOURCES[0])
        for source in SOURCES[1:]:
            model.add_adapter(source, config)
    return model.eval()


def _train(model: nn.Module, part: Reviews, steps: int, seed: int) -> None:
    """Train the active adapter."""
    factors = [p for pair in adapter_pairs(model) for p in pair]
    optimizer = torch.optim.AdamW(factors, lr=RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        _step(model, optimizer, part, generator)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, part: Reviews, generator: torch.Generator) -> None:
    batch = part.at(torch.randperm(len(part), generator=generator)[:BATCH])
    nn.functional.cross_entropy(model(batch.hidden, batch.mask), batch.labels).backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def _rewrite(model: Any, adapter: str, seed: int) -> None:
    """Write an adapter as (B Z^-1, Z A) with random Z of condition `CONDITION`, another for each module."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if adapter in getattr(module, "lora_A", {}):
            A, B = module.lora_A[adapter].weight, module.lora_B[adapter].weight
            U, V = (torch.linalg.qr(torch.randn(RANK, RANK, generator=generator).double())[0] for _ in range(2))
            sizes = torch.logspace(0, float(np.log10(CONDITION)), RANK, dtype=torch.float64) / CONDITION**0.5
            A.copy_((U * sizes @ V.mT) @ A.double())
            B.copy_(B.double() @ (V / sizes @ U.mT))


def _merged(model: Any, base: nn.Module, method: str) -> nn.Module:
    """Return a model with the merged adapter alone active."""
    import peft

    weights = [1 / len(SOURCES)] * len(SOURCES)
    if method == OURS:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            merge_adapters([Path(folder, source) for source in SOURCES], weights).save(Path(folder, "merged"))
            layers: Any = copy.deepcopy(base)
            return peft.PeftModel.from_pretrained(layers, str(Path(folder, "merged"))).eval()
    options: dict[str, Any] = {"density": 0.5} if method == "ties" else {}
    model.add_weighted_adapter(list(SOURCES), weights, "merged", combination_type=method, **options)
    model.set_adapter("merged")
    merged: nn.Module = model.eval()
    return merged


def _score(model: nn.Module, tests: dict[str, Reviews]) -> tuple[float, float]:
    """Return the mean over sources of the loss and of the error."""
    return _mean([_of(logits_of(model, part), part.labels) for part in tests.values()])


def _of(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    return float(nn.functional.cross_entropy(logits, labels)), float((logits.argmax(1) != labels).double().mean())


def _mean(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    loss, error = np.mean(pairs, axis=0)
    return float(loss), float(error)
