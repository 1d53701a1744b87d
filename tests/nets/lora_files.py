"""Directories of LoRA adapters, written by hand: whatever peft would or would not write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Factors = Mapping[str, tuple[Tensor, Tensor]]
PREFIX = "base_model.model."


def lora_directory(
    folder: Path, factors: Factors, whole: Mapping[str, Tensor] | None = None, **settings: object
) -> Path:
    """Write B and A of each module, and tensors that are stored whole, as an adapter."""
    folder.mkdir(parents=True)
    tensors = {PREFIX + name: value.contiguous() for name, value in (whole or {}).items()}
    for module, (B, A) in factors.items():
        tensors |= {
            f"{PREFIX}{module}.lora_B.weight": B.contiguous(),
            f"{PREFIX}{module}.lora_A.weight": A.contiguous(),
        }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    ranks = {module: A.shape[0] for module, (_, A) in factors.items()}
    r = max(ranks.values(), default=8)
    edit(folder, peft_type="LORA", r=r, lora_alpha=r, target_modules=list(factors), rank_pattern=ranks)
    edit(folder, alpha_pattern=ranks, base_model_name_or_path=None)
    edit(folder, **settings)
    return folder


def random_lora(folder: Path, ranks: Mapping[str, int], seed: int, *, size: int = 12, **settings: Any) -> Path:
    """Write an adapter of random modules, all of `size` x (`size` + 2)."""
    generator = torch.Generator().manual_seed(seed)
    dtype = settings.pop("dtype", torch.float32)
    factors = {
        name: (
            torch.randn(size, r, generator=generator, dtype=torch.float64).to(dtype),
            torch.randn(r, size + 2, generator=generator, dtype=torch.float64).to(dtype),
        )
        for name, r in ranks.items()
    }
    return lora_directory(folder, factors, **settings)


def edit(directory: Path, **entries: object) -> None:
    """Change entries of the settings."""
    file = directory / "adapter_config.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **entries}))


def replace_tensors(directory: Path, without: str = "", **added: Tensor) -> None:
    """Take tensors whose names have the part out of an adapter's file, and put others in."""
    file = directory / "adapter_model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if not without or without not in name}
    save_file({**kept, **added}, file, metadata={"format": "pt"})


def product(directory: Path, module: str) -> Tensor:
    """The matrix B A of what stands in the file, in float64, without any scale."""
    tensors = load_file(directory / "adapter_model.safetensors")
    B, A = (tensors[f"{PREFIX}{module}.lora_{factor}.weight"].double() for factor in "BA")
    return B @ A
