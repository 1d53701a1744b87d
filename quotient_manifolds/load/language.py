"""Make batches of language modelling: which tokens a model sees, and which it has to tell."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from quotient_manifolds.load.batches import drawn
from quotient_manifolds.load.huggingface import transformers_library
from quotient_manifolds.load.text import PLAIN, read_examples
from quotient_manifolds.load.tokens import TextEncoder

CAUSAL, MASKED, SEQ2SEQ = "causal", "masked", "seq2seq"
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
    unwrapped: Any = getattr(model, "get_base_model", lambda: model)()  # of peft
    kind = type(unwrapped).__name__
    if type(unwrapped).__module__.startswith("transformers.") and not kind.endswith(ENDINGS[task]):
        raise ValueError(f"The task {task} needs a model whose class ends in {ENDINGS[task][0]}. Found {kind}.")
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
