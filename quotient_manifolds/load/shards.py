"""Fill a sharded model from safetensors: every process reads its part of every parameter, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from quotient_manifolds.sharded import ShardedModel, is_sharded, together


def load_shards(model: nn.Module, folder: str | Path, *, device: str | torch.device = "cpu") -> None:
    """Read a model's weights from a folder of safetensors into the parts that this process holds.

    The model is sharded (`fully_shard`, tensor parallelism) and may be on the meta device, made without memory: then it
    is given memory on `device`, for its parts alone; buffers that have values keep them. folder: as `save_pretrained`
    writes it, one file or several with `model.safetensors.index.json`. Numbers are cast to the parameters' types. All
    processes call it together.

    Raises ValueError for a model that is not sharded, a parameter that no file holds or that has another shape there,
    and buffers without values, such as those of a model that was made under `torch.device("meta")`.
    """
    if not is_sharded(model):
        raise ValueError("load_shards fills sharded models. Found one that is not; call fully_shard(model) first")
    if bare := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise ValueError(
            f"Buffers must have values, for files rarely hold them. Found {bare[0]} on the meta device; make the model "
            f"under accelerate.init_empty_weights(include_buffers=False)"
        )
    if any(w.is_meta for w in model.parameters()):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.to_empty(device=device)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    sharded = ShardedModel(model)
    together(lambda: _read(sharded, Path(folder)))


def _read(model: ShardedModel, folder: Path) -> None:
    from safetensors import safe_open

    places = _places(folder)
    held = model.held()
    if missing := [name for name in held if name not in places]:
        raise ValueError(f"The files of {folder} must hold every parameter. Found none for {missing[0]}")
    for file in sorted({places[name] for name in held}):
        with safe_open(file, framework="pt") as opened:
            for name in (name for name in held if places[name] == file):
                part, layout = opened.get_slice(name), model.layouts[name]
                if list(part.get_shape()) != list(layout.shape):
                    raise ValueError(
                        f"{name} must have shape {tuple(layout.shape)}. Found {tuple(part.get_shape())} in {file}"
                    )
                if held[name].numel():
                    box = layout.boxes[model.rank]
                    held[name].copy_(part[box] if box else opened.get_tensor(name))


def _places(folder: Path) -> dict[str, Path]:
    """Return the file that holds each tensor, by its name."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    files: Iterable[Path] = sorted(folder.glob("*.safetensors"))
    places: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            places |= dict.fromkeys(opened.keys(), file)
    if not places:
        raise ValueError(f"{folder} must hold weights as safetensors. Found none")
    return places
