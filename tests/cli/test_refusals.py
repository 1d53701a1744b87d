"""Bad input of every kind: one sentence, exit code 2, nothing changed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line import FAST, call, digest, refused
from tests.nets import hugging_face
from tests.nets.hugging_face import rewrite_weights
from tests.nets.lora_files import random_lora

MEASURE = ("measure", "BERT", "--data", "DATA", "--radius", 0.1, *FAST)
SPOILED = ("measure", "BERT", "--data", "DATA", "--geometry", "inv:0.1", *FAST)
OWN = ("measure", "M:encoder", "--data", "M:batches", "--geometry", "adaptive:0.1", *FAST)


def poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors["bert.encoder.layer.0.attention.self.query.weight"][0, 0] = math.nan


def flatten(tensors: dict[str, torch.Tensor]) -> None:
    """The first head's queries lose a dimension, weight and bias."""
    tensors["bert.encoder.layer.0.attention.self.query.weight"][0] = 0
    tensors["bert.encoder.layer.0.attention.self.query.bias"][0] = 0


def explode(tensors: dict[str, torch.Tensor]) -> None:
    bias = tensors["classifier.bias"]
    bias.copy_(torch.where(torch.arange(len(bias)) % 2 == 0, 3e38, -3e38))


# The words of a command, BERT for a model, DATA for texts with labels, M for a module; words of the sentence; how the
# model or the texts are spoiled before.
CALLS: dict[str, tuple[Any, ...]] = {
    "no model": (("inspect", "nowhere"), ("No model at",)),
    "no parameters": (("inspect", "torch.nn:Identity"), ("No example inputs can be made for Identity",)),
    "no data": (("measure", "BERT", "--data", "nowhere.csv", "--radius", 1), ("nowhere.csv",)),
    "data of no known kind": (("measure", "BERT", "--data", "data.parquet", "--radius", 1), ("data.parquet",)),
    "unknown geometry": ((*MEASURE, "--geometry", "manhattan"), ("geometry must be", "manhattan")),
    "unknown geodesic": ((*MEASURE, "--geodesic", "third"), ("geodesic must be one of first, second, exact",)),
    "no number as radius": ((*MEASURE, "--geometry", "inv:x"), ("inv:0.1,0.2",)),
    "negative radius": ((*MEASURE, "--geometry", "inv:-1"), ("radius",)),
    "texts longer than the model": ((*MEASURE, "--max-length", 65), ("64",)),
    "no such column": ((*MEASURE, "--column", "texts", "x"), ("columns must name some of text",)),
    "a device without numbers": (("inspect", "BERT", "--device", "meta"), ("meta", "cannot be used here")),
    "no place for the record": (("inspect", "BERT", "--out", "nowhere/x.json"), ("Cannot write nowhere",)),
    "an input as output": (("inspect", "BERT", "--out", "BERT/config.json"), ("must not be in an input",)),
    "an output inside of an input": (("move", "BERT", "BERT/moved"), ("must not be in an input",)),
    "a scale of 0": (("orbit", "BERT", "--scale", 0), ("0.0 is not in the range x>0",)),
    "a figure of another kind": (("orbit", "BERT", "--figure", "orbit.gif"), (".svg, .pdf, .png", "orbit.gif")),
    "no inputs": (("orbit", "M:encoder"), ("No example inputs can be made for Sequential", "--inputs")),
    "inputs of another shape": (("inspect", "M:layer", "--inputs", "M:narrow"), ("must run on the inputs",)),
    "a function that raises": (("inspect", "M:layer", "--inputs", "M:raises"), ("raised KeyError: 'weights'",)),
    "no function": (("inspect", "M:nothing"), ("nothing",)),
    "no symmetries": (
        ("inspect", "M:layer", "--inputs", "M:inputs", "--symmetries", "M:undeclared"),
        ("must return quotient_manifolds.Symmetries",),
    ),
    "the forward fails": (("measure", "M:broken", *OWN[2:]), ("no_such_method", "in forward", ".py, line")),
    "the loss fails": ((*OWN, "--loss", "M:crooked_loss"), ("KeyError", "in crooked_loss")),
    "the model writes to its weights": (("measure", "M:writing", *OWN[2:]), ("writes to",)),
    "no batches": (("measure", "M:encoder", "--data", "M:no_batch", "--radius", 0.1), ("at least one batch",)),
    "batches are made elsewhere": ((*OWN, "--batch-size", 3), ("batch_size must be left out for the batches of",)),
    "merge into what is there": (("merge", "A", "BERT"), ("must be a new directory",)),
    "merge into no directory": (("merge", "A", "a/b"), ("there is no directory",)),
    "merge what is no adapter": (("merge", "nowhere", "OUT"), ("No adapter at",)),
    "a weight too many": (("merge", "A", "OUT", "--weight", 1, "--weight", 2), ("weight",)),
    "a rank of 0": (("merge", "A", "OUT", "--rank", 0), ("rank must be",)),
    "move no directory": (("move", "nowhere", "OUT"), ("No model at",)),
    "align with no directory": (("align", "BERT", "nowhere", "--out", "OUT"), ("No model at",)),
    "refine without data": (("align", "BERT", "BERT", "--refine", 3, "--out", "OUT"), ("Found no --data",)),
    "a quantizer for pruning": (
        ("descend", "BERT", "--for", "sparsity", "--clip", "--out", "OUT"),
        ("describe a quantizer",),
    ),
    "move to what is there": (("move", "BERT", "BERT"), ("must be a new directory",)),
    "a demo without a ranking": (("demo", "--models", 4), ("--models", "5")),
    "NaN weights": (SPOILED, ("finite",), lambda model, data: rewrite_weights(model, poison)),
    "a rank-deficient pair": (
        SPOILED,
        ("bert.encoder.layer.0.attention query/key",),
        lambda model, data: rewrite_weights(model, flatten),
    ),
    "a loss that is not finite": (SPOILED, ("finite",), lambda model, data: rewrite_weights(model, explode)),
    "no tokenizer": (SPOILED, ("no tokenizer",), lambda model, data: [f.unlink() for f in model.glob("token*")]),
    "a label out of range": (
        SPOILED,
        ("0 ... 1",),
        lambda model, data: data.write_text('{"text": "good", "label": 2}'),
    ),
    "a model of images": (
        ("measure", "other", *SPOILED[2:]),
        ("no tokenizer",),
        lambda model, data: hugging_face.vit_classifier(model.with_name("other")),
    ),
    "a causal model": (
        ("measure", "other", *SPOILED[2:]),
        ("task must be causal for a GPT2LMHeadModel", "Found classification"),
        lambda model, data: hugging_face.gpt2(model.with_name("other")),
    ),
}


@pytest.mark.parametrize("case", CALLS.values(), ids=list(CALLS))
def test_refusals(case: tuple[Any, ...], spoilable: Path, texts: Path, mine: str) -> None:
    arguments, words, *spoil = case
    random_lora(texts.parent / "A", {"a": 2}, 0)
    for change in spoil:
        change(spoilable, texts)
    before = digest(spoilable), sorted(texts.parent.iterdir())
    named = {"BERT": str(spoilable), "DATA": str(texts), "M": mine}
    swapped = [
        "".join(named.get(part, part) for part in str(each).replace(":", "\n:\n").replace("/", "\n/\n").split("\n"))
        for each in arguments
    ]
    refused(call(*swapped), *words)
    left = [each for each in sorted(texts.parent.iterdir()) if each.name != "__pycache__"]
    assert (digest(spoilable), left) == before
