"""Read and write the updates of LoRA in a peft directory, without peft and without the base model."""

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
from quotient_manifolds.load.adapter_names import PREFIX, check_rank, current_names, module_setting
from quotient_manifolds.load.adapters import SETTINGS, WEIGHTS, read_adapter
from quotient_manifolds.messages import brief

# A module's two factors are named MODULE + suffix: these are the suffixes for layers, and for embeddings.
FACTORS = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))
# With any of these settings the weight of a module is not W + scale B A.
OTHER_FUNCTIONS = (
    *("use_dora", "lora_bias", "use_qalora", "alora_invocation_tokens", "arrow_config", "kasa_config"),
    *("monteclora_config", "use_bdlora", "target_parameters", "trainable_token_indices", "layer_replication"),
    *("megatron_config", "ensure_weight_tying"),
)
# With other initializations (pissa, olora, corda, loftq, ...) peft changes the base weight when it loads the adapter.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class LowRankUpdate:
    """Hold the update scale * B A of one module's weight, with factors shaped as they are stored.

    A layer has B (n, r) and A (r, m). A convolution has B (n, r, 1, ...) and A (r, channels, height, ...). The update
    of an embedding is the transpose of B A, with m the number of tokens.
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
        """Return the shape (n, m) of the update as a matrix."""
        return self.B.shape[0], math.prod(self.A.shape[1:])

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return B (n, r) and A (r, m) as matrices."""
        return self.B.reshape(self.B.shape[0], -1), self.A.reshape(self.rank, -1)


@dataclass(frozen=True)
class LoraAdapter:
    """Hold the settings, the update of each module and the full tensors in a directory of a LoRA adapter.

    Full tensors are heads (modules_to_save), biases and embeddings, by their names in the file.
    """

    path: Path
    settings: dict[str, Any]
    updates: dict[str, LowRankUpdate]
    full_tensors: dict[str, Tensor]

    def renamed(self, rename: Callable[[str], str]) -> LoraAdapter:
        """Return the same adapter with modules renamed. Raises ValueError if two of its tensors get one name."""
        names = current_names([*self.full_tensors, *(names_of(module, False)[0] for module in self.updates)], rename)
        return replace(
            self,
            updates={rename(module): update for module, update in self.updates.items()},
            full_tensors={names[name]: value for name, value in self.full_tensors.items()},
        )


def read_lora(path: Path) -> LoraAdapter:
    """Return the LoRA adapter in a peft directory, with the scale of each update as peft computes it.

    Raises ValueError for anything but plain LoRA, a factor without its partner, incompatible shapes, and non-finite
    numbers.
    """
    if not (path / SETTINGS).is_file():
        raise ValueError(f"No adapter at {path}: expected a directory with {SETTINGS} and {WEIGHTS}")
    settings, tensors = read_adapter(path)
    _check_plain(path, settings)
    file = path / WEIGHTS
    for name, value in tensors.items():
        if not value.is_floating_point() or value.dtype.itemsize < 2:
            raise ValueError(
                f"{file} must hold floating-point numbers of 16 bits or more. Found {name} in {value.dtype}"
            )
        if not torch.isfinite(value).all():
            raise ValueError(f"{file} must be finite. Found NaN or infinity in {name}")
    updates = {
        module: update
        for embedding in (False, True)
        for module, update in _updates(path, settings, tensors, embedding).items()
    }
    if not updates:
        raise ValueError(f"{file} has no update: expected tensors named ...lora_A.weight")
    factors = {name for module, update in updates.items() for name in names_of(module, update.embedding)}
    full_tensors = {name: value for name, value in tensors.items() if name not in factors}
    if others := sorted(name for name in full_tensors if ".lora_" in name or ".token_adapter" in name):
        raise ValueError(f"{file} must hold plain LoRA. Found {others[0]}, which belongs to a variant such as DoRA")
    return LoraAdapter(path, settings, updates, full_tensors)


def _check_plain(path: Path, settings: Mapping[str, Any]) -> None:
    start = settings.get("init_lora_weights", True)
    if settings.get("peft_type") != "LORA":
        raise ValueError(
            f"{path} must be a LoRA adapter. Found an adapter of peft of kind {settings.get('peft_type')!r}"
        )
    if others := [name for name in OTHER_FUNCTIONS if settings.get(name) not in (None, False, [], {})]:
        raise ValueError(
            f"{path} must be a plain LoRA adapter, whose updates add up. Found {others[0]} in its settings"
        )
    if start not in PLAIN_STARTS:
        raise ValueError(
            f"{path} must start from the base weights. Found init_lora_weights = {brief(start)}, which may change "
            "them; save it as plain LoRA, by save_pretrained with path_initial_model_for_weight_conversion"
        )


def _updates(
    path: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], embedding: bool
) -> dict[str, LowRankUpdate]:
    """Return the update of each layer, or of each embedding."""
    file, suffixes = path / WEIGHTS, FACTORS[embedding]
    with_A, with_B = ({name.removesuffix(end) for name in tensors if name.endswith(end)} for end in suffixes)
    for stem in sorted(with_A ^ with_B):
        raise ValueError(f"{file} lacks parameter {stem + suffixes[stem in with_A]}")
    updates: dict[str, LowRankUpdate] = {}
    for stem in sorted(with_A):
        A, B = (tensors[stem + end] for end in suffixes)
        module = stem.removeprefix(PREFIX)
        convolution = B.ndim > 2 and A.ndim == B.ndim and set(B.shape[2:]) == {1}
        if not (A.ndim == B.ndim == 2 or convolution) or A.shape[0] != B.shape[1] or not A.numel() * B.numel():
            raise ValueError(
                f"{file} must have factors A (r, m) and B (n, r), or those of a convolution without groups. Found A of "
                f"shape {tuple(A.shape)} and B of shape {tuple(B.shape)} for {module}"
            )
        updates[module] = LowRankUpdate(B, A, _scale(module, A.shape[0], settings, path), embedding)
    return updates


def _scale(module: str, rank: int, settings: Mapping[str, Any], path: Path) -> float:
    """Return alpha / r or, with rsLoRA, alpha / sqrt(r), as in peft's LoraLayer.update_layer."""
    where = str(path / SETTINGS)
    check_rank(module, rank, settings, where)
    alpha = module_setting(module, settings, "alpha_pattern", settings.get("lora_alpha", 8), where)
    return alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank


def names_of(module: str, embedding: bool) -> tuple[str, str]:
    """Return the names of A and B of a module in an adapter's file."""
    A, B = FACTORS[embedding]
    return f"{PREFIX}{module}{A}", f"{PREFIX}{module}{B}"


def write_adapter(directory: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter of peft atomically to a new directory.

    Raises ValueError unless `directory` is new and its parent exists; OSError if it cannot be written.
    """
    from safetensors.torch import save_file

    with new_directory(directory) as unfinished, writing(directory):
        (unfinished / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        contiguous = {name: value.contiguous() for name, value in tensors.items()}
        save_file(contiguous, os.fspath(unfinished / WEIGHTS), metadata={"format": "pt"})
