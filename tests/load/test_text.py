"""Labelled text from files, and batches of its tokens: what is there is read exactly, what is wrong is one sentence."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from quotient_manifolds.load import (
    LabelledText,
    load_model,
    read_text_labels,
    tokenised_batches,
)
from quotient_manifolds.load.tokens import OFFSET_POSITIONS
from tests import hugging_face
from tests.hugging_face import edit_config, rewrite_weights
from tests.refusals import one_sentence

ROWS = [("a good film", "good", "yes"), ("bad", "very good", "no"), ("not bad", "bad", "maybe")]


def write_text(folder: Path, suffix: str, columns: tuple[str, str, str] = ("text", "text_pair", "label")) -> Path:
    path = folder / f"data{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in ROWS))
    else:
        between = {".csv": ",", ".tsv": "\t"}[suffix]
        path.write_text("\n".join(between.join(row) for row in (columns, *ROWS)) + "\n")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv"])
def test_words_become_classes_and_columns_may_have_other_names(suffix: str, tmp_path: Path) -> None:
    labels = {"yes": 2, "no": 0, "maybe": 0}
    expected = [LabelledText(text, pair, labels[word]) for text, pair, word in ROWS]
    assert read_text_labels(write_text(tmp_path, suffix), labels=labels, num_labels=3) == expected
    other = write_text(tmp_path, suffix, ("premise", "hypothesis", "gold"))
    columns = {"text": "premise", "text_pair": "hypothesis", "label": "gold"}
    assert read_text_labels(other, labels=labels, columns=columns) == expected
    with pytest.raises(ValueError, match=r"line [12]: no 'text'; expected the columns text and gold"):
        read_text_labels(other, labels=labels, columns={"label": "gold"})
    with pytest.raises(
        ValueError, match=r"line [12]: no 'second'; expected .*premise and gold \(second too for pairs\)"
    ):
        read_text_labels(other, labels=labels, columns={**columns, "text_pair": "second"})
    with pytest.raises(ValueError, match=r"line [23]: the label must be one of yes, maybe, found 'no'"):
        read_text_labels(other, labels={"yes": 0, "maybe": 1}, columns=columns)
    with pytest.raises(ValueError, match=r"line [12]: the label must be in 0 \.\.\. 1, .* found 2"):
        read_text_labels(other, labels=labels, columns=columns, num_labels=2)
    with pytest.raises(ValueError, match=r"line [12]: the label must be an integer, found 'yes'"):
        read_text_labels(other, labels=[1, 0], columns=columns)


def test_numbers_are_renumbered(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,0\nb,2\nc, 1\n")
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": 0}\n{"text": "b", "label": 2}\n{"text": "c", "label": 1}')
    for name in ("a.csv", "a.jsonl"):
        path = tmp_path / name
        assert [example.label for example in read_text_labels(path, labels=[1, 2, 0])] == [1, 0, 2]
        table = {"0": 5, "1": 6, "2": 7}
        assert [example.label for example in read_text_labels(path, labels=table)] == [5, 7, 6]
        with pytest.raises(ValueError, match=r"line [23]: the label must be in 0 \.\.\. 1, as many .* found 2"):
            read_text_labels(path, labels=[1, 0])


def test_a_tsv_file_has_no_quotes(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('text\tlabel\n"an open quote, and a comma\t1\n12" long\t0\n')
    assert [example.text for example in read_text_labels(tmp_path / "a.tsv")] == [
        '"an open quote, and a comma',
        '12" long',
    ]


def test_jsonl_and_csv_agree(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a good film", "label": 1}\n\n{"text": "bad, bad", "label": 0}\n')
    (tmp_path / "a.csv").write_text('\ufefflabel,text,id\n1,a good film,7\n0,"bad, bad",8\n', encoding="utf-8")
    expected = [LabelledText("a good film", None, 1), LabelledText("bad, bad", None, 0)]
    assert read_text_labels(tmp_path / "a.jsonl") == expected
    assert read_text_labels(tmp_path / "a.csv", num_labels=2) == expected


def test_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good", "text_pair": "bad", "label": 0}\n')
    assert read_text_labels(tmp_path / "a.jsonl") == [LabelledText("good", "bad", 0)]


GOOD = '{"text": "good", "label": 1}\n'


BAD_DATA = {
    "empty": ("a.jsonl", "", "is empty"),
    "blank": ("a.jsonl", "\n \n", "is empty"),
    "header only": ("a.csv", "text,label\n", "is empty"),
    "no JSON": ("a.jsonl", GOOD + "good\n", "line 2: not valid JSON"),
    "no object": ("a.jsonl", GOOD + "[1]\n", "line 2: expected an object"),
    "no label": ("a.jsonl", GOOD + '\n{"text": "good"}\n', "line 3: no 'label'"),
    "no text": ("a.csv", "words,label\ngood,1\n", "line 2: no 'text'"),
    "short row": ("a.csv", "text,label\ngood,1\nbad\n", "line 3: no 'label'"),
    "long row": ("a.csv", "text,label\ngood,1\nbad, bad,0\n", "line 3: more fields than columns"),
    "text is a number": ("a.jsonl", '{"text": 3, "label": 1}\n', "line 1: text and text_pair must be strings"),
    "label is a word": ("a.csv", "text,label\ngood,1\nbad,no\n", "line 3: the label must be an integer, found 'no'"),
    "label is a string": ("a.jsonl", '{"text": "good", "label": "1"}\n', "line 1: the label must be an integer"),
    "label is a truth value": ("a.jsonl", '{"text": "good", "label": true}\n', "line 1: the label must be an integer"),
    "label too large": ("a.jsonl", GOOD + '{"text": "bad", "label": 2}\n', r"line 2: .* 0 \.\.\. 1, .* found 2"),
    "label negative": ("a.csv", "text,label\ngood,-1\n", "line 2: .* found -1"),
    "another kind of file": ("a.parquet", "", ".jsonl, .csv or .tsv"),
    "digits": ("a.jsonl", '{"text": "good", "label": ' + "9" * 400 + "}", "line 1: the label must be .* 9{57}"),
    "more digits": ("a.jsonl", '{"text": "good", "label": ' + "9" * 5000 + "}", "line 1: not valid JSON"),
    "digits in a table": ("a.csv", "text,label\ngood," + "9" * 400, "line 2: the label must be .* 9{57}"),
    "more digits in a table": ("a.csv", "text,label\ngood," + "9" * 5000, "line 2: the label must be an integer"),
    "negative digits": ("a.jsonl", '{"text": "good", "label": -' + "9" * 400 + "}", "found -9{56}"),
    "infinite": ("a.jsonl", '{"text": "good", "label": 1e999}', "must be an integer, found inf"),
    "nested": ("a.jsonl", "[" * 100_000, "line 1: not valid JSON"),
    "long": ("a.jsonl", '{"text": "' + "a" * 10_000_001, "line 1 has more than 10000000 characters"),
    "long in a table": ("a.csv", "text,label\n" + "a" * 10_000_001, "line 2 has more than"),
    "a long field": ("a.csv", "text,label\n" + "a" * 200_000 + ",1\n", "cannot be read as a table"),
    "half a pair": ("a.jsonl", '{"text": "\\ud800", "label": 1}', "line 1: the text is not valid Unicode"),
    "a number of digits for a text": ("a.jsonl", '{"text": ' + "9" * 400 + ', "label": 1}', "must be strings"),
}


@pytest.mark.parametrize(("name", "content", "match"), BAD_DATA.values(), ids=list(BAD_DATA))
def test_bad_data_is_refused_in_one_sentence(name: str, content: str, match: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=match) as caught:
        read_text_labels(tmp_path / name, num_labels=2)
    with pytest.raises(ValueError, match=r"the label must|line|table|empty|Expected") as renamed:
        read_text_labels(tmp_path / name, labels={"a": 0})
    for message in (str(caught.value), str(renamed.value)):
        assert one_sentence(message), message
        assert len(message) < 500


def test_absent_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data file"):
        read_text_labels(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_bytes(b"text,label\n\xff\xfe,1\n")
    with pytest.raises(ValueError, match="UTF-8"):
        read_text_labels(tmp_path / "a.csv")


PIECES = [b"text,label\n", b"text\tlabel\n", b'{"text": "a", "label": 1}', b"\n", b'"', b",", b"\r", b"1", b"\0"]


@settings(max_examples=150)
@given(
    name=st.sampled_from(["a.jsonl", "a.csv", "a.tsv"]),
    content=st.lists(
        st.binary(max_size=8) | st.sampled_from(PIECES),
        max_size=8,
    ),
)
def test_any_bytes_are_read_or_refused(
    name: str, content: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("text") / name
    path.write_bytes(b"".join(content))
    with contextlib.suppress(ValueError):
        for example in read_text_labels(path):
            example.text.encode()
            assert isinstance(example.label, int)


# ---- tokens


def test_batches_hold_every_example_once_in_order(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path)
    texts = ["good", "very bad film", "a film", "not very good", "bad"]
    examples = [LabelledText(text, None, i % 2) for i, text in enumerate(texts)]
    batches = tokenised_batches(tmp_path, examples, batch_size=2)
    assert [len(batch["labels"]) for batch in batches] == [2, 2, 1]
    assert torch.cat([batch["labels"] for batch in batches]).tolist() == [0, 1, 0, 1, 0]
    vocabulary = hugging_face.VOCABULARY
    rows = [row[row != 0].tolist() for batch in batches for row in batch["input_ids"]]
    assert [" ".join(vocabulary[i] for i in row[1:-1]) for row in rows] == texts
    with torch.no_grad():
        assert load_model(tmp_path)(**batches[0]).loss.isfinite()


def test_batches_cut_long_texts_and_mark_pairs(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path)
    (batch,) = tokenised_batches(tmp_path, [LabelledText("good " * 50, None, 0)], max_length=8)
    assert batch["input_ids"].shape == (1, 8)
    (batch,) = tokenised_batches(tmp_path, [LabelledText("good", "bad", 0)])
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 1, 1]]


def save_tokenizer(directory: Path, tokens: list[str]) -> None:
    model = WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0])
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token=tokens[0]).save_pretrained(directory)


def test_batches_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    good, pair = LabelledText("good", None, 0), LabelledText("good", "bad", 0)
    hugging_face.gpt2(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer"):
        tokenised_batches(tmp_path, [good])
    save_tokenizer(tmp_path, ["?", "good"])
    with pytest.raises(ValueError, match="no padding token; use batches of size 1"):
        tokenised_batches(tmp_path, [good])
    (batch,) = tokenised_batches(tmp_path, [good], batch_size=1)
    assert batch["input_ids"].tolist() == [[1]]
    save_tokenizer(tmp_path, [str(i) for i in range(50)] + ["good"])
    with pytest.raises(ValueError, match="gives token 50, but the model knows 40"):
        tokenised_batches(tmp_path, [good], batch_size=1)
    hugging_face.bert_classifier(tmp_path)
    with pytest.raises(ValueError, match="all of them one, or none"):
        tokenised_batches(tmp_path, [good, pair])
    with pytest.raises(ValueError, match="at least 1"):
        tokenised_batches(tmp_path, [good], batch_size=0)
    with pytest.raises(ValueError, match=r"max_length must lie in 3 \.\.\. 64, .* found 65"):
        tokenised_batches(tmp_path, [good], max_length=65)


def write_vocabulary(directory: Path, words: list[str]) -> None:
    (directory / "tokenizer.json").unlink(missing_ok=True)
    (directory / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")


def test_a_vocabulary_of_another_model_is_refused(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path)
    texts = ["good film", "very bad", "a film"]
    examples = [LabelledText(text, None, 0) for text in texts]
    assert tokenised_batches(tmp_path, examples).notes == []
    for words in ([], ["xx", "yy"], ["".join(reversed(word)) + "x" for word in hugging_face.VOCABULARY[5:]]):
        write_vocabulary(tmp_path, words)
        with pytest.raises(ValueError, match=r"100% of the tokens are unknown to the tokenizer") as caught:
            tokenised_batches(tmp_path, examples)
        assert one_sentence(str(caught.value))
    (tmp_path / "vocab.txt").write_text("")
    with pytest.raises(ValueError, match="The tokenizer in"):
        tokenised_batches(tmp_path, examples)
    write_vocabulary(tmp_path, hugging_face.VOCABULARY[5:])
    honest = [LabelledText("a good film", None, 0), LabelledText("a good qwerty", None, 0)]
    assert tokenised_batches(tmp_path, honest).notes == ["17% of the tokens are unknown to the tokenizer."]


def test_texts_that_are_cut_are_counted(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path)
    examples = [LabelledText("good " * count, None, 0) for count in (5, 6, 7, 8, 9, 200)]
    for batch_size in (1, 4, 32):
        batches = tokenised_batches(tmp_path, examples, batch_size=batch_size, max_length=9)
        assert (batches.truncated, batches.examples, batches.max_length) == (3, 6, 9)
        assert batches.notes == ["3 of 6 texts were cut at 9 tokens (max_length)."]
    assert tokenised_batches(tmp_path, examples).max_length == 64  # the model's positions
    assert tokenised_batches(tmp_path, examples[:3]).truncated == 0


def test_empty_texts(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path)
    (batch,) = tokenised_batches(tmp_path, [LabelledText("", None, 0), LabelledText("good", None, 1)])
    assert batch["attention_mask"].sum(1).tolist() == [2, 3]
    save_tokenizer(tmp_path, ["?", "good"])  # adds no tokens of its own
    with pytest.raises(ValueError, match=r"example 1: the text '' has no tokens"):
        tokenised_batches(tmp_path, [LabelledText("good", None, 0), LabelledText("", None, 0)], batch_size=1)


def test_pairs_for_a_model_with_one_type_of_tokens(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path)
    edit_config(tmp_path, type_vocab_size=1)
    rewrite_weights(
        tmp_path,
        lambda t: t.update({name: t[name][:1].clone() for name in t if "token_type_embeddings" in name}),
    )
    (batch,) = tokenised_batches(tmp_path, [LabelledText("good", "bad", 0)])
    with torch.no_grad():
        assert load_model(tmp_path)(**batch).loss.isfinite()


def test_the_end_of_the_table_of_positions(tmp_path: Path) -> None:
    """RoBERTa's begins after the padding token: of 12 places with padding token 1, 10 are used."""
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=len(hugging_face.VOCABULARY),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=12,
        pad_token_id=1,
        num_labels=2,
    )
    transformers.RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    vocabulary = {token: i for i, token in enumerate(hugging_face.VOCABULARY)}
    transformers.BertTokenizerFast(vocab=vocabulary).save_pretrained(tmp_path)
    model, long = load_model(tmp_path), [LabelledText("good " * 50, None, 0)]
    (batch,) = tokenised_batches(tmp_path, long)
    assert batch["input_ids"].shape == (1, 10)
    del batch["token_type_ids"]
    with torch.no_grad():
        assert model(**batch).loss.isfinite()
    with pytest.raises(ValueError, match=r"max_length must lie in 3 \.\.\. 10, .* found 11"):
        tokenised_batches(tmp_path, long, max_length=11)


@pytest.mark.parametrize("model_type", sorted(OFFSET_POSITIONS))
def test_types_whose_table_of_positions_begins_after_the_padding_token(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    tables = [
        module
        for module in model.modules()
        if hasattr(module, "padding_idx") and len(getattr(module, "weight", ())) == config.max_position_embeddings
    ]
    assert any(table.padding_idx == config.pad_token_id for table in tables)
