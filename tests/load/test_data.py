"""Batches from text, arrays and folders of images: every row once, in order, as the model wants them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from quotient_manifolds.load import Checkpoint, DataSource, LabelledText, load_model, read_text_labels
from quotient_manifolds.load.examples import Head
from quotient_manifolds.sharpness import cross_entropy
from tests import hugging_face


def one_sentence(message: str) -> bool:
    return "\n" not in message.strip() and "Traceback" not in message and len(message) > 20


def images_and_labels(batches: list[Any]) -> tuple[Tensor, list[int]]:
    """All images and all labels of batches (inputs, labels)."""
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches]).tolist()


PLAIN = nn.Flatten()

# ---- labels and columns of text

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


# ---- batches of text


def write_examples(folder: Path, count: int) -> Path:
    words = hugging_face.VOCABULARY[5:]
    lines = [{"text": " ".join(words[: 1 + i % 6]), "label": i % 2} for i in range(count)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "data.jsonl"


def test_first_rows_in_order_as_keywords_of_the_model(tmp_path: Path) -> None:
    model = load_model(hugging_face.bert_classifier(tmp_path / "model"))
    path = write_examples(tmp_path, 11)
    batches = DataSource(path, batch_size=4, max_batches=2).batches(model)
    assert [batch["labels"].tolist() for batch in batches] == [[0, 1, 0, 1], [0, 1, 0, 1]]
    lengths = torch.cat([batch["attention_mask"].sum(1) for batch in batches]) - 2
    assert lengths.tolist() == [1, 2, 3, 4, 5, 6, 1, 2]
    assert [len(batch["labels"]) for batch in DataSource(path, batch_size=4).batches(model)] == [4, 4, 3]
    assert [len(batch["labels"]) for batch in DataSource(path, batch_size=4, max_batches=9).batches(model)] == [4, 4, 3]
    with torch.no_grad():
        assert torch.equal(cross_entropy(model, batches[0]), model(**batches[0]).loss)
    (short,) = DataSource(path, max_length=4, batch_size=11).batches(model)
    assert short["input_ids"].shape == (11, 4)
    for most, sizes in ((1, [1]), (4, [4]), (6, [4, 2]), (99, [4, 4, 3])):
        found = DataSource(path, batch_size=4, max_examples=most).batches(model)
        assert [len(batch["labels"]) for batch in found] == sizes
    assert len(DataSource(path, batch_size=2, max_batches=2, max_examples=9, seed=1).batches(model)) == 2
    (path).write_text(path.read_text() + "no JSON\n")
    assert len(DataSource(path, batch_size=11, max_examples=11).batches(model)) == 1
    assert len(DataSource(path, batch_size=11, max_batches=1).batches(model)) == 1  # what is not wanted is not read
    with pytest.raises(ValueError, match="line 12: not valid JSON"):
        DataSource(path).batches(model)


def test_a_seed_draws_rows_without_putting_back(tmp_path: Path) -> None:
    model = load_model(hugging_face.bert_classifier(tmp_path / "model"))
    path = write_examples(tmp_path, 11)

    def ids(seed: int | None, batches: int | None = None) -> list[tuple[int, ...]]:
        source = DataSource(path, batch_size=3, max_batches=batches, seed=seed)
        return [
            (*row[mask.bool()].tolist(), label)
            for batch in source.batches(model)
            for row, mask, label in zip(
                batch["input_ids"], batch["attention_mask"], batch["labels"].tolist(), strict=True
            )
        ]

    assert sorted(ids(0)) == sorted(ids(None))
    assert ids(0) == ids(0)
    assert ids(0, 2) == ids(0)[:6]
    assert len({tuple(ids(seed)) for seed in (None, 0, 1)}) == 3


def test_tokenizer_of_the_model_of_the_checkpoint_or_another(tmp_path: Path) -> None:
    home = hugging_face.bert_classifier(tmp_path / "model")
    path = write_examples(tmp_path, 2)
    model = load_model(home)
    expected = DataSource(path).batches(model)[0]["input_ids"]
    bare = transformers.BertForSequenceClassification(model.config)
    bare.config.name_or_path = bare.name_or_path = ""
    with pytest.raises(ValueError, match="was not loaded from a directory, so there is no tokenizer"):
        DataSource(path).batches(bare)
    for batches in (
        DataSource(path).batches(bare, Checkpoint("model", home, "huggingface")),
        DataSource(path, tokenizer=home).batches(bare),
    ):
        assert torch.equal(batches[0]["input_ids"], expected)
    other = tmp_path / "other"
    (other).mkdir()
    (other / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "good"]))
    (other / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "model_max_length": 16}')
    with pytest.raises(ValueError, match="gives token 13, but the model knows 11 tokens only"):
        DataSource(path, tokenizer=other).batches(model)
    with pytest.raises(ValueError, match=r"max_length must lie in 3 \.\.\. 16, .* found 17"):
        DataSource(path, tokenizer=other, max_length=17).batches(model)
    with pytest.raises(ValueError, match="has no tokenizer"):
        DataSource(path, tokenizer=tmp_path).batches(model)


class Ids(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.float()


class Configured(Ids):
    """With a configuration, and yet a model of one tensor."""

    config = "small"


class Keywords(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return (input_ids * attention_mask).float()


class PassesOn(nn.Module):
    """As wrappers of Hugging Face models do."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.config = config

    def forward(self, **inputs: Tensor) -> Tensor:
        return inputs["input_ids"].float()


