"""The zoos of others: found in order, read exactly as their authors meant them, refused in one sentence when broken."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from quotient_manifolds.load import (
    Checkpoint,
    ClipClassifier,
    DataSource,
    find_checkpoints,
    load_checkpoint,
    load_clip_soup,
)
from quotient_manifolds.sharpness import cross_entropy
from quotient_manifolds.symmetries import find_symmetries, prove_symmetries
from tests import hugging_face


def one_sentence(message: str) -> bool:
    return "\n" not in message.strip() and "Traceback" not in message and len(message) > 20


# ---- finding


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names(checkpoints: tuple[Checkpoint, ...]) -> list[str]:
    return [checkpoint.name for checkpoint in checkpoints]


def test_numbers_sort_as_numbers(tmp_path: Path) -> None:
    touch(tmp_path, *(f"model_{i}.pt" for i in (10, 2, 0, 71)), "README.md", "model_2.json")
    found = find_checkpoints(["model_*"], "clip-soup", tmp_path)
    assert names(found) == ["model_0", "model_2", "model_10", "model_71"]
    assert [checkpoint.path for checkpoint in found] == [tmp_path / f"model_{i}.pt" for i in (0, 2, 10, 71)]
    assert {checkpoint.loader for checkpoint in found} == {"clip-soup"}


def test_names_are_unique(tmp_path: Path) -> None:
    touch(tmp_path, "a/best.pt", "b/best.pt", "b/last.pt", "b/best.safetensors", "best.pth")
    found = find_checkpoints(["**/*.*"], "clip-soup", tmp_path)
    assert names(found) == ["a/best", "b/best.pt", "b/best.safetensors", "last", "best"]


def test_a_checkpoint_that_two_patterns_match_counts_once(tmp_path: Path) -> None:
    touch(tmp_path, "a.pt", "b.pt")
    found = find_checkpoints(["*.pt", str(tmp_path / "a.pt"), "./b.pt"], "clip-soup", tmp_path)
    assert names(found) == ["a", "b"]


def test_a_name_with_brackets_is_found_literally(tmp_path: Path) -> None:
    touch(tmp_path, "run [1].pt")
    assert names(find_checkpoints(["run [1].pt"], "clip-soup", tmp_path)) == ["run [1]"]


def test_directories_and_bundles(tmp_path: Path) -> None:
    touch(tmp_path, "x/1/model.v2/config.json", "x/2/README", "README")
    assert names(find_checkpoints(["x/*/*", "x/*"], "huggingface", tmp_path)) == ["1", "model.v2", "2"]
    parts = ("index", "meta", "data-00000-of-00001")
    touch(tmp_path, *(f"bert_{i:02}/model.ckpt-36815.{part}" for i in range(3) for part in parts), "bert_00/checkpoint")
    touch(tmp_path, *(f"flat/bert_1.ckpt.{part}" for part in parts))
    whole = find_checkpoints(["bert_*"], "bert-tensorflow", tmp_path)
    assert names(whole) == [f"bert_0{i}" for i in range(3)]
    files = find_checkpoints(["bert_*/*"], "bert-tensorflow", tmp_path)
    assert names(files) == [f"bert_0{i}/model.ckpt-36815" for i in range(3)]
    (flat,) = find_checkpoints(["flat/*"], "bert-tensorflow", tmp_path)
    assert flat == Checkpoint("bert_1.ckpt", tmp_path / "flat/bert_1.ckpt", "bert-tensorflow")
    assert find_checkpoints(["flat/bert_1.ckpt.index"], "bert-tensorflow", tmp_path) == (flat,)


NOT_FOUND = {
    "no match": (["nothing_*.pt"], "clip-soup", "'nothing_\\*.pt' matches nothing in"),
    "other files only": (["*.md"], "clip-soup", r"reads a .pt, .pth, .safetensors file, and this matches README.md"),
    "a file is no directory": (["a.pt"], "huggingface", "reads a directory, and this matches a.pt"),
    "one of two": (["a.pt", "c.pt"], "clip-soup", "'c.pt' matches nothing"),
    "loader": (["a.pt"], "clip_soup", "one of huggingface, clip-soup, bert-tensorflow, or package.module:function"),
    "no patterns": ([], "huggingface", "needs patterns"),
}


@pytest.mark.parametrize(("patterns", "loader", "match"), NOT_FOUND.values(), ids=list(NOT_FOUND))
def test_what_is_not_found_is_said(patterns: list[str], loader: str, match: str, tmp_path: Path) -> None:
    touch(tmp_path, "a.pt", "README.md")
    with pytest.raises(ValueError, match=match) as caught:
        find_checkpoints(patterns, loader, tmp_path)
    assert one_sentence(str(caught.value))


# ---- functions and directories


@pytest.fixture
def zoo_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "zoo_of_functions.py").write_text(
        "import torch\n"
        "def one():\n    return torch.nn.Linear(2, 3, dtype=torch.float64)\n"
        "def sized(path):\n    return torch.nn.Linear(int(path.read_text()), 1)\n"
        "def bad(path):\n    raise RuntimeError('first\\nsecond')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "zoo_of_functions", raising=False)
    return "zoo_of_functions"


def test_functions_with_and_without_a_path(zoo_module: str, tmp_path: Path) -> None:
    (tmp_path / "4.txt").write_text("4")
    (tmp_path / "12.txt").write_text("12")
    small, large = find_checkpoints(["*.txt"], f"{zoo_module}:sized", tmp_path)
    assert [small.name, large.name] == ["4", "12"]
    model = load_checkpoint(large)
    assert isinstance(model, nn.Linear)
    assert model.in_features == 12
    (alone,) = find_checkpoints([], f"{zoo_module}:one", tmp_path)
    assert alone == Checkpoint(f"{zoo_module}:one", None, f"{zoo_module}:one")
    model = load_checkpoint(alone)
    assert not model.training
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match=r"bad was called with .*4\.txt and raised RuntimeError: first$"):
        load_checkpoint(Checkpoint("4", tmp_path / "4.txt", f"{zoo_module}:bad"))
    with pytest.raises(ValueError, match="has no path"):
        load_checkpoint(Checkpoint("4", None, "huggingface"))


def test_a_directory_in_half_precision_is_measured_in_single(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path / "a")
    half = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "b")
    (checkpoint,) = find_checkpoints(["b"], "huggingface", tmp_path)
    model = load_checkpoint(checkpoint)
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    stored = safetensors.torch.load_file(tmp_path / "b" / "model.safetensors")["classifier.weight"]
    assert stored.dtype == torch.bfloat16
    assert torch.equal(model.get_parameter("classifier.weight"), stored.float())
    (tmp_path / "b" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="does not load"):
        load_checkpoint(checkpoint)
    (tmp_path / "b" / "model.safetensors").unlink()
    (tmp_path / "b" / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    with pytest.raises(ValueError, match="has no weight_map"):
        load_checkpoint(checkpoint)


# ---- CLIP soups

WIDTH, PATCH, GRID, LAYERS, HIDDEN, FEATURES, CLASSES = 128, 4, 2, 2, 96, 16, 5
TEXT_TOWER = {
    "model.positional_embedding": (7, FEATURES),
    "model.text_projection": (FEATURES, FEATURES),
    "model.logit_scale": (),
    "model.token_embedding.weight": (9, FEATURES),
    "model.ln_final.weight": (FEATURES,),
    "model.ln_final.bias": (FEATURES,),
}


def soup(seed: int = 0) -> dict[str, Tensor]:
    """A state dict as model-soups saves them: 2 blocks, 2 heads of 64, 8 x 8 pixels, 5 classes."""
    block = {
        "attn.in_proj_weight": (3 * WIDTH, WIDTH),
        "attn.in_proj_bias": (3 * WIDTH,),
        "attn.out_proj.weight": (WIDTH, WIDTH),
        "attn.out_proj.bias": (WIDTH,),
        "ln_1.weight": (WIDTH,),
        "ln_1.bias": (WIDTH,),
        "mlp.c_fc.weight": (HIDDEN, WIDTH),
        "mlp.c_fc.bias": (HIDDEN,),
        "mlp.c_proj.weight": (WIDTH, HIDDEN),
        "mlp.c_proj.bias": (WIDTH,),
        "ln_2.weight": (WIDTH,),
        "ln_2.bias": (WIDTH,),
    }
    visual = {
        "class_embedding": (WIDTH,),
        "positional_embedding": (GRID**2 + 1, WIDTH),
        "proj": (WIDTH, FEATURES),
        "conv1.weight": (WIDTH, 3, PATCH, PATCH),
        **{f"{norm}.{part}": (WIDTH,) for norm in ("ln_pre", "ln_post") for part in ("weight", "bias")},
        **{f"transformer.resblocks.{i}.{name}": shape for i in range(LAYERS) for name, shape in block.items()},
    }
    shapes = {
        **TEXT_TOWER,
        **{f"model.visual.{name}": shape for name, shape in visual.items()},
        "classification_head.weight": (CLASSES, FEATURES),
        "classification_head.bias": (CLASSES,),
    }
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def hugging_face_features(tensors: dict[str, Tensor], images: Tensor, heads: int) -> Tensor:
    """Image features by another implementation of CLIP, filled with the same weights."""
    config = transformers.CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        image_size=PATCH * GRID,
        patch_size=PATCH,
        projection_dim=FEATURES,
        hidden_act="quick_gelu",
    )
    model = transformers.CLIPVisionModelWithProjection(config).eval()
    ours = {name.removeprefix("model.visual."): value for name, value in tensors.items() if ".visual." in name}
    theirs = {
        "embeddings.class_embedding": ours["class_embedding"],
        "embeddings.patch_embedding.weight": ours["conv1.weight"],
        "embeddings.position_embedding.weight": ours["positional_embedding"],
    }
    renamed = {"ln_pre": "pre_layrnorm", "ln_post": "post_layernorm"}
    for norm, name in renamed.items():
        theirs |= {f"{name}.{part}": ours[f"{norm}.{part}"] for part in ("weight", "bias")}
    for i in range(LAYERS):
        old, new = f"transformer.resblocks.{i}", f"encoder.layers.{i}"
        for part in ("weight", "bias"):
            packed = ours[f"{old}.attn.in_proj_{part}"].chunk(3)
            theirs |= {f"{new}.self_attn.{x}_proj.{part}": value for x, value in zip("qkv", packed, strict=True)}
            theirs[f"{new}.self_attn.out_proj.{part}"] = ours[f"{old}.attn.out_proj.{part}"]
            theirs |= {f"{new}.layer_norm{j}.{part}": ours[f"{old}.ln_{j}.{part}"] for j in (1, 2)}
            theirs |= {f"{new}.mlp.fc{j}.{part}": ours[f"{old}.mlp.c_{x}.{part}"] for j, x in ((1, "fc"), (2, "proj"))}
    filled = {f"vision_model.{name}": value for name, value in theirs.items()}
    filled["visual_projection.weight"] = ours["proj"].T
    result = model.load_state_dict(filled, strict=False)
    assert not result.unexpected_keys
    assert all("position_ids" in key for key in result.missing_keys)
    with torch.no_grad():
        return model(pixel_values=images).image_embeds


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("heads", [None, 4])
def test_clip_soup_computes_what_another_implementation_does(suffix: str, heads: int | None, tmp_path: Path) -> None:
    tensors, path = soup(), tmp_path / f"model_0{suffix}"
    save: dict[str, Callable[[Any, Path], object]] = {".pt": torch.save, ".safetensors": safetensors.torch.save_file}
    save[suffix](tensors, path)
    model = load_clip_soup(path, heads=heads)
    images = torch.randn(3, 3, 8, 8)
    features = hugging_face_features(tensors, images, heads or 2)
    weight, bias = tensors["classification_head.weight"], tensors["classification_head.bias"]
    logits = features @ weight.T / features.norm(dim=-1, keepdim=True) + bias
    with torch.no_grad():
        assert torch.allclose(model(images), logits, rtol=0, atol=1e-5 * float(logits.abs().max()))
        assert torch.allclose(model.visual(images), features, rtol=0, atol=1e-5 * float(features.abs().max()))
    assert not model.training
    assert all(value.requires_grad and value.dtype == torch.float32 for value in model.parameters())
    kept = {name: value for name, value in tensors.items() if name not in TEXT_TOWER}
    assert sum(value.numel() for value in model.parameters()) == sum(value.numel() for value in kept.values())


def test_clip_soup_has_its_symmetries(tmp_path: Path) -> None:
    torch.save(soup(), tmp_path / "model_0.pt")
    model = load_checkpoint(Checkpoint("model_0", tmp_path / "model_0.pt", "clip-soup"))
    assert isinstance(model, ClipClassifier)
    symmetries = find_symmetries(model)
    assert len(symmetries.pairs) == 2 * LAYERS
    assert {pair.h for pair in symmetries.pairs} == {64}
    assert not symmetries.unrecognised
    assert prove_symmetries(model, torch.randn(2, 3, 8, 8), symmetries).all_proved
    with pytest.raises(ValueError, match=r"takes images \(N, 3, 8, 8\)"):
        model(torch.randn(2, 3, 16, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_clip_soup_does_not_hang_on_its_file(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "model_0.pt"
    torch.save({name: value.to(dtype) for name, value in soup().items()}, path)
    model = load_clip_soup(path)
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    path.write_bytes(b"\0" * path.stat().st_size)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_clip_soup_of_the_first_file_format(tmp_path: Path) -> None:
    torch.save(soup(), tmp_path / "new.pt")
    torch.save(soup(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    new, old = (load_clip_soup(tmp_path / name).state_dict() for name in ("new.pt", "old.pt"))
    assert all(torch.equal(new[name], old[name]) for name in new)


def saved(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        tensors: dict[str, Any] = soup()
        change(tensors)
        torch.save(tensors, path)

    return save


class Code:
    """Pickled, it would write a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path.with_name("ran")),)


