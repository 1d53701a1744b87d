"""Train a zoo of small vision transformers on scikit-learn's handwritten digits."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds.check import needs
from quotient_manifolds.files import atomic_file, new_directory, write_text, writing
from quotient_manifolds.load.huggingface import transformers_library
from quotient_manifolds.messages import Progress

Points = tuple[Tensor, Tensor]  # images and their classes
TRAIN_POINTS = 256  # few, so that generalization gaps vary
# 58,570 parameters: width 48, 4 heads of 12, 3 layers, 17 tokens. Initial weights of standard deviation 0.12 (about
# 1 / sqrt(48)) instead of 0.02 avoid the long plateau at the start of training.
ARCHITECTURE: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "initializer_range": 0.12,
    "num_labels": 10,
}


def prepare(out: Path, *, models: int, seed: int, workers: int, progress: Progress) -> Path:
    """Train the zoo, write the files that `compare` needs, and return the path of the spec.

    These are models/vit-00, vit-01, ..., train.npz, test.npz, scores.csv with the recipe of each model, and zoo.yaml.
    """
    import pandas as pd

    write_digits(out, train_points=TRAIN_POINTS, seed=seed)
    recipes = {f"vit-{index:02}": draw_recipe(index, seed=seed) for index in range(models)}
    train_zoo(out / "models", recipes, out / "train.npz", architecture=ARCHITECTURE, workers=workers, progress=progress)
    scores = pd.DataFrame([{"checkpoint": name, **asdict(recipe)} for name, recipe in recipes.items()])
    write_text(out / "scores.csv", scores.to_csv(index=False))
    write_text(out / "zoo.yaml", resources.files(__package__).joinpath("zoo.yaml").read_text(encoding="utf-8"))
    return out / "zoo.yaml"


def write_digits(folder: Path, *, train_points: int, seed: int = 0) -> None:
    """Write train.npz and test.npz with the `images` and `labels` of `load_digits`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (images, labels) in zip(("train", "test"), load_digits(train_points, seed), strict=True):
        with atomic_file(folder / f"{name}.npz") as unfinished, unfinished.open("wb") as file:
            np.savez(file, images=images.numpy(), labels=labels.numpy())


def load_digits(train_points: int, seed: int = 0) -> tuple[Points, Points]:
    """Return `train_points` of the 1797 digits for training and the others for testing, stratified by class.

    Images are (N, 1, 8, 8) float32, standardized by mean and standard deviation of the training images. Raises
    ImportError without scikit-learn.
    """
    with needs("The demonstration", "scikit-learn", "demo"):
        from sklearn import datasets, model_selection
    pixels, classes = datasets.load_digits(return_X_y=True)
    train, test = model_selection.train_test_split(
        np.arange(len(classes)), train_size=train_points, stratify=classes, random_state=seed
    )
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8)
    images = (images - images[train].mean()) / images[train].std()
    labels = torch.from_numpy(classes).long()
    return (images[train], labels[train]), (images[test], labels[test])


@dataclass(frozen=True)
class TrainingRecipe:
    """Hold the settings that determine a trained model, besides its architecture and data."""

    learning_rate: float
    weight_decay: float
    batch_size: int
    label_smoothing: float
    shift: int  # largest random shift in pixels, on every other step; 0 for none
    steps: int
    seed: int


def draw_recipe(index: int, *, seed: int = 0, steps: int | None = None) -> TrainingRecipe:
    """Draw recipe number `index` of the zoo with this seed, independently of the number of models."""
    draw = np.random.default_rng([seed, index])
    return TrainingRecipe(
        learning_rate=float(f"{10 ** draw.uniform(-3.2, -2.2):.3g}"),
        weight_decay=float(f"{10 ** draw.uniform(-4.0, 0.0):.3g}"),
        batch_size=int(draw.choice([16, 32, 64])),
        label_smoothing=float(draw.choice([0.0, 0.1])),
        shift=int(draw.choice([0, 1])),
        steps=int(draw.choice([400, 600])) if steps is None else steps,
        seed=int(draw.integers(2**31)),
    )