def test_the_signature_of_the_model_decides(tmp_path: Path) -> None:
    home = hugging_face.bert_classifier(tmp_path / "model")
    source = DataSource(write_examples(tmp_path, 2), tokenizer=home)
    ((ids, labels),) = source.batches(Ids())
    assert labels.tolist() == [0, 1]
    ((again, _),) = source.batches(Configured())
    assert torch.equal(again, ids)
    (named,) = source.batches(Keywords())
    assert set(named) == {"input_ids", "attention_mask", "labels"}
    assert torch.equal(named["input_ids"], ids)
    (all_of_them,) = source.batches(PassesOn(load_model(home).config))
    assert set(all_of_them) == {"input_ids", "attention_mask", "token_type_ids", "labels"}


# ---- arrays


def pictures(dtype: str = "uint8", *, count: int = 5, channels: int = 3) -> NDArray[Any]:
    """(N, channels, 6, 4)"""
    return np.random.default_rng(0).integers(0, 256, (count, channels, 6, 4)).astype(dtype)


def write_npz(folder: Path, **arrays: NDArray[Any]) -> Path:
    np.savez(folder / "data.npz", **arrays)
    return folder / "data.npz"


def test_layouts_of_arrays_agree(tmp_path: Path) -> None:
    colour, labels = pictures(), np.array([3, 1, 2, 0, 1])
    expected = torch.tensor(colour).float() / 255
    for images in (colour, colour.transpose(0, 2, 3, 1), colour / np.float32(255), colour / np.float64(255)):
        source = DataSource(write_npz(tmp_path, images=images, labels=labels), batch_size=2, mean="none")
        found, classes = images_and_labels(source.batches(PLAIN))
        assert found.dtype == torch.float32
        assert torch.allclose(found, expected, rtol=0, atol=1e-7)
        assert classes == labels.tolist()
    grey = pictures(channels=1)
    for images in (grey, grey[:, 0], grey[:, 0, :, :, None]):
        source = DataSource(write_npz(tmp_path, images=images, labels=labels.astype("uint8")), mean="none")
        found, _ = images_and_labels(source.batches(PLAIN))
        assert torch.equal(found, torch.tensor(grey).float() / 255)


