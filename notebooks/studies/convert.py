"""Convert what the paper's zoos are published as into what the package loads: safetensors and arrays.

`python -m studies convert soup|bert|images SOURCE TARGET`, with `notebooks` on Python's path. See full_scale.md.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import click
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quotient_manifolds.files import whole
from quotient_manifolds.load import load_model
from quotient_manifolds.load.text import drawn

HEAD_WIDTH = 64  # of attention heads, in CLIP and in BERT
HEAD = "head.safetensors"

# What is left of the text tower in a soup: no output depends on it.
TEXT_TOWER = re.compile(
    r"model\.(positional_embedding|text_projection|logit_scale|token_embedding\.weight|ln_final\.(weight|bias))"
)
SKIPPED = re.compile(r".*/adam_[mv]|global_step")  # in a TensorFlow checkpoint: the optimizer's, not the model's
# The order of MNLI's classes in google-research/bert (and so in McCoy, Min and Linzen, 2020).
MNLI_LABELS = ("contradiction", "entailment", "neutral")
LAST = {  # how the last part of a variable's name is called in transformers
    "kernel": "weight",
    "gamma": "weight",
    "beta": "bias",
    "output_weights": "classifier.weight",
    "output_bias": "classifier.bias",
}
PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".webp")


@final
class ClipClassifier(nn.Module):
    """Compute logits = head(f / |f|), f the features of CLIP's vision transformer (Wortsman et al., 2022)."""

    def __init__(self, vision: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.vision, self.head = vision, head

    def forward(self, pixel_values: Tensor) -> Tensor:
        features = self.vision(pixel_values=pixel_values).image_embeds
        return self.head(features / torch.linalg.vector_norm(features, dim=-1, keepdim=True))


def clip_classifier(path: Path) -> nn.Module:
    """Return the classifier in a directory that `convert_soup` wrote, in eval mode: the loader of a spec."""
    tensors = load_file(path / HEAD)
    classes, features = tensors["weight"].shape
    head = nn.Linear(features, classes)
    head.load_state_dict(tensors)
    return ClipClassifier(load_model(path), head).eval()


def convert_soup(source: Path, target: Path) -> None:
    """Write a state dict of model-soups (.pt, read without running code) as a directory for `clip_classifier`.

    Sizes are read off the tensors; heads are 64 wide. Raises ValueError, RuntimeError or KeyError naming the parameter
    that is missing, has no place in the model, or another shape.
    """
    stored: dict[str, Tensor] = torch.load(source, weights_only=True, map_location="cpu")
    tensors = {name: value.float() for name, value in stored.items() if not TEXT_TOWER.fullmatch(name)}
    head = {name: tensors.pop(f"classification_head.{name}") for name in ("weight", "bias")}
    renamed: dict[str, Tensor] = {}
    for name, value in tensors.items():
        renamed |= _renamed(name.removeprefix("model.visual."), value)
    width, channels, patch, _ = renamed["vision_model.embeddings.patch_embedding.weight"].shape
    positions = len(renamed["vision_model.embeddings.position_embedding.weight"])
    config = transformers.CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=len(renamed["vision_model.encoder.layers.0.mlp.fc1.weight"]),
        num_hidden_layers=len({name for name in renamed if name.endswith("mlp.fc1.weight")}),
        num_attention_heads=width // HEAD_WIDTH,
        num_channels=channels,
        image_size=patch * math.isqrt(positions - 1),
        patch_size=patch,
        projection_dim=len(renamed["visual_projection.weight"]),
        hidden_act="quick_gelu",
    )
    model = transformers.CLIPVisionModelWithProjection(config)
    model.load_state_dict(renamed)
    model.save_pretrained(target, safe_serialization=True)
    save_file({name: value.contiguous() for name, value in head.items()}, target / HEAD)


