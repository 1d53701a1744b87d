"""Sets of models on which finders of symmetries are compared, each with inputs that a finder does not see."""

from __future__ import annotations

import csv
import importlib
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quotient_manifolds.batches import mapped, tensors_in
from quotient_manifolds.symmetries import example_inputs
from quotient_manifolds.symmetries.outputs import Evaluate
from tests.nets import kinds, model_types, programs, random_nets, small
from tests.nets.net import GIVEN, TOKENS, Net, generic
from tests.symmetries import breadth

ROOT = Path(__file__).parents[2]
PROGRAMS, RANDOM = 2_000, 1_000


@dataclass(frozen=True)
class Example:
    """A model, the batch that finders are given, and by name batches that they do not see.

    A batch that the model refuses is left out later. many: batches enough for the rank of the Jacobian of `outputs`,
    which has the kernel of all that `evaluate` may say. kernel: parameters minus this rank, where it is known already.
    """

    model: nn.Module
    shown: Any
    unseen: Mapping[str, Any]
    evaluate: Evaluate | None = None
    many: Sequence[Any] = ()
    outputs: Evaluate | None = None
    kernel: int | None = None


@dataclass(frozen=True)
class Set:
    """Models by name. close: relative changes of outputs below this are rounding."""

    names: Callable[[], list[str]]
    make: Callable[[str], Example]
    close: float = 1e-8


# ---- inputs that were not seen


def varied(batch: Any, seed: int = 1) -> dict[str, Any]:
    """Return other batches: other rows, larger and smaller ones, padding, other lengths, other sizes of pictures."""
    draw = torch.Generator().manual_seed(seed)
    again = partial(_redrawn, draw=draw)
    found = {"rows": mapped(again, batch)}
    found |= {f"{scale:g} times": mapped(partial(_scaled, scale=scale), mapped(again, batch)) for scale in (3, 0.3)}
    found["reversed"] = mapped(lambda x: x.flip(1) if x.ndim > 1 else x, batch)  # of valid boxes, say
    found["padded"] = mapped(_padded, mapped(again, batch))
    for name, size in {
        "shorter": lambda n: (n + 1) // 2,
        "longer": lambda n: 2 * n,
        "one more": lambda n: n + 1,
    }.items():
        for ndims, axes in (((2, 3), (1,)), ((3,), (2,)), ((4, 5), (-2, -1))):
            resized = mapped(partial(_resized, size=size, ndims=ndims, axes=axes), batch)
            if any(x.shape != y.shape for x, y in zip(tensors_in(batch), tensors_in(resized), strict=True)):
                found[f"{name} along {axes}"] = mapped(again, resized)
    return found


def _redrawn(x: Tensor, draw: torch.Generator) -> Tensor:
    if bool(((x == 0) | (x == 1)).all()):  # a mask, or types of tokens
        return x
    if x.is_floating_point():
        return (float(x.std()) if x.numel() > 1 else 1.0) * torch.randn(x.shape, generator=draw, dtype=torch.double).to(
            x
        )
    low, high = (int(each) for each in x.aminmax())
    return torch.randint(low, high + 1, x.shape, generator=draw).to(x)


def _scaled(x: Tensor, scale: float) -> Tensor:
    return scale * x if x.is_floating_point() else x


