"""Pixels as the model's directory says: transformers' own processor, a written-out formula, and what the user says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from quotient_manifolds.load import (
    DataSource,
    load_model,
)
from quotient_manifolds.load.preparation import Normalisation, Preparation
from tests import hugging_face
from tests.image_files import PLAIN, picture


def vit(directory: Path, channels: int = 3, labels: list[str] | None = None) -> nn.Module:
    """A ViT of 16 x 16 pictures with the classes ant, bee and cat, or those given."""
    torch.manual_seed(0)
    names = dict(enumerate(labels or ["ant", "bee", "cat"]))
    config = transformers.ViTConfig(
        **hugging_face.TINY_VIT,
        num_channels=channels,
        id2label=names,
        label2id={name: number for number, name in names.items()},
    )
    transformers.ViTForImageClassification(config).save_pretrained(directory)
    return load_model(directory)


def tell(directory: Path, name: str = "preprocessor_config.json", **entries: Any) -> Path:
    """A file that says how pixels are prepared."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {"image_processor_type": "ViTImageProcessor", **entries}
    (directory / name).write_text(json.dumps(content))
    return directory


def draw(folder: Path, width: int = 20, height: int = 14, channels: int = 3) -> dict[str, NDArray[np.uint8]]:
    """Folders ant, bee and cat with a picture each; the pixels (height, width[, 3]) by folder."""
    pixels = {}
    for seed, name in enumerate(["ant", "bee", "cat"]):
        (folder / name).mkdir(parents=True, exist_ok=True)
        shape = (height, width, 3) if channels == 3 else (height, width)
        pixels[name] = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
        Image.fromarray(pixels[name]).save(folder / name / "1.png")
    return pixels


def pixel_values(source: DataSource, model: nn.Module) -> Tensor:
    (batch,) = source.batches(model)
    return batch["pixel_values"] if isinstance(batch, dict) else batch[0]


SETTINGS: dict[str, dict[str, Any]] = {
    "sides": {"size": {"height": 16, "width": 16}, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]},
    "one number": {"size": 16, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]},
    "no normalisation": {"size": {"height": 16, "width": 16}, "do_normalize": False},
    "no rescaling": {"size": {"height": 16, "width": 16}, "do_rescale": False, "image_mean": [120.0] * 3},
    "another factor": {"size": {"height": 16, "width": 16}, "rescale_factor": 1 / 127.5},
    "nearest": {"size": {"height": 16, "width": 16}, "resample": 0},
    "defaults": {"size": {"height": 16, "width": 16}},
    "shorter side": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 18},
        "crop_size": {"height": 16, "width": 16},
    },
    "shorter side, one number": {"image_processor_type": "CLIPImageProcessor", "size": 18, "crop_size": 16},
    "a feature extractor": {"image_processor_type": None, "feature_extractor_type": "ViTFeatureExtractor", "size": 16},
    "ConvNext": {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 16}, "crop_pct": 0.875},
    "channels flipped": {
        "image_processor_type": "MobileViTImageProcessor",
        "size": {"shortest_edge": 16},
        "crop_size": {"height": 16, "width": 16},
    },
}


