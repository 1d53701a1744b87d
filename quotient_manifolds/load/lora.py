"""Read and write the updates of LoRA in a directory of peft, without peft and without the base model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.files import new_directory, writing
from quotient_manifolds.load.adapter_names import PREFIX, check_rank, present_names, value_of
from quotient_manifolds.load.adapters import SETTINGS, WEIGHTS, read_adapter
from quotient_manifolds.messages import brief

# What follows the module's name in the names of its two factors: of layers, and of embeddings.
FACTORS = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))
# Settings of peft with which the weight of a module does not become W + scale B A.
OTHER_FUNCTIONS = (
    *("use_dora", "lora_bias", "use_qalora", "alora_invocation_tokens", "arrow_config", "kasa_config"),
    *("monteclora_config", "use_bdlora", "target_parameters", "trainable_token_indices", "layer_replication"),
    *("megatron_config", "ensure_weight_tying"),
)
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

    def renamed(self, rename: Callable[[str], str]) -> LoraAdapter:
        """Return the same adapter with other names of modules; ValueError if two of its tensors get one name."""
        names = present_names([*self.whole, *(names_of(module, False)[0] for module in self.updates)], rename)
        return replace(
            self,
            updates={rename(module): update for module, update in self.updates.items()},
            whole={names[name]: value for name, value in self.whole.items()},
        )


def read_lora(path: Path) -> LoraAdapter:
    """Return the LoRA adapter in a directory of peft, with the scale of each update worked out as peft does it.

    Raises ValueError in one sentence for anything but plain LoRA, for a factor without partner, for shapes that do not
    fit, and for numbers that are not finite.
    """
    if not (path / SETTINGS).is_file():
        raise ValueError(f"No adapter at {path}: expected a directory with {SETTINGS} and {WEIGHTS}.")
    settings, tensors = read_adapter(path)
    start = settings.get("init_lora_weights", True)
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"{path} is an adapter of peft of kind {settings.get('peft_type')!r}: expected LORA.")
    if other := [name for name in OTHER_FUNCTIONS if settings.get(name) not in (None, False, [], {})]:
        raise ValueError(f"{path} is no plain LoRA adapter, whose updates add up: it has {other[0]}.")
    if start not in PLAIN_STARTS:
        raise ValueError(
            f"{path} was started with init_lora_weights = {brief(start)}, which may change the base weights "
            "too: save it as plain LoRA, by save_pretrained with path_initial_model_for_weight_conversion."
        )
    file = path / WEIGHTS
    for name, value in tensors.items():
        if not value.is_floating_point() or value.dtype.itemsize < 2:
            raise ValueError(
                f"{file} must hold floating-point numbers of 16 bits or more. Found {name} in {value.dtype}."
            )
        if not torch.isfinite(value).all():
            raise ValueError(f"{file} has NaN or infinity in {name}.")
    updates: dict[str, LowRankUpdate] = {}
    for embedding, ends in enumerate(FACTORS):
        stems = [{name.removesuffix(end) for name in tensors if name.endswith(end)} for end in ends]
        for stem in sorted(stems[0] ^ stems[1]):
            raise ValueError(f"{file} lacks parameter {stem + ends[stem in stems[0]]}.")
        for stem in sorted(stems[0]):
            A, B = (tensors[stem + end] for end in ends)
            module = stem.removeprefix(PREFIX)
            convolution = B.ndim > 2 and A.ndim == B.ndim and set(B.shape[2:]) == {1}
            if not (A.ndim == B.ndim == 2 or convolution) or A.shape[0] != B.shape[1] or not A.numel() * B.numel():
                raise ValueError(
                    f"{file} has A of shape {tuple(A.shape)} and B of shape {tuple(B.shape)} for {module}: expected "
                    "(r, m) and (n, r), or those of a convolution without groups."
                )
            updates[module] = LowRankUpdate(B, A, _scale(module, A.shape[0], settings, path), bool(embedding))
    if not updates:
        raise ValueError(f"{file} has no update: expected tensors named ...lora_A.weight.")
    paired = {key for module, update in updates.items() for key in names_of(module, update.embedding)}
    whole = {name: value for name, value in tensors.items() if name not in paired}
    if odd := sorted(name for name in whole if ".lora_" in name or ".token_adapter" in name):
        raise ValueError(f"{file} has {odd[0]}, which is no part of plain LoRA (of DoRA, for example).")
    return LoraAdapter(path, settings, updates, whole)


def names_of(module: str, embedding: bool) -> tuple[str, str]:
    """Return the names of A and B of a module in an adapter's file."""
    A, B = FACTORS[embedding]
    return f"{PREFIX}{module}{A}", f"{PREFIX}{module}{B}"


def write_adapter(directory: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter of peft to a new directory, which is complete or not there at all.

    Raises ValueError unless `directory` is new, in one that exists; OSError if it cannot be written.
    """
    from safetensors.torch import save_file

    with new_directory(directory) as fresh, writing(directory):
        (fresh / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        plain = {name: value.contiguous() for name, value in tensors.items()}
        save_file(plain, os.fspath(fresh / WEIGHTS), metadata={"format": "pt"})


def _scale(module: str, rank: int, settings: Mapping[str, Any], path: Path) -> float:
    """Return alpha / r or, with rsLoRA, alpha / sqrt(r), as peft's LoraLayer.update_layer has it."""
    where = str(path / SETTINGS)
    check_rank(module, rank, settings, where)
    alpha = value_of(module, settings, "alpha_pattern", settings.get("lora_alpha", 8), where)
    return alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank
