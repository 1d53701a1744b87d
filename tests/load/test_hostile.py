"""Files made to harm: nothing runs, is fetched, or fills the memory, and each is refused in one sentence."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image
from safetensors.torch import load_file
from torch import nn

from quotient_manifolds.files import siblings
from quotient_manifolds.load import (
    DataSource,
    LabelledText,
    find_checkpoints,
    load_model,
    read_text_labels,
    tokenised_batches,
)
from quotient_manifolds.load.image_arrays import StoredArray
from quotient_manifolds.load.untrusted import TooLarge, at_most, no_network
from tests import hugging_face
from tests.load.test_load import edit_config, one_sentence

PLAIN = nn.Flatten()


def config(**entries: Any) -> Callable[[Path], None]:
    return lambda path: edit_config(path, **entries)


def text(content: str, name: str = "config.json") -> Callable[[Path], Any]:
    return lambda path: (path / name).write_text(content)


def pickled_shard(path: Path) -> None:
    """An index that names a file which torch.load would read."""
    tensors = load_file(path / "model.safetensors")
    torch.save(tensors, path / "model-1.bin")
    (path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-1.bin")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def pipe(name: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return make


def shard_elsewhere(path: Path) -> None:
    (path / "model.safetensors").rename(path.parent / "model.safetensors")
    index = {"weight_map": {"classifier.bias": "../model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


DIRECTORIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "classes": (config(num_labels=10**9), "asks for num_labels = 1000000000"),
    "classes, nested": (config(text_config={"num_labels": 1e9}), "asks for num_labels"),
    "layers": (config(num_hidden_layers=10**7), "asks for num_hidden_layers"),
    "some more layers": (config(num_hidden_layers=900), "many times larger than its weights"),
    "width": (config(hidden_size=10**6), "many times larger than its weights"),
    "words": (config(vocab_size=10**12), "many times larger than its weights"),
    "positions": (config(max_position_embeddings=10**12), "many times larger than its weights"),
    "neurons": (config(intermediate_size=10**13), "many times larger than its weights"),
    "lists": (text('{"model_type": "bert", "a": ' + "[" * 5000 + "]" * 5000 + "}"), "not valid JSON"),
    "tables": (text('{"a":' * 5000 + "1" + "}" * 5000), "not valid JSON"),
    "a list": (text("[]"), "one JSON object"),
    "a word": (text('"bert"'), "one JSON object"),
    "digits": (text('{"model_type": "bert", "hidden_size": ' + "9" * 5000 + "}"), "not valid JSON"),
    "architectures is a word": (config(architectures="Bert"), "must be a list of names"),
    "architectures is a number": (config(architectures=[3]), "must be a list of names"),
    "no model": (config(architectures=["Trainer"]), "does not know"),
    "a tokenizer": (config(architectures=["BertTokenizer"]), "does not know"),
    "a kind of number": (config(num_hidden_layers="many"), "num_hidden_layers"),
    "pickled shard": (pickled_shard, "as a shard: expected files of safetensors"),
    "shard elsewhere": (shard_elsewhere, "as a shard: expected files of safetensors"),
    "weights of its own": (config(transformers_weights="x.safetensors.index.json"), "names weights of its own"),
    "a pipe for the configuration": (pipe("config.json"), "has no config.json"),
    "a pipe for the weights": (pipe("model.safetensors"), "no regular file"),
    "a pipe beside them": (pipe("generation_config.json"), "no regular file"),
}


@pytest.mark.parametrize(("spoil", "match"), DIRECTORIES.values(), ids=list(DIRECTORIES))
def test_directories(spoil: Callable[[Path], Any], match: str, tmp_path: Path) -> None:
    model = hugging_face.bert_classifier(tmp_path / "model")
    spoil(model)
    started = time.process_time()
    with pytest.raises(ValueError, match=match) as caught:
        load_model(model)
    assert one_sentence(str(caught.value)), str(caught.value)
    assert time.process_time() - started < 10


@settings(max_examples=30)
@given(
    entries=st.dictionaries(
        st.sampled_from(["hidden_size", "num_hidden_layers", "vocab_size", "architectures", "id2label", "dtype", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(10**9), 10**13) | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=5,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_configuration_loads_or_is_refused(
    entries: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = hugging_face.bert_classifier(tmp_path_factory.mktemp("model"))
    edit_config(model, **entries)
    with contextlib.suppress(ValueError):
        load_model(model)


def test_a_model_may_be_a_few_times_larger_than_its_file() -> None:
    """Tied weights stand in a file once; parameters that are put in others' place count once."""
    shapes = {"weight": (1000, 4000)}
    with at_most(shapes, "here"):
        layer = nn.Linear(4000, 2000, device="meta")
        for _ in range(50):
            layer.weight = nn.Parameter(torch.empty(2000, 4000, device="meta"))
    with pytest.raises(TooLarge, match="many times larger"), at_most(shapes, "here"):
        nn.Linear(10**5, 10**5, device="meta")
    nn.Linear(10**5, 10**5, device="meta")  # outside, anything goes


