"""Turn labelled texts into batches of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.load.huggingface import has_tokenizer, load_tokenizer, read_config
from quotient_manifolds.load.labelled_examples import Batches, Examples
from quotient_manifolds.load.text import LabelledText
from quotient_manifolds.messages import brief, first_line, shown

MAX_LENGTH = 128  # where nothing else is said; models with fewer positions set their own
MOST_UNKNOWN = 0.5  # of the tokens; beyond it the vocabulary is another model's, or the text in a script it has not
# Model types whose table of positions begins after the padding token: that many places of it are never used.
OFFSET_POSITIONS = frozenset(
    {
        *("camembert", "data2vec-text", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet"),
        *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    }
)


@final
class TextEncoder:
    """Turn texts into input_ids and what belongs to them (rows, tokens), cut at `max_length`, padded to the longest.

    It counts, over all calls, texts that were cut, tokens, and tokens that the tokenizer does not know.
    The model's configuration says as attributes what it takes, if it does.
    """

    def __init__(self, source: Path, config: Any, max_length: int | None, *, batch_size: int, pairs: bool) -> None:
        """Raise ValueError without a tokenizer, or if the lengths or batches asked for are more than it can make."""
        names = ("max_position_embeddings", "n_positions", "vocab_size", "type_vocab_size", "pad_token_id")
        numbers = (getattr(config, name, None) for name in names)
        known = [number if isinstance(number, int) and number >= 0 else None for number in numbers]
        positions, self.vocabulary, self.types, padding = known[0] or known[1], *known[2:]
        if positions and getattr(config, "model_type", None) in OFFSET_POSITIONS:
            positions = max(1, positions - (1 if padding is None else padding) - 1)
        self.source, self.tokenizer = source, load_tokenizer(source)
        self.max_length = self._length(max_length, positions, pairs=pairs)
        if self.tokenizer.pad_token is None and batch_size > 1:
            raise ValueError(f"The tokenizer in {shown(source)} has no padding token; use batches of size 1.")
        self.truncated = self.tokens = self.unknown = 0

    def _length(self, asked: int | None, positions: int | None, *, pairs: bool) -> int:
        own = self.tokenizer.model_max_length
        known = [bound for bound in (own, positions) if isinstance(bound, (int, float)) and bound >= 1]
        longest = int(min(known, default=MAX_LENGTH))
        least = self.tokenizer.num_special_tokens_to_add(pair=pairs) + 1 + pairs  # and a token of each text
        wanted = min(MAX_LENGTH, longest) if asked is None else asked
        if not least <= wanted <= longest:
            raise ValueError(
                f"max_length must lie in {least} ... {longest}, the positions of {shown(self.source)}, found {wanted}."
            )
        return wanted

    def __call__(self, chunk: Sequence[LabelledText], places: Sequence[str]) -> dict[str, Tensor]:
        """Encode the texts; `places` says where each stands."""
        texts = [example.text for example in chunk]
        pairs = [example.text_pair for example in chunk] if chunk[0].text_pair is not None else None
        self._count(texts, pairs, places)
        padding = {"padding": len(chunk) > 1, "return_tensors": "pt"}
        encoded = self._tokens(texts, pairs, places, truncation=True, max_length=self.max_length, **padding)
        self._check_known(int(encoded["input_ids"].max()))
        if self.types == 1:  # the second text of a pair has no type of its own here
            encoded.pop("token_type_ids", None)
        return {**encoded}

    def _tokens(self, texts: list[str], pairs: Any, places: Sequence[str], **options: Any) -> Any:
        try:
            return self.tokenizer(texts, pairs, **options)
        except Exception as error:  # of a tokenizer that is not what it says it is: any kind
            what = f"The tokenizer in {shown(self.source)} fails on the text of {places[0]}"
            raise ValueError(f"{what}: {first_line(error)}") from error

    def ids(self, texts: list[str], where: str, *, target: bool = False) -> list[list[int]]:
        """Return the tokens of texts, not cut; target: as a decoder has to tell them. `where` is the first one's."""
        given = {"text_target": texts} if target else {"text": texts}
        options = {"return_token_type_ids": False, "return_attention_mask": False, "verbose": False}
        try:
            found = self.tokenizer(**given, **options)["input_ids"]
        except Exception as error:  # as in `_tokens`
            what = f"The tokenizer in {shown(self.source)} fails on the text of {where}"
            raise ValueError(f"{what}: {first_line(error)}") from error
        largest = max((token for row in found for token in row), default=0)
        self._check_known(largest)
        return [list(row) for row in found]

    def cut_ids(self, texts: list[str], where: str, *, target: bool = False) -> tuple[list[list[int]], list[int]]:
        """Return the tokens of texts, cut as the tokenizer cuts them, and how many there were before."""
        whole = [len(row) for row in self.ids(texts, where, target=target)]
        given = {"text_target": texts} if target else {"text": texts}
        cut = self.tokenizer(**given, truncation=True, max_length=self.max_length, return_attention_mask=False)
        return [list(row) for row in cut["input_ids"]], whole

    def _check_known(self, largest: int) -> None:
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise ValueError(
                f"The tokenizer in {shown(self.source)} gives token {largest}, but the model knows {self.vocabulary} "
                "tokens only."
            )

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
            self.truncated += len(ids) > self.max_length
            self.tokens += len(words) + lost
            self.unknown += sum(token == unknown for token in words) + lost

    def summary(self) -> dict[str, Any]:
        """Return what `Batches` says of all calls; ValueError if most of the words mean nothing to the tokenizer."""
        unknown = self.unknown / self.tokens if self.tokens else 0.0
        if unknown > MOST_UNKNOWN:
            raise ValueError(
                f"{unknown:.0%} of the tokens are unknown to the tokenizer in {shown(self.source)}: its vocabulary is "
                "empty, damaged or another model's, or the texts are in a script that it does not have."
            )
        return {"truncated": self.truncated, "max_length": self.max_length, "unknown": unknown}


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
    config = SimpleNamespace(**read_config(path))
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, found {batch_size}.")
    pairs = are_pairs(examples)
    encode = TextEncoder(path, config, max_length, batch_size=batch_size, pairs=pairs)
    batches = []
    for start in range(0, len(examples), batch_size):
        chunk = examples[start : start + batch_size]
        places = [f"example {start + row}" for row in range(len(chunk))]
        batches.append({**encode(chunk, places), "labels": torch.tensor([example.label for example in chunk])})
    return Batches(batches, examples=len(examples), **encode.summary())


