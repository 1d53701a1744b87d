"""Turn texts into batches of tokens: for a classifier with labels, for a causal language model with next tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from quotient_manifolds.load.huggingface import load_tokenizer, transformers_library
from quotient_manifolds.load.text import PLAIN, LabelledText, drawn, read_examples
from quotient_manifolds.messages import brief, first_line
from quotient_manifolds.symmetries.example_inputs import without_adapters

MAX_LENGTH = 128  # where nothing else is said; models with fewer positions set their own
NOTABLE = 0.1  # share of unknown tokens that is worth a sentence
MOST_UNKNOWN = 0.5  # of the tokens; beyond it the vocabulary is another model's, or the text in a script it has not

CLASSIFICATION, CAUSAL = "classification", "causal"  # what a model of text predicts
LETTERS = 32  # of a token, at most on average: of a long text no more are read than these for each that is wanted

CAUSAL_MODELS = ("ForCausalLM", "LMHeadModel")  # how classes of transformers end that predict the next token

Row = tuple[list[int], bool]  # tokens, and whether the text was cut


@final
class TextEncoder:
    """Turn texts into input_ids and what belongs to them (rows, tokens), cut at `max_length`, padded to the longest.

    It counts, over all calls, texts that were cut, tokens, and tokens that the tokenizer does not know. home: directory
    of the tokenizer. config: the model's configuration, whose attributes say how many positions and tokens it knows.
    """

    def __init__(self, home: Path, config: Any, max_length: int | None, *, pairs: bool = False) -> None:
        """Raise ValueError without a tokenizer, or for a length that it or the model cannot have."""
        self.home, self.tokenizer = home, load_tokenizer(home)
        self.vocabulary = getattr(config, "vocab_size", None)
        positions = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
        known = [bound for bound in (self.tokenizer.model_max_length, *positions) if isinstance(bound, (int, float))]
        longest = int(min((bound for bound in known if bound >= 1), default=MAX_LENGTH))
        least = self.tokenizer.num_special_tokens_to_add(pair=pairs) + 1 + pairs  # and a token of each text
        self.max_length = min(MAX_LENGTH, longest) if max_length is None else max_length
        if not least <= self.max_length <= longest:
            raise ValueError(
                f"max_length must lie in {least} ... {longest}, the positions of {home}. Found {self.max_length}."
            )
        self.truncated = self.tokens = self.unknown = 0

    def __call__(self, chunk: Sequence[LabelledText]) -> dict[str, Tensor]:
        """Return the tokens of the texts, or pairs of texts, by keyword of the model."""
        if self.tokenizer.pad_token is None and len(chunk) > 1:
            raise ValueError(f"The tokenizer in {self.home} has no padding token; use batches of size 1.")
        texts = [each.text for each in chunk]
        pairs = None if chunk[0].text_pair is None else [each.text_pair for each in chunk]
        whole = self.tokenizer(texts, pairs, return_special_tokens_mask=True, verbose=False)
        for text, ids, special in zip(texts, whole["input_ids"], whole["special_tokens_mask"], strict=True):
            if not ids:
                raise ValueError(f"A text must have tokens for the tokenizer in {self.home}. Found {brief(text)}.")
            self.truncated += len(ids) > self.max_length
            self.tokens += special.count(0)
            self.unknown += sum(
                token == self.tokenizer.unk_token_id and not added for token, added in zip(ids, special, strict=True)
            )
        self.check_known(whole["input_ids"])
        cut = {"truncation": True, "max_length": self.max_length}
        return {**self.tokenizer(texts, pairs, **cut, padding=len(chunk) > 1, return_tensors="pt")}

    def check_known(self, rows: Sequence[Sequence[int]]) -> None:
        """Raise ValueError for a token that the model does not have."""
        largest = max((token for row in rows for token in row), default=0)
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise ValueError(
                f"The tokenizer in {self.home} gives token {largest}, but the model knows {self.vocabulary} tokens."
            )

    def notes(self, examples: int) -> list[str]:
        """Return what must be said of so many texts: how many were cut, which share of the tokens is unknown."""
        unknown = self.unknown / max(1, self.tokens)
        if unknown > MOST_UNKNOWN:
            raise ValueError(
                f"{unknown:.0%} of the tokens are unknown to the tokenizer in {self.home}: its vocabulary is damaged "
                "or another model's, or the texts are in a script that it does not have."
            )
        cut = f"{self.truncated} of {examples} texts were cut at {self.max_length} tokens (max_length)."
        rare = f"{unknown:.0%} of the tokens are unknown to the tokenizer."
        return [cut] * bool(self.truncated) + [rare] * (unknown > NOTABLE)


def encoded(
    examples: Sequence[LabelledText], home: Path, config: Any, batch_size: int, max_length: int | None
) -> tuple[list[dict[str, Tensor]], list[str]]:
    """Return the examples as batches of tokens, and what must be said of them; see `TextEncoder` for the rest."""
    encode = TextEncoder(home, config, max_length, pairs=are_pairs(examples))
    chunks = (examples[start : start + batch_size] for start in range(0, len(examples), batch_size))
    return [encode(chunk) for chunk in chunks], encode.notes(len(examples))


def are_pairs(examples: Sequence[LabelledText]) -> bool:
    """Return whether all examples are pairs of texts; ValueError if only some are."""
    kinds = {each.text_pair is not None for each in examples}
    if len(kinds) > 1:
        raise ValueError("All examples must have a text_pair, or none. Found some with and some without.")
    return kinds == {True}


# ---- causal language models


def check_task(model: nn.Module, task: str) -> None:
    """Raise ValueError for a model of transformers whose class says that it predicts something else."""
    unwrapped = without_adapters(model)
    kind, causal = type(unwrapped).__name__, type(unwrapped).__name__.endswith(CAUSAL_MODELS)
    if not type(unwrapped).__module__.startswith("transformers.") or causal == (task == CAUSAL):
        return
    if causal:
        raise ValueError(f"task must be causal for a {kind}, which predicts tokens and no labels. Found {task}.")
    raise ValueError(f"The task {task} needs a model whose class ends in {CAUSAL_MODELS[0]}. Found {kind}.")


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
    row of another file at max_length. Labels are at the position of their token, as in Hugging Face, -100 where it is
    ignored; `next_token_cross_entropy` shifts them. most, seed: how many rows or blocks, and what draws
    them. Raises ValueError for a model of another kind, a file without text, and tokens that the model does not know.
    """
    check_task(model, CAUSAL)
    wanted = most if seed is None else None
    blocks = path.suffix.lower() == PLAIN
    rows = _blocks(path, encoder, wanted) if blocks else _rows(path, encoder, columns, wanted)
    if not rows:
        raise ValueError(f"{path} must have a text of at least two tokens. Found none, so there is nothing to predict.")
    encoder.check_known([ids for ids, _ in rows])
    tokenizer = encoder.tokenizer
    tokenizer.padding_side = "right"  # so that every position keeps its number
    if tokenizer.pad_token is None:  # any will do: it is masked and never predicted
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    collate = transformers_library().DataCollatorForSeq2Seq(tokenizer)  # which fills labels up, too
    chosen = [rows[row] for row in drawn(len(rows), most, seed)]
    told = [{"input_ids": ids, "labels": ids} for ids, _ in chosen]
    encoder.truncated = sum(cut for _, cut in chosen)
    batches = [dict(collate(told[start : start + batch_size])) for start in range(0, len(told), batch_size)]
    return batches, encoder.notes(len(chosen))