def test_arrays_are_normalised_renamed_and_drawn(tmp_path: Path) -> None:
    images, labels = pictures(), np.array([0, 1, 2, 0, 1])
    path = write_npz(tmp_path, images=images, labels=labels)
    source = DataSource(path, batch_size=2, max_batches=2, mean=[0.5, 0.25, 0.0], std=[0.5, 1.0, 2.0], labels=[2, 0, 1])
    found, classes = images_and_labels(source.batches(PLAIN))
    scaled = images[:4] / 255.0
    expected = np.stack([(scaled[:, 0] - 0.5) / 0.5, scaled[:, 1] - 0.25, scaled[:, 2] / 2], axis=1)
    assert np.allclose(found.numpy(), expected, rtol=0, atol=1e-6)
    assert classes == [2, 0, 1, 2]
    one, _ = images_and_labels(DataSource(path, mean=[0.5], std=[0.5]).batches(PLAIN))
    assert np.allclose(one.numpy(), (images / 255.0 - 0.5) / 0.5, atol=1e-6)
    drawn, classes = images_and_labels(DataSource(path, seed=3, mean="none").batches(PLAIN))
    order = [int(np.argmin(np.abs(images / 255.0 - row.numpy()).sum((1, 2, 3)))) for row in drawn]
    assert sorted(order) == list(range(5)) != order
    assert classes == labels[order].tolist()


def test_arrays_for_hugging_face_models(tmp_path: Path) -> None:
    model = load_model(hugging_face.vit_classifier(tmp_path / "model"))
    images = np.random.default_rng(0).random((3, 16, 16), dtype=np.float32)
    (batch,) = DataSource(write_npz(tmp_path, images=images, labels=np.array([0, 2, 1]))).batches(model)
    assert set(batch) == {"pixel_values", "labels"}
    assert torch.equal(batch["pixel_values"], torch.tensor(images)[:, None])
    with torch.no_grad():
        assert torch.equal(cross_entropy(model, batch), model(**batch).loss)


def objects(path: Path) -> None:
    """An .npz whose labels are pickled objects; loading them would make a directory."""

    class Code:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(path.with_name("ran")),)

    np.savez(path, images=pictures(), labels=np.array([Code()] * 5, dtype=object))


def arrays(**changes: NDArray[Any]) -> Callable[[Path], None]:
    return lambda path: np.savez(path, **{"images": pictures(), "labels": np.arange(5), **changes})


