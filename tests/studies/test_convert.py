"""Pictures that `convert images` writes have the pixels that transformers' CLIP processor computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from PIL import Image

from quotient_manifolds.load import DataSource
from studies.convert import convert


def run(*words: object) -> None:
    done = CliRunner().invoke(convert, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(("width", "height"), [(40, 28), (28, 40), (16, 16), (10, 15), (29, 41)])
def test_images_are_prepared_as_for_clip(width: int, height: int, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, height, width, 3)).astype(np.uint8)
    for name, each in zip(("cat", "dog"), pixels, strict=True):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.fromarray(each).save(tmp_path / "photos" / name / "1.png")
    run("images", tmp_path / "photos", tmp_path / "photos.npz", "--size", 16)
    run("images", tmp_path / "photos", tmp_path / "one.npz", "--size", 16, "--examples", 1)
    assert len(np.load(tmp_path / "one.npz")["labels"]) == 1
    ((images, labels),) = DataSource(tmp_path / "photos.npz", mean="clip", seed=None).batches(torch.nn.Flatten())
    theirs = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=16)
    order = [int(label) for label in labels]
    assert sorted(order) == [0, 1]
    expected = theirs([Image.fromarray(pixels[label]) for label in order], return_tensors="pt")["pixel_values"]
    assert torch.allclose(images, expected, rtol=0, atol=1e-5)
