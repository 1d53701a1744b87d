"""Read and write LoRA adapters of peft as files: the update of every module, without peft and without the base."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.load.adapters import PREFIX, SETTINGS, WEIGHTS
from quotient_manifolds.load.huggingface import read_object, without_weights
from quotient_manifolds.load.untrusted import check_patterns, check_regular
from quotient_manifolds.load.weights import read_tensors
from quotient_manifolds.messages import brief, shown

# What follows the module's name in the names of its two factors: of layers, and of embeddings.
FACTORS = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))

# Settings of peft with which the weight of a module does not become W + scale B A.
OTHER_FUNCTIONS = {
    "use_dora": "DoRA rescales the sum of weight and update, so its updates do not add up",
    "lora_bias": "its updates have biases of their own (lora_bias)",
    "use_qalora": "QALoRA pools the inputs",
    "alora_invocation_tokens": "aLoRA acts on some tokens only",
    "arrow_config": "Arrow routes between experts",
    "kasa_config": "KaSA changes the base weight",
    "monteclora_config": "MonteCLoRA draws its weights",
    "use_bdlora": "its factors are block-diagonal (BD-LoRA)",
    "target_parameters": "it updates parameters that are no module's weight (target_parameters)",
    "trainable_token_indices": "it has trained tokens (trainable_token_indices)",
    "layer_replication": "it repeats layers of the base (layer_replication)",
    "megatron_config": "it is of Megatron",
    "ensure_weight_tying": "it ties adapters of two modules (ensure_weight_tying)",
}
PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# With other starts (pissa, olora, corda, loftq, ...) peft changes the base weight when it loads the adapter.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class LowRankUpdate:
    """Hold the update scale * B A of one module's weight, its factors shaped as they are stored.

    B (n, r) and A (r, m); of a convolution B (n, r, 1, ...) and A (r, channels, height, ...); of an embedding the
    update is the transpose, with m the number of tokens.
    """

    B: Tensor
    A: Tensor
    scale: float
    embedding: bool = False

    @property
    def rank(self) -> int:
        return self.A.shape[0]

    @property
    def size(self) -> tuple[int, int]:
        """Return (n, m), the size of the update as a matrix."""
        return self.B.shape[0], math.prod(self.A.shape[1:])

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return B (n, r) and A (r, m) as matrices."""
        return self.B.reshape(self.B.shape[0], -1), self.A.reshape(self.rank, -1)


@dataclass(frozen=True)
class LoraAdapter:
    """Hold what is in a directory of a LoRA adapter: settings, update of each module, tensors that are stored whole.

    `whole` has heads (modules_to_save), biases and embeddings, by their names in the file.
    """

    path: Path
    settings: dict[str, Any]
    updates: dict[str, LowRankUpdate]
    whole: dict[str, Tensor]


def read_lora(path: Path) -> LoraAdapter:
    """Return the LoRA adapter in a directory of peft, with the scale of each update worked out as peft does it.

    The scale is alpha / r, or alpha / sqrt(r) with rsLoRA; `rank_pattern` and `alpha_pattern` hold for the modules
    whose names their keys match. Raises ValueError in one sentence for anything but plain LoRA, for a factor without
    partner, for shapes that do not fit, and for numbers that are not finite.
    """
    settings = _plain_settings(path)
    check_regular(path)
    if not (path / WEIGHTS).is_file():
        raise ValueError(without_weights(path))
    tensors = read_tensors(path / WEIGHTS)
    for name, value in tensors.items():
        if value.dtype not in PRECISIONS:
            expected = ", ".join(str(dtype) for dtype in PRECISIONS)
            raise ValueError(f"{shown(path / WEIGHTS)} has {shown(name)} in {value.dtype}: expected {expected}.")
        if not torch.isfinite(value).all():
            raise ValueError(f"{shown(path / WEIGHTS)} has NaN or infinity in {shown(name)}.")
    updates = _updates(tensors, settings, path)
    if not updates:
        raise ValueError(f"{shown(path / WEIGHTS)} has no update: expected tensors named ...lora_A.weight.")
    paired = {key for module, update in updates.items() for key in names_of(module, update.embedding)}
    whole = {name: value for name, value in tensors.items() if name not in paired}
    if odd := sorted(name for name in whole if re.search(r"\.(lora_|token_adapter)", name)):
        raise ValueError(
            f"{shown(path / WEIGHTS)} has {shown(odd[0])}, which is no part of plain LoRA (of DoRA, for example)."
        )
    return LoraAdapter(path, settings, updates, whole)


def names_of(module: str, embedding: bool) -> tuple[str, str]:
    """Return the names of A and B of a module in an adapter's file."""
    A, B = FACTORS[embedding]
    return f"{PREFIX}{module}{A}", f"{PREFIX}{module}{B}"


