"""Labelled texts as batches of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.load.huggingface import has_tokenizer, load_tokenizer, read_config
from quotient_manifolds.load.names import brief, first_line, shown
from quotient_manifolds.load.points import Batches, Points, Reader
from quotient_manifolds.load.text import Example, LabelledText

MAX_LENGTH = 128  # where nothing else is said; models with fewer positions set their own
MOST_UNKNOWN = 0.5  # of the tokens; beyond it the vocabulary is another model's, or the text in a script it has not
# Model types whose table of positions begins after the padding token: that many places of it are never used.
OFFSET_POSITIONS = frozenset(
    {
        "camembert",
        "data2vec-text",
        "ibert",
        "layoutlmv3",
        "lilt",
        "longformer",
        "luke",
        "markuplm",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)


@final
@dataclass(frozen=True)
class Table:
    """What a model takes: so many positions, tokens and types of tokens (None: not known)."""

    positions: int | None = None
    vocabulary: int | None = None
    types: int | None = None

    @classmethod
    def of(cls, setting: Callable[[str], Any]) -> Table:
        """Read off a configuration; `setting` gives its entries by name, None where there is none."""
        names = ("max_position_embeddings", "n_positions", "vocab_size", "type_vocab_size", "pad_token_id")
        found = [value if isinstance(value := setting(name), int) and value >= 0 else None for name in names]
        longest, others, vocabulary, types, padding = found
        positions = longest or others
        if positions and setting("model_type") in OFFSET_POSITIONS:
            positions = max(1, positions - (1 if padding is None else padding) - 1)
        return cls(positions, vocabulary, types)


class TextEncoder:
    """Texts -> input_ids and what belongs to them (rows, tokens), cut at `max_length`, padded to the longest.

    It counts, over all calls, texts, those that were cut, tokens, and tokens that the tokenizer does not know.
    """

    def __init__(self, source: Path, table: Table, max_length: int | None, batch_size: int, *, pairs: bool) -> None:
        """Raise ValueError without a tokenizer, or if the lengths or batches asked for are more than it can make."""
        self.tokenizer = load_tokenizer(source)
        self.source, self.table = source, table
        self.max_length = self._length(max_length, pairs=pairs)
        if self.tokenizer.pad_token is None and batch_size > 1:
            raise ValueError(f"The tokenizer in {shown(source)} has no padding token; use batches of size 1.")
        self.texts = self.truncated = self.tokens = self.unknown = 0

    def _length(self, asked: int | None, *, pairs: bool) -> int:
        own = self.tokenizer.model_max_length
        known = [bound for bound in (own, self.table.positions) if isinstance(bound, (int, float)) and bound >= 1]
        longest = int(min(known, default=MAX_LENGTH))
        least = self.tokenizer.num_special_tokens_to_add(pair=pairs) + 1 + pairs  # and a token of each text
        wanted = min(MAX_LENGTH, longest) if asked is None else asked
        if not least <= wanted <= longest:
            raise ValueError(
                f"max_length must lie in {least} ... {longest}, the positions of {shown(self.source)}, found {wanted}."
            )
        return wanted

    def __call__(self, chunk: Sequence[LabelledText | Example], places: Sequence[str]) -> dict[str, Tensor]:
        """Encode the texts; `places` says where each stands."""
        texts = [example.text for example in chunk]
        pairs = [example.text_pair for example in chunk] if chunk[0].text_pair is not None else None
        self._count(texts, pairs, places)
        padding = {"padding": len(chunk) > 1, "return_tensors": "pt"}
        encoded = self._tokens(texts, pairs, places, truncation=True, max_length=self.max_length, **padding)
        largest = int(encoded["input_ids"].max())
        if self.table.vocabulary is not None and largest >= self.table.vocabulary:
            raise ValueError(
                f"The tokenizer in {shown(self.source)} gives token {largest}, but the model knows "
                f"{self.table.vocabulary} tokens only."
            )
        if self.table.types == 1:  # the second text of a pair has no type of its own here
            encoded.pop("token_type_ids", None)
        return {**encoded}

    def _tokens(self, texts: list[str], pairs: Any, places: Sequence[str], **options: Any) -> Any:
        try:
            return self.tokenizer(texts, pairs, **options)
        except Exception as error:  # of a tokenizer that is not what it says it is: any kind
            what = f"The tokenizer in {shown(self.source)} fails on the text of {places[0]}"
            raise ValueError(f"{what}: {first_line(error)}") from error

    def _count(self, texts: list[str], pairs: Any, places: Sequence[str]) -> None:
        """Look at all tokens, the ones that will be cut as well. Raises ValueError for a text that has none at all."""
        options = {"return_special_tokens_mask": True, "return_token_type_ids": False, "verbose": False}
        found = self._tokens(texts, pairs, places, **options)
        unknown = self.tokenizer.unk_token_id
        for row, (ids, special) in enumerate(zip(found["input_ids"], found["special_tokens_mask"], strict=True)):
            if not ids:
                raise ValueError(f"{places[row]}: the text {brief(texts[row])} has no tokens: nothing is left to read.")
            words = [token for token, added in zip(ids, special, strict=True) if not added]
            # A tokenizer without a sign for what it does not know leaves it out.
            lost = bool(texts[row].strip()) and not words
            self.texts += 1
            self.truncated += len(ids) > self.max_length
            self.tokens += len(words) + lost
            self.unknown += sum(token == unknown for token in words) + lost

    def check(self) -> None:
        """Raise ValueError if most of what was read means nothing to the tokenizer."""
        if self.unknown_share > MOST_UNKNOWN:
            raise ValueError(
                f"{self.unknown_share:.0%} of the tokens are unknown to the tokenizer in {shown(self.source)}: its "
                "vocabulary is empty, damaged or another model's, or the texts are in a script that it does not have."
            )

    @property
    def unknown_share(self) -> float:
        """Return the share of unknown tokens in all that was read."""
        return self.unknown / self.tokens if self.tokens else 0.0


def tokenised_batches(
    directory: str | Path, examples: Sequence[LabelledText], *, batch_size: int = 32, max_length: int | None = None
) -> Batches:
    """Return the examples, in order, as batches a Hugging Face classifier takes: dicts of input_ids and so on, and
    labels.

    Texts are cut at `max_length` tokens (128, or the positions the model has, if fewer) and padded to the longest of
    their batch; the last batch may be smaller. The answer is a list that says how many texts were cut (`truncated`,
    `notes`). Raises ValueError if the directory has no tokenizer, one whose tokens or positions the model beside it
    does not have, or one that knows less than half of the words.
    """
    path = Path(directory)
    config = read_config(path)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, found {batch_size}.")
    check_pairs(examples)
    pairs = bool(examples) and examples[0].text_pair is not None
    encode = TextEncoder(path, Table.of(config.get), max_length, batch_size, pairs=pairs)
    batches = []
    for start in range(0, len(examples), batch_size):
        chunk = examples[start : start + batch_size]
        places = [f"example {start + row}" for row in range(len(chunk))]
        batches.append({**encode(chunk, places), "labels": torch.tensor([example.label for example in chunk])})
    encode.check()
    return Batches(
        batches,
        examples=len(examples),
        truncated=encode.truncated,
        max_length=encode.max_length,
        unknown=encode.unknown_share,
    )


def check_pairs(examples: Sequence[LabelledText | Example]) -> None:
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
        examples: Sequence[Example],
        *,
        tokenizer: Path | None,
        max_length: int | None,
        batch_size: int,
    ) -> None:
        check_pairs(examples)
        self._path = path
        self._examples = examples
        self._tokenizer, self._max_length, self._batch_size = tokenizer, max_length, batch_size

    @property
    def labels(self) -> Sequence[int | str]:
        return [example.label for example in self._examples]

    def file(self, row: int) -> Path:
        return self._path

    def where(self, row: int) -> str:
        return f"{shown(self._path)}, line {self._examples[row].line}"

    def reader(self, model: nn.Module, homes: Sequence[Path]) -> Reader:
        source = self._tokenizer or next(filter(has_tokenizer, homes), None) or next(iter(homes), None)
        if source is None:
            raise ValueError(
                f"{type(model).__name__} was not loaded from a directory, so there is no tokenizer for "
                f"{shown(self._path)}: name the directory of one."
            )
        config = getattr(model, "config", None)
        pairs = self._examples[0].text_pair is not None
        table = Table.of(lambda name: getattr(config, name, None))
        encode = TextEncoder(source, table, self._max_length, self._batch_size, pairs=pairs)
        return _TextReader(self, self._examples, encode)


@final
class _TextReader(Reader):
    """Tokens of the examples in these rows."""

    def __init__(self, points: TextPoints, examples: Sequence[Example], encode: TextEncoder) -> None:
        self._points, self._examples, self._encode = points, examples, encode
        self.length = encode.max_length

    def __call__(self, rows: Sequence[int]) -> dict[str, Tensor]:
        return self._encode([self._examples[row] for row in rows], list(map(self._points.where, rows)))

    def check(self) -> None:
        self._encode.check()
        self.truncated, self.unknown = self._encode.truncated, self._encode.unknown_share
