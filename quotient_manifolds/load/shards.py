"""Fill a sharded model from safetensors: every process reads its part of every parameter, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from quotient_manifolds.load.huggingface import INDEX, opened, shapes_in
from quotient_manifolds.sharded import ShardedModel, is_sharded, plain_name, together


def load_shards(model: nn.Module, folder: str | Path, *, device: str | torch.device = "cpu") -> None:
    """Read a model's weights from a folder of safetensors into the parts that this process holds.

    The model is sharded (`fully_shard`, tensor parallelism) and may be on the meta device, made without memory: then it
    is given memory on `device`, for its parts alone. Buffers that files hold are read, others keep their values.
    folder: as `save_pretrained` writes it, one file or several with `model.safetensors.index.json`. Numbers are cast to
    the parameters' types. All processes call it together.

    Raises ValueError, and writes nothing, for a parameter that no file holds (such as one tied to another, where the
    model was made without memory and not tied again before it was sharded), for another shape, or a damaged file; also
    for a model that is not sharded, and for buffers without values, such as those of a model that was made under
    `torch.device("meta")`.
    """
    if not is_sharded(model):
        raise ValueError("load_shards fills sharded models. Found one that is not; call fully_shard(model) first")
    if bare := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise ValueError(
            f"Buffers must have values, for files rarely hold them. Found {bare[0]} on the meta device; make the model "
            f"under accelerate.init_empty_weights(include_buffers=False)"
        )
    if any(w.is_meta for w in model.parameters()):
        _give_memory(model, device)
    sharded = ShardedModel(model)
    together(lambda: _read(sharded, Path(folder)))


def _give_memory(model: nn.Module, device: str | torch.device) -> None:
    """Give the parameters memory, those that are tied one for all; buffers keep their values."""
    tied: dict[int, list[str]] = {}
    for name, w in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(w), []).append(name)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)  # which unties
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    for first, *others in tied.values():
        for name in others:
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, model.get_parameter(first))


def _read(model: ShardedModel, folder: Path) -> None:
    places, held = _places(folder), model.held()
    buffers = {plain_name(name): buffer for name, buffer in model.model.named_buffers() if plain_name(name) in places}
    if missing := [name for name in held if name not in places]:
        raise ValueError(
            f"The files of {folder} must hold every parameter. Found none for {missing[0]}; if it is tied to another "
            f"one, which a model made without memory forgets, call model.tie_weights() before it is sharded"
        )
    shapes = {name: model.layouts[name].shape for name in held} | {name: each.shape for name, each in buffers.items()}
    for copying in (False, True):  # nothing is written before all is found to fit
        for file in sorted({places[name] for name in shapes}):
            with opened(file) as weights:
                for name in (name for name in shapes if places[name] == file):
                    part = weights.get_slice(name)
                    if list(part.get_shape()) != list(shapes[name]):
                        raise ValueError(
                            f"{name} must have shape {tuple(shapes[name])}. Found {tuple(part.get_shape())} in {file}"
                        )
                    if copying and name in buffers:
                        buffers[name].copy_(weights.get_tensor(name))
                    elif copying and held[name].numel():
                        box = model.layouts[name].box
                        held[name].copy_(part[box] if box else weights.get_tensor(name))


def _places(folder: Path) -> dict[str, Path]:
    """Return the file that holds each tensor, by its name."""
    if (folder / INDEX).is_file():
        return {name: folder / file for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items()}
    places = {name: file for file in sorted(folder.glob("*.safetensors")) for name in shapes_in([file])}
    if not places:
        raise ValueError(f"{folder} must hold weights as safetensors. Found none")
    return places