# ---- the network


@pytest.fixture
def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a connection fails, and nobody was told to stay offline."""
    from huggingface_hub import constants

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


BACKBONE = {"backbone": "microsoft/resnet-50", "use_pretrained_backbone": True, "use_timm_backbone": False}


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        ("DetrForObjectDetection", "detr"),
        ("DPTForDepthEstimation", "dpt"),
        ("UperNetForSemanticSegmentation", "upernet"),
        ("MaskFormerForInstanceSegmentation", "maskformer"),
    ],
)
@pytest.mark.usefixtures("without_network")
def test_a_backbone_is_not_fetched(kind: str, model_type: str, tmp_path: Path) -> None:
    from huggingface_hub import constants

    hugging_face.bert_classifier(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": [kind], **BACKBONE}))
    with pytest.raises(ValueError, match=r"nothing is ever fetched from a network") as caught:
        load_model(tmp_path)
    assert one_sentence(str(caught.value)), str(caught.value)
    assert constants.HF_HUB_OFFLINE is False


@pytest.mark.usefixtures("without_network")
def test_the_switch_stays_down_until_the_last_has_left() -> None:
    from huggingface_hub import constants

    first, second = no_network(), no_network()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert constants.HF_HUB_OFFLINE is True
    second.__exit__(None, None, None)
    assert constants.HF_HUB_OFFLINE is False


@pytest.mark.usefixtures("without_network")
def test_models_and_tokenizers_load_without_a_connection(tmp_path: Path) -> None:
    load_model(hugging_face.bert_classifier(tmp_path))
    assert tokenised_batches(tmp_path, [LabelledText("good", None, 0)])


# ---- pictures


def picture(path: Path, width: int, height: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height)).save(path)
    return path


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


def test_thin_pictures_for_a_model_that_says_how_they_are_resized(tmp_path: Path) -> None:
    from tests.load.test_preparation import tell

    model = hugging_face.vit_classifier(tmp_path / "model")
    tell(model, image_processor_type="CLIPImageProcessor", size={"shortest_edge": 224})
    picture(tmp_path / "data" / "a" / "1.png", 20000, 1)
    with pytest.raises(ValueError, match="along its shorter side"):
        DataSource(tmp_path / "data", labels=[0]).batches(load_model(model))


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


def test_folders_of_thousands_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"m{i}.safetensors" for i in range(50)]
    for file in files:
        file.touch()
    (tmp_path / "m7.json").touch()
    os.utime(tmp_path, (1e9, 1e9))
    listed = []
    names = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: listed.append(folder) or names(folder))
    found = [siblings(file, file.stem) for file in files]
    assert len(listed) == 1
    assert [path.name for path in found[7]] == ["m7.json", "m7.safetensors"]
    assert len(found[4]) == 11  # m4 and m40 to m49
    (tmp_path / "m4.json").touch()
    assert len(siblings(files[4], "m4")) == 12


# ---- arrays


def zipped(path: Path, shape: tuple[int, ...], content: bytes, name: str = "images", kind: str = "|u1") -> None:
    """An .npz with labels and an array that is declared to have this shape, deflated."""
    header = repr({"descr": kind, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    head = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("labels.npy", "w") as stream:
            np.lib.format.write_array(stream, np.zeros(shape[0] if name == "images" else 1, np.int64))
        if name == "images":
            archive.writestr("images.npy", head + content)
        else:
            archive.writestr(f"{name}.npy", head + content)


def test_a_bomb_of_zeros(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    zipped(path, (70, 1, 1000, 1000), bytes(70_000_000))
    assert path.stat().st_size < 200_000
    with pytest.raises(ValueError, match=r"images has 70\d+ bytes, packed into \d+"):
        DataSource(path, mean="none", max_batches=1, batch_size=1).batches(PLAIN)


@pytest.mark.parametrize("shape", [(10**6, 3, 224, 224), (2, 3, 4, 5), (2, 3, 4, 3), (2**62, 3, 4, 4)])
def test_a_header_that_lies(shape: tuple[int, ...], tmp_path: Path) -> None:
    zipped(tmp_path / "data.npz", (2, 3, 4, 4), bytes(96))
    assert len(DataSource(tmp_path / "data.npz", mean="none").batches(PLAIN)) == 1
    content = bytes(96)
    header = repr({"descr": "|u1", "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    head = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        with archive.open("labels.npy", "w") as stream:
            np.lib.format.write_array(stream, np.zeros(2, np.int64))
        archive.writestr("images.npy", head + content)
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


# ---- text


LINES: dict[str, tuple[str, str, str]] = {
    "digits": ("a.jsonl", '{"text": "good", "label": ' + "9" * 400 + "}", "line 1: the label must be .* 400 digits"),
    "more digits": ("a.jsonl", '{"text": "good", "label": ' + "9" * 5000 + "}", "line 1: not valid JSON"),
    "digits in a table": ("a.csv", "text,label\ngood," + "9" * 400, "line 2: the label must be .* 400 digits"),
    "more digits in a table": ("a.csv", "text,label\ngood," + "9" * 5000, "line 2: the label must be an integer"),
    "negative digits": ("a.jsonl", '{"text": "good", "label": -' + "9" * 400 + "}", "400 digits"),
    "infinite": ("a.jsonl", '{"text": "good", "label": 1e999}', "must be an integer, found inf"),
    "nested": ("a.jsonl", "[" * 100_000, "line 1: not valid JSON"),
    "long": ("a.jsonl", '{"text": "' + "a" * 10_000_001, "line 1 has more than 10000000 characters"),
    "long in a table": ("a.csv", "text,label\n" + "a" * 10_000_001, "line 2 has more than"),
    "a long field": ("a.csv", "text,label\n" + "a" * 200_000 + ",1\n", "cannot be read as a table"),
    "half a pair": ("a.jsonl", '{"text": "\\ud800", "label": 1}', "line 1: the text is not valid Unicode"),
    "a number of digits for a text": ("a.jsonl", '{"text": ' + "9" * 400 + ', "label": 1}', "must be strings"),
}


@pytest.mark.parametrize(("name", "content", "match"), LINES.values(), ids=list(LINES))
@pytest.mark.parametrize("labels", [None, {"a": 0}], ids=["as they are", "renamed"])
def test_lines(name: str, content: str, match: str, labels: dict[str, int] | None, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=match if labels is None else "the label must|line|table") as caught:
        read_text_labels(tmp_path / name, labels=labels)
    assert one_sentence(str(caught.value))
    assert len(str(caught.value)) < 500


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


def test_the_home_of_nobody(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No model at ~nosuchuser"):
        load_model("~nosuchuser/model")
    for name in ("a.jsonl", "a.npz", "a"):
        with pytest.raises(ValueError, match=r"There is no .*~nosuchuser"):
            DataSource(f"~nosuchuser/{name}", mean=None if name == "a.jsonl" else "none").batches(PLAIN)
    with pytest.raises(ValueError, match="matches nothing"):
        find_checkpoints(["~nosuchuser/*"], "huggingface", tmp_path)
