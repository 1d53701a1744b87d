"""Train a zoo of small vision transformers on digits, each once and in a process of its own."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds.demo.digits import shifted
from quotient_manifolds.files import write_text
from quotient_manifolds.load import load_object
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
RECORD = "training.json"  # what made the model in a directory, and the digest of its weights


@dataclass(frozen=True)
class TrainingRecipe:
    """Hold what decides a trained model besides the data: AdamW's settings, batches, regularisation, seed."""

    learning_rate: float
    weight_decay: float
    batch_size: int
    label_smoothing: float
    shift: int  # random shifts of up to so many pixels on every other step; 0: none
    steps: int
    seed: int


def draw_recipe(index: int, *, seed: int = 0, steps: int | None = None) -> TrainingRecipe:
    """Draw recipe number `index` of the zoo that `seed` names; it does not depend on how many others are drawn."""
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
    """Train the models folder/NAME, by the recipe of each name, in `workers` processes.

    A model that is there, complete and made by the same recipe, architecture and data, is not trained again; each is
    moved to its place when it is finished, so an interrupted run goes on where it stopped.

    data: an npz file of `images` (N, 1, 8, 8) and `labels` (N,).
    """
    common = {"architecture": dict(architecture), "data": hashlib.sha256(data.read_bytes()).hexdigest()}
    jobs = []
    for name, recipe in recipes.items():
        made_by = {"recipe": asdict(recipe), **common}
        if not is_made(folder / name, made_by):
            jobs.append(partial(make_once, folder / name, made_by, partial(_train_into, recipe, data, common)))
    report = progress or (lambda what, finished, total: None)
    kept = len(recipes) - len(jobs)
    report("training", kept, len(recipes))
    for finished, _ in enumerate(each_finished(jobs, workers), kept + 1):
        report("training", finished, len(recipes))


def each_finished(jobs: Sequence[Callable[[], Any]], workers: int) -> Iterator[Any]:
    """Yield the results of jobs as they are finished; with two or more workers in so many processes."""
    if min(workers, len(jobs)) < 2:
        yield from (job() for job in jobs)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork of a process that has run torch's threads may hang
    waits = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(min(workers, len(jobs)), spawn, waits) as pool:
        try:
            yield from (done.result() for done in as_completed([pool.submit(_interruptibly, job) for job in jobs]))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _interruptibly(job: Callable[[], Any]) -> Any:
    """Run a job that Ctrl-C ends. A process that waits for one does not hear it, and so leaves no traceback."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return job()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def is_made(directory: Path, made_by: Mapping[str, Any]) -> bool:
    """Return whether `directory` holds a complete model that was made by this; `made_by` is anything JSON can hold."""
    try:
        record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        return bool(record["made_by"] == made_by and record["weights_sha256"] == digest(directory))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def make_once(directory: Path, made_by: Mapping[str, Any], make: Callable[[Path], None]) -> None:
    """Call `make`, which writes a model into an empty folder, and move that to `directory`: it is never half-written.

    Nothing is done if `directory` holds it already, see `is_made`.
    """
    if is_made(directory, made_by):
        return
    unfinished = directory.parent.with_name(f".unfinished-{directory.name}")  # a zoo is all that lies in one folder
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        make(unfinished)
        record = {"made_by": made_by, "weights_sha256": digest(unfinished)}
        (unfinished / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        os.replace(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def digest(directory: Path) -> str:
    """Return a hash of a model's configuration and weights."""
    files = [directory / "config.json", directory / "model.safetensors"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _train_into(recipe: TrainingRecipe, data: Path, common: Mapping[str, Any], folder: Path) -> None:
    with np.load(data, allow_pickle=False) as points:
        images, labels = (torch.from_numpy(points[name]) for name in ("images", "labels"))
    train(recipe, images, labels, common["architecture"]).save_pretrained(folder, safe_serialization=True)


def write_scores(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows with the same keys as CSV."""
    first, *others = rows
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(first), lineterminator="\n")
    writer.writeheader()
    writer.writerows([first, *others])
    write_text(path, text.getvalue())


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one CPU thread.

    Tensors this small gain little from more, lose up to tenfold where other programs keep the cores busy, and round
    differently with every number of threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def train(
    recipe: TrainingRecipe,
    images: Tensor,
    labels: Tensor,
    architecture: Mapping[str, Any] = ARCHITECTURE,
) -> Any:
    """Return a vision transformer trained by AdamW with a one-cycle learning rate, on the CPU in float32.

    torch's global generator is left alone.
    """
    model = _untrained(recipe.seed, architecture).train()
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=recipe.steps)
    blank = float(images.min())  # the background after standardisation
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


def _untrained(seed: int, architecture: Mapping[str, Any]) -> Any:
    # By name, for the library itself is imported behind one door.
    config = load_object("transformers:ViTConfig", "a model's configuration")(**architecture)
    build = load_object("transformers:ViTForImageClassification", "a vision transformer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(config)
