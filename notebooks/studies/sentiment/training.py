"""Fine-tune the sentence encoder to tell good from bad, and score it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.load import load_model
from quotient_manifolds.load.huggingface import load_tokenizer
from studies.common import pretrained_encoder
from studies.sentiment.sentences import LONGEST, Sentence
from studies.zoos.models import Scores, score_of


@final
@dataclass(frozen=True)
class Recipe:
    """Hold what decides a fine-tuned model besides the data: AdamW's settings, batches, dropout, epochs, seed.

    The learning rate rises over the first tenth of the steps and then falls to 0, both linearly. group: "seeds" for
    models that differ by their seed alone, "settings" for those of the factorial design.
    """

    group: str
    learning_rate: float
    batch_size: int
    dropout: float
    epochs: int
    seed: int


@one_thread()
def fine_tune(recipe: Recipe, sentences: Sequence[Sentence], architecture: Mapping[str, Any] | None = None) -> Any:
    """Train and return a BERT that says whether sentences are good; torch's global generator is left alone.

    architecture: of a model with random weights in place of the pretrained one.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    encoded = encode(sentences)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)  # of the classifier and of dropout
        model = _fresh_model(recipe.dropout, architecture).train()
        optimizer = torch.optim.AdamW(model.parameters(), recipe.learning_rate, weight_decay=0.01, fused=True)
        steps = recipe.epochs * -(-len(sentences) // recipe.batch_size)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
        for _ in range(recipe.epochs):
            for rows in torch.randperm(len(sentences), generator=generator).split(recipe.batch_size):
                batch = _rows(encoded, rows)
                labels = batch.pop("labels")
                loss = nn.functional.cross_entropy(model(**batch).logits, labels)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                schedule.step()
    return model.eval()


def _rate(step: int, steps: int) -> float:
    rising = round(0.1 * steps)
    return (step + 1) / (rising + 1) if step < rising else (steps - step) / (steps - rising)


def _fresh_model(dropout: float, architecture: Mapping[str, Any] | None) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    drop: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "num_labels": 2}
    if architecture is not None:
        return BertForSequenceClassification(BertConfig(**architecture, **drop))
    model = BertForSequenceClassification(BertConfig.from_pretrained(pretrained_encoder(), **drop))
    model.bert.load_state_dict(load_model(pretrained_encoder()).state_dict())
    return model


def encode(sentences: Sequence[Sentence]) -> dict[str, Tensor]:
    """Return tokens and labels of all sentences, padded to the longest."""
    tokens = load_tokenizer(pretrained_encoder())
    texts = [each.text for each in sentences]
    batch = tokens(texts, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
    return {**batch, "labels": torch.tensor([each.label for each in sentences])}


def _rows(encoded: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Return some rows, without columns that are padding only."""
    length = int(encoded["attention_mask"][rows].sum(1).max())
    return {name: value[rows, :length] if value.ndim == 2 else value[rows] for name, value in encoded.items()}


@one_thread()
@torch.no_grad()
def score(model: nn.Module, sentences: Sequence[Sentence]) -> Scores:
    """Return what a model in eval mode does with sentences, of which the short ones are read first."""
    encoded = encode(sentences)
    labels = encoded.pop("labels")
    order = encoded["attention_mask"].sum(1).argsort()
    logits = torch.cat([model(**_rows(encoded, rows)).logits for rows in order.split(64)])
    return score_of(logits, labels[order])
