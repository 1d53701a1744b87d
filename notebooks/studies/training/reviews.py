"""Film reviews, and the upper layers of the sentence encoder, which say whether a review is good.

The layers below are frozen: what they make of every sentence is computed once.
"""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.load import LabelledText, load_model, tokenised_batches
from quotient_manifolds.symmetries import Symmetries, find_symmetries
from studies.common import pretrained_encoder
from studies.sentiment.sentences import read_sentences

LONGEST = 20  # tokens of a sentence, at most
BELOW = 4  # layers that are frozen, of 6
WIDTH, CLASSES = 384, 2
TARGETS = ["query", "key", "value", "dense"]  # every matrix of a layer has an adapter


@final
@dataclass(frozen=True)
class Reviews:
    """Hold what the frozen layers make of sentences (N, T, 384), which tokens there are (N, T), and classes (N,)."""

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


@functools.cache
@torch.no_grad()
def read_reviews(archive: Path, sizes: tuple[int, ...], source: str = "films") -> tuple[Reviews, ...]:
    """Return parts of so many sentences of a source. ValueError if too few are there."""
    sentences = read_sentences(archive, pretrained_encoder(), LONGEST)[source]
    if len(sentences) < sum(sizes):
        raise ValueError(
            f"Expected at least {sum(sizes)} clear and short sentences of {source}. Found {len(sentences)}."
        )
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
    """Map what the frozen layers make of sentences, and their masks, to logits (N, 2); the classifier is drawn anew."""

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


def adapted_layers(rank: int, scale: float, seed: int) -> nn.Module:
    """Return the upper layers, frozen but for the classifier and an adapter B A of every matrix of theirs.

    B = 0 and A is drawn as peft does, and then multiplied by `scale`, which no function can tell.
    """
    import peft

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lora = peft.LoraConfig(
            r=rank,
            lora_alpha=rank,
            target_modules=TARGETS,
            exclude_modules=r".*pooler.*",
            modules_to_save=["classifier"],
        )
        layers: Any = Upper()
        model: nn.Module = peft.get_peft_model(layers, lora).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_A" in name:
                p.mul_(scale)
    return model


@functools.cache
def symmetries_of_adapted(rank: int) -> Symmetries:
    """Return the pairs of `adapted_layers` of a rank: they are the same whatever the weights."""
    return _found(adapted_layers(rank, 1.0, 0))


@functools.cache
def symmetries_of_upper() -> Symmetries:
    """Return the symmetries of `upper_layers`."""
    return _found(upper_layers(0))


def _found(model: nn.Module) -> Symmetries:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return find_symmetries(model, (torch.randn(2, 7, WIDTH), torch.ones(2, 7)))