def _renamed(name: str, value: Tensor) -> dict[str, Tensor]:
    """Return by transformers' names what OpenAI's CLIP calls `name`: one parameter, or three that are stored as one."""
    plain = {
        "class_embedding": "vision_model.embeddings.class_embedding",
        "positional_embedding": "vision_model.embeddings.position_embedding.weight",
        "conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    }
    if name == "proj":
        return {"visual_projection.weight": value.mT.contiguous()}
    if name in plain:
        return {plain[name]: value}
    for old, new in (
        ("transformer.resblocks.", "encoder.layers."),
        ("ln_pre", "pre_layrnorm"),
        ("ln_post", "post_layernorm"),
        (".ln_", ".layer_norm"),
        (".c_fc", ".fc1"),
        (".c_proj", ".fc2"),
        (".attn.out_proj", ".self_attn.out_proj"),
    ):
        name = name.replace(old, new)
    if ".attn.in_proj_" not in name:
        return {f"vision_model.{name}": value}
    before, after = name.split(".attn.in_proj_")
    return {
        f"vision_model.{before}.self_attn.{which}_proj.{after}": part.contiguous()
        for which, part in zip("qkv", value.chunk(3), strict=True)
    }


def convert_bert(source: Path, target: Path) -> None:
    """Write a TensorFlow-1 checkpoint of a google-research/bert classifier as a Hugging Face directory.

    source: its prefix (dir/model.ckpt-3), or a directory with no other. vocab.txt and bert_config.json (for the number
    of heads, else they are 64 wide) are taken from the checkpoint's directory or the one above. Raises ValueError or
    RuntimeError naming what is missing, has no place in the model, or another shape; ImportError without tensorflow.
    """
    found = [file.with_suffix("") for file in source.glob("*.index")] if source.is_dir() else [source]
    if len(found) != 1:
        raise ValueError(f"{source} must have one TensorFlow checkpoint. Found {len(found)}; name one by its prefix.")
    (prefix,) = found
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # tensorflow reports on the processor when it is imported
    try:
        from tensorflow import train
    except ImportError as error:
        raise ImportError(
            f"{prefix} is a TensorFlow checkpoint, read by tensorflow: pip install tensorflow."
        ) from error
    reader = train.load_checkpoint(str(prefix))
    tensors: dict[str, Tensor] = {}
    for variable in sorted(reader.get_variable_to_shape_map()):
        if not SKIPPED.fullmatch(variable):
            value = np.asarray(reader.get_tensor(variable), dtype=np.float32)
            kernel = variable.endswith("/kernel")  # (in, out), where transformers has (out, in)
            tensors[_parameter(variable)] = torch.from_numpy(np.ascontiguousarray(value.T if kernel else value))
    beside = {name: folder / name for folder in prefix.parents[1::-1] for name in ("vocab.txt", "bert_config.json")
              if (folder / name).is_file()}  # fmt: skip
    config = _bert_config(tensors)
    if "bert_config.json" in beside:
        config.num_attention_heads = transformers.BertConfig.from_json_file(
            beside["bert_config.json"]
        ).num_attention_heads
    model = transformers.BertForSequenceClassification(config)
    model.load_state_dict(tensors)
    model.save_pretrained(target, safe_serialization=True)
    if "vocab.txt" in beside:
        shutil.copyfile(beside["vocab.txt"], target / "vocab.txt")
        settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
        settings["model_max_length"] = config.max_position_embeddings
        (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _parameter(variable: str) -> str:
    """Return the parameter of a variable: of bert/encoder/layer_0/output/dense/kernel
    bert.encoder.layer.0.output.dense.weight, and so on.
    """
    *path, last = variable.replace("/layer_", "/layer/").split("/")
    last = f"{last}.weight" if last.endswith("_embeddings") else LAST.get(last, last)
    return ".".join([*path, last])


def _bert_config(tensors: Mapping[str, Tensor]) -> Any:
    rows = {name: len(value) for name, value in tensors.items()}
    width, classes = rows["bert.pooler.dense.weight"], rows["classifier.weight"]
    names = MNLI_LABELS if classes == len(MNLI_LABELS) else [f"LABEL_{i}" for i in range(classes)]
    return transformers.BertConfig(
        vocab_size=rows["bert.embeddings.word_embeddings.weight"],
        max_position_embeddings=rows["bert.embeddings.position_embeddings.weight"],
        type_vocab_size=rows["bert.embeddings.token_type_embeddings.weight"],
        hidden_size=width,
        num_hidden_layers=len({name for name in rows if name.endswith("intermediate.dense.bias")}),
        num_attention_heads=max(1, width // HEAD_WIDTH),
        intermediate_size=rows["bert.encoder.layer.0.intermediate.dense.weight"],
        hidden_act="gelu_new",
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
    )


def convert_images(source: Path, target: Path, *, size: int = 224, examples: int | None = None, seed: int = 0) -> None:
    """Write the pictures of a folder with a folder for each class, some of them drawn at random, to a .npz file.

    The classes are the folders in the order of their names. A picture is resized along its shorter side, bicubic, and
    size x size pixels are cut from the middle, as CLIP does: images (N, 3, size, size) of 8 bits, labels (N,).
    """
    folders = sorted(each for each in source.iterdir() if each.is_dir() and not each.name.startswith("."))
    files = [
        (file, label)
        for label, folder in enumerate(folders)
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in PICTURES
    ]
    if not files:
        raise ValueError(f"{source} must have a folder of pictures for each class. Found no picture.")
    chosen = [files[row] for row in drawn(len(files), examples, seed)]
    images = np.stack([_pixels(file, size) for file, _ in chosen])
    with whole(target) as unfinished, unfinished.open("wb") as stream:
        np.savez(stream, images=images, labels=np.array([label for _, label in chosen]))


def _pixels(file: Path, size: int) -> NDArray[np.uint8]:
    """Return the values of a picture, (3, size, size)."""
    from PIL import Image

    with Image.open(file) as picture:
        image = picture.convert("RGB")
    shorter = min(image.size)
    width, height = (int(size * side / shorter) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return np.asarray(image.crop((left, top, left + size, top + size)), dtype=np.uint8).transpose(2, 0, 1)


@click.command()
@click.argument("kind", type=click.Choice(("soup", "bert", "images")))
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--size", default=224, show_default=True, help="Images: pixels of a side.")
@click.option("--examples", type=int, help="Images: so many, drawn at random.  [default: all]")
@click.option("--seed", default=0, show_default=True, help="Images: what draws them.")
def convert(kind: str, source: Path, target: Path, size: int, examples: int | None, seed: int) -> None:
    """Convert SOURCE, a model soup, a BERT of TensorFlow or a folder of images, to TARGET, which compare reads."""
    if kind == "images":
        convert_images(source, target, size=size, examples=examples, seed=seed)
    else:
        (convert_soup if kind == "soup" else convert_bert)(source, target)
