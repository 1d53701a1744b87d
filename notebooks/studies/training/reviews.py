"""Film reviews, and the upper layers of the sentence encoder, which say whether a review is good.

The layers below are frozen: their output is computed once for every sentence.
"""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from quotient_manifolds.load import LabelledText, load_model, tokenised_batches
from studies.common import Record, pretrained_encoder
from studies.zoos.sentences import read_sentences

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


@functools.cache
@torch.no_grad()
def read_reviews(archive: Path, sizes: tuple[int, ...]) -> tuple[Reviews, ...]:
    """Return parts of so many film reviews. Raises ValueError if too few are there."""
    sentences = read_sentences(archive, pretrained_encoder(), LONGEST)["films"]
    if len(sentences) < sum(sizes):
        raise ValueError(f"films must have {sum(sizes)} clear and short sentences. Found {len(sentences)}")
    texts = [LabelledText(each.text, None, each.label) for each in sentences[: sum(sizes)]]
    (batch,) = tokenised_batches(pretrained_encoder(), texts, batch_size=len(texts), max_length=LONGEST)
    labels, bert = batch.pop("labels"), _encoder()
    hidden = torch.cat(
        [
            bert(**{name: value[rows] for name, value in batch.items()}, output_hidden_states=True).hidden_states[BELOW]
            for rows in torch.arange(len(texts)).split(64)
        ]
    )
    every = Reviews(hidden, batch["attention_mask"], labels)
    return tuple(every.at(rows) for rows in torch.arange(len(texts)).split(list(sizes)))


@functools.cache
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