@pytest.mark.parametrize("entries", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_pictures_are_prepared_as_transformers_does_it(name: str, entries: dict[str, Any], tmp_path: Path) -> None:
    model, pixels = vit(tmp_path / "model"), draw(tmp_path / "data")
    found = {key: value for key, value in entries.items() if value is not None}
    if name == "processor_config.json":  # the newer one nests it
        content = {"image_processor": {"image_processor_type": "ViTImageProcessor", **found}}
        (tmp_path / "model" / name).write_text(json.dumps(content))
    else:
        tell(tmp_path / "model", **found)
        if entries.get("image_processor_type", "") is None:
            (tmp_path / "model" / name).write_text(json.dumps(found))
    kind = entries.get("image_processor_type", "ViTImageProcessor") or "ViTImageProcessor"
    arguments = {key: value for key, value in found.items() if not key.endswith("_type")}
    theirs = getattr(transformers, f"{kind}Pil")(**arguments)
    expected = theirs([Image.fromarray(value) for value in pixels.values()], return_tensors="pt")["pixel_values"]
    assert torch.equal(pixel_values(DataSource(tmp_path / "data"), model), expected)


def test_pictures_are_prepared_by_the_written_formula(tmp_path: Path) -> None:
    """Bilinear to 16 x 16, then (x / 255 - mean) / std."""
    model, pixels = vit(tmp_path / "model"), draw(tmp_path / "data")
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    tell(tmp_path / "model", size={"height": 16, "width": 16}, image_mean=mean, image_std=std)
    resized = [np.asarray(Image.fromarray(each).resize((16, 16), 2)) for each in pixels.values()]
    expected = (np.stack(resized) / 255 - mean) / std
    found = pixel_values(DataSource(tmp_path / "data"), model)
    assert np.allclose(found.numpy(), expected.transpose(0, 3, 1, 2), rtol=0, atol=1e-5)


def test_arrays_of_8_bits_are_prepared_like_pictures(tmp_path: Path) -> None:
    model, pixels = vit(tmp_path / "model"), draw(tmp_path / "data")
    tell(tmp_path / "model", size={"height": 16, "width": 16}, image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.3, 0.4])
    np.savez(tmp_path / "data.npz", images=np.stack(list(pixels.values())), labels=np.arange(3))
    assert torch.equal(
        pixel_values(DataSource(tmp_path / "data.npz"), model), pixel_values(DataSource(tmp_path / "data"), model)
    )


def test_grey_pictures_for_a_grey_model(tmp_path: Path) -> None:
    model = vit(tmp_path / "model", channels=1)
    pixels = draw(tmp_path / "data", 16, 16, channels=1)
    tell(tmp_path / "model", size={"height": 16, "width": 16}, image_mean=[0.5], image_std=[0.25])
    found = pixel_values(DataSource(tmp_path / "data"), model)  # channels as the model's configuration has them
    expected = (np.stack(list(pixels.values()))[:, None] / 255 - 0.5) / 0.25
    assert np.allclose(found.numpy(), expected, rtol=0, atol=1e-5)


@settings(max_examples=25)
@given(
    said=st.sampled_from([None, "none", "clip", "figures"]),
    size=st.sampled_from([None, 12]),
    shape=st.tuples(st.integers(12, 40), st.integers(12, 40)),
)
def test_what_the_user_says_wins(
    said: str | None, size: int | None, shape: tuple[int, int], tmp_path_factory: Any
) -> None:
    """Normalisation and geometry are each the user's where given, and the directory's otherwise."""
    home = tell(
        tmp_path_factory.mktemp("home"), size={"height": 16, "width": 16}, image_mean=[0.5] * 3, image_std=[0.25] * 3
    )
    figures = {None: None, "none": Normalisation((), ()), "figures": Normalisation((0.1,), (2.0,))}
    clip = Normalisation((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
    normalisation = clip if said == "clip" else figures[said]
    picture = np.random.default_rng(0).integers(0, 256, (3, *shape)).astype(np.uint8)
    found = Preparation.of(size, normalisation, PLAIN, [home])([picture], ["here"])
    image = Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0)))
    if size is None:
        image = image.resize((16, 16), 2)
    else:
        width, height = (int(size * side / min(image.size)) for side in image.size)
        left, top = round((width - size) / 2), round((height - size) / 2)
        image = image.resize((width, height), 3).crop((left, top, left + size, top + size))
    scaled = torch.tensor(np.asarray(image).transpose(2, 0, 1)[None].copy()) / 255
    wanted = (scaled - 0.5) / 0.25 if normalisation is None else normalisation(scaled)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5)


def test_nothing_says_how_pixels_are_normalised(tmp_path: Path) -> None:
    model, pixels = vit(tmp_path / "model"), draw(tmp_path / "data", 16, 16)
    images = np.stack(list(pixels.values()))
    np.savez(tmp_path / "bytes.npz", images=images, labels=np.arange(3))
    np.savez(tmp_path / "floats.npz", images=images / np.float32(255), labels=np.arange(3))
    for path in (tmp_path / "data", tmp_path / "bytes.npz"):
        for network in (model, PLAIN):
            with pytest.raises(ValueError, match=r"Nothing says how pixels are normalised .* mean: none"):
                DataSource(path).batches(network)
        assert pixel_values(DataSource(path, mean="none"), model).max() <= 1
    floats = DataSource(tmp_path / "floats.npz")
    assert torch.equal(pixel_values(floats, model), pixel_values(DataSource(tmp_path / "data", mean="none"), model))
    tell(tmp_path / "model")  # now it says that they are normalised, and these are not
    with pytest.raises(ValueError, match=r"lie in 0 \.\.\. 1, and the model .* was trained on normalised ones"):
        floats.batches(model)
    assert pixel_values(DataSource(tmp_path / "floats.npz", mean="none"), model).max() <= 1
    np.savez(tmp_path / "floats.npz", images=images / np.float32(127.5) - 1, labels=np.arange(3))
    assert pixel_values(floats, model).min() < 0
    tell(tmp_path / "model", do_normalize=False)
    np.savez(tmp_path / "floats.npz", images=images / np.float32(255), labels=np.arange(3))
    assert pixel_values(floats, model).min() >= 0


