"""Merge adapters that were trained on sentences of different sources, and score the merged model on each.

The upper layers of the encoder are frozen; their classifier is trained on all sources first, and frozen then. Every
source has an adapter, trained from B = 0 by AdamW. They are merged with equal weights, once as they were trained and
once with the first of them written in another way, (B Z^-1, Z A), which changes nothing that it computes.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from torch import nn

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.merge import merge_adapters
from studies.audit import factors_of
from studies.common import Record
from studies.training.adapters import BATCH, HEAD_RATE
from studies.training.reviews import TARGETS, logits_of, read_reviews, scores, upper_layers

SOURCES: Final = ("films", "products", "tweets")
RANK = 16
RATE = 1e-3
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


@one_thread()
def merge_seed(seed: int, size: Size, archive: Path) -> Record:
    """Train, merge and score: without adapter, by the source's own, and by every way to merge.

    A score holds the means over sources of the test loss (nats) and of the error; moved: the loss where the first
    adapter was written in another way, None where nothing is merged.
    """
    parts = {source: read_reviews(archive, (size.training, size.test), source) for source in SOURCES}
    tests = [test for _, test in parts.values()]
    base: Any = upper_layers(seed).requires_grad_(False)
    base.classifier.requires_grad_(True)
    head = list(base.classifier.parameters())
    _train(base, head, HEAD_RATE, [training for training, _ in parts.values()], size.head_steps, seed)
    base.requires_grad_(False)
    adapted, own = _adapted(base, seed), []
    for place, source in enumerate(SOURCES):
        adapted.set_adapter(source)
        _train(adapted, factors_of(adapted), RATE, parts[source][:1], size.steps, 10 * seed + place)
        own.append(_score(adapted, parts[source][1:]))
    loss, error = np.mean(own, axis=0).tolist()
    rows: list[Any] = [(NOTHING, *_score(base, tests), None), (OWN, loss, error, None)]
    other = copy.deepcopy(adapted)
    _rewrite(other, SOURCES[0], seed)
    for method in METHODS:
        plain, moved = (_score(_merged(copy.deepcopy(model), base, method), tests) for model in (adapted, other))
        rows.append((method, *plain, moved[0]))
    found = [dict(zip(("method", "loss", "error", "moved"), row, strict=True)) for row in rows]
    return {"merge": {"seed": seed, "size": asdict(size)}, "scores": found}


def _train(model: nn.Module, weights: Any, rate: float, parts: Any, steps: int, seed: int) -> None:
    """Train some weights by AdamW on the parts in turn."""
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        part = parts[step % len(parts)]
        part.at(torch.randperm(len(part), generator=generator)[:BATCH]).loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()


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


def _score(model: nn.Module, tests: Any) -> tuple[float, float]:
    """Return the mean over sources of the loss and of the error."""
    loss, error = np.mean([scores(logits_of(model, part), part.labels) for part in tests], axis=0)
    return float(loss), float(error)
