"""What the converter writes computes what the published files say, and is loaded by the specs of the paper's zoos."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import einops
import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from quotient_manifolds.load import DataSource, load_model
from quotient_manifolds.symmetries import find_symmetries, verify_symmetries
from studies.convert import clip_classifier, convert

WIDTH, PATCH, GRID, LAYERS, HIDDEN, FEATURES, CLASSES = 128, 4, 2, 2, 96, 16, 5
HEADS = WIDTH // 64


def run(*words: object) -> None:
    done = CliRunner().invoke(convert, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def soup() -> dict[str, Tensor]:
    """A state dict as model-soups saves them: 2 blocks, 2 heads of 64, 8 x 8 pixels, 5 classes."""
    dense = {"attn.in_proj_": (3 * WIDTH, WIDTH), "attn.out_proj.": (WIDTH, WIDTH)}
    dense |= {"mlp.c_fc.": (HIDDEN, WIDTH), "mlp.c_proj.": (WIDTH, HIDDEN)}
    visual: dict[str, tuple[int, ...]] = {
        "class_embedding": (WIDTH,),
        "positional_embedding": (GRID**2 + 1, WIDTH),
        "proj": (WIDTH, FEATURES),
        "conv1.weight": (WIDTH, 3, PATCH, PATCH),
    }
    norms = ["ln_pre", "ln_post"]
    for at in (f"transformer.resblocks.{i}." for i in range(LAYERS)):
        visual |= {f"{at}{name}weight": shape for name, shape in dense.items()}
        visual |= {f"{at}{name}bias": shape[:1] for name, shape in dense.items()}
        norms += [f"{at}ln_1", f"{at}ln_2"]
    visual |= {f"{norm}.{part}": (WIDTH,) for norm in norms for part in ("weight", "bias")}
    shapes: dict[str, tuple[int, ...]] = {
        "model.positional_embedding": (7, FEATURES),  # of the text tower, as the next two
        "model.logit_scale": (),
        "model.ln_final.weight": (FEATURES,),
        **{f"model.visual.{name}": shape for name, shape in visual.items()},
        "classification_head.weight": (CLASSES, FEATURES),
        "classification_head.bias": (CLASSES,),
    }
    return {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}


def clip_logits(tensors: dict[str, Tensor], images: Tensor) -> Tensor:
    """The logits of CLIP's vision transformer [Radford et al. 2021] with a head, straight from a soup's tensors."""
    w = {name.removeprefix("model.visual."): value.double() for name, value in tensors.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (WIDTH,), w[f"{name}.weight"], w[f"{name}.bias"])

    patches = F.conv2d(images.double(), w["conv1.weight"], stride=PATCH).flatten(2).mT
    x = torch.cat([w["class_embedding"].expand(len(images), 1, -1), patches], dim=1) + w["positional_embedding"]
    x = norm(x, "ln_pre")
    for i in range(LAYERS):
        at = f"transformer.resblocks.{i}"
        packed = F.linear(norm(x, f"{at}.ln_1"), w[f"{at}.attn.in_proj_weight"], w[f"{at}.attn.in_proj_bias"])
        q, k, v = einops.rearrange(packed, "b n (three h d) -> three b h n d", three=3, h=HEADS)
        mixed = einops.rearrange(((q @ k.mT) / 8).softmax(-1) @ v, "b h n d -> b n (h d)")
        x = x + F.linear(mixed, w[f"{at}.attn.out_proj.weight"], w[f"{at}.attn.out_proj.bias"])
        hidden = F.linear(norm(x, f"{at}.ln_2"), w[f"{at}.mlp.c_fc.weight"], w[f"{at}.mlp.c_fc.bias"])
        x = x + F.linear(hidden * (1.702 * hidden).sigmoid(), w[f"{at}.mlp.c_proj.weight"], w[f"{at}.mlp.c_proj.bias"])
    features = F.normalize(norm(x[:, 0], "ln_post") @ w["proj"], dim=-1)
    return F.linear(features, w["classification_head.weight"], w["classification_head.bias"])


def test_a_soup_computes_what_its_tensors_say(tmp_path: Path) -> None:
    tensors, images = soup(), torch.randn(3, 3, 8, 8)
    torch.save({name: value.half() if "proj" in name else value for name, value in tensors.items()}, tmp_path / "a.pt")
    tensors = {name: value.half().float() if "proj" in name else value for name, value in tensors.items()}
    run("soup", tmp_path / "a.pt", tmp_path / "a")
    model = clip_classifier(tmp_path / "a")
    expected = clip_logits(tensors, images)
    with torch.no_grad():
        assert torch.allclose(model(images).double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    symmetries = find_symmetries(model, images).within("pairs")
    assert len(symmetries.pairs) == 2 * LAYERS
    assert {pair.h for pair in symmetries.pairs} == {64}
    assert verify_symmetries(model, images, symmetries).all_hold
    tensors.pop("model.visual.transformer.resblocks.1.ln_2.bias")
    torch.save(tensors, tmp_path / "b.pt")
    with pytest.raises(RuntimeError, match=r"layers\.1\.layer_norm2\.bias"):
        run("soup", tmp_path / "b.pt", tmp_path / "b")


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "very", "film", "a", "not"]
Variables = dict[str, NDArray[Any]]


def bert_variables(width: int = 128) -> Variables:
    """The variables of a TensorFlow-1 checkpoint of google-research/bert after fine-tuning: 2 layers, 2 heads of 64."""
    dense = {"bert/pooler/dense": (width, width)}
    norms = ["bert/embeddings"]
    for i in range(2):
        at = f"bert/encoder/layer_{i}"
        dense |= {f"{at}/attention/self/{part}": (width, width) for part in ("query", "key", "value")}
        dense |= {f"{at}/attention/output/dense": (width, width), f"{at}/intermediate/dense": (width, 48)}
        dense |= {f"{at}/output/dense": (48, width)}
        norms += [f"{at}/attention/output", f"{at}/output"]
    shapes: dict[str, tuple[int, ...]] = {
        "bert/embeddings/word_embeddings": (len(WORDS), width),
        "bert/embeddings/position_embeddings": (32, width),
        "bert/embeddings/token_type_embeddings": (2, width),
        **{f"{path}/kernel": shape for path, shape in dense.items()},
        **{f"{path}/bias": shape[1:] for path, shape in dense.items()},
        **{f"{path}/LayerNorm/{part}": (width,) for path in norms for part in ("gamma", "beta")},
        "output_weights": (3, width),
        "output_bias": (3,),
    }
    draw = np.random.default_rng(0)
    variables = {name: (0.2 * draw.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    moments = {f"{name}/{which}": value for name, value in variables.items() for which in ("adam_m", "adam_v")}
    return {**variables, **moments, "global_step": np.int64(36815)}


def bert_logits(v: Variables, ids: NDArray[Any], types: NDArray[Any], *, heads: int = 2) -> NDArray[Any]:
    """The logits of BERT [Devlin et al. 2019] for rows without padding, in float64, straight from the variables."""

    def dense(path: str, x: NDArray[Any]) -> NDArray[Any]:
        return x @ v[f"{path}/kernel"].astype(float) + v[f"{path}/bias"]

    def norm(path: str, x: NDArray[Any]) -> NDArray[Any]:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return scaled * v[f"{path}/LayerNorm/gamma"] + v[f"{path}/LayerNorm/beta"]

    words, positions, kinds = (v[f"bert/embeddings/{name}_embeddings"] for name in ("word", "position", "token_type"))
    x = norm("bert/embeddings", words[ids].astype(float) + positions[: ids.shape[1]] + kinds[types])
    for i in range(2):
        at = f"bert/encoder/layer_{i}"
        q, k, value = (
            einops.rearrange(dense(f"{at}/attention/self/{part}", x), "b n (h d) -> b h n d", h=heads)
            for part in ("query", "key", "value")
        )
        scores = np.exp(q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1]))
        mixed = einops.rearrange(scores / scores.sum(-1, keepdims=True) @ value, "b h n d -> b n (h d)")
        x = norm(f"{at}/attention/output", x + dense(f"{at}/attention/output/dense", mixed))
        hidden = dense(f"{at}/intermediate/dense", x)
        gelu = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
        x = norm(f"{at}/output", x + dense(f"{at}/output/dense", gelu))
    pooled = np.tanh(dense("bert/pooler/dense", x[:, 0]))
    return pooled @ v["output_weights"].T.astype(float) + v["output_bias"]


def test_a_bert_computes_what_its_variables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = bert_variables()
    for array in (torch.zeros(1), np.zeros(1)):
        einops.rearrange(array, "a -> a")  # which asks every library that is imported, once, for its tensors
    module = ModuleType("tensorflow")
    module.__spec__ = ModuleSpec("tensorflow", None)  # libraries that are imported now ask whether it is there
    reader = SimpleNamespace(get_tensor=variables.__getitem__)  # answers as tensorflow's CheckpointReader does
    reader.get_variable_to_shape_map = lambda: {name: list(value.shape) for name, value in variables.items()}
    module.train = SimpleNamespace(load_checkpoint=lambda prefix: reader)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    (tmp_path / "bert_00").mkdir()
    (tmp_path / "bert_00" / "model.ckpt-36815.index").touch()
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    ids, types = np.array([[2, 5, 8, 3, 6, 3], [2, 9, 7, 6, 3, 10]]), np.array([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1]])
    for heads in (2, 4):
        run("bert", tmp_path / "bert_00", tmp_path / f"new_{heads}")
        model = load_model(tmp_path / f"new_{heads}")
        assert isinstance(model, transformers.BertForSequenceClassification)
        assert model.config.id2label == {0: "contradiction", 1: "entailment", 2: "neutral"}
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(ids), token_type_ids=torch.tensor(types)).logits.numpy()
        expected = bert_logits(variables, ids, types, heads=heads)
        assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
        (tmp_path / "bert_config.json").write_text('{"num_attention_heads": 4}')
    (tmp_path / "a.jsonl").write_text('{"text": "A good film", "text_pair": "not bad", "label": 1}')
    (batch,) = DataSource(tmp_path / "a.jsonl").batches(load_model(tmp_path / "new_2"))
    assert batch["input_ids"].tolist() == [[2, 9, 5, 8, 3, 10, 6, 3]]
    del variables["bert/pooler/dense/bias"]
    with pytest.raises(RuntimeError, match=r"pooler\.dense\.bias"):
        run("bert", tmp_path / "bert_00" / "model.ckpt-36815", tmp_path / "broken")


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
