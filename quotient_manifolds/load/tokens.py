"""Turn texts into batches of tokens: for a classifier with its labels, for a language model with what it predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from quotient_manifolds.load.huggingface import load_tokenizer, read_config, transformers_library
from quotient_manifolds.load.text import PLAIN, Batches, LabelledText, drawn, read_examples
from quotient_manifolds.messages import brief

MAX_LENGTH = 128  # where nothing else is said; models with fewer positions set their own
NOTABLE = 0.1  # share of unknown tokens that is worth a sentence
MOST_UNKNOWN = 0.5  # of the tokens; beyond it the vocabulary is another model's, or the text in a script it has not

CLASSIFICATION, CAUSAL, MASKED, SEQ2SEQ = "classification", "causal", "masked", "seq2seq"
LANGUAGE: Final = (CAUSAL, MASKED, SEQ2SEQ)
ENDINGS: Final[dict[str, tuple[str, ...]]] = {  # of the classes of transformers that have such a task
    CAUSAL: ("ForCausalLM", "LMHeadModel"),
    MASKED: ("ForMaskedLM",),
    SEQ2SEQ: ("ForConditionalGeneration", "ForSeq2SeqLM"),
}
SHARE = 0.15  # of the tokens are masked, as in BERT [Devlin et al. 2019]
LETTERS = 8  # of a token, as a first guess
MARGIN = 16  # tokens in which a text that is cut short may end otherwise than the whole one

Row = tuple[dict[str, list[int]], bool]  # tokens by keyword, and whether the text was cut


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


def tokenised_batches(
    directory: str | Path, examples: Sequence[LabelledText], *, batch_size: int = 32, max_length: int | None = None
) -> Batches:
    """Return the examples, in order, as batches a Hugging Face classifier takes: dicts of input_ids and so on, and
    labels.

    Texts are cut at `max_length` tokens (128, or the positions the model has, if fewer) and padded to the longest of
    their batch; the last batch may be smaller. The `notes` of the answer say how many texts were cut. Raises ValueError
    if the directory has no tokenizer, one whose tokens or positions the model beside it does not have, or one that
    knows less than half of the words.
    """
    path = Path(directory)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1. Found {batch_size}.")
    encode = TextEncoder(path, SimpleNamespace(**read_config(path)), max_length, pairs=are_pairs(examples))
    chunks = [examples[start : start + batch_size] for start in range(0, len(examples), batch_size)]
    batches = [{**encode(chunk), "labels": torch.tensor([each.label for each in chunk])} for chunk in chunks]
    return Batches(batches, encode.notes(len(examples)))


def are_pairs(examples: Sequence[LabelledText]) -> bool:
    """Return whether all examples are pairs of texts; ValueError if only some are."""
    kinds = {each.text_pair is not None for each in examples}
    if len(kinds) > 1:
        raise ValueError("All examples must have a text_pair, or none. Found some with and some without.")
    return kinds == {True}


# ---- language models


def check_task(model: nn.Module, task: str) -> None:
    """Raise ValueError for a model of transformers whose class says that it predicts something else."""
    unwrapped: Any = getattr(model, "get_base_model", lambda: model)()  # of peft
    kind = type(unwrapped).__name__
    own = next((each for each, endings in ENDINGS.items() if kind.endswith(endings)), CLASSIFICATION)
    if not type(unwrapped).__module__.startswith("transformers.") or own == task:
        return
    if task == CLASSIFICATION:
        raise ValueError(f"task must be {own} for a {kind}, which predicts tokens and no labels. Found {task}.")
    raise ValueError(f"The task {task} needs a model whose class ends in {ENDINGS[task][0]}. Found {kind}.")


def language_batches(
    path: Path,
    task: str,
    encoder: TextEncoder,
    model: nn.Module,
    *,
    columns: Mapping[str, str] | None,
    batch_size: int,
    most: int | None,
    seed: int | None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return batches, dicts of the model's keywords and labels, and the notes on them.

    A causal model tells every token from those before it: of a .txt file in blocks of max_length tokens, one behind the
    other; of rows of other files each cut at max_length. A masked one tells about 15 % of the tokens of every row (of a
    .txt file, line), chosen and replaced as by BERT; a sequence-to-sequence model the column text_pair from text.
    Labels stand at the place of their token, as Hugging Face has them, -100 where it does not count:
    `next_token_cross_entropy` shifts those of causal models, `cross_entropy` takes the others. most, seed: how many
    rows or blocks, and what draws them and the masks. Raises ValueError for a model of another kind, a file without
    text, and tokens that the model does not know.
    """
    check_task(model, task)
    wanted = most if seed is None else None
    if task == CAUSAL and path.suffix.lower() == PLAIN:
        rows = _blocks(path, encoder, wanted)
    else:
        rows = _rows(path, task, encoder, columns, wanted)
    if not rows:
        raise ValueError(f"{path} must have a text of at least two tokens. Found none, so nothing is to be told.")
    encoder.check_known(list(chain.from_iterable(row.values() for row, _ in rows)))
    tokenizer = encoder.tokenizer
    tokenizer.padding_side = "right"  # so that every position keeps its number
    if tokenizer.pad_token is None:  # any will do: it is masked and never told
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    if task == MASKED:
        collate: Any = transformers_library().DataCollatorForLanguageModeling(tokenizer, mlm_probability=SHARE)
    else:
        collate = transformers_library().DataCollatorForSeq2Seq(tokenizer, model if task == SEQ2SEQ else None)
    chosen = [rows[row] for row in drawn(len(rows), most, seed)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed or 0)
        chunks = (chosen[start : start + batch_size] for start in range(0, len(chosen), batch_size))
        batches = [dict(collate([row for row, _ in chunk])) for chunk in chunks]
    if any(bool((batch["labels"] < 0).all()) for batch in batches):
        raise ValueError(f"Each batch of the task {task} must tell a token. Found one without. Use larger batches.")
    encoder.truncated = sum(cut for _, cut in chosen)
    return batches, encoder.notes(len(chosen))


