"""How much each family of symmetries alone changes each measure: four models, moved along one family at a time.

All moved models compute the same function. What changes is what a measure sees of its parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pandas as pd

from quotient_manifolds.demo.zoo import one_thread
from quotient_manifolds.geometry import Adaptive, Geometry, Quotient
from quotient_manifolds.messages import Progress
from quotient_manifolds.sharpness import SharpnessWarning, worst_case_sharpness
from quotient_manifolds.symmetries import Symmetries, random_move
from studies.common import Record, Tables, pretrained_encoder
from studies.invariance import METRICS, Subject, group_dimension, loss

GEOMETRIES: Final[dict[str, Geometry]] = {
    "adaptive": Adaptive(),
    **{f"{metric}, {scope}": Quotient(metric, symmetries=scope) for scope in ("paper", "pairs") for metric in METRICS},
    **{metric: Quotient(metric) for metric in METRICS},
}
RADIUS, STEPS, LOG_SCALE = 0.05, 5, 1.0
SMALL: Final = {"ViT": "vit with a head", "GPT-2": "gpt2 with a head", "Llama": "llama with a head"}
PRETRAINED: Final = "all-MiniLM-L6-v2"
SENTENCES = ("A man is playing a guitar.", "The market fell sharply today.", "She never said that.", "It rains.")


@one_thread()
def run(out: Path, *, fast: bool, progress: Progress) -> Record:
    """Transform every model along each of its families; `fast`: the ViT alone."""
    names = ["ViT"] if fast else [*SMALL, PRETRAINED]
    moves: list[Record] = []
    for place, name in enumerate(names):
        progress("models", place, len(names))
        subject = _sentence_encoder() if name == PRETRAINED else Subject.of(SMALL[name])
        moves += [{"model": name, **move} for move in _moves(subject)]
    settings = {"radius": RADIUS, "steps": STEPS, "log_scale": LOG_SCALE}
    return {"moves": moves, **settings}


def _sentence_encoder() -> Subject:
    from transformers import AutoModel, AutoTokenizer

    directory = pretrained_encoder()
    batch = dict(AutoTokenizer.from_pretrained(directory)(list(SENTENCES), padding=True, return_tensors="pt"))
    return Subject(AutoModel.from_pretrained(directory).double().eval(), batch)


def _moves(here: Subject) -> Iterator[Record]:
    """Yield what a random move along each family does to worst-case sharpness, after / before, by geometry.

    change: of the loss, relative. dimension: of the family in the model.
    """
    before, base = _sharpness(here), here.loss()
    for family, symmetries in _families(here.symmetries()):
        there = here.at(random_move(here.model, symmetries, log_scale=LOG_SCALE))
        change = abs(there.loss() / base - 1)
        ratios = {name: value / before[name] for name, value in _sharpness(there).items()}
        yield {"family": family, "dimension": group_dimension(symmetries), "change": change, "ratios": ratios}


def _sharpness(at: Subject) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SharpnessWarning)  # of other measures than those that are constant
        return {
            name: worst_case_sharpness(at.model, loss, [at.batch], geometry=each, radius=RADIUS, steps=STEPS).mean
            for name, each in GEOMETRIES.items()
        }


def _families(found: Symmetries) -> Iterator[tuple[str, Symmetries]]:
    """Yield what moves one family alone, by its name."""
    nothing = replace(found, pairs=(), translations=(), freedoms=())
    for part in ("pairs", "translations", "freedoms"):
        every = getattr(found, part)
        for kind in dict.fromkeys(each.kind for each in every):
            yield kind, replace(nothing, **{part: tuple(each for each in every if each.kind == kind)})


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
