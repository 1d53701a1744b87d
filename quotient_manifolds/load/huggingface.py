"""The one door to transformers: a model and its tokenizer from a directory, safely and offline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.load.text import LabelledText

VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "tekken.json")


def load_directory(path: Path) -> nn.Module:
    """The model of the class that `architectures` names, every parameter read from safetensors, in eval mode."""
    config = _read_config(path)
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


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ValueError(
            f"No model at {path}: expected a directory with config.json and safetensors weights, "
            "or package.module:function."
        )
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} is no Hugging Face model: it has no config.json.")
    config = _read_object(path / "config.json")
    if not config.get("model_type"):
        raise ValueError(f"{path / 'config.json'} does not say which model_type this is.")
    return config


def _read_object(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
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
        shards = set(dict(_read_object(index).get("weight_map", {})).values())
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


def tokenised_batches(
    directory: str | Path, examples: Sequence[LabelledText], *, batch_size: int = 32, max_length: int = 64
) -> list[dict[str, Tensor]]:
    """The examples, in order, as dicts a Hugging Face classifier takes: input_ids and what belongs to them, and labels.

    Texts are cut at `max_length` tokens and padded to the longest of their batch; the last batch may be smaller. Raises
    ValueError if the directory has no tokenizer, or one whose tokens or positions the model beside it does not have.
    """
    path = Path(directory)
    config = _read_config(path)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, found {batch_size}.")
    if len({example.text_pair is None for example in examples}) > 1:
        raise ValueError("Some examples have a text_pair and some have none; give all of them one, or none.")
    tokenizer = _load_tokenizer(path)
    longest = min(config.get("max_position_embeddings") or tokenizer.model_max_length, tokenizer.model_max_length)
    if not 1 <= max_length <= longest:
        raise ValueError(f"max_length must lie in 1 ... {longest}, the positions of {path}, found {max_length}.")
    if tokenizer.pad_token is None and batch_size > 1:
        raise ValueError(f"The tokenizer in {path} has no padding token; use batches of size 1.")
    chunks = [examples[start : start + batch_size] for start in range(0, len(examples), batch_size)]
    batches = [_tokenise(tokenizer, chunk, max_length) for chunk in chunks]
    largest = max((int(batch["input_ids"].max()) for batch in batches), default=0)
    if largest >= config.get("vocab_size", largest + 1):
        raise ValueError(
            f"The tokenizer in {path} gives token {largest}, but the model knows {config['vocab_size']} tokens only."
        )
    return batches


def _tokenise(tokenizer: Any, chunk: Sequence[LabelledText], max_length: int) -> dict[str, Tensor]:
    pairs = [example.text_pair for example in chunk] if chunk[0].text_pair is not None else None
    encoded = tokenizer(
        [example.text for example in chunk],
        pairs,
        truncation=True,
        max_length=max_length,
        padding=len(chunk) > 1,
        return_tensors="pt",
    )
    return {**encoded, "labels": torch.tensor([example.label for example in chunk])}


def _load_tokenizer(path: Path) -> Any:
    # Without a vocabulary transformers builds an empty tokenizer, which reads every text as the same nothing.
    if not any(file for pattern in VOCABULARIES for file in path.glob(pattern)):
        raise ValueError(f"{path} has no tokenizer: expected tokenizer.json or a vocabulary beside the weights.")
    transformers = _transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises a dozen kinds
        raise ValueError(f"The tokenizer in {path} does not load: {first_line(error)}") from error