def train_zoo(
    folder: Path,
    recipes: Mapping[str, TrainingRecipe],
    data: Path,
    *,
    architecture: Mapping[str, Any] = ARCHITECTURE,
    workers: int = 1,
    progress: Progress | None = None,
) -> None:
    """Train the models folder/NAME, each by its recipe, in `workers` processes.

    A model that was trained with the same recipe, architecture and data is kept, so an interrupted run resumes. data:
    a .npz file with `images` (N, 1, 8, 8) and `labels` (N,).
    """
    common = {"architecture": dict(architecture), "data": hashlib.sha256(data.read_bytes()).hexdigest()}
    jobs = []
    for name, recipe in recipes.items():
        origin, make = {"recipe": asdict(recipe), **common}, partial(_train_into, recipe, data, architecture)
        jobs.append(partial(make_once, folder / name, origin, make))
    run_jobs(jobs, workers, "training", progress)


def run_jobs(
    jobs: Sequence[Callable[[], Any]], workers: int, what: str = "", progress: Progress | None = None
) -> list[Any]:
    """Return the results of jobs in order, run in `workers` processes; a single worker is this process."""
    import joblib

    run = joblib.Parallel(n_jobs=min(workers, max(len(jobs), 1)), return_as="generator")
    progress, results = progress or (lambda *_: None), list[Any]()
    progress(what, 0, len(jobs))
    for result in run(joblib.delayed(job)() for job in jobs):
        results.append(result)
        progress(what, len(results), len(jobs))
    return results


def make_once(directory: Path, origin: Mapping[str, Any], make: Callable[[Path], None]) -> None:
    """Write a directory atomically by calling `make` with an empty folder, unless it exists with the same origin.

    origin: a description in JSON of everything that the content depends on.
    """
    record, text = "training.json", json.dumps({"made_by": origin}, indent=1) + "\n"
    if (directory / record).is_file() and (directory / record).read_text(encoding="utf-8") == text:
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with new_directory(directory) as unfinished:  # hidden, so no pattern of a zoo matches it
        make(unfinished)
        with writing(directory):
            (unfinished / record).write_text(text, encoding="utf-8")


def _train_into(recipe: TrainingRecipe, data: Path, architecture: Mapping[str, Any], folder: Path) -> None:
    with np.load(data, allow_pickle=False) as points:
        images, labels = (torch.from_numpy(points[name]) for name in ("images", "labels"))
    model = train(recipe, images, labels, architecture)
    with writing(folder):
        model.save_pretrained(folder)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one CPU thread.

    More threads hardly speed up small tensors, are up to ten times slower on busy cores, and change the rounding.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def train(
    recipe: TrainingRecipe, images: Tensor, labels: Tensor, architecture: Mapping[str, Any] = ARCHITECTURE
) -> Any:
    """Return a vision transformer trained by AdamW with a one-cycle learning rate, on the CPU in float32.

    The state of torch's global generator is unchanged.
    """
    transformers = transformers_library()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**architecture)).train()
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=recipe.steps)
    blank = float(images.min())  # the background after standardization
    for step in range(recipe.steps):
        rows = torch.randperm(len(labels), generator=generator)[: recipe.batch_size]
        chosen = images[rows]
        if recipe.shift and step % 2:
            chosen = shifted(chosen, recipe.shift, blank, generator)
        logits = model(pixel_values=chosen).logits
        loss = nn.functional.cross_entropy(logits, labels[rows], label_smoothing=recipe.label_smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def shifted(images: Tensor, most: int, blank: float, generator: torch.Generator) -> Tensor:
    """Return each image shifted by random (rows, columns) in -most ... most, the edges filled with `blank`."""
    height, width = images.shape[-2:]
    padded = torch.nn.functional.pad(images, (most,) * 4, value=blank)
    offset = torch.randint(0, 2 * most + 1, (len(images), 2), generator=generator)
    offsets = zip(padded, offset.tolist(), strict=True)
    return torch.stack([image[:, r : r + height, c : c + width] for image, (r, c) in offsets])
