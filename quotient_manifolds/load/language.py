"""Make batches of language modelling: which tokens a model sees, and which it has to tell."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from quotient_manifolds.load.text import PLAIN_SUFFIX, read_plain, read_texts
from quotient_manifolds.load.tokens import TextEncoder
from quotient_manifolds.messages import shown
from quotient_manifolds.sharpness.losses import IGNORED

CAUSAL, MASKED, SEQ2SEQ = "causal", "masked", "seq2seq"
LANGUAGE: Final = (CAUSAL, MASKED, SEQ2SEQ)
ENCODERS = frozenset(  # which decode only where their configuration says is_decoder
    {
        *("Bert", "BertGeneration", "BigBird", "Camembert", "Data2VecText", "Electra", "Ernie", "MegatronBert"),
        *("RemBert", "RoCBert", "RoFormer", "Roberta", "RobertaPreLayerNorm", "XLMRoberta", "XLMRobertaXL", "Xmod"),
    }
)
SHARE = 0.15  # of the tokens are masked, as in BERT [Devlin et al. 2019]

LETTERS = 8  # of a token, as a first guess
MARGIN = 16  # tokens in which a text that is cut short may end otherwise than the whole one
Rows = Sequence[Sequence[int]]
Tokens = dict[str, Tensor]


@final
@dataclass(frozen=True)
class LanguageText:
    """Describe text for a language model: where it is, what has to be told, and how much of it is wanted.

    A causal model tells every token from those before it: of a .txt file in blocks of max_length tokens, one behind the
    other; of rows of other files each cut at max_length. A masked one tells about 15 % of the tokens of every row (of a
    .txt file, line), one at least and no special ones, which are replaced by its mask token; a sequence-to-sequence
    model the column text_pair from text.
    """

    path: Path
    task: str
    max_length: int | None
    columns: Mapping[str, str] | None
    batch_size: int
    most: int | None  # of rows or blocks; None: all
    seed: int | None  # draws rows or blocks, and what is masked

    def batches(self, model: nn.Module, source: Path) -> tuple[list[tuple[Tokens, Tensor]], dict[str, Any]]:
        """Return inputs by keyword and labels of every batch, and what `Batches` says of them.

        Labels stand at the place of their token, as Hugging Face has them, -100 where it does not count:
        `next_token_cross_entropy` shifts those of causal models, `cross_entropy` takes the others. source: directory of
        the tokenizer. Raises ValueError for a model of another kind, text that is none, and tokens that the model does
        not know.
        """
        _require_kind(model, self.task)
        encoder = TextEncoder(source, getattr(model, "config", None), self.max_length, batch_size=1, pairs=False)
        rows, targets, truncated = self._rows(encoder)
        chosen = self._chosen(len(rows))
        generator = torch.Generator().manual_seed(self.seed or 0)
        make = {CAUSAL: _causal, MASKED: _masked, SEQ2SEQ: _seq2seq}[self.task]
        made = []
        for start in range(0, len(chosen), self.batch_size):
            part = chosen[start : start + self.batch_size]
            taken = [rows[row] for row in part], [targets[row] for row in part]
            inputs = make(*taken, encoder.tokenizer, model, generator)
            made.append((inputs, inputs.pop("labels")))
        return made, {
            "examples": len(chosen),
            "truncated": sum(truncated[row] for row in chosen),
            "max_length": encoder.max_length,
        }

    def check(self) -> None:
        """Raise ValueError for a file that cannot be read or has no text."""
        if self._in_blocks:
            read_plain(self.path)
        else:
            texts = read_texts(self.path, pairs=self.task == SEQ2SEQ, columns=self.columns)
            deque(islice(texts, self._first), maxlen=0)

    @property
    def _in_blocks(self) -> bool:
        return self.task == CAUSAL and self.path.suffix.lower() == PLAIN_SUFFIX

    @property
    def _first(self) -> int | None:
        """Return how many rows are looked at: with a seed all, to draw from."""
        return self.most if self.seed is None else None

    def _rows(self, encoder: TextEncoder) -> tuple[list[list[int]], list[list[int]], list[bool]]:
        """Return the tokens of every row or block, those of its target (of sequences), and whether it was cut."""
        if self._in_blocks:
            length = encoder.max_length
            tokens = self._tokens(encoder, None if self._first is None else self._first * length)
            blocks = [tokens[start : start + length] for start in range(0, len(tokens), length)]
            blocks = [block for block in blocks if len(block) > 1][: self._first]
            return self._told(blocks), [[] for _ in blocks], [False] * len(blocks)
        rows, targets, truncated = self._texts(encoder)
        return self._told(rows), targets, truncated

    def _texts(self, encoder: TextEncoder) -> tuple[list[list[int]], list[list[int]], list[bool]]:
        """Return what `_rows` does, of the rows that tell something; nothing is read behind the last that is wanted."""
        pairs = self.task == SEQ2SEQ
        least = 2 if self.task == CAUSAL else 1  # of a single token a causal model has nothing to tell
        source = read_texts(self.path, pairs=pairs, columns=self.columns)
        rows: list[list[int]] = []
        targets: list[list[int]] = []
        truncated: list[bool] = []
        # As many as are still missing, for each gives one at most.
        while texts := list(islice(source, None if self._first is None else self._first - len(rows))):
            where = f"{shown(self.path)}, line {texts[0][0]}"
            kept, whole = encoder.cut_ids([text for _, text, _ in texts], where)
            told = encoder.cut_ids([str(pair) for _, _, pair in texts], where, target=True)[0] if pairs else None
            for (line, _, _), row, length, target in zip(texts, kept, whole, told or [[]] * len(kept), strict=True):
                if self.task != CAUSAL and (not row or (pairs and not target)):
                    raise ValueError(
                        f"{shown(self.path)}, line {line}: the text has no tokens: nothing is left to read."
                    )
                if len(row) >= least:
                    rows.append(row)
                    targets.append(target)
                    truncated.append(length > encoder.max_length)
        return rows, targets, truncated

    def _tokens(self, encoder: TextEncoder, wanted: int | None) -> list[int]:
        """Return the tokens of all of the text, or, of a longer one, as many as are wanted and some more."""
        text = read_plain(self.path)
        end = len(text) if wanted is None else LETTERS * wanted
        while True:
            tokens = encoder.ids([text[:end]], shown(self.path))[0]
            if end >= len(text) or wanted is None or len(tokens) > wanted + MARGIN:
                return tokens
            end *= 4

    def _told(self, rows: list[list[int]]) -> list[list[int]]:
        if not rows:
            raise ValueError(f"{shown(self.path)} has no text of at least two tokens: nothing is to be told.")
        return rows

    def _chosen(self, count: int) -> list[int]:
        wanted = count if self.most is None else min(count, self.most)
        if self.seed is None:
            return list(range(wanted))
        return torch.randperm(count, generator=torch.Generator().manual_seed(self.seed))[:wanted].tolist()


_ENDINGS: Final[dict[str, tuple[str, ...]]] = {
    CAUSAL: ("ForCausalLM", "LMHeadModel"),
    MASKED: ("ForMaskedLM",),
    SEQ2SEQ: ("ForConditionalGeneration", "ForSeq2SeqLM"),
}


def _require_kind(model: nn.Module, task: str) -> None:
    unwrapped: Any = getattr(model, "get_base_model", lambda: model)()  # of peft
    kind = type(unwrapped).__name__
    if type(unwrapped).__module__.startswith("transformers.") and not kind.endswith(_ENDINGS[task]):
        raise ValueError(f"The task {task} needs a model whose class ends in {_ENDINGS[task][0]}, found {kind}.")
    if (
        task == CAUSAL
        and getattr(getattr(unwrapped, "config", None), "is_decoder", None) is False
        and _may_see_ahead(kind)
    ):
        raise ValueError(f"{kind} sees the tokens it has to tell unless its configuration says is_decoder: true.")


def _may_see_ahead(kind: str) -> bool:
    """Tell whether a class is made of an encoder."""
    return kind.removesuffix("LMHeadModel").removesuffix("ForCausalLM") in ENCODERS


def _padded(rows: Rows, filler: int) -> tuple[Tensor, Tensor]:
    """Return tokens and attention_mask (rows, longest), shorter rows filled up on the right."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows], dtype=torch.long)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], dtype=torch.long)
    return tokens, mask


