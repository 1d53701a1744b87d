"""CLIP classifiers of model soups: read exactly as their authors meant them, refused in one sentence when broken."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from quotient_manifolds.load import (
    Checkpoint,
    ClipClassifier,
    load_checkpoint,
    load_clip_soup,
)
from quotient_manifolds.symmetries import find_symmetries, prove_symmetries
from tests.refusals import one_sentence

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
    x = torch.randn(2, 3, 8, 8)
    symmetries = find_symmetries(model, x).within("pairs")
    assert len(symmetries.pairs) == 2 * LAYERS
    assert {pair.h for pair in symmetries.pairs} == {64}
    assert not symmetries.unrecognised
    assert prove_symmetries(model, x, symmetries).all_proved
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
