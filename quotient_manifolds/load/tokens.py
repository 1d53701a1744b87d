"""Labelled texts as batches of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.load.huggingface import load_tokenizer, read_config
from quotient_manifolds.load.points import Points, Read
from quotient_manifolds.load.text import LabelledText

MAX_LENGTH = 128  # where nothing else is said; models with fewer positions set their own


@final
@dataclass(frozen=True)
class TextEncoder:
    """Texts -> input_ids and what belongs to them (rows, tokens), cut at `max_length`, padded to the longest."""

    tokenizer: Any
    source: Path
    max_length: int
    vocabulary: int | None  # tokens that the model knows

    def __call__(self, chunk: Sequence[LabelledText]) -> dict[str, Tensor]:
        pairs = [example.text_pair for example in chunk] if chunk[0].text_pair is not None else None
        encoded = self.tokenizer(
            [example.text for example in chunk],
            pairs,
            truncation=True,
            max_length=self.max_length,
            padding=len(chunk) > 1,
            return_tensors="pt",
        )
        largest = int(encoded["input_ids"].max())
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise ValueError(
                f"The tokenizer in {self.source} gives token {largest}, but the model knows {self.vocabulary} tokens "
                "only."
            )
        return {**encoded}


def text_encoder(
    source: Path, *, positions: int | None, vocabulary: int | None, max_length: int | None, batch_size: int
) -> TextEncoder:
    """The encoder of the tokenizer in `source`, for a model of so many positions and tokens (None: not known).

    Raises ValueError if there is no tokenizer, or if the lengths or batches asked for are more than it can make.
    """
    tokenizer = load_tokenizer(source)
    longest = min(positions or tokenizer.model_max_length, tokenizer.model_max_length)
    wanted = min(MAX_LENGTH, longest) if max_length is None else max_length
    if not 1 <= wanted <= longest:
        raise ValueError(f"max_length must lie in 1 ... {longest}, the positions of {source}, found {wanted}.")
    if tokenizer.pad_token is None and batch_size > 1:
        raise ValueError(f"The tokenizer in {source} has no padding token; use batches of size 1.")
    return TextEncoder(tokenizer, source, wanted, vocabulary)


def tokenised_batches(
    directory: str | Path, examples: Sequence[LabelledText], *, batch_size: int = 32, max_length: int = 64
) -> list[dict[str, Tensor]]:
    """The examples, in order, as dicts a Hugging Face classifier takes: input_ids and what belongs to them, and labels.

    Texts are cut at `max_length` tokens and padded to the longest of their batch; the last batch may be smaller. Raises
    ValueError if the directory has no tokenizer, or one whose tokens or positions the model beside it does not have.
    """
    path = Path(directory)
    config = read_config(path)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, found {batch_size}.")
    check_pairs(examples)
    encode = text_encoder(
        path,
        positions=config.get("max_position_embeddings"),
        vocabulary=config.get("vocab_size"),
        max_length=max_length,
        batch_size=batch_size,
    )
    chunks = [examples[start : start + batch_size] for start in range(0, len(examples), batch_size)]
    return [{**encode(chunk), "labels": torch.tensor([example.label for example in chunk])} for chunk in chunks]


def check_pairs(examples: Sequence[LabelledText]) -> None:
    """Raises ValueError unless all examples are pairs of texts or none is."""
    if len({example.text_pair is None for example in examples}) > 1:
        raise ValueError("Some examples have a text_pair and some have none; give all of them one, or none.")


@final
class TextPoints(Points):
    """Labelled texts or pairs of them, with the lines they stand in."""

    keyword = "input_ids"

    def __init__(
        self,
        path: Path,
        examples: Sequence[tuple[int, LabelledText]],
        *,
        tokenizer: Path | None,
        max_length: int | None,
        batch_size: int,
    ) -> None:
        check_pairs([example for _, example in examples])
        self._path = path
        self._examples = examples
        self._labels = [example.label for _, example in examples]
        self._tokenizer, self._max_length, self._batch_size = tokenizer, max_length, batch_size

    @property
    def labels(self) -> Sequence[int]:
        return self._labels

    def file(self, row: int) -> Path:
        return self._path

    def where(self, row: int) -> str:
        return f"{self._path}, line {self._examples[row][0]}"

    def reader(self, model: nn.Module, home: Path | None) -> Read:
        source = self._tokenizer or home
        if source is None:
            raise ValueError(
                f"{type(model).__name__} was not loaded from a directory, so there is no tokenizer for {self._path}: "
                "name the directory of one."
            )
        config = getattr(model, "config", None)
        encode = text_encoder(
            source,
            positions=getattr(config, "max_position_embeddings", None),
            vocabulary=getattr(config, "vocab_size", None),
            max_length=self._max_length,
            batch_size=self._batch_size,
        )
        return lambda rows: encode([self._examples[row][1] for row in rows])