def _rows(path: Path, encoder: TextEncoder, columns: Mapping[str, str] | None, most: int | None) -> list[Row]:
    """Return the tokens of every text of at least two tokens; nothing is read behind the last that is wanted."""
    rows: list[Row] = []
    for example in read_examples(path, columns=columns, needed=("text",)):
        ids = encoder.tokenizer(example.text, verbose=False)["input_ids"]
        cut = len(ids) > encoder.max_length
        if cut:
            ids = encoder.tokenizer(example.text, truncation=True, max_length=encoder.max_length)["input_ids"]
        if len(ids) > 1:  # a single token predicts nothing
            rows.append((ids, cut))
        if len(rows) == most:
            break
    return rows


def _blocks(path: Path, encoder: TextEncoder, most: int | None) -> list[Row]:
    """Return blocks of max_length tokens, one behind the other, at most so many."""
    length = encoder.max_length
    try:
        text = path.read_text(encoding="utf-8-sig")[: None if most is None else LETTERS * (most + 1) * length]
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not readable as UTF-8 text ({first_line(error)}).") from error
    tokens = encoder.tokenizer(text, verbose=False)["input_ids"]
    blocks = (tokens[start : start + length] for start in range(0, len(tokens), length))
    return [(block, False) for block in blocks if len(block) > 1][:most]
