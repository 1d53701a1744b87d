"""Labelled text from files, and batches of its tokens: what is there is read exactly, what is wrong is one sentence."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from quotient_manifolds.load.huggingface import read_config
from quotient_manifolds.load.text import LabeledText, Labels, class_of, read_examples
from quotient_manifolds.load.tokens import encoded
from tests.nets import hugging_face
from tests.refusals import one_sentence

ROWS = [("a good film", "good", "yes"), ("bad", "very good", "no"), ("not bad", "bad", "maybe")]
SUFFIXES = [".jsonl", ".csv", ".tsv"]


def read(
    path: Path, labels: Labels | None = None, columns: dict[str, str] | None = None, count: int | None = None
) -> list[LabeledText]:
    examples = read_examples(path, columns=columns)
    return [replace(each, label=class_of(each.label, f"{path}, line {each.line}", labels, count)) for each in examples]


def tokenised(
    home: Path, examples: list[LabeledText], batch_size: int = 32, max_length: int | None = None
) -> tuple[list[dict[str, Tensor]], list[str]]:
    return encoded(examples, home, SimpleNamespace(**read_config(home)), batch_size, max_length)


def write_text(folder: Path, suffix: str, columns: tuple[str, str, str] = ("text", "text_pair", "label")) -> Path:
    path = folder / f"data{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in ROWS))
    else:
        between = {".csv": ",", ".tsv": "\t"}[suffix]
        path.write_text("\n".join(between.join(row) for row in (columns, *ROWS)) + "\n")
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_words_become_classes_and_columns_may_have_other_names(suffix: str, tmp_path: Path) -> None:
    labels = {"yes": 2, "no": 0, "maybe": 0}
    expected = [LabeledText(text, pair, labels[word]) for text, pair, word in ROWS]
    assert read(write_text(tmp_path, suffix), labels=labels, count=3) == expected
    other = write_text(tmp_path, suffix, ("premise", "hypothesis", "gold"))
    columns = {"text": "premise", "text_pair": "hypothesis", "label": "gold"}
    assert read(other, labels=labels, columns=columns) == expected
    with pytest.raises(ValueError, match=r"line [12] must have the columns text and gold .* Found no 'text'"):
        read(other, labels=labels, columns={"label": "gold"})
    with pytest.raises(ValueError, match=r"line [23]: the label must be one of yes, maybe. Found 'no'"):
        read(other, labels={"yes": 0, "maybe": 1}, columns=columns)
    with pytest.raises(ValueError, match=r"line [12]: the label must be in 0 \.\.\. 1, .* Found 'yes'"):
        read(other, labels=labels, columns=columns, count=2)


def test_a_tsv_file_has_no_quotes(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('text\tlabel\n"an open quote, and a comma\t1\n12" long\t0\n')
    texts = [example.text for example in read(tmp_path / "a.tsv")]
    assert texts == ['"an open quote, and a comma', '12" long']


def test_jsonl_and_csv_agree(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a good film", "label": 1}\n\n{"text": "bad, bad", "label": 0}\n')
    (tmp_path / "a.csv").write_text('\ufefflabel,text,id\n1,a good film,7\n 0,"bad, bad",8\n', encoding="utf-8")
    expected = [LabeledText("a good film", None, 1), LabeledText("bad, bad", None, 0)]
    assert read(tmp_path / "a.jsonl") == expected
    assert read(tmp_path / "a.csv", count=2) == expected


def test_empty_texts_and_columns_that_nobody_reads_are_no_fault(tmp_path: Path) -> None:
    """A language model predicts nothing from the first, as in WikiText; tables often have nameless columns."""
    (tmp_path / "a.csv").write_text("text,label,,\n,1,a,b\ngood,0,c,d\n")
    assert [each.text for each in read_examples(tmp_path / "a.csv", needed=("text",))] == ["", "good"]


PIECES = [b"text,label\n", b"text\tlabel\n", b'{"text": "a", "label": 1}', b"\n", b'"', b",", b"\r", b"1", b"\0"]


@settings(max_examples=100)
@given(
    name=st.sampled_from(["a.jsonl", "a.csv", "a.tsv"]),
    content=st.lists(st.binary(max_size=8) | st.sampled_from(PIECES), max_size=8),
)
def test_any_bytes_are_read_or_refused(
    name: str, content: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("text") / name
    path.write_bytes(b"".join(content))
    with contextlib.suppress(ValueError):
        assert all(isinstance(example.label, int) for example in read(path))


# ---- tokens


def test_pairs_are_marked_and_texts_that_are_cut_are_counted(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path)
    (batch,), _ = tokenised(tmp_path, [LabeledText("good", "bad", 0)])
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 1, 1]]
    examples = [LabeledText("good " * count, None, 0) for count in (5, 6, 7, 8, 9, 200)]
    for batch_size in (1, 4, 32):
        batches, notes = tokenised(tmp_path, examples, batch_size, max_length=9)
        assert notes == ["3 of 6 texts were cut at 9 tokens (max_length)."]
        assert max(batch["input_ids"].shape[1] for batch in batches) == 9
    (batch,), _ = tokenised(tmp_path, examples)
    assert batch["input_ids"].shape[1] == 64  # the model's positions
    assert tokenised(tmp_path, examples[:3])[1] == []


def save_tokenizer(directory: Path, tokens: list[str]) -> None:
    model = WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0])
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token=tokens[0]).save_pretrained(directory)


def test_batches_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    good, pair = LabeledText("good", None, 0), LabeledText("good", "bad", 0)
    hugging_face.gpt2(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer"):
        tokenised(tmp_path, [good])
    save_tokenizer(tmp_path, ["?", "good"])  # adds no tokens of its own
    with pytest.raises(ValueError, match="no padding token; use batches of size 1"):
        tokenised(tmp_path, [good, good])
    with pytest.raises(ValueError, match=r"must have tokens .* Found ''"):
        tokenised(tmp_path, [LabeledText("", None, 0)])
    (batch,), _ = tokenised(tmp_path, [good], batch_size=1)
    assert batch["input_ids"].tolist() == [[1]]
    save_tokenizer(tmp_path, [str(i) for i in range(50)] + ["good"])
    with pytest.raises(ValueError, match="gives token 50, but the model knows 40"):
        tokenised(tmp_path, [good])
    hugging_face.bert_classifier(tmp_path)
    with pytest.raises(ValueError, match="must have a text_pair, or none"):
        tokenised(tmp_path, [good, pair])
    with pytest.raises(ValueError, match=r"max_length must lie in 3 \.\.\. 64, .* Found 65"):
        tokenised(tmp_path, [good], max_length=65)


def test_a_vocabulary_of_another_model_is_refused(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path)
    examples = [LabeledText(text, None, 0) for text in ("a good film", "a good qwerty")]
    assert tokenised(tmp_path, examples)[1] == ["17% of the tokens are unknown to the tokenizer."]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "xx"]) + "\n")
    with pytest.raises(ValueError, match=r"100% of the tokens are unknown to the tokenizer") as caught:
        tokenised(tmp_path, examples)
    assert one_sentence(str(caught.value))