def write_adapter(directory: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter of peft to a new directory, which is complete or not there at all.

    Raises ValueError if `directory` is there already, or the one above it is not.
    """
    from safetensors.torch import save_file

    if directory.exists() or directory.is_symlink():
        raise ValueError(f"{shown(directory)} is there already; give a new directory.")
    above = directory.absolute().parent
    if not above.is_dir():
        raise ValueError(f"{shown(above)} is no directory to write {shown(directory.name)} into.")
    with tempfile.TemporaryDirectory(dir=above, prefix=f".{directory.name[:200]}.") as folder:
        fresh = Path(folder) / directory.name
        fresh.mkdir()
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        (fresh / SETTINGS).write_text(text, encoding="utf-8")
        save_file(
            {name: value.contiguous() for name, value in tensors.items()},
            os.fspath(fresh / WEIGHTS),
            metadata={"format": "pt"},
        )
        fresh.rename(directory)


def _plain_settings(path: Path) -> dict[str, Any]:
    """Return what adapter_config.json says; ValueError unless it is of plain LoRA."""
    file = path / SETTINGS
    if not file.is_file():
        raise ValueError(f"No adapter at {shown(path)}: expected a directory with {SETTINGS} and {WEIGHTS}.")
    settings = read_object(file)
    check_patterns(settings, shown(file))
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"{shown(path)} is an adapter of peft of kind {settings.get('peft_type')!r}: expected LORA.")
    for name, reason in OTHER_FUNCTIONS.items():
        if settings.get(name) not in (None, False, [], {}):
            raise ValueError(f"{shown(path)} is no plain LoRA adapter: {reason}.")
    start = settings.get("init_lora_weights", True)
    if start not in PLAIN_STARTS:
        raise ValueError(
            f"{shown(path)} was started with init_lora_weights = {brief(start)}, which may change the base weights "
            "too: save it as plain LoRA, by save_pretrained with path_initial_model_for_weight_conversion."
        )
    return settings


def _updates(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], path: Path) -> dict[str, LowRankUpdate]:
    found: dict[str, LowRankUpdate] = {}
    for embedding, factors in enumerate(FACTORS):
        stems = [{name.removesuffix(end) for name in tensors if name.endswith(end)} for end in factors]
        for stem in sorted(stems[0] ^ stems[1]):
            lacking = stem + factors[stem in stems[0]]
            raise ValueError(f"{shown(path / WEIGHTS)} lacks parameter {shown(lacking)}.")
        for stem in sorted(stems[0]):
            module = stem.removeprefix(PREFIX)
            A, B = (tensors[stem + end] for end in factors)
            _check_shapes(A, B, shown(module), path)
            found[module] = LowRankUpdate(B, A, _scale(module, A.shape[0], settings, path), bool(embedding))
    return found


def _check_shapes(A: Tensor, B: Tensor, module: str, path: Path) -> None:
    convolution = B.ndim > 2 and A.ndim == B.ndim and set(B.shape[2:]) == {1}
    if not (A.ndim == B.ndim == 2 or convolution) or A.shape[0] != B.shape[1] or not A.numel() * B.numel():
        raise ValueError(
            f"{shown(path / WEIGHTS)} has A of shape {tuple(A.shape)} and B of shape {tuple(B.shape)} for {module}: "
            "expected (r, m) and (n, r), or those of a convolution without groups."
        )


def _scale(module: str, rank: int, settings: Mapping[str, Any], path: Path) -> float:
    """Return alpha / r or, with rsLoRA, alpha / sqrt(r), as peft's LoraLayer.update_layer has it."""
    r = _matched(module, "rank_pattern", settings.get("r", 8), settings, path)
    alpha = _matched(module, "alpha_pattern", settings.get("lora_alpha", 8), settings, path)
    if r != rank:
        raise ValueError(f"{shown(path)} has factors of rank {rank} for {shown(module)}, but {SETTINGS} says {r:g}.")
    return alpha / math.sqrt(r) if settings.get("use_rslora") else alpha / r


def _matched(module: str, pattern: str, default: Any, settings: Mapping[str, Any], path: Path) -> float:
    """Return the value of the first key that matches the end of the module's name, as peft's get_pattern_key has it."""
    given = settings.get(pattern) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{pattern} in {shown(path / SETTINGS)} must be a dict of numbers, found {brief(given)}.")
    value = default
    for key, own in given.items():
        try:
            matches = re.match(rf"(.*\.)?({key})$", module)
        except re.error as error:
            raise ValueError(
                f"{pattern} in {shown(path / SETTINGS)} has {brief(key)}, which is no regular expression: {error}."
            ) from error
        if matches:
            value = own
            break
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"Rank and alpha in {shown(path / SETTINGS)} must be numbers, found {brief(value)}.")
    return value