def tokenizer_of(given: Path | None, homes: Sequence[Path], model: nn.Module, path: Path) -> Path:
    """Return the directory of the tokenizer for the text at `path`: the one given, or one the model was loaded from."""
    source = given or next(filter(has_tokenizer, homes), None) or next(iter(homes), None)
    if source is None:
        raise ValueError(
            f"{type(model).__name__} was not loaded from a directory, so there is no tokenizer for {shown(path)}: name "
            "the directory of one."
        )
    return source


def are_pairs(examples: Sequence[LabelledText]) -> bool:
    """Return whether all examples are pairs of texts; ValueError if only some are."""
    kinds = {example.text_pair is not None for example in examples}
    if len(kinds) > 1:
        raise ValueError("Some examples have a text_pair and some have none; give all of them one, or none.")
    return kinds == {True}


@final
class TextExamples(Examples):
    """Hold labelled texts or pairs of them, with the lines they stand in."""

    keyword = "input_ids"

    def __init__(
        self,
        path: Path,
        examples: Sequence[LabelledText],
        *,
        tokenizer: Path | None,
        max_length: int | None,
        batch_size: int,
    ) -> None:
        self.path, self._examples, self._pairs = path, examples, are_pairs(examples)
        self._tokenizer, self._max_length, self._batch_size = tokenizer, max_length, batch_size
        self.labels = [example.label for example in examples]

    def where(self, row: int) -> str:
        return f"{shown(self.path)}, line {self._examples[row].line}"

    def inputs(
        self, batches: Sequence[Sequence[int]], model: nn.Module, homes: Sequence[Path]
    ) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
        source = tokenizer_of(self._tokenizer, homes, model, self.path)
        config = getattr(model, "config", None)
        encode = TextEncoder(source, config, self._max_length, batch_size=self._batch_size, pairs=self._pairs)
        made = [encode([self._examples[row] for row in rows], list(map(self.where, rows))) for rows in batches]
        return made, encode.summary()