def _filler(tokenizer: Any) -> int:
    """Return the token that fills rows up, any one where the tokenizer has none: it is masked and never told."""
    found = tokenizer.pad_token_id
    return 0 if found is None else int(found)


def _causal(rows: Rows, targets: Rows, tokenizer: Any, model: nn.Module, generator: torch.Generator) -> Tokens:
    tokens, mask = _padded(rows, _filler(tokenizer))
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, IGNORED)}


def _masked(
    rows: Rows, targets: Rows, tokenizer: Any, model: nn.Module, generator: torch.Generator
) -> dict[str, Tensor]:
    if tokenizer.mask_token_id is None:
        raise ValueError("The task masked needs a tokenizer with a mask token, found one without.")
    tokens, mask = _padded(rows, _filler(tokenizer))
    words = mask.bool() & ~torch.isin(tokens, torch.tensor(sorted(tokenizer.all_special_ids)))
    chance = torch.rand(tokens.shape, generator=generator, dtype=torch.float32).masked_fill(~words, 2.0)
    if not bool(words.any(1).all()):
        raise ValueError("Every text of the task masked needs a word that its tokenizer knows, found one without.")
    told = (chance < SHARE) | (words & (chance == chance.amin(1, keepdim=True)))  # one of every row at least
    seen = tokens.masked_fill(told, tokenizer.mask_token_id)
    return {"input_ids": seen, "attention_mask": mask, "labels": tokens.masked_fill(~told, IGNORED)}


def _seq2seq(
    rows: Rows, targets: Rows, tokenizer: Any, model: nn.Module, generator: torch.Generator
) -> dict[str, Tensor]:
    tokens, mask = _padded(rows, _filler(tokenizer))
    answers, there = _padded(targets, _filler(tokenizer))
    labels = answers.masked_fill(there == 0, IGNORED)
    unwrapped: Any = getattr(model, "get_base_model", lambda: model)()
    shift: Callable[..., Tensor] | None = getattr(unwrapped, "prepare_decoder_input_ids_from_labels", None)
    if shift is None:
        raise ValueError(
            f"{type(unwrapped).__name__} does not say what its decoder is given (it has no "
            "prepare_decoder_input_ids_from_labels): give batches by a function."
        )
    return {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": shift(labels=labels), "labels": labels}
