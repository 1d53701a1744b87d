"""A zoo of small vision transformers, trained or fine-tuned once on the digits and kept on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds.experiments.digits import Digits, shifted
from quotient_manifolds.experiments.kept import Scores, digest, keep, kept_scores, one_thread
from quotient_manifolds.load import load_model, load_object
from quotient_manifolds.progress import Progress

# hidden 48 in 4 heads of 12, 3 layers, 17 tokens: 58,570 parameters. Weights of standard deviation 0.12 (about
# 1 / sqrt(48)) instead of 0.02 leave out the long plateau at the start of training.
ARCHITECTURE: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "initializer_range": 0.12,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 10,
}
HEAD = "classifier."  # how the names of the last layer's parameters begin
CACHE_FORMAT = 1  # raise when the training procedure changes: older models are then trained anew


@dataclass(frozen=True)
class Recipe:
    """What decides a trained model besides the data: AdamW's settings, batches, regularisation, seed."""

    learning_rate: float
    weight_decay: float
    batch_size: int
    label_smoothing: float
    shift: int  # random shifts of up to so many pixels on every other step; 0: none
    steps: int
    seed: int


@dataclass(frozen=True)
class TrainedModel:
    """One model of the zoo: how it was trained, how it does, and the directory it loads from."""

    recipe: Recipe
    scores: Scores
    directory: Path
    reused: bool  # found in the cache, not trained now

    def load(self) -> nn.Module:
        """The model, in eval mode, float32, on the CPU."""
        return load_model(self.directory)


def draw_recipe(index: int, *, seed: int = 0, steps: int | None = None) -> Recipe:
    """Recipe number `index` of the zoo that `seed` names; it does not depend on how many others are drawn."""
    draw = np.random.default_rng([seed, index])
    return Recipe(
        learning_rate=float(f"{10 ** draw.uniform(-3.2, -2.2):.3g}"),
        weight_decay=float(f"{10 ** draw.uniform(-4.0, 0.0):.3g}"),
        batch_size=int(draw.choice([16, 32, 64])),
        label_smoothing=float(draw.choice([0.0, 0.1])),
        shift=int(draw.choice([0, 1])),
        steps=int(draw.choice([400, 600])) if steps is None else steps,
        seed=int(draw.integers(2**31)),
    )


def train_zoo(
    recipes: list[Recipe],
    digits: Digits,
    cache: Path,
    *,
    architecture: dict[str, Any] = ARCHITECTURE,
    starts: Sequence[TrainedModel] | None = None,
    progress: Progress | None = None,
) -> list[TrainedModel]:
    """One trained model a recipe, in order; a model that the cache holds complete is not trained again.

    starts: by recipe, the model whose weights are fine-tuned, all but those of its classifier; None trains from
    scratch. Training runs on one CPU thread in float32, so a zoo is the same whatever it is measured on. Each model is
    kept as soon as it is finished: an interrupted run goes on where it stopped.
    """
    cache.mkdir(parents=True, exist_ok=True)
    zoo: list[TrainedModel] = []
    for index, recipe in enumerate(recipes):
        if progress is not None:
            progress("training", index, len(recipes))
        start = None if starts is None else starts[index].directory
        directory = cache / _key(recipe, digits, architecture, start)
        zoo.append(_kept_or_trained(directory, recipe, digits, architecture, start))
    if progress is not None:
        progress("training", len(recipes), len(recipes))
    return zoo


def _key(recipe: Recipe, digits: Digits, architecture: dict[str, Any], start: Path | None) -> str:
    """A name for everything that decides the weights, so that another setting is never mistaken for this one."""
    data = hashlib.sha256(digits.train_images.numpy().tobytes() + digits.train_labels.numpy().tobytes()).hexdigest()
    what = {"format": CACHE_FORMAT, "recipe": asdict(recipe), "architecture": architecture, "data": data}
    what |= {} if start is None else {"start": digest(start)}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:20]


def _kept_or_trained(
    directory: Path, recipe: Recipe, digits: Digits, architecture: dict[str, Any], start: Path | None
) -> TrainedModel:
    def make(folder: Path) -> Scores:
        model = train(recipe, digits, architecture, start)
        model.save_pretrained(folder, safe_serialization=True)
        return score(model, digits)

    made_by = {"recipe": asdict(recipe)}
    kept = kept_scores(directory, made_by)
    scores = kept or keep(directory, made_by, make, work=directory.parent)
    return TrainedModel(recipe, scores, directory, reused=kept is not None)


@one_thread()
def train(
    recipe: Recipe, digits: Digits, architecture: dict[str, Any] = ARCHITECTURE, start: Path | None = None
) -> Any:
    """A vision transformer trained by AdamW with a one-cycle learning rate; torch's global generator is left alone.

    start: the directory of a model to begin from, all but its classifier, which is drawn anew.
    """
    model = _fresh_model(recipe.seed, architecture).train()
    if start is not None:
        own, known = model.state_dict(), load_model(start).state_dict()
        model.load_state_dict({name: own[name] if name.startswith(HEAD) else known[name] for name in own})
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=recipe.steps)
    for step in range(recipe.steps):
        rows = torch.randperm(len(digits.train_labels), generator=generator)[: recipe.batch_size]
        images = digits.train_images[rows]
        if recipe.shift and step % 2:
            images = shifted(images, recipe.shift, digits.blank, generator)
        logits = model(pixel_values=images).logits
        loss = nn.functional.cross_entropy(logits, digits.train_labels[rows], label_smoothing=recipe.label_smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def _fresh_model(seed: int, architecture: dict[str, Any]) -> Any:
    try:  # by name, for the library itself is imported behind one door
        config = load_object("transformers:ViTConfig", "a model's configuration")(**architecture)
        build = load_object("transformers:ViTForImageClassification", "a vision transformer")
    except ValueError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        raise ImportError(
            'The zoo is built from transformers\' models: pip install "quotient-manifolds[transformers]".'
        ) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(config)


@torch.no_grad()
def score(model: nn.Module, digits: Digits) -> Scores:
    """Loss and error of a model in eval mode on all training and all test images."""
    train_loss, train_error = _loss_and_error(model, digits.train_images, digits.train_labels)
    test_loss, test_error = _loss_and_error(model, digits.test_images, digits.test_labels)
    return Scores(train_loss, train_error, test_loss, test_error)


def _loss_and_error(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    logits = model(pixel_values=images).logits
    loss = nn.functional.cross_entropy(logits, labels)
    return float(loss), float((logits.argmax(-1) != labels).double().mean())