def cut(path: Path) -> None:
    np.savez(path, images=pictures(), labels=np.arange(5))
    os.truncate(path, path.stat().st_size // 2)


def flipped(path: Path) -> None:
    np.savez(path, images=pictures(), labels=np.arange(5))
    content = bytearray(path.read_bytes())
    content[content.find(pictures().tobytes()) + 7] ^= 1
    path.write_bytes(content)


BROKEN_ARRAYS = {
    "absent": (lambda path: None, "no data file"),
    "pickled": (objects, "no readable .npz file of plain arrays"),
    "no labels": (lambda path: np.savez(path, images=pictures()), "no array 'labels'"),
    "no images": (lambda path: np.savez(path, labels=np.arange(5)), "no array 'images'"),
    "text": (lambda path: path.write_text("hello"), "no readable .npz"),
    "empty": (lambda path: path.write_bytes(b""), "no readable .npz"),
    "one array": (lambda path: path.write_bytes(b"\x93NUMPY"), "no readable .npz"),
    "truncated": (cut, "no readable .npz"),
    "a changed bit": (flipped, "no readable .npz"),
    "labels are real": (arrays(labels=np.arange(5.0)), r"integers \(N,\), found float64"),
    "labels are truths": (arrays(labels=np.ones(5, bool)), r"integers \(N,\), found bool"),
    "labels one-hot": (arrays(labels=np.eye(5, dtype=int)), r"integers \(N,\), found int64 \(5, 5\)"),
    "nothing": (arrays(labels=np.zeros(0, int)), r"integers \(N,\), found int64 \(0,\)"),
    "fewer labels": (arrays(labels=np.arange(4)), "5 images and 4 labels"),
    "images are integers": (arrays(images=pictures("int64")), "uint8 or floating point, found int64"),
    "images are vectors": (arrays(images=np.zeros((5, 12), np.uint8)), r"found \(5, 12\)\."),
    "seven channels": (arrays(images=np.zeros((5, 7, 8, 9), np.uint8)), r"found \(5, 7, 8, 9\)\."),
    "either axis": (arrays(images=np.zeros((5, 3, 8, 3), np.uint8)), "where either axis may be the channels"),
}


@pytest.mark.parametrize(("spoil", "match"), BROKEN_ARRAYS.values(), ids=list(BROKEN_ARRAYS))
def test_broken_arrays_are_refused_in_one_sentence(spoil: Callable[[Path], object], match: str, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    spoil(path)
    with pytest.raises(ValueError, match=match) as caught:
        DataSource(path, mean="none").batches(PLAIN)
    assert one_sentence(str(caught.value)), str(caught.value)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "ran").exists()


# ---- folders of images


def paint(path: Path, width: int = 12, height: int = 9, *, mode: str = "RGB", seed: int = 0) -> NDArray[Any]:
    """A smooth picture, stored without loss; its pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 4)).astype(np.uint8)
    picture = Image.fromarray(coarse, "RGBA").resize((width, height), Image.Resampling.BILINEAR).convert(mode)
    picture.save(path)
    return np.asarray(picture)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    root = tmp_path / "pictures"
    for i, name in enumerate(["wolf/2.png", "wolf/10.png", "cat/b.PNG", "cat/a.bmp", "ox/deep/1.ppm"]):
        paint(root / name, seed=i)
    (root / "cat" / "notes.txt").write_text("no picture")
    (root / "cat" / ".hidden.png").write_text("no picture")
    (root / ".cache").mkdir()
    (root / "README").write_text("no class")
    return root


def test_folders_are_classes_and_files_sort(folders: Path) -> None:
    batches = DataSource(folders, batch_size=2, mean="none").batches(PLAIN)
    assert [len(labels) for _, labels in batches] == [2, 2, 1]
    found, labels = images_and_labels(batches)
    order = ["cat/a.bmp", "cat/b.PNG", "ox/deep/1.ppm", "wolf/10.png", "wolf/2.png"]
    expected = [np.asarray(Image.open(folders / name)).transpose(2, 0, 1) / 255.0 for name in order]
    assert np.allclose(found.numpy(), np.stack(expected), rtol=0, atol=1e-7)
    assert labels == [0, 0, 1, 2, 2]
    renamed = DataSource(folders, labels={"cat": 7, "ox": 3, "wolf": 7}, mean="none")
    assert images_and_labels(renamed.batches(PLAIN))[1] == [7, 7, 3, 7, 7]
    assert images_and_labels(DataSource(folders, labels=[1, 2, 0], mean="none").batches(PLAIN))[1] == [1, 1, 2, 0, 0]
    with pytest.raises(ValueError, match=r"wolf: the label must be one of cat, ox, found 'wolf'"):
        DataSource(folders, labels={"cat": 0, "ox": 1}).batches(PLAIN)
    with pytest.raises(ValueError, match=r"wolf: the label must be in 0 \.\.\. 1, as many .* found 2"):
        DataSource(folders, labels=[1, 0]).batches(PLAIN)


@pytest.mark.parametrize(("width", "height"), [(40, 28), (28, 40), (16, 16), (10, 15), (29, 41)])
def test_pictures_are_prepared_as_for_clip(width: int, height: int, tmp_path: Path) -> None:
    paint(tmp_path / "pictures" / "a" / "1.png", width, height)
    source = DataSource(tmp_path / "pictures", size=16, mean="clip")
    found, _ = images_and_labels(source.batches(PLAIN))
    theirs = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=16)
    expected = theirs(Image.open(tmp_path / "pictures" / "a" / "1.png"), return_tensors="pt")["pixel_values"]
    assert found.shape == (1, 3, 16, 16)
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("width", "left"), [(16, 0), (17, 0), (18, 1), (19, 2), (20, 2), (21, 2), (22, 3)])
def test_an_odd_margin_is_cut_as_torchvision_does(width: int, left: int, tmp_path: Path) -> None:
    """CenterCrop rounds half the margin to the nearest even number where it is no integer."""
    pixels = paint(tmp_path / "a" / "1.png", width, 16)
    found, _ = images_and_labels(DataSource(tmp_path, size=16, mean="none").batches(PLAIN))
    expected = pixels[:, left : left + 16].transpose(2, 0, 1) / 255.0
    assert np.allclose(found.numpy()[0], expected, rtol=0, atol=1e-6)


def test_transparency_is_left_out(tmp_path: Path) -> None:
    pixels = paint(tmp_path / "a" / "1.png", mode="RGBA")
    assert pixels[..., 3].min() < 200
    found, _ = images_and_labels(DataSource(tmp_path, mean="none").batches(PLAIN))
    assert np.allclose(found.numpy()[0], pixels[..., :3].transpose(2, 0, 1) / 255.0, rtol=0, atol=1e-6)


def test_grey_pictures(tmp_path: Path) -> None:
    pixels = paint(tmp_path / "a" / "1.png", mode="L")
    found, _ = images_and_labels(DataSource(tmp_path, channels=1, mean=[0.5], std=[0.5]).batches(PLAIN))
    assert np.allclose(found.numpy()[0, 0], (pixels / 255.0 - 0.5) / 0.5, atol=1e-6)
    colour, _ = images_and_labels(DataSource(tmp_path, mean="none").batches(PLAIN))
    assert np.allclose(colour.numpy()[0], np.stack([pixels / 255.0] * 3), atol=1e-6)


def test_only_pictures_that_are_measured_on_are_read(folders: Path) -> None:
    (folders / "wolf" / "2.png").write_text("no picture at all")
    found, labels = images_and_labels(DataSource(folders, batch_size=2, max_batches=2, mean="none").batches(PLAIN))
    assert len(found) == 4
    assert labels == [0, 0, 1, 2]
    with pytest.raises(ValueError, match=r"wolf/2\.png is no readable image"):
        DataSource(folders, mean="none").batches(PLAIN)


def half_a_png(root: Path) -> None:
    paint(root / "a" / "1.png")
    os.truncate(root / "a" / "1.png", (root / "a" / "1.png").stat().st_size // 2)


def deep_png(root: Path) -> None:
    (root / "a").mkdir(parents=True)
    Image.fromarray(np.full((4, 4), 1000, np.uint16)).save(root / "a" / "1.png")


def two_sizes(root: Path) -> None:
    paint(root / "a" / "1.png")
    paint(root / "b" / "1.png", 13, 9)


BROKEN_FOLDERS = {
    "absent": (lambda root: None, "no folder of images"),
    "a file": (lambda root: root.write_text("text"), "no folder of images"),
    "no classes": (lambda root: paint(root / "1.png"), "has no folders"),
    "an empty class": (lambda root: (root / "a").mkdir(parents=True), "a has no images"),
    "truncated": (half_a_png, "1.png is no readable image"),
    "16 bits": (deep_png, "1.png has pixels of more than 8 bits"),
    "two sizes": (two_sizes, "1.png is of another size than others; give a size"),
}


@pytest.mark.parametrize(("spoil", "match"), BROKEN_FOLDERS.values(), ids=list(BROKEN_FOLDERS))
def test_broken_folders_are_refused_in_one_sentence(
    spoil: Callable[[Path], object], match: str, tmp_path: Path
) -> None:
    root = tmp_path / "pictures"
    spoil(root)
    with pytest.raises(ValueError, match=match) as caught:
        DataSource(root, mean="none").batches(PLAIN)
    assert one_sentence(str(caught.value)), str(caught.value)
    assert str(root) in str(caught.value)


# ---- labels outside the head; identity; settings


def test_labels_outside_the_head_are_named(folders: Path, tmp_path: Path) -> None:
    text, npz = write_examples(tmp_path, 3), write_npz(tmp_path, images=pictures(), labels=np.array([0, 1, 2, 5, -1]))
    for source, classes in (
        (DataSource(text), 2),
        (DataSource(folders), 3),
        (DataSource(npz, max_batches=1, batch_size=3), 3),
    ):
        source.check(classes)
    with pytest.raises(ValueError, match=r"data\.jsonl, line 2: the label must be in 0 \.\.\. 0, .* found 1"):
        DataSource(text).check(1)
    with pytest.raises(ValueError, match=r"data\.npz, row 3: the label must be in 0 \.\.\. 4, .* found 5"):
        DataSource(npz).check(5)
    with pytest.raises(ValueError, match=r"data\.npz, row 4: the label must be in 0 \.\.\. 5, .* found -1"):
        DataSource(npz).check(6)
    with pytest.raises(ValueError, match=r"wolf/10\.png: the label must be in 0 \.\.\. 1, .* found 2"):
        DataSource(folders).check(2)


def changed(path: Path) -> None:
    """Another time of change, a second later."""
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


def test_fingerprint_tells_settings_and_files_apart(folders: Path, tmp_path: Path) -> None:
    home = hugging_face.bert_classifier(tmp_path / "model")
    text, npz = write_examples(tmp_path, 3), write_npz(tmp_path, images=pictures(), labels=np.arange(5))
    sources = [
        DataSource(text),
        DataSource(text, batch_size=2),
        DataSource(text, max_batches=1),
        DataSource(text, seed=0),
        DataSource(text, labels=[1, 0]),
        DataSource(text, labels={"0": 1, "1": 0}),
        DataSource(text, columns={"text": "text"}),
        DataSource(text, max_length=8),
        DataSource(text, tokenizer=home),
        DataSource(npz),
        DataSource(npz, mean="clip"),
        DataSource(folders),
        DataSource(folders, size=8),
        DataSource(folders, channels=1),
        DataSource(folders, labels=[0, 2, 1]),
    ]
    before = [source.fingerprint() for source in sources]
    assert len(set(before)) == len(sources)
    assert [source.fingerprint() for source in sources] == before
    assert DataSource(str(text), format="text").fingerprint() == before[0]
    for touched, kinds in ((text, {"text"}), (npz, {"npz"}), (folders / "ox" / "deep" / "1.ppm", {"images"})):
        changed(touched)
        after = [source.fingerprint() for source in sources]
        assert {source.kind for source, old, new in zip(sources, before, after, strict=True) if old != new} == kinds
        assert all(old != new for source, old, new in zip(sources, before, after, strict=True) if source.kind in kinds)
        before = after
    changed(home / "tokenizer.json")
    assert [source.fingerprint() != old for source, old in zip(sources, before, strict=True)].index(True) == 8
    paint(folders / "ape" / "1.png")  # a class before the others: every label changes
    assert sources[11].fingerprint() != before[11]
    text.unlink()
    with pytest.raises(ValueError, match=r"no file .*data\.jsonl"):
        sources[0].fingerprint()


def test_fingerprint_reads_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("no JSON")
    assert len(DataSource(tmp_path / "a.jsonl").fingerprint()) == 64


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"path": "a.csv", "format": "parquet"}, "one of text, npz, images, found 'parquet'"),
    "batch size": ({"path": "a.csv", "batch_size": 0}, "batch_size must be an integer of at least 1, found 0"),
    "batches": ({"path": "a.csv", "max_batches": 0}, "max_batches must be"),
    "length": ({"path": "a.csv", "max_length": -1}, "max_length must be"),
    "size of text": ({"path": "a.csv", "size": 8}, "size means nothing for data of the format text"),
    "length of arrays": ({"path": "a.npz", "max_length": 8}, "max_length means nothing for data of the format npz"),
    "size of arrays": ({"path": "a.npz", "size": 8}, "size means nothing for data of the format npz"),
    "columns of images": ({"path": "a", "columns": {}}, "columns means nothing for data of the format images"),
    "a column": ({"path": "a.csv", "columns": {"lable": "x"}}, "some of text, text_pair, label, found 'lable'"),
    "channels": ({"path": "a", "channels": 2}, r"channels must be 1 \(grey\) or 3"),
    "mean alone": ({"path": "a", "mean": [0.5]}, "must have a figure for each channel"),
    "std alone": ({"path": "a", "std": [0.5]}, "must have a figure for each channel"),
    "std zero": ({"path": "a", "mean": [0.5], "std": [0.0]}, "std above 0"),
    "preset": ({"path": "a", "mean": "clap"}, "one of clip, imagenet, none alone; found 'clap'"),
    "preset and std": ({"path": "a", "mean": "clip", "std": [1.0]}, "alone; found 'clip'"),
    "negative class": ({"path": "a.csv", "labels": {"a": -1}}, "must give the new class, 0 or more"),
    "no class": ({"path": "a.csv", "labels": []}, "must give the new class, 0 or more"),
    "a word": ({"path": "a.csv", "labels": "ab"}, "must give the new class, 0 or more"),
    "a truth": ({"path": "a.csv", "labels": [True]}, "must give the new class, 0 or more"),
}


@pytest.mark.parametrize(("settings", "match"), BAD_SETTINGS.values(), ids=list(BAD_SETTINGS))
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        DataSource(**settings)
    assert one_sentence(str(caught.value))


def test_channels_of_arrays_and_of_mean_must_agree(tmp_path: Path) -> None:
    path = write_npz(tmp_path, images=pictures(channels=1), labels=np.arange(5))
    with pytest.raises(ValueError, match="have 1 channels, but mean and std are given for 3"):
        DataSource(path, mean="clip").batches(PLAIN)


# ---- labels by the names in the model's configuration


def test_words_are_the_models_classes(tmp_path: Path) -> None:
    home = hugging_face.bert_classifier(tmp_path / "model", num_labels=3)
    content = json.loads((home / "config.json").read_text())
    names = ["contradiction", "Entailment", "neutral"]
    by_name = {name: number for number, name in enumerate(names)}
    path = tmp_path / "data.csv"
    path.write_text("text,label\ngood,entailment\nbad,NEUTRAL\nnot,contradiction\nfilm,1\n")
    source = DataSource(path)
    with pytest.raises(ValueError, match=r"line 2: the label must be an integer, found 'entailment', .* no names"):
        source.batches(load_model(home))
    named = {"id2label": dict(enumerate(names)), "label2id": by_name}
    (home / "config.json").write_text(json.dumps({**content, **named}))
    model = load_model(home)
    assert source.batches(model)[0]["labels"].tolist() == [1, 2, 0, 1]
    source.check(2**31)
    again = DataSource(path, labels={"entailment": 0, "NEUTRAL": 0, "contradiction": 2, "1": 1})
    assert again.batches(model)[0]["labels"].tolist() == [0, 0, 2, 1]
    path.write_text("text,label\ngood,entailed\n")
    with pytest.raises(
        ValueError,
        match=r"line 2: the label 'entailed' is not one of the model's \('contradiction', 'Entailment'",
    ):
        source.batches(model)
    path.write_text("text,label\ngood,3\n")
    with pytest.raises(ValueError, match=r"line 2: the label must be in 0 \.\.\. 2, the classes of the model, found 3"):
        source.batches(model)


def test_names_that_differ_in_capitals_alone_are_told_apart() -> None:
    head = Head(3, {"US": 0, "us": 1, "Them": 2})
    assert [head.find(word) for word in ("US", "us", "Us", "them", " THEM ", "we")] == [0, 1, None, 2, 2, None]


def test_texts_that_are_cut_are_counted_in_a_source(tmp_path: Path) -> None:
    model = load_model(hugging_face.bert_classifier(tmp_path / "model"))
    batches = DataSource(write_examples(tmp_path, 12), batch_size=5, max_length=5).batches(model)
    assert (batches.truncated, batches.examples) == (6, 12)  # of 1 to 6 words, those of 4, 5 and 6
    assert batches.notes == ["6 of 12 texts were cut at 5 tokens (max_length)."]
    arrays = DataSource(write_npz(tmp_path, images=pictures(), labels=np.arange(5)), mean="none")
    assert arrays.batches(PLAIN).notes == []
