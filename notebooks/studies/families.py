"""How much each family of symmetries alone changes each measure: real models, moved along one family at a time.

All moved models compute the same function. What changes is what a measure sees of its parameters.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pandas as pd
import torch
from torch import Tensor, nn

from quotient_manifolds.demo.zoo import Digits, draw_recipe, load_digits, one_thread, train
from quotient_manifolds.geometry import Adaptive, Geometry, Quotient
from quotient_manifolds.progress import Progress
from quotient_manifolds.sharpness import Loss, SharpnessWarning, worst_case_sharpness
from quotient_manifolds.symmetries import Symmetries, find_symmetries, random_move
from studies.common import Record, Tables, pretrained_encoder, read_record, write_record
from studies.invariance import group_dimension

GEOMETRIES: Final[dict[str, Geometry]] = {
    "adaptive": Adaptive(),
    "inv, paper": Quotient("inv", symmetries="paper"),
    "mix, paper": Quotient("mix", symmetries="paper"),
    "inv, pairs": Quotient("inv", symmetries="pairs"),
    "mix, pairs": Quotient("mix", symmetries="pairs"),
    "inv": Quotient("inv"),
    "mix": Quotient("mix"),
}
RADIUS, STEPS, LOG_SCALE = 0.05, 5, 1.0
TRAINING_STEPS, GREYS = 300, 17  # of the small models; digits have grey values from 0 to 16
SENTENCES = ("A man is playing a guitar.", "The market fell sharply today.", "She never said that.", "It rains.")

Subject = tuple[nn.Module, Any, Loss]
"""A model, a batch and the loss."""


@one_thread()
def run(out: Path, *, fast: bool, command: str, progress: Progress) -> Record:
    """Transform every model along each of its families and write OUT/families.json; `fast`: the ViT, hardly trained."""
    digits, steps = load_digits(train_points=256), 5 if fast else TRAINING_STEPS
    models: dict[str, Callable[[], Subject]] = {
        "ViT": partial(_vit, digits, steps),
        "GPT-2": partial(_decoder, digits, steps, "GPT2"),
        "Llama": partial(_decoder, digits, steps, "Llama"),
        "all-MiniLM-L6-v2": _sentence_encoder,
    }
    moves: list[Record] = []
    for place, (name, make) in enumerate(models.items()):
        progress("models", place, len(models))
        if name == "ViT" or not fast:
            moves += _moves(name, *make())
    settings = {"radius": RADIUS, "steps": STEPS, "log_scale": LOG_SCALE}
    return write_record(out / "families.json", {"moves": moves, **settings}, command)


def load(folder: Path) -> Record:
    """Read the record in a folder."""
    return read_record(folder / "families.json")


def _moves(name: str, model: nn.Module, batch: Any, loss: Loss) -> Iterator[Record]:
    """Yield what a random move along each family does to worst-case sharpness, after / before, by geometry.

    change: of the loss, relative. dimension: of the family in the model.
    """
    model = model.double().eval()
    here = _sharpness(model, loss, batch)
    for family, symmetries in _families(find_symmetries(model, batch, evaluate=loss)):
        there = copy.deepcopy(model)
        there.load_state_dict(random_move(model, symmetries, log_scale=LOG_SCALE), strict=False)
        with torch.no_grad():
            before, after = (float(loss(each, batch)) for each in (model, there))
        ratios = {label: value / here[label] for label, value in _sharpness(there, loss, batch).items()}
        counted = {"dimension": group_dimension(symmetries), "change": abs(after / before - 1)}
        yield {"model": name, "family": family, **counted, "ratios": ratios}


def _sharpness(model: nn.Module, loss: Loss, batch: Any) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SharpnessWarning)  # of other measures than those that are constant
        return {
            name: worst_case_sharpness(model, loss, [batch], geometry=geometry, radius=RADIUS, steps=STEPS).mean
            for name, geometry in GEOMETRIES.items()
        }


def _families(found: Symmetries) -> Iterator[tuple[str, Symmetries]]:
    """Yield what moves one family alone, by its name."""
    nothing = replace(found, pairs=(), translations=(), freedoms=())
    for part in ("pairs", "translations", "freedoms"):
        every = getattr(found, part)
        for kind in dict.fromkeys(each.kind for each in every):
            yield kind, replace(nothing, **{part: tuple(each for each in every if each.kind == kind)})


# ---- the models, each with a batch and its loss


def _vit(digits: Digits, steps: int) -> Subject:
    model = train(draw_recipe(0, steps=steps), digits.train_images, digits.train_labels)
    batch = {"pixel_values": digits.train_images[:64].double(), "labels": digits.train_labels[:64]}
    return model, batch, _cross_entropy


def _decoder(digits: Digits, steps: int, kind: str) -> Subject:
    """Train a small decoder with a head of its own to tell the next pixel of a digit, row by row."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": GREYS, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
    torch.manual_seed(0)
    if kind == "GPT2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **sizes)
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    else:
        size: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **heads, **sizes))
    grey = digits.train_images.flatten(1)
    ids = ((grey - grey.min()) / (grey.max() - grey.min()) * (GREYS - 1)).round().long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        some = ids[torch.randint(len(ids), (16,), generator=generator)]
        optimizer.zero_grad()
        _next_token(model, {"input_ids": some}).backward()
        optimizer.step()
    return model, {"input_ids": ids[:8]}, _next_token


def _sentence_encoder() -> Subject:
    from transformers import AutoModel, AutoTokenizer

    directory = pretrained_encoder()
    model = AutoModel.from_pretrained(directory)
    batch = dict(AutoTokenizer.from_pretrained(directory)(list(SENTENCES), padding=True, return_tensors="pt"))
    with torch.no_grad():
        size = model.eval()(**batch).last_hidden_state.shape
    target = torch.randn(size, generator=torch.Generator().manual_seed(0)).double()
    return model, {"inputs": batch, "target": target}, _distance


def _cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(pixel_values=batch["pixel_values"]).logits, batch["labels"])


def _next_token(model: nn.Module, batch: Any) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def _distance(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(**batch["inputs"]).last_hidden_state
    return (found - batch["target"]).square().mean()


# ---- tables


def tables(found: Record) -> Tables:
    """Return worst-case sharpness after / before in every geometry, a row for each model and family."""
    frame = pd.DataFrame(found["moves"])
    heads = {"model": "Model", "family": "Family", "dimension": "Dimension"}
    first = frame[[*heads]].assign(dimension=frame["dimension"].map("{:,}".format)).rename(columns=heads)
    return {"ratios": first.join(pd.DataFrame([*frame["ratios"]])[[*GEOMETRIES]].map(_ratio))}


def _ratio(value: float) -> str:
    """Return a ratio, and 1 where it is 1 to 1e-9."""
    if abs(value - 1) < 1e-9:
        return "1"
    return f"{value:.3f}" if 0.01 <= value < 100 else f"{value:.2g}"
