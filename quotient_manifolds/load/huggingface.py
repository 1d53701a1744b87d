"""The one door to transformers: a model and its tokenizer from a directory, safely and offline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "tekken.json")
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")


def load_directory(path: Path) -> nn.Module:
    """The model of the class that `architectures` names, every parameter read from safetensors, in eval mode."""
    config = read_config(path)
    _check_weights(path)
    transformers = _transformers()
    (architecture, *_) = config.get("architectures") or ["AutoModel"]
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        raise ValueError(
            f"{path} holds a {architecture}, which transformers {transformers.__version__} does not know; code stored "
            "beside the weights is never run, so build such a model in a function and give package.module:function."
        )
    try:
        model, info = model_class.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:  # transformers raises a dozen kinds, from KeyError to safetensors' own
        raise ValueError(f"The {architecture} in {path} does not load: {first_line(error)}") from error
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"The weights in {path} lack {len(missing)} parameters of {architecture} (the first is {missing[0]}), "
            "which would be left at random values; save the model again with all its weights."
        )
    return model.eval()


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model's directory."""
    if not path.is_dir():
        raise ValueError(
            f"No model at {path}: expected a directory with config.json and safetensors weights, "
            "or package.module:function."
        )
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} is no Hugging Face model: it has no config.json.")
    config = read_object(path / "config.json")
    if not config.get("model_type"):
        raise ValueError(f"{path / 'config.json'} does not say which model_type this is.")
    return config


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{file} must hold one JSON object, found {type(record).__name__}.")
    return record


def _check_weights(path: Path) -> None:
    """One model.safetensors, or an index and every shard it names."""
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        return
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} has no weight_map: expected the shard of each parameter.")
        shards = set(map(str, weight_map.values()))
        if missing := sorted(shard for shard in shards if not (path / shard).is_file()):
            raise ValueError(f"{path} is incomplete: {index.name} names {missing[0]}, which is not there.")
        return
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in path.glob(pattern))
    if pickles:
        raise ValueError(
            f"{path} has pickled weights only ({pickles[0]}), and unpickling can run any code: convert them where you "
            "trust them, with model.save_pretrained(directory, safe_serialization=True), and give that directory."
        )
    raise ValueError(f"{path} has a config.json but no weights: expected model.safetensors.")


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            'Hugging Face models need the transformers library: pip install "quotient-manifolds[transformers]".'
        ) from error
    return transformers


def first_line(error: Exception) -> str:
    """What an error says, without the pages some libraries append."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def shapes_of(architecture: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the model that a configuration describes, without making it."""
    transformers = _transformers()
    model_class = getattr(transformers, architecture)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**config))
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def tokenizer_files(path: Path) -> list[Path]:
    """The vocabulary, and what else decides the tokens."""
    return [file for pattern in (*VOCABULARIES, *TOKENIZER_SETTINGS) for file in path.glob(pattern)]


def load_tokenizer(path: Path) -> Any:
    """The tokenizer in a directory."""
    # Without a vocabulary transformers builds an empty tokenizer, which reads every text as the same nothing.
    if not any(file for pattern in VOCABULARIES for file in path.glob(pattern)):
        raise ValueError(f"{path} has no tokenizer: expected tokenizer.json or a vocabulary beside the weights.")
    transformers = _transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises a dozen kinds
        raise ValueError(f"The tokenizer in {path} does not load: {first_line(error)}") from error