def _padded(x: Tensor) -> Tensor:
    if x.is_floating_point() or x.ndim != 2 or int(x.max()) > 1:
        return x
    x = x.clone()
    x[::2, -(x.shape[1] // 3) :] = 0
    return x


def _resized(x: Tensor, size: Callable[[int], int], ndims: tuple[int, ...], axes: tuple[int, ...]) -> Tensor:
    for axis in axes if x.ndim in ndims else ():
        x = torch.cat([x, x], axis).narrow(axis, 0, size(x.shape[axis]))
    return x


# ---- the sets


def _net(name: str, bias: bool) -> Example:
    model, x = small.net(name, bias)
    shown = small.shown(name, x)
    return Example(model, shown, {"all": x, **varied(x[:24])}, many=[x])


def _kind(name: str) -> Example:
    model, x = kinds.net(name)
    return Example(model, x[:4], varied(x[4:12]), many=kinds.batches(name))


def _program(name: str) -> Example:
    draw = random.Random(int(name))
    operations = [*programs.OPERATIONS]
    program = [(draw.choice(operations), draw.randint(0, 5), draw.randint(0, 5)) for _ in range(draw.randint(1, 6))]
    bias, pooled = draw.random() < 0.5, draw.random() < 0.5
    torch.manual_seed(0)
    x = torch.randn(96 if pooled else 24, TOKENS, GIVEN)
    model = generic(Net(programs.body(program), bias, pooled, words=False), x[:3])
    x = x.double()
    return Example(model, x[:3], varied(x[3:7]), many=list(x.split(4)))


def _random(name: str) -> Example:
    """Return a net with parts that show in later rows, or where there is padding; its loss is what is computed."""
    seed = int(name)
    model, loss, batches = random_nets.net(seed, hidden=True, fresh=False)
    draw = torch.Generator().manual_seed(seed)
    unseen = {f"batch {number}": batch for number, batch in enumerate(batches[1:], 2)}
    for length in (2, 4, 7):
        x = torch.randn(6, length, random_nets.D, generator=draw, dtype=torch.float64)
        labels = torch.randint(3, (6,), generator=draw)
        mask = torch.ones(6, length, dtype=torch.float64)
        unseen[f"no padding, length {length}"] = (x, mask, labels)
        mask = mask.clone()
        mask[1::2, -1:] = 0
        unseen[f"padding, length {length}"] = (2 * x, mask, labels)
    many = [
        (torch.randn(4, 4, random_nets.D, generator=draw, dtype=torch.float64), mask, batches[0][2])
        for mask in (torch.ones(4, 4).double(), (torch.arange(16).view(4, 4) != 7).double()) * 30
    ]
    return Example(model, batches[0], unseen, evaluate=loss, many=many, outputs=partial(_shown_by, loss))


def _shown_by(loss: random_nets.Loss, model: nn.Module, batch: random_nets.Batch) -> Tensor:
    """Return what the loss knows with all labels: logits, or these up to a constant."""
    logits = model(*batch[:2])
    return logits if loss is random_nets.squares else F.log_softmax(logits, -1)


def _fibres() -> Any:
    sys.path[:0] = [] if str(ROOT / "notebooks") in sys.path else [str(ROOT / "notebooks")]
    return importlib.import_module("studies.fibres")


def _type(name: str) -> Example:
    """Return a small copy of a Hugging Face model, given words as tokenizers return them."""
    model, batch = _fibres().small_model(name)
    with (ROOT / "docs" / "fibres.csv").open(encoding="utf-8", newline="") as file:
        kernel = next(int(row["Fibre"]) for row in csv.DictReader(file) if row["Model"] == name)
    shown = batch
    if isinstance(batch, dict) and "input_ids" in batch:
        shown = importlib.import_module("transformers").BatchEncoding(batch)
    return Example(model, shown, varied(batch), kernel=kernel)


def _broad(name: str) -> Example:
    model = model_types.build(name)
    batch = example_inputs(model)
    if name == "prophetnet":  # adds two masks of the least float64, which is minus infinity
        del batch["attention_mask"]
    return Example(model, batch, varied(batch))


def _numbers(count: int) -> Callable[[], list[str]]:
    return lambda: [str(number) for number in range(count)]


SETS = {
    "nets": Set(lambda: [*small.NETS], partial(_net, bias=True)),
    "nets without biases": Set(lambda: [*small.NETS], partial(_net, bias=False)),
    "kinds": Set(lambda: [*kinds.KINDS], _kind),
    "programs": Set(_numbers(PROGRAMS), _program, close=1e-6),
    "random": Set(_numbers(RANDOM), _random),
    "types": Set(lambda: _fibres().names(), _type),
    "breadth": Set(lambda: [name for name, *_ in breadth.cases()], _broad),
}
"""Models by the name of their set."""


def chosen(sets: Sequence[str], only: Sequence[str], every: int, first: int | None) -> Iterator[tuple[str, str]]:
    """Yield set and name of models: those whose name matches one of the expressions, if there are any."""
    for each in sets:
        names = [name for name in SETS[each].names()[:first] if not only or any(re.fullmatch(e, name) for e in only)]
        yield from ((each, name) for name in names[::every])
