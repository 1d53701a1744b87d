"""Tokenize texts in batches: for a classifier with labels, for a causal language model with next tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from quotient_manifolds.data_options import CAUSAL, PLAIN
from quotient_manifolds.load.huggingface import load_tokenizer, transformers_library
from quotient_manifolds.load.text import LabeledText, chunked, drawn, read_examples
from quotient_manifolds.messages import brief, first_line
from quotient_manifolds.symmetries.example_inputs import without_adapters

MAX_LENGTH = 128  # the default, or the number of positions of the model if smaller
NOTABLE = 0.1  # A larger share of unknown tokens is reported.
MOST_UNKNOWN = 0.5  # Beyond this share, the vocabulary is another model's, or it lacks the script of the text.
LETTERS = 32  # A token has fewer letters on average, so a prefix of a long text with 32 letters per token is enough.

CAUSAL_MODELS = ("ForCausalLM", "LMHeadModel")  # endings of the transformers classes that predict the next token

Row = tuple[list[int], bool]  # tokens, and whether the text was cut


@final
class TextEncoder:
    """Tokenize texts into input_ids and other keywords (rows, tokens), cut at `max_length`, padded to the longest.

    It counts truncated texts, tokens, and tokens that the tokenizer does not know, over all calls. home: directory of
    the tokenizer. config: the model's configuration, for its numbers of positions and tokens.
    """

    def __init__(self, home: Path, config: Any, max_length: int | None, *, pairs: bool = False) -> None:
        """Raise ValueError without a tokenizer, or for a length that it or the model does not support."""
        self.home, self.tokenizer = home, load_tokenizer(home)
        self.vocabulary = getattr(config, "vocab_size", None)
        bounds = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
        numbers = [bound for bound in (self.tokenizer.model_max_length, *bounds) if isinstance(bound, (int, float))]
        longest = int(min((bound for bound in numbers if bound >= 1), default=MAX_LENGTH))
        least = self.tokenizer.num_special_tokens_to_add(pair=pairs) + 1 + pairs  # each text has at least one token
        self.max_length = min(MAX_LENGTH, longest) if max_length is None else max_length
        if not least <= self.max_length <= longest:
            raise ValueError(
                f"max_length must lie in {least} ... {longest}, the positions of {home}. Found {self.max_length}"
            )
        self.truncated = self.tokens = self.unknown = 0

    def __call__(self, chunk: Sequence[LabeledText]) -> dict[str, Tensor]:
        """Return the tokens of the texts, or pairs of texts, by keyword argument of the model."""
        if self.tokenizer.pad_token is None and len(chunk) > 1:
            raise ValueError(f"The tokenizer in {self.home} has no padding token; use batches of size 1")
        texts = [each.text for each in chunk]
        pairs = None if chunk[0].text_pair is None else [each.text_pair for each in chunk]
        uncut = self.tokenizer(texts, pairs, return_special_tokens_mask=True, verbose=False)
        for text, ids, special in zip(texts, uncut["input_ids"], uncut["special_tokens_mask"], strict=True):
            if not ids:
                raise ValueError(f"A text must have tokens for the tokenizer in {self.home}. Found {brief(text)}")
            self.truncated += len(ids) > self.max_length
            self.tokens += special.count(0)
            self.unknown += sum(
                token == self.tokenizer.unk_token_id and not added for token, added in zip(ids, special, strict=True)
            )
        self.check_vocabulary(uncut["input_ids"])
        cut = {"truncation": True, "max_length": self.max_length}
        return {**self.tokenizer(texts, pairs, **cut, padding=len(chunk) > 1, return_tensors="pt")}

    def check_vocabulary(self, rows: Sequence[Sequence[int]]) -> None:
        """Raise ValueError for a token that the model does not have."""
        largest = max((token for row in rows for token in row), default=0)
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise ValueError(
                f"The tokenizer in {self.home} gives token {largest}, but the model knows {self.vocabulary} tokens"
            )

    def notes(self, examples: int) -> list[str]:
        """Return notes on the `examples` texts: how many were cut, and the share of unknown tokens.

        Raises ValueError if most tokens are unknown.
        """
        unknown = self.unknown / max(1, self.tokens)
        if unknown > MOST_UNKNOWN:
            raise ValueError(
                f"{unknown:.0%} of the tokens are unknown to the tokenizer in {self.home}: its vocabulary is damaged "
                "or another model's, or it lacks the script of the texts"
            )
        cut = f"{self.truncated} of {examples} texts were cut at {self.max_length} tokens (max_length)."
        rare = f"{unknown:.0%} of the tokens are unknown to the tokenizer."
        return [cut] * bool(self.truncated) + [rare] * (unknown > NOTABLE)


def encoded(
    examples: Sequence[LabeledText], home: Path, config: Any, batch_size: int, max_length: int | None
) -> tuple[list[dict[str, Tensor]], list[str]]:
    """Return the examples as batches of tokens, and the notes on them; see `TextEncoder` for the arguments.

    Raises ValueError if only some of the examples are pairs.
    """
    kinds = {each.text_pair is not None for each in examples}
    if len(kinds) > 1:
        raise ValueError("All examples must have a text_pair, or none. Found some with and some without")
    encode = TextEncoder(home, config, max_length, pairs=kinds == {True})
    return [encode(chunk) for chunk in chunked(examples, batch_size)], encode.notes(len(examples))


# ---- causal language models


def check_task(model: nn.Module, task: str) -> None:
    """Raise ValueError for a model of transformers whose class is for another task."""
    unwrapped = without_adapters(model)
    name, is_causal = type(unwrapped).__name__, type(unwrapped).__name__.endswith(CAUSAL_MODELS)
    if not type(unwrapped).__module__.startswith("transformers.") or is_causal == (task == CAUSAL):
        return
    if is_causal:
        raise ValueError(f"task must be causal for a {name}, which predicts tokens and no labels. Found {task}")
    raise ValueError(f"The task {task} needs a model whose class ends in {CAUSAL_MODELS[0]}. Found {name}")


def causal_batches(
    path: Path,
    encoder: TextEncoder,
    model: nn.Module,
    *,
    columns: Mapping[str, str] | None,
    batch_size: int,
    most: int | None,
    seed: int | None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return batches, dicts of the model's keywords and labels, and the notes on them.

    Every token is predicted from those before it. A .txt file is cut into consecutive blocks of max_length tokens, each
    row of another file at max_length. Labels are at the position of their token, as in Hugging Face, and -100 at
    padding; `next_token_cross_entropy` shifts them. most, seed: number of rows or blocks, and seed of their draw.

    Raises ValueError for a model of another task, a file without text, and tokens that the model does not know.
    """
    check_task(model, CAUSAL)
    first = most if seed is None else None
    is_plain = path.suffix.lower() == PLAIN
    rows = _blocks(path, encoder, first) if is_plain else _rows(path, encoder, columns, first)
    if not rows:
        raise ValueError(f"{path} must have a text of at least two tokens, one to predict. Found none")
    encoder.check_vocabulary([ids for ids, _ in rows])
    tokenizer = encoder.tokenizer
    tokenizer.padding_side = "right"  # padding on the left would change the positions
    if tokenizer.pad_token is None:  # any token will do, because padding is masked and never predicted
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    collate = transformers_library().DataCollatorForSeq2Seq(tokenizer)  # pads labels, too
    chosen = [rows[row] for row in drawn(len(rows), most, seed)]
    examples = [{"input_ids": ids, "labels": ids} for ids, _ in chosen]
    encoder.truncated = sum(cut for _, cut in chosen)
    return [dict(collate(chunk)) for chunk in chunked(examples, batch_size)], encoder.notes(len(chosen))


def _rows(path: Path, encoder: TextEncoder, columns: Mapping[str, str] | None, most: int | None) -> list[Row]:
    """Return the tokens of the first `most` texts with at least two tokens; the rest of the file is not read."""
    rows: list[Row] = []
    for example in read_examples(path, columns=columns, needed=("text",)):
        ids = encoder.tokenizer(example.text, verbose=False)["input_ids"]
        cut = len(ids) > encoder.max_length
        if cut:
            ids = encoder.tokenizer(example.text, truncation=True, max_length=encoder.max_length)["input_ids"]
        if len(ids) > 1:  # nothing is predicted from a single token
            rows.append((ids, cut))
        if len(rows) == most:
            break
    return rows


def _blocks(path: Path, encoder: TextEncoder, most: int | None) -> list[Row]:
    """Return the first `most` consecutive blocks of max_length tokens."""
    length = encoder.max_length
    try:
        text = path.read_text(encoding="utf-8-sig")[: None if most is None else LETTERS * (most + 1) * length]
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not readable as UTF-8 text ({first_line(error)})") from error
    tokens = encoder.tokenizer(text, verbose=False)["input_ids"]
    return [(block, False) for block in chunked(tokens, length) if len(block) > 1][:most]
