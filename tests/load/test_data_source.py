"""Data sources: every row once, in order, as the model wants it, with the labels of its head."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from quotient_manifolds.load import Checkpoint, DataSource, load_model
from quotient_manifolds.sharpness import cross_entropy
from tests.load.sources import PLAIN, pictures
from tests.nets import hugging_face
from tests.refusals import one_sentence


def images_and_labels(batches: list[Any]) -> tuple[Tensor, list[int]]:
    """All images and all labels of batches (inputs, labels)."""
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches]).tolist()


def write_npz(folder: Path, **arrays: NDArray[Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "data.npz", **arrays)
    return folder / "data.npz"


def write_examples(folder: Path, count: int) -> Path:
    words = hugging_face.VOCABULARY[5:]
    lines = [{"text": " ".join(words[: 1 + i % 6]), "label": i % 2} for i in range(count)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "data.jsonl"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return hugging_face.bert_classifier(tmp_path / "model")


def sizes(batches: list[Any]) -> list[int]:
    return [len(batch["labels"]) for batch in batches]


def test_first_rows_in_order_as_keywords_of_the_model(home: Path, tmp_path: Path) -> None:
    model, path = load_model(home), write_examples(tmp_path, 11)
    batches = DataSource(path, batch_size=4, max_batches=2).batches(model)
    assert [batch["labels"].tolist() for batch in batches] == [[0, 1, 0, 1], [0, 1, 0, 1]]
    lengths = torch.cat([batch["attention_mask"].sum(1) for batch in batches]) - 2
    assert lengths.tolist() == [1, 2, 3, 4, 5, 6, 1, 2]
    with torch.no_grad():
        assert torch.equal(cross_entropy(model, batches[0]), model(**batches[0]).loss)
    (short,) = DataSource(path, max_length=4, batch_size=11).batches(model)
    assert short["input_ids"].shape == (11, 4)
    for most, expected in ((1, [1]), (4, [4]), (6, [4, 2]), (99, [4, 4, 3]), (None, [4, 4, 3])):
        assert sizes(DataSource(path, batch_size=4, max_examples=most).batches(model)) == expected
    assert sizes(DataSource(path, batch_size=2, max_batches=2, max_examples=9, seed=1).batches(model)) == [2, 2]
    path.write_text(path.read_text() + "no JSON\n")
    assert sizes(DataSource(path, batch_size=11, max_batches=1).batches(model)) == [11]  # the rest is not read
    with pytest.raises(ValueError, match="line 12: not valid JSON"):
        DataSource(path).batches(model)


def test_a_seed_draws_rows_without_putting_back(home: Path, tmp_path: Path) -> None:
    model, path = load_model(home), write_examples(tmp_path, 11)

    def ids(seed: int | None, batches: int | None = None) -> list[tuple[int, ...]]:
        found = DataSource(path, batch_size=3, max_batches=batches, seed=seed).batches(model)
        rows = ((row, mask) for b in found for row, mask in zip(b["input_ids"], b["attention_mask"], strict=True))
        return [tuple(row[mask.bool()].tolist()) for row, mask in rows]

    assert sorted(ids(0)) == sorted(ids(None))
    assert ids(0) == ids(0)
    assert ids(0, 2) == ids(0)[:6]
    assert len({tuple(ids(seed)) for seed in (None, 0, 1)}) == 3


def test_tokenizer_of_the_model_of_the_checkpoint_or_another(home: Path, tmp_path: Path) -> None:
    path, model = write_examples(tmp_path, 2), load_model(home)
    expected = DataSource(path).batches(model)[0]["input_ids"]
    bare = transformers.BertForSequenceClassification(model.config)
    bare.config.name_or_path = bare.name_or_path = ""
    with pytest.raises(ValueError, match=r"needs a tokenizer\. Found none: Bert"):
        DataSource(path).batches(bare)
    for batches in (
        DataSource(path).batches(bare, Checkpoint("model", home, "huggingface")),
        DataSource(path, tokenizer=home).batches(bare),
    ):
        assert torch.equal(batches[0]["input_ids"], expected)
    other = tmp_path / "other"
    other.mkdir()
    (other / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "good"]))
    (other / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "model_max_length": 16}')
    with pytest.raises(ValueError, match="gives token 13, but the model knows 11 tokens"):
        DataSource(path, tokenizer=other).batches(model)
    with pytest.raises(ValueError, match=r"max_length must lie in 3 \.\.\. 16, .* Found 17"):
        DataSource(path, tokenizer=other, max_length=17).batches(model)


class Ids(nn.Module):
    """With a configuration, and yet a model of one tensor."""

    config = "small"

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.float()


class Keywords(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return (input_ids * attention_mask).float()


class PassesOn(nn.Module):
    """As wrappers of Hugging Face models do."""

    config = "of the model inside"

    def forward(self, **inputs: Tensor) -> Tensor:
        return inputs["input_ids"].float()


def test_the_signature_of_the_model_decides(home: Path, tmp_path: Path) -> None:
    source = DataSource(write_examples(tmp_path, 2), tokenizer=home)
    ((ids, labels),) = source.batches(Ids())
    assert labels.tolist() == [0, 1]
    (named,) = source.batches(Keywords())
    assert set(named) == {"input_ids", "attention_mask", "labels"}
    assert torch.equal(named["input_ids"], ids)
    (all_of_them,) = source.batches(PassesOn())
    assert set(all_of_them) == {"input_ids", "attention_mask", "token_type_ids", "labels"}


def test_words_are_the_models_classes(tmp_path: Path) -> None:
    home = hugging_face.bert_classifier(tmp_path / "three", num_labels=3)
    path = tmp_path / "data.csv"
    path.write_text("text,label\ngood,entailment\nbad,NEUTRAL\nnot,contradiction\nfilm,1\n")
    source = DataSource(path)
    with pytest.raises(ValueError, match=r"line 2: the label must be an integer or .*, label_2. Found 'entailment'"):
        source.batches(load_model(home))
    names = dict(enumerate(["contradiction", "Entailment", "neutral"]))
    hugging_face.edit_config(home, id2label=names, label2id={name: number for number, name in names.items()})
    model = load_model(home)
    assert source.batches(model)[0]["labels"].tolist() == [1, 2, 0, 1]
    source.check()
    again = DataSource(path, labels={"entailment": 0, "NEUTRAL": 0, "contradiction": 2, "1": 1})
    assert again.batches(model)[0]["labels"].tolist() == [0, 0, 2, 1]
    path.write_text("text,label\ngood,1\nbad,3\n")
    with pytest.raises(ValueError, match=r"data\.csv, line 3: the label must be in 0 \.\.\. 2, .* Found '3'"):
        source.batches(model)
    npz = DataSource(write_npz(tmp_path, images=pictures(), labels=np.array([0, 1, 2, 5, -1])))
    with pytest.raises(ValueError, match=r"data\.npz, row 4: the label must be at least 0. Found -1"):
        npz.check()


def test_fingerprint_tells_settings_and_files_apart(home: Path, tmp_path: Path) -> None:
    text, npz = write_examples(tmp_path, 3), write_npz(tmp_path, images=pictures(), labels=np.arange(5))
    settings: list[dict[str, Any]] = [{}, {"batch_size": 2}, {"max_batches": 1}, {"seed": 0}, {"labels": {"0": 1}}]
    settings += [{"columns": {"text": "text"}}, {"max_length": 8}, {"tokenizer": home}]
    sources = [DataSource(text, **each) for each in settings] + [DataSource(npz), DataSource(npz, mean="clip")]
    before = [source.fingerprint() for source in sources]
    assert len(set(before)) == len(sources)
    assert [source.fingerprint() for source in sources] == before
    for touched, changed in ((text, range(8)), (npz, range(8, 10)), (home / "tokenizer.json", [7])):
        seen = touched.stat()
        os.utime(touched, ns=(seen.st_atime_ns, seen.st_mtime_ns + 10**9))
        after = [source.fingerprint() for source in sources]
        assert [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new] == list(changed)
        before = after
    text.write_text("no JSON")
    assert len(sources[0].fingerprint()) == 64  # no text is read
    text.unlink()
    with pytest.raises(ValueError, match=r"no file .*data\.jsonl"):
        sources[0].fingerprint()


# ---- images in arrays


@pytest.mark.parametrize("layout", ["channels first", "channels last", "grey"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_arrays_are_read_in_every_layout(layout: str, dtype: str, tmp_path: Path) -> None:
    images = pictures(dtype)[:, :1] if layout == "grey" else pictures(dtype)
    images = images if dtype == "uint8" else images / np.float32(255)
    stored = {"channels first": images, "channels last": images.transpose(0, 2, 3, 1), "grey": images[:, 0]}[layout]
    path, scale = write_npz(tmp_path, images=stored, labels=np.array([4, 1, 0, 3, 2])), 255 if dtype == "uint8" else 1
    found, labels = images_and_labels(DataSource(path, batch_size=2, mean="none").batches(PLAIN))
    assert labels == [4, 1, 0, 3, 2]
    assert np.allclose(found.numpy(), images / scale, rtol=0, atol=1e-6)
    found, _ = images_and_labels(DataSource(path, mean=[0.5], std=[0.25], max_examples=2).batches(PLAIN))
    assert np.allclose(found.numpy(), (images[:2] / scale - 0.5) / 0.25, rtol=1e-5, atol=1e-6)
    one: Any = {"mean": 0.5, "std": 0.25}  # for all channels
    assert images_and_labels(DataSource(path, **one, max_examples=2).batches(PLAIN))[0].equal(found)


def test_8_bits_are_prepared_by_the_image_processor_of_the_model(tmp_path: Path) -> None:
    """Bilinear to 16 x 16, then (x / 255 - mean) / std, as transformers does it."""
    home = hugging_face.vit_classifier(tmp_path / "vit")
    model, path = load_model(home), write_npz(tmp_path, images=pictures(channels=3), labels=np.array([0, 1, 2, 0, 1]))
    with pytest.raises(ValueError, match=r"must have a known normalization\. Found no preprocessor_config"):
        DataSource(path).batches(model)
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    processor = transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}, image_mean=mean, image_std=std)
    processor.save_pretrained(home)
    (batch,) = DataSource(path).batches(model)
    expected = processor(list(pictures()), input_data_format="channels_first", return_tensors="pt")["pixel_values"]
    assert set(batch) == {"pixel_values", "labels"}
    assert batch["pixel_values"].shape == (5, 3, 16, 16)
    assert torch.allclose(batch["pixel_values"], expected)
    small = write_npz(tmp_path / "small", images=pictures().astype(np.float32) / 255, labels=np.arange(5) % 3)
    with pytest.raises(ValueError, match=r"must be normalized, .* Found values in 0 \.\.\. 1"):
        DataSource(small).batches(model)
    assert len(DataSource(small, mean="none").batches(model)) == 1


@pytest.mark.parametrize("settings", [{}, {"mean": "none"}])
def test_grey_images_are_no_color_images(settings: dict[str, Any], tmp_path: Path) -> None:
    config = transformers.ViTConfig(**hugging_face.TINY_VIT, num_channels=3, num_labels=3)
    model = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    size = {"height": 16, "width": 16}
    transformers.ViTImageProcessorPil(size=size).save_pretrained(tmp_path)
    path = write_npz(tmp_path, images=pictures(channels=1), labels=np.arange(5) % 3)
    with pytest.raises(ValueError, match=r"3 channels, as .* Found 1") as caught:
        DataSource(path, **settings).batches(model, Checkpoint("vit", tmp_path, "huggingface"))
    assert one_sentence(str(caught.value)), str(caught.value)
    assert str(path) in str(caught.value)


def real(lowest: float, highest: float, channels: int = 3) -> NDArray[Any]:
    """(5, channels, 16, 16), floating point, of which the last picture reaches both ends."""
    pixels = np.random.default_rng(0).uniform(lowest, highest, (5, channels, 16, 16)).astype(np.float32)
    pixels[-1, :, 0, 0], pixels[-1, :, 0, 1] = lowest, highest
    return pixels


MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])  # of ImageNet's training images
CHANNELWISE = (slice(None), None, None)


def with_processor(folder: Path, **settings: Any) -> nn.Module:
    home = hugging_face.vit_classifier(folder / "vit")
    settings = {"size": {"height": 16, "width": 16}, "image_mean": [*MEAN], "image_std": [*STD], **settings}
    transformers.ViTImageProcessorPil(**settings).save_pretrained(home)
    return load_model(home)


OUTSIDE = {"openml's MNIST": (0, 255), "scikit-learn's digits": (0, 16), "above white": (-1, 2.8), "below": (-2.3, 1)}


@pytest.mark.parametrize("ends", OUTSIDE.values(), ids=list(OUTSIDE))
@pytest.mark.parametrize("channels", [1, 3])
def test_real_pixels_outside_of_normalized_ones_are_refused(
    ends: tuple[float, float], channels: int, tmp_path: Path
) -> None:
    """They went through a processor unchanged, and reached 1136 with the figures of ImageNet."""
    path = write_npz(tmp_path, images=real(*ends, channels), labels=np.arange(5) % 3)
    with pytest.raises(
        ValueError, match=r"pixels of .* must lie in -2\.12 \.\.\. 2\.64.* Found .*; scale them"
    ) as caught:
        DataSource(path, batch_size=2).batches(with_processor(tmp_path))
    assert one_sentence(str(caught.value))
    figures: Any = {"mean": "imagenet"} if channels == 3 else {"mean": 0.1307, "std": 0.3081}
    with pytest.raises(ValueError, match=r"pixels of .* must lie in 0 \.\.\. 1.* Found .*; scale them") as caught:
        DataSource(path, batch_size=2, **figures).batches(PLAIN)
    assert one_sentence(str(caught.value))
    kept, _ = images_and_labels(DataSource(path, mean="none").batches(PLAIN))
    assert np.array_equal(kept.numpy(), real(*ends, channels))


def test_real_pixels_of_normalized_pictures_are_taken_as_they_are(tmp_path: Path) -> None:
    """From -mean/std to (1 - mean)/std in each channel, with 1 % for rounding, whatever the processor does besides."""
    exact = (real(0, 1) - MEAN[CHANNELWISE]) / STD[CHANNELWISE]
    for name, images in {
        "exact": exact.astype(np.float32),
        "half": exact.astype(np.float16),
        "1 %": ((real(-0.009, 1.009) - MEAN[CHANNELWISE]) / STD[CHANNELWISE]).astype(np.float32),
    }.items():
        path = write_npz(tmp_path / name, images=images, labels=np.arange(5) % 3)
        (batch,) = DataSource(path).batches(with_processor(tmp_path / name))
        assert np.array_equal(batch["pixel_values"].numpy(), images.astype(np.float32))
    red = exact.astype(np.float32)
    red[0, 0, 0, 0] = 2.5  # where blue may be, and red not
    path = write_npz(tmp_path, images=red, labels=np.arange(5) % 3)
    with pytest.raises(ValueError, match="pixels of"):
        DataSource(path).batches(with_processor(tmp_path))
    for processor, ends in (
        ({"do_normalize": False}, (0, 1)),
        ({"do_normalize": False, "do_rescale": False}, (0, 255)),
        ({"do_rescale": False, "image_mean": [128] * 3, "image_std": [64] * 3}, (-2, 127 / 64)),
    ):
        path = write_npz(tmp_path, images=real(*ends), labels=np.arange(5) % 3)
        model = with_processor(tmp_path / str(ends), **processor)
        (batch,) = DataSource(path).batches(model)
        assert np.array_equal(batch["pixel_values"].numpy(), real(*ends))


@pytest.mark.parametrize(
    ("mean", "std", "ends"),
    [
        ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4], (0, 1)),
        (128.0, 64.0, (0, 255)),
        (0.0, 255.0, (0, 255)),
        (-20.0, 9.0, (-80, 0)),
    ],
)
def test_real_pixels_are_normalized_by_figures_on_their_own_scale(
    mean: Any, std: Any, ends: tuple[float, float], tmp_path: Path
) -> None:
    path = write_npz(tmp_path, images=real(*ends), labels=np.arange(5))
    found, _ = images_and_labels(DataSource(path, mean=mean, std=std).batches(PLAIN))
    first, second = (np.reshape(each, (-1, 1, 1)) for each in (mean, std))
    assert np.allclose(found.numpy(), (real(*ends) - first) / second, rtol=1e-5, atol=1e-6)


def test_code_beside_an_image_processor_is_never_run(tmp_path: Path) -> None:
    home = hugging_face.vit_classifier(tmp_path / "vit")
    (home / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    said = {"auto_map": {"AutoImageProcessor": "mine.Mine"}, "image_processor_type": "Mine"}
    (home / "preprocessor_config.json").write_text(json.dumps(said))
    path = write_npz(tmp_path, images=pictures(), labels=np.array([0, 1, 2, 0, 1]))
    with pytest.raises(ValueError, match=r"The image processor in .* does not load"):
        DataSource(path).batches(load_model(home))
    assert not (tmp_path / "ran").exists()