def damaged(path: Path) -> None:
    torch.save(soup(), path)
    content = bytearray(path.read_bytes())
    place = content.find(soup()["classification_head.weight"].numpy().tobytes())
    content[place] ^= 1
    path.write_bytes(content)


def truncated(path: Path) -> None:
    torch.save(soup(), path)
    os.truncate(path, path.stat().st_size // 2)


BLOCK = "model.visual.transformer.resblocks"
BROKEN_SOUPS = {
    "a parameter missing": (saved(lambda t: t.pop(f"{BLOCK}.1.ln_2.bias")), rf"lacks parameter {BLOCK}\.1\.ln_2\.bias"),
    "a size missing": (saved(lambda t: t.pop("model.visual.proj")), r"lacks parameter model\.visual\.proj"),
    "a parameter too many": (saved(lambda t: t.update(extra=torch.ones(2))), "unexpected parameter extra"),
    "a text tower's other tensor": (
        saved(lambda t: t.update({"model.transformer.width": torch.ones(2)})),
        r"unexpected parameter model\.transformer\.width",
    ),
    "a block number": (saved(lambda t: t.update({f"{BLOCK}.99999999.ln_1.bias": torch.ones(2)})), "lacks parameter"),
    "another shape": (
        saved(lambda t: t.update({f"{BLOCK}.1.ln_2.bias": torch.ones(3)})),
        rf"{BLOCK}\.1\.ln_2\.bias of shape \(3,\), expected \(128,\)",
    ),
    "another number of axes": (saved(lambda t: t.update({"model.visual.proj": torch.ones(3)})), "expected 2 axes"),
    "positions": (
        saved(lambda t: t.update({"model.visual.positional_embedding": torch.ones(4, WIDTH)})),
        "4 positions, expected a square number",
    ),
    "integers": (
        saved(lambda t: t.update({"classification_head.bias": torch.ones(CLASSES, dtype=torch.int64)})),
        "classification_head.bias of dtype torch.int64",
    ),
    "not flat": (saved(lambda t: t.update(nested={"a": torch.ones(2)})), "'nested' is of type dict"),
    "a tensor": (
        lambda path: torch.save(torch.ones(2), path),
        "must hold a flat dict of tensors by name, found Tensor",
    ),
    "nothing": (lambda path: torch.save({}, path), "flat dict of tensors"),
    "code": (lambda path: torch.save({"a": Code(path)}, path), "unpickling that can run any code"),
    "a changed bit": (damaged, "is damaged: the checksum of its part"),
    "truncated": (truncated, "is damaged|no readable file"),
    "empty": (lambda path: path.write_bytes(b""), "no readable file of weights"),
    "text": (lambda path: path.write_text("hello world, this is text"), "no readable file of weights|is damaged"),
    "absent": (lambda path: None, "no file"),
}


@pytest.mark.parametrize(("spoil", "match"), BROKEN_SOUPS.values(), ids=list(BROKEN_SOUPS))
def test_broken_soup_is_refused_in_one_sentence(spoil: Callable[[Path], object], match: str, tmp_path: Path) -> None:
    path = tmp_path / "model_0.pt"
    spoil(path)
    with pytest.raises(ValueError, match=match) as caught:
        load_checkpoint(Checkpoint("model_0", path, "clip-soup"))
    assert one_sentence(str(caught.value)), str(caught.value)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_soup_of_an_odd_width_needs_its_heads(tmp_path: Path) -> None:
    torch.save(soup(), tmp_path / "a.pt")
    with pytest.raises(ValueError, match="128 wide, which does not make 3 heads"):
        load_clip_soup(tmp_path / "a.pt", heads=3)


# ---- BERTs of TensorFlow

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "very", "film", "a", "not"]
Variables = dict[str, NDArray[Any]]


