"""Rated sentences of four sources: film reviews, product reviews, newspaper editorials, tweets [Hutto, Gilbert 2014].

They are in the source distribution of vaderSentiment 3.3.2 (MIT). Twenty people rated each sentence from -4 to 4; the
mean is its rating.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import numpy as np

from quotient_manifolds.load.huggingface import load_tokenizer

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
