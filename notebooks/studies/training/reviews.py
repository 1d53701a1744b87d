"""Film reviews, and the upper layers of the sentence encoder, which say whether a review is good.

The layers below are frozen: their output is computed once for every sentence.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from quotient_manifolds.load import LabelledText, load_model, tokenised_batches
from quotient_manifolds.symmetries import Symmetries, find_symmetries
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
def read_reviews(archive: Path, sizes: tuple[int, ...], source: str = "films") -> tuple[Reviews, ...]:
    """Return parts of so many sentences of a source. Raises ValueError if too few are there."""
    sentences = read_sentences(archive, pretrained_encoder(), LONGEST)[source]
    if len(sentences) < sum(sizes):
        raise ValueError(f"{source} must have {sum(sizes)} clear and short sentences. Found {len(sentences)}")
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


def upper_layers(seed: int) -> nn.Module:
    """Return the upper layers in eval mode, all of them to be trained: dropout is off in this study."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Upper().eval()


@functools.cache
def symmetries_of(make: Any, *arguments: Any) -> Symmetries:
    """Return the symmetries of `upper_layers` or `adapted_layers`: they are the same whatever the weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return find_symmetries(make(*arguments), (torch.randn(2, 7, WIDTH), torch.ones(2, 7)))


# ---- what a run ends with

LOST: Final[Record] = {"validation": None, "test": None, "error": None}
"""The outcome of a run that left the finite numbers."""


@torch.no_grad()
def logits_of(model: nn.Module, reviews: Reviews) -> Tensor:
    """Return the logits of all reviews; the short ones are read first."""
    order = reviews.mask.sum(1).argsort()
    parts = [reviews.at(rows) for rows in order.split(64)]
    return torch.cat([model(part.hidden, part.mask) for part in parts])[order.argsort()]


def scores(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the cross-entropy (nats) and the error."""
    return float(nn.functional.cross_entropy(logits, labels)), float((logits.argmax(1) != labels).double().mean())


def outcome(parts: Sequence[tuple[Tensor, Tensor]]) -> Record:
    """Return the losses on what choices are made by and on the test set, and the error there, of logits and classes."""
    (validation, _), (test, error) = (scores(*part) for part in parts)
    finite = math.isfinite(validation) and math.isfinite(test)
    return {"validation": validation, "test": test, "error": error} if finite else LOST