def bert_variables(*, classes: int = 3, width: int = 128, layers: int = 2, seed: int = 0) -> Variables:
    """The variables of a TensorFlow-1 checkpoint of google-research/bert after fine-tuning: 2 layers, 2 heads of 64."""
    draw = np.random.default_rng(seed)

    def dense(path: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {f"{path}/kernel": (rows, columns), f"{path}/bias": (columns,)}

    def norm(path: str) -> dict[str, tuple[int, ...]]:
        return {f"{path}/LayerNorm/gamma": (width,), f"{path}/LayerNorm/beta": (width,)}

    shapes: dict[str, tuple[int, ...]] = {
        "bert/embeddings/word_embeddings": (len(WORDS), width),
        "bert/embeddings/position_embeddings": (32, width),
        "bert/embeddings/token_type_embeddings": (2, width),
        **norm("bert/embeddings"),
        **dense("bert/pooler/dense", width, width),
        "output_weights": (classes, width),
        "output_bias": (classes,),
    }
    for i in range(layers):
        layer = f"bert/encoder/layer_{i}"
        for part in ("query", "key", "value"):
            shapes |= dense(f"{layer}/attention/self/{part}", width, width)
        shapes |= dense(f"{layer}/attention/output/dense", width, width) | norm(f"{layer}/attention/output")
        shapes |= dense(f"{layer}/intermediate/dense", width, 48)
        shapes |= dense(f"{layer}/output/dense", 48, width) | norm(f"{layer}/output")
    variables = {name: (0.2 * draw.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    moments = {f"{name}/{which}": np.zeros(shape, np.float32) for name, shape in shapes.items() for which in MOMENTS}
    return {**variables, **moments, "global_step": np.int64(36815)}


MOMENTS = ("adam_m", "adam_v")


def bert_logits(v: Variables, ids: NDArray[Any], types: NDArray[Any], *, heads: int = 2) -> NDArray[Any]:
    """The logits of BERT (Devlin et al., 2019) for rows without padding, in float64, straight from the variables."""

    def dense(path: str, x: NDArray[Any]) -> NDArray[Any]:
        return x @ v[f"{path}/kernel"].astype(float) + v[f"{path}/bias"]

    def norm(path: str, x: NDArray[Any]) -> NDArray[Any]:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return scaled * v[f"{path}/LayerNorm/gamma"] + v[f"{path}/LayerNorm/beta"]

    def gelu(x: NDArray[Any]) -> NDArray[Any]:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    words, positions, kinds = (v[f"bert/embeddings/{name}_embeddings"] for name in ("word", "position", "token_type"))
    x = norm("bert/embeddings", words[ids].astype(float) + positions[: ids.shape[1]] + kinds[types])
    rows, length, width = x.shape
    for i in range(sum(name.endswith("intermediate/dense/bias") for name in v)):
        layer = f"bert/encoder/layer_{i}"
        split = (rows, length, heads, width // heads)
        q, k, value = (
            dense(f"{layer}/attention/self/{part}", x).reshape(split).transpose(0, 2, 1, 3)
            for part in ("query", "key", "value")
        )
        scores = np.exp(q @ k.transpose(0, 1, 3, 2) / np.sqrt(width // heads))
        mixed = (scores / scores.sum(-1, keepdims=True) @ value).transpose(0, 2, 1, 3).reshape(x.shape)
        x = norm(f"{layer}/attention/output", x + dense(f"{layer}/attention/output/dense", mixed))
        x = norm(f"{layer}/output", x + dense(f"{layer}/output/dense", gelu(dense(f"{layer}/intermediate/dense", x))))
    pooled = np.tanh(dense("bert/pooler/dense", x[:, 0]))
    return pooled @ v["output_weights"].T.astype(float) + v["output_bias"]


class FakeReader:
    """Answers as tensorflow's CheckpointReader does."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        return {name: list(value.shape) for name, value in self.variables.items()}

    def get_tensor(self, name: str) -> NDArray[Any]:
        return self.variables[name]


@pytest.fixture
def tensorflow(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A tensorflow whose checkpoints hold `variables`; `opened` counts how often one was."""
    state = SimpleNamespace(variables=bert_variables(), opened=0, reader=FakeReader)

    def load_checkpoint(prefix: str) -> Any:
        state.opened += 1
        return state.reader(state.variables)

    module = ModuleType("tensorflow")
    module.train = SimpleNamespace(load_checkpoint=load_checkpoint)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    return state


def bundle(folder: Path, name: str = "bert_00", *, vocabulary: bool = True) -> Checkpoint:
    """The files of a TensorFlow checkpoint: the fake reads none of them, their content is their identity."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "model.ckpt-36815.index").write_bytes(b"checksums of " + name.encode())
    (folder / name / "model.ckpt-36815.data-00000-of-00001").write_bytes(b"data")
    if vocabulary:
        (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (found,) = find_checkpoints([name], "bert-tensorflow", folder)
    return found


def test_bert_computes_what_its_variables_say(tensorflow: SimpleNamespace, tmp_path: Path) -> None:
    model = load_checkpoint(bundle(tmp_path))
    assert isinstance(model, transformers.BertForSequenceClassification)
    ids, types = np.array([[2, 5, 8, 3, 6, 3], [2, 9, 7, 6, 3, 10]]), np.array([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1]])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids), token_type_ids=torch.tensor(types)).logits.numpy()
    expected = bert_logits(tensorflow.variables, ids, types)
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
    assert not model.training
    assert model.config.id2label == {0: "contradiction", 1: "entailment", 2: "neutral"}


def test_conversion_is_made_once_and_says_what_it_left_out(tensorflow: SimpleNamespace, tmp_path: Path) -> None:
    checkpoint = bundle(tmp_path)
    first = load_checkpoint(checkpoint)
    again = load_checkpoint(checkpoint)
    assert tensorflow.opened == 1
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in first.state_dict().items())
    (directory,) = (path for path in (tmp_path / "bert_00").iterdir() if path.is_dir())
    record = json.loads((directory / "conversion.json").read_text())
    assert record["skipped"] == sorted(name for name in tensorflow.variables if "adam" in name or name == "global_step")
    assert find_checkpoints(["bert*"], "bert-tensorflow", tmp_path) == (checkpoint,)  # a conversion is none
    assert names(find_checkpoints(["bert*/*"], "bert-tensorflow", tmp_path)) == ["model.ckpt-36815"]
    (tmp_path / "bert_00" / "model.ckpt-36815.index").write_bytes(b"checksums of other weights")
    tensorflow.variables = bert_variables(seed=1)
    changed = load_checkpoint(checkpoint)
    assert tensorflow.opened == 2
    assert not torch.equal(changed.state_dict()["classifier.weight"], first.state_dict()["classifier.weight"])


def test_conversions_in_a_cache(tensorflow: SimpleNamespace, tmp_path: Path) -> None:
    cache = tmp_path / "kept" / "here"
    for seed, name in enumerate(("bert_00", "bert_01")):
        tensorflow.variables = bert_variables(seed=seed)
        checkpoint = bundle(tmp_path, name)
        for _ in range(2):
            model = load_checkpoint(checkpoint, cache=cache)
            found = model.get_parameter("classifier.weight").detach().numpy()
            assert np.array_equal(found, tensorflow.variables["output_weights"])
        assert not [path for path in (tmp_path / name).iterdir() if path.is_dir()]
    assert tensorflow.opened == 2
    assert len(list(cache.iterdir())) == 2


def test_heads_of_another_width_come_from_the_configuration_beside(tensorflow: SimpleNamespace, tmp_path: Path) -> None:
    tensorflow.variables = bert_variables(width=32, classes=2)
    checkpoint = bundle(tmp_path)
    with pytest.raises(ValueError, match=r"32 wide, which does not make 0 heads; put its bert_config\.json beside it"):
        load_checkpoint(checkpoint)
    (tmp_path / "bert_00" / "bert_config.json").write_text('{"num_attention_heads": 4, "hidden_act": "gelu"}')
    model = load_checkpoint(checkpoint)
    ids = np.array([[2, 5, 8, 3]])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids)).logits.numpy()
    expected = bert_logits(tensorflow.variables, ids, np.zeros_like(ids), heads=4)
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
    assert prove_symmetries(model, {"input_ids": torch.tensor(ids)}).all_proved


def edited(**changes: NDArray[Any] | None) -> Callable[[Variables], Variables]:
    def edit(variables: Variables) -> Variables:
        merged: dict[str, Any] = {**variables, **{name.replace("__", "/"): value for name, value in changes.items()}}
        return {name: value for name, value in merged.items() if value is not None}

    return edit


BROKEN_BERTS = {
    "a variable missing": (edited(bert__encoder__layer_1__output__dense__bias=None), r"lacks parameter .*1\.output"),
    "no head": (edited(output_weights=None), "no matrix classifier.weight"),
    "an unknown variable": (edited(bert__more=np.zeros(3, np.float32)), r"unexpected parameter bert\.more"),
    "a pretraining head": (edited(cls__predictions__output_bias=np.zeros(3, np.float32)), "unexpected parameter cls"),
    "another shape": (
        edited(bert__pooler__dense__bias=np.zeros(3, np.float32)),
        r"pooler\.dense\.bias of shape \(3,\)",
    ),
    "not transposed": (
        lambda v: {n: a.T if n.endswith("intermediate/dense/kernel") else a for n, a in v.items()},
        "intermediate.dense.weight of shape",
    ),
    "integers": (edited(output_bias=np.zeros(3, np.int64)), "output_bias of dtype int64"),
}


@pytest.mark.parametrize(("edit", "match"), BROKEN_BERTS.values(), ids=list(BROKEN_BERTS))
def test_broken_bert_is_refused_and_leaves_nothing(
    edit: Callable[[Variables], Variables], match: str, tensorflow: SimpleNamespace, tmp_path: Path
) -> None:
    tensorflow.variables = edit(tensorflow.variables)
    checkpoint = bundle(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=match) as caught:
        load_checkpoint(checkpoint)
    assert one_sentence(str(caught.value))
    assert str(checkpoint.path) in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


class FailingReader(FakeReader):
    """Tells the shapes and fails at the values, as tensorflow does for files that were cut."""

    def get_tensor(self, name: str) -> NDArray[Any]:
        raise IndexError("Read less bytes than requested\nsecond line")


class ForgetfulReader(FakeReader):
    """Answers differently when asked again."""

    def __init__(self, variables: Variables) -> None:
        super().__init__(variables)
        self.asked: set[str] = set()

    def get_tensor(self, name: str) -> NDArray[Any]:
        value = self.variables[name]
        again = name in self.asked and name == "bert/pooler/dense/kernel"
        self.asked.add(name)
        return value + 1 if again else value


@pytest.mark.parametrize(
    ("reader", "match"),
    [
        (FailingReader, "is damaged: .* cannot be read: Read less bytes than requested$"),
        (ForgetfulReader, "pooler/dense"),
    ],
)
def test_what_is_read_is_checked(
    reader: type[FakeReader], match: str, tensorflow: SimpleNamespace, tmp_path: Path
) -> None:
    tensorflow.reader = reader
    with pytest.raises(ValueError, match=match):
        load_checkpoint(bundle(tmp_path))
    assert not [path for path in (tmp_path / "bert_00").iterdir() if path.is_dir()]


def test_a_full_disk_leaves_nothing(
    tensorflow: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(ValueError, match=r"cannot be written to .*No space left on device; give a directory"):
        load_checkpoint(bundle(tmp_path))
    assert not [path for path in (tmp_path / "bert_00").iterdir() if path.is_dir()]
    monkeypatch.undo()


def test_two_processes_converting_at_once(
    tensorflow: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process finishes while this one is about to: the rename fails, and what is there is read."""
    checkpoint, rename = bundle(tmp_path), os.replace

    def overtaken(source: Path, target: Path) -> None:
        monkeypatch.setattr("os.replace", rename)
        load_checkpoint(checkpoint)
        rename(source, target)  # a directory that is not empty stands there now

    monkeypatch.setattr("os.replace", overtaken)
    load_checkpoint(checkpoint)
    assert tensorflow.opened == 2
    assert len([path for path in (tmp_path / "bert_00").iterdir() if path.is_dir()]) == 1


def test_killed_in_the_middle_of_a_conversion(
    tensorflow: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed process leaves behind is never taken for a conversion."""
    checkpoint = bundle(tmp_path)
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # a killed process does not clean up

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            load_checkpoint(checkpoint)
    assert len([path for path in (tmp_path / "bert_00").iterdir() if path.is_dir()]) == 1
    assert load_checkpoint(checkpoint).config.num_labels == 3
    assert tensorflow.opened == 2


def test_absent_and_unreadable_tensorflow_checkpoints(
    tensorflow: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = bundle(tmp_path)

    def not_one(_: str) -> object:
        raise OSError("not an sstable (bad magic number)")

    monkeypatch.setattr(sys.modules["tensorflow"].train, "load_checkpoint", not_one)
    with pytest.raises(ValueError, match="no readable TensorFlow checkpoint: not an sstable"):
        load_checkpoint(checkpoint)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match=r'pip install "quotient-manifolds\[tensorflow\]"'):
        load_checkpoint(checkpoint)
    with pytest.raises(ValueError, match=r"There is no TensorFlow checkpoint .*nowhere/model\.ckpt"):
        load_checkpoint(Checkpoint("a", tmp_path / "nowhere" / "model.ckpt", "bert-tensorflow"))


def test_mnli_pairs_reach_the_classes_in_the_order_of_the_checkpoint(
    tensorflow: SimpleNamespace, tmp_path: Path
) -> None:
    """contradiction 0, entailment 1, neutral 2, whatever the copy of MNLI calls them; pairs, uncased, at most 128."""
    model = load_checkpoint(checkpoint := bundle(tmp_path))
    rows = [("Good film", "a BAD film", "contradiction"), ("a film", "film", "entailment"), ("good", "very", "neutral")]
    words = tmp_path / "mnli.jsonl"
    lines = [{"sentence1": a, "sentence2": b, "gold_label": label} for a, b, label in rows]
    words.write_text("".join(json.dumps(line) + "\n" for line in lines))
    by_name = DataSource(
        words,
        columns={"text": "sentence1", "text_pair": "sentence2", "label": "gold_label"},
        labels={"entailment": 1, "contradiction": 0, "neutral": 2},
    )
    glue = {"entailment": 0, "neutral": 1, "contradiction": 2}
    numbers = tmp_path / "glue.csv"
    numbers.write_text("label,text,text_pair\n" + "".join(f"{glue[label]},{a},{b}\n" for a, b, label in rows))
    (batch,) = by_name.batches(model, checkpoint)
    (other,) = DataSource(numbers, labels=[1, 2, 0]).batches(model, checkpoint)
    assert batch["labels"].tolist() == [0, 1, 2]
    assert batch["input_ids"][0].tolist() == [2, 5, 8, 3, 9, 6, 8, 3]  # [CLS] good film [SEP] a bad film [SEP]
    assert batch["token_type_ids"][0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert all(torch.equal(batch[name], other[name]) for name in batch)
    logits = [
        bert_logits(tensorflow.variables, ids[mask].numpy()[None], types[mask].numpy()[None])[0]
        for ids, types, mask in zip(
            batch["input_ids"], batch["token_type_ids"], batch["attention_mask"].bool(), strict=True
        )
    ]
    losses = [np.log(np.exp(row).sum()) - row[label] for row, label in zip(logits, [0, 1, 2], strict=True)]
    with torch.no_grad():
        assert float(cross_entropy(model, batch)) == pytest.approx(np.mean(losses), rel=1e-5)
