"""Images from arrays and folders: every value as the model wants it, nothing run or unpacked that should not be."""

from __future__ import annotations

import contextlib
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import EpsImagePlugin, Image

from quotient_manifolds.load import (
    DataSource,
    find_checkpoints,
    load_model,
)
from quotient_manifolds.load.image_arrays import StoredArray
from quotient_manifolds.sharpness import cross_entropy
from tests import hugging_face
from tests.image_files import PLAIN, images_and_labels, paint, picture, pictures, write_npz
from tests.refusals import one_sentence


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


def test_channels_of_arrays_and_of_mean_must_agree(tmp_path: Path) -> None:
    path = write_npz(tmp_path, images=pictures(channels=1), labels=np.arange(5))
    with pytest.raises(ValueError, match="have 1 channels, but mean and std are given for 3"):
        DataSource(path, mean="clip").batches(PLAIN)


def zipped(path: Path, shape: tuple[int, ...], content: bytes, labels: int) -> None:
    """An .npz with so many labels and images that are declared to have this shape, deflated."""
    header = repr({"descr": "|u1", "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    head = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("labels.npy", "w") as stream:
            np.lib.format.write_array(stream, np.zeros(labels, np.int64))
        archive.writestr("images.npy", head + content)


def test_a_bomb_of_zeros(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    zipped(path, (70, 1, 1000, 1000), bytes(70_000_000), labels=70)
    assert path.stat().st_size < 200_000
    with pytest.raises(ValueError, match=r"images has 70\d+ bytes, packed into \d+"):
        DataSource(path, mean="none", max_batches=1, batch_size=1).batches(PLAIN)


@pytest.mark.parametrize("shape", [(10**6, 3, 224, 224), (2, 3, 4, 5), (2, 3, 4, 3), (2**62, 3, 4, 4)])
def test_a_header_that_lies(shape: tuple[int, ...], tmp_path: Path) -> None:
    zipped(tmp_path / "data.npz", (2, 3, 4, 4), bytes(96), labels=2)
    assert len(DataSource(tmp_path / "data.npz", mean="none").batches(PLAIN)) == 1
    zipped(tmp_path / "data.npz", shape, bytes(96), labels=2)
    with pytest.raises(ValueError, match=r"no readable \.npz file of plain arrays: images is no array of"):
        DataSource(tmp_path / "data.npz", mean="none").batches(PLAIN)


@settings(max_examples=25)
@given(
    count=st.integers(1, 12),
    compressed=st.booleans(),
    fortran=st.booleans(),
    data=st.data(),
)
def test_rows_are_those_of_the_array(
    count: int, compressed: bool, fortran: bool, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("arrays") / "data.npz"
    array = np.random.default_rng(0).random((count, 1, 3, 400)).astype(np.float64)
    stored = np.asfortranarray(array) if fortran else array
    (np.savez_compressed if compressed else np.savez)(path, images=stored)
    wanted = data.draw(st.lists(st.integers(0, count - 1), max_size=8))
    assert np.array_equal(StoredArray(path, "images").rows(wanted), array[wanted])


@settings(max_examples=60)
@given(data=st.data())
def test_a_spoiled_archive_is_read_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("arrays") / "data.npz"
    images = np.arange(96, dtype=np.uint8).reshape(2, 3, 4, 4)
    np.savez_compressed(path, images=images, labels=np.arange(2))
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=3)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(ValueError):
        ((found, _),) = DataSource(path, mean="none").batches(PLAIN)
        assert np.array_equal((found * 255).round().numpy(), images)


# ---- folders


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


def bomb(path: Path, side: int) -> None:
    """A PNG that says it is side x side, and holds next to nothing."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


def postscript(path: Path) -> None:
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n")


def only(spoil: Callable[[Path], Any]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.unlink()
        spoil(path)

    return make


PICTURES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "thin": (lambda path: picture(path, 20000, 1), "along its shorter side"),
    "tall": (lambda path: picture(path, 1, 20000), "along its shorter side"),
    "bomb": (lambda path: bomb(path, 100_000), "no readable image"),
    "small bomb": (lambda path: bomb(path, 12_000), "no readable image|has 12000 x 12000 pixels"),
    "PostScript": (postscript, "no readable image"),
    "a pipe": (only(os.mkfifo), "no regular file"),
    "a device": (only(lambda path: path.symlink_to("/dev/zero")), "no regular file"),
    "text": (lambda path: path.write_text("no picture"), "no readable image"),
}


@pytest.mark.parametrize(("spoil", "match"), PICTURES.values(), ids=list(PICTURES))
def test_pictures(spoil: Callable[[Path], Any], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *options, **_: ran.append(options))
    file = picture(tmp_path / "a" / "1.png", 8, 8)
    spoil(file)
    with pytest.raises(ValueError, match=match) as caught:
        DataSource(tmp_path, size=224, mean="none").batches(PLAIN)
    assert one_sentence(str(caught.value)), str(caught.value)
    assert not ran


def odd(name: bytes, folder: Path) -> Path:
    """A path with bytes that are no UTF-8; skips where the file system has none such."""
    path = folder / os.fsdecode(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError:
        pytest.skip("names are UTF-8 on this file system")
    return path


def test_names_that_are_not_text(tmp_path: Path) -> None:
    file = odd(b"a/\xff\xfe.png", tmp_path)
    picture(tmp_path / "a" / "ok.png", 8, 8).rename(file)
    source = DataSource(tmp_path, mean="none")
    assert len(source.fingerprint()) == 64
    ((images, _),) = source.batches(PLAIN)
    assert images.shape == (1, 3, 8, 8)
    file.write_text("no picture")
    with pytest.raises(ValueError, match=r"\\xff\\xfe\.png is no readable image") as caught:
        source.batches(PLAIN)
    str(caught.value).encode()
    odd(b"zoo/\xff.safetensors", tmp_path)
    names = [checkpoint.name for checkpoint in find_checkpoints(["zoo/*"], "clip-soup", tmp_path)]
    assert names == ["\\xff"]