BROKEN: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "not valid JSON"),
    "a list": ("[]", "must hold one JSON object"),
    "nested": ('{"size": ' + "[" * 5000 + "]" * 5000 + "}", "not valid JSON"),
    "unknown": ({"image_processor_type": "MyImageProcessor"}, "does not load"),
    "remote code": ({"image_processor_type": None, "auto_map": {"AutoImageProcessor": "mine.P"}}, "never run"),
    "a great size": ({"size": {"height": 10**6, "width": 10**6}}, "sides of 1000000 pixels"),
    "a great crop": ({"do_center_crop": True, "crop_size": 10**6}, "sides of 1000000 pixels"),
    "a zero size": ({"size": {"height": 0, "width": 0}}, "cannot be prepared"),
    "three figures for two": ({"image_mean": [0.5, 0.5]}, "cannot be prepared"),
    "a word": ({"image_mean": "half"}, "cannot be prepared"),
    "std zero": ({"image_std": [0.0, 0.0, 0.0]}, "not finite|cannot be prepared"),
}


@pytest.mark.parametrize(("content", "match"), BROKEN.values(), ids=list(BROKEN))
def test_broken_settings_are_refused_in_one_sentence(content: Any, match: str, tmp_path: Path) -> None:
    model = vit(tmp_path / "model")
    draw(tmp_path / "data")
    if isinstance(content, str):
        (tmp_path / "model" / "preprocessor_config.json").write_text(content)
    else:
        entries = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}, **content}
        kept = {key: value for key, value in entries.items() if value is not None}
        (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(kept))
    (tmp_path / "model" / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match=match) as caught:
        DataSource(tmp_path / "data").batches(model)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_folders_go_by_the_names_of_the_models_classes(tmp_path: Path) -> None:
    draw(tmp_path / "data", 16, 16)

    def labels(model: nn.Module, **options: Any) -> list[int]:
        (batch,) = DataSource(tmp_path / "data", mean="none", **options).batches(model)
        return batch["labels"].tolist()

    assert labels(vit(tmp_path / "a", labels=["Cat", "ANT", "bee", "dog"])) == [1, 2, 0]
    assert labels(vit(tmp_path / "b", labels=["LABEL_0", "LABEL_1", "LABEL_2"])) == [0, 1, 2]
    assert labels(vit(tmp_path / "c", labels=["x", "y", "z"])) == [0, 1, 2]  # as many: in the order of the names
    with pytest.raises(ValueError, match=r"ant: the label 'ant' is not one of the model's \('bee', 'cat', 'dog'\)"):
        labels(vit(tmp_path / "d", labels=["bee", "cat", "dog"]))
    few = vit(tmp_path / "e", labels=["w", "x", "y", "z"])
    with pytest.raises(ValueError, match=r"has 3 folders and the model 4 classes .* give labels"):
        labels(few)
    assert labels(few, labels={"ant": 3, "bee": 0, "cat": 1}) == [3, 0, 1]
    with pytest.raises(ValueError, match=r"ant/1\.png: the label must be in 0 \.\.\. 3, .* found 4"):
        labels(few, labels={"ant": 4, "bee": 0, "cat": 1})


def test_thin_pictures_for_a_model_that_says_how_they_are_resized(tmp_path: Path) -> None:
    model = hugging_face.vit_classifier(tmp_path / "model")
    tell(model, image_processor_type="CLIPImageProcessor", size={"shortest_edge": 224})
    picture(tmp_path / "data" / "a" / "1.png", 20000, 1)
    with pytest.raises(ValueError, match="along its shorter side"):
        DataSource(tmp_path / "data", labels=[0]).batches(load_model(model))
