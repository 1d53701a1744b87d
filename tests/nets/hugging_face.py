"""Small random Hugging Face models on disk, with a tokenizer, for the tests that load from directories."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from quotient_manifolds.load import load_model

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "very", "film", "a", "not"]

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48
}  # fmt: skip
TINY_VIT: dict[str, Any] = {**SIZES, "image_size": 16, "patch_size": 8}


def made_once(make: Callable[..., Path]) -> Callable[..., Path]:
    """Run `make` once for each set of options; later calls copy what it wrote."""

    @functools.cache
    def template(**options: Any) -> tempfile.TemporaryDirectory[str]:
        made = tempfile.TemporaryDirectory()
        make(Path(made.name), **options)
        return made

    @functools.wraps(make)
    def copied(directory: Path, **options: Any) -> Path:
        shutil.copytree(template(**options).name, directory, dirs_exist_ok=True)
        torch.manual_seed(0)
        return directory

    return copied


@made_once
def bert_classifier(
    directory: Path, *, num_labels: int = 2, shard: str | None = None, seed: int = 0, layers: int = 2
) -> Path:
    """A BERT for sequence classification (4 heads of 8) and its tokenizer."""
    torch.manual_seed(seed)
    words = len(VOCABULARY)
    sizes = {**SIZES, "num_hidden_layers": layers, "max_position_embeddings": 64, "num_labels": num_labels}
    config = transformers.BertConfig(**sizes, vocab_size=words)
    model = transformers.BertForSequenceClassification(config)
    model.save_pretrained(directory, **({} if shard is None else {"max_shard_size": shard}))
    transformers.BertTokenizerFast(vocab={token: i for i, token in enumerate(VOCABULARY)}).save_pretrained(directory)
    return directory


@made_once
def vit_classifier(directory: Path) -> Path:
    """A ViT for image classification of 16 x 16 pictures with one channel."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(**TINY_VIT, num_channels=1, num_labels=3)
    transformers.ViTForImageClassification(config).save_pretrained(directory)
    return directory


@made_once
def clip(directory: Path) -> Path:
    """A CLIP with a text and a vision tower of one layer."""
    torch.manual_seed(0)
    tower = {**SIZES, "num_hidden_layers": 1}
    text = {**tower, "vocab_size": 40, "max_position_embeddings": 12, "eos_token_id": 39, "bos_token_id": 38}
    vision = {**tower, "image_size": 16, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    transformers.CLIPModel(config).save_pretrained(directory)
    return directory


@made_once
def gpt2(directory: Path) -> Path:
    """A GPT-2 with its language-model head, which is tied to the embedding and so not stored."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=40, n_positions=24, n_embd=32, n_layer=1, n_head=4)
    transformers.GPT2LMHeadModel(config).save_pretrained(directory)
    return directory


def causal_model(folder: Path) -> Path:
    """A GPT-2 and a tokenizer."""
    model: Any = load_model(gpt2(folder / "made"))
    model.save_pretrained(folder / "causal")
    vocabulary = {token: i for i, token in enumerate(VOCABULARY)}
    transformers.BertTokenizerFast(vocab=vocabulary).save_pretrained(folder / "causal")
    return folder / "causal"


def edit_config(directory: Path, **entries: object) -> None:
    """Replace entries of config.json."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **entries}))


def rewrite_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors in model.safetensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