def _rows(
    path: Path, task: str, encoder: TextEncoder, columns: Mapping[str, str] | None, most: int | None
) -> list[Row]:
    """Return the tokens of every text that tells something; nothing is read behind the last that is wanted."""
    cut: dict[str, Any] = {"truncation": True, "max_length": encoder.max_length}
    rows: list[Row] = []
    for example in read_examples(path, columns=columns, needed=needed_for(task)):
        whole = encoder.tokenizer(example.text, verbose=False)["input_ids"]
        ids = encoder.tokenizer(example.text, **cut)["input_ids"] if len(whole) > encoder.max_length else whole
        row = {"input_ids": ids}
        if task == SEQ2SEQ:
            row["labels"] = encoder.tokenizer(text_target=example.text_pair, **cut)["input_ids"]
        elif task == CAUSAL:
            row["labels"] = ids
        if len(ids) > (task == CAUSAL):  # of a single token a causal model has nothing to tell
            rows.append((row, len(whole) > len(ids)))
        if len(rows) == most:
            break
    return rows


def needed_for(task: str) -> tuple[str, ...]:
    """Return the columns that a task needs."""
    return ("text", "text_pair") if task == SEQ2SEQ else ("text",)


def _blocks(path: Path, encoder: TextEncoder, most: int | None) -> list[Row]:
    """Return blocks of max_length tokens; of a long text as many as are wanted are read, and little more."""
    text, length = path.read_text(encoding="utf-8"), encoder.max_length
    wanted = None if most is None else most * length
    end = len(text) if wanted is None else LETTERS * wanted
    while True:
        tokens = encoder.tokenizer(text[:end], verbose=False)["input_ids"]
        if wanted is None or end >= len(text) or len(tokens) > wanted + MARGIN:
            break
        end *= 4
    blocks = (tokens[start : start + length] for start in range(0, len(tokens), length))
    return [({"input_ids": block, "labels": block}, False) for block in blocks if len(block) > 1][:most]
