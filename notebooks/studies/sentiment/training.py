"""Fine-tuning the sentence encoder to tell good from bad, and what is known of a model without measuring sharpness."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.load import LabelledText, load_model, load_object, tokenised_batches
from quotient_manifolds.load.huggingface import read_config, tokenizer_files
from studies.common import pretrained_encoder
from studies.sentiment.sentences import LONGEST, Sentence
from studies.zoos.scores import Scores, score_of


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
                batch = _trimmed({name: value[rows] for name, value in encoded.items()})
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
    pretrained = pretrained_encoder() if architecture is None else None
    settings = read_config(pretrained) if pretrained else architecture
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = load_object("transformers:BertConfig", "a configuration")(**{**(settings or {}), **drop, "num_labels": 2})
    model = load_object("transformers:BertForSequenceClassification", "a BERT")(config)
    if pretrained:
        model.bert.load_state_dict(load_model(pretrained).state_dict())
    return model


def encode(sentences: Sequence[Sentence]) -> dict[str, Tensor]:
    """Return tokens and labels of all sentences, padded to the longest."""
    texts = [LabelledText(each.text, None, each.label) for each in sentences]
    (batch,) = tokenised_batches(pretrained_encoder(), texts, batch_size=len(texts), max_length=LONGEST)
    return batch


def _trimmed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch without columns that are padding only."""
    length = int(batch["attention_mask"].sum(1).max())
    return {name: value[:, :length] if value.ndim == 2 else value for name, value in batch.items()}


@one_thread()
@torch.no_grad()
def score(model: nn.Module, sentences: Sequence[Sentence]) -> Scores:
    """Return what a model in eval mode does with sentences, of which the short ones are read first."""
    encoded = encode(sentences)
    order = encoded["attention_mask"].sum(1).argsort()
    parts = [_trimmed({name: value[rows] for name, value in encoded.items()}) for rows in order.split(64)]
    logits = torch.cat(
        [model(**{name: value for name, value in part.items() if name != "labels"}).logits for part in parts]
    )
    return score_of(logits, encoded["labels"][order])


def save(model: Any, folder: Path) -> None:
    """Write the model and its tokenizer."""
    model.save_pretrained(folder, safe_serialization=True)
    for file in tokenizer_files(pretrained_encoder()):
        shutil.copyfile(file, folder / file.name)
