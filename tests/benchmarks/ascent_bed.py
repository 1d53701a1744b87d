"""Compare ascents on 12 small problems: python -m tests.benchmarks.ascent_bed [STEPS ...].

Perceptrons and vision transformers on scikit-learn's digits, a GPT-2 and a Llama on text, and a vision transformer
that was acted on by a random group element, in Euclidean, adaptive and quotient geometries, three of them in boxes. At
the radii L0, L1 and L2 twelve steps of Auto-PGD gain 0.01, 0.1 and 1; L3 is four times L2.

Prints, for each number of steps (10 and 20) and level, the increase in loss over the best known: its median, tenth
percentile and least over the problems, and the median of forward passes; then how many values fall short of the same
method's in a smaller ball, and what is warned of. The best known is the best of both methods and of 200 steps of
Auto-PGD.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers
from torch import Tensor, nn

from quotient_manifolds.demo.zoo import Points, draw_recipe, load_digits, one_thread, train
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.sharpness import (
    Ascent,
    AscentMethod,
    AutoPGD,
    FullStepAPGD,
    PreparedModel,
    cross_entropy,
    next_token_cross_entropy,
)
from quotient_manifolds.sharpness.objective import BatchObjective, autograd_available
from quotient_manifolds.symmetries import find_symmetries, random_representative

METHODS: tuple[type[AscentMethod], ...] = (FullStepAPGD, AutoPGD)
GAINS = {"L0": 0.01, "L1": 0.1, "L2": 1.0}
LEVELS = (*GAINS, "L3")
LONG = 200
TEXT = (
    "Beautiful is better than ugly. Explicit is better than implicit. Simple is better than complex. "
    "Complex is better\nthan complicated. Flat is better than nested. Sparse is better than dense. "
    "Readability counts. Special cases are not\nspecial enough to break the rules. Although practicality "
    "beats purity. Errors should never pass silently. Unless\nexplicitly silenced. In the face of "
    "ambiguity, refuse the temptation to guess."
)


@dataclass(frozen=True)
class Problem:
    name: str
    objective: BatchObjective

    def climb(self, method: type[AscentMethod], steps: int, radius: float) -> Ascent:
        with autograd_available():
            return method(steps=steps).maximise(
                self.objective, radius, torch.Generator().manual_seed(0), norm=self.objective.space.norm
            )

    def radius(self, gain: float) -> float:
        """The radius at which twelve steps of Auto-PGD gain about this much, by bisection."""
        low, high = 1e-6, 1e-5
        while self._gained(high) < gain:
            low, high = high, 4 * high
        while high / low > 1.2:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self._gained(middle) >= gain else (middle, high)
        return high

    def _gained(self, radius: float) -> float:
        found = self.climb(AutoPGD, 12, radius)
        return found.loss - found.base


# ---- problems


def perceptron(activation: Callable[[], nn.Module], points: Points) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), activation(), nn.Linear(32, 32), activation(), nn.Linear(32, 10)
    )
    return fitted(model, lambda: cross_entropy(model, points), 200)


def language_model(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.tensor([min(ord(letter), 127) for letter in TEXT])[: 8 * 48].reshape(8, 48)
    batch = {"input_ids": ids, "labels": ids}
    if kind == "GPT-2":
        config: Any = transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=48)
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes))
    model.eval()
    return fitted(model, lambda: next_token_cross_entropy(model, batch), 150), batch


def fitted(model: nn.Module, loss: Callable[[], Tensor], steps: int) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


def transformed(model: nn.Module, images: Tensor) -> nn.Module:
    """The same function, at a random point of its orbit."""
    found = find_symmetries(model, {"pixel_values": images[:4]})
    moved = random_representative(model, found, scale=0.1, seed=1)
    with torch.no_grad():
        for name, w in model.named_parameters():
            w.copy_(moved[name])
    return model


def problems() -> Iterator[Problem]:
    points, _ = load_digits(300)
    batch = points[0][:64].double(), points[1][:64]
    images = {"pixel_values": batch[0], "labels": batch[1]}

    def vision() -> nn.Module:
        model: nn.Module = train(draw_recipe(0, steps=200), *points)
        return model

    made: list[tuple[str, Callable[[], nn.Module], Any, Any, Geometry]] = [
        ("tanh, Euclidean", lambda: perceptron(nn.Tanh, points), cross_entropy, batch, Euclidean()),
        ("ReLU, adaptive", lambda: perceptron(nn.ReLU, points), cross_entropy, batch, Adaptive()),
        ("ReLU, Euclidean linf", lambda: perceptron(nn.ReLU, points), cross_entropy, batch, Euclidean("linf")),
        ("tanh, adaptive linf", lambda: perceptron(nn.Tanh, points), cross_entropy, batch, Adaptive(norm="linf")),
        ("ViT, adaptive", vision, cross_entropy, images, Adaptive()),
        ("ViT, inv", vision, cross_entropy, images, Quotient("inv")),
        ("ViT, mix", vision, cross_entropy, images, Quotient("mix")),
        (
            "transformed ViT, adaptive",
            lambda: transformed(vision().double(), batch[0]),
            cross_entropy,
            images,
            Adaptive(),
        ),
    ]
    for name, geometry in (("GPT-2", Adaptive()), ("GPT-2", Quotient("mix"))):
        made.append((name, lambda: language_model("GPT-2")[0], next_token_cross_entropy, None, geometry))
    for name, geometry in (("Llama", Quotient("inv")), ("Llama", Euclidean("linf"))):
        made.append((name, lambda: language_model("Llama")[0], next_token_cross_entropy, None, geometry))
    for name, make, loss, data, geometry in made:
        model = make().double().eval()
        given = language_model("GPT-2")[1] if data is None else data
        prepared = PreparedModel.of(model, loss, [given], geometry)
        yield Problem(name if "," in name else f"{name}, {geometry.name}", prepared.objective(0))


# ---- the table


def rows(problem: Problem, budgets: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    radii = {level: problem.radius(gain) for level, gain in GAINS.items()}
    radii["L3"] = 4 * radii["L2"]
    for level, radius in radii.items():
        asked = [*((each, steps) for steps in budgets for each in METHODS), (AutoPGD, LONG)]
        found = {(method, steps): problem.climb(method, steps, radius) for method, steps in asked}
        best = max(each.loss - each.base for each in found.values())
        for method, steps in asked[:-1]:
            each = found[method, steps]
            value, promise = each.loss - each.base, each.promise or math.inf
            warned = value < 0.5 * promise or each.gap > 0.01 * value
            told = {"problem": problem.name, "level": level, "radius": radius, "method": method.__name__}
            yield {**told, "steps": steps, "share": value / best, "passes": each.forward_passes, "value": value} | {
                "warned": warned
            }


def summary(table: pd.DataFrame) -> Iterator[str]:
    yield "| method | steps | level | median | 10 % | worst | passes | warned, misses over 5 % | warned, others |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for (method, steps, level), some in table.groupby(["method", "steps", "level"], sort=False):
        missed = some[some["share"] < 0.95]
        others = some.drop(missed.index)
        told = [f"{some['share'].median():.4f}", f"{some['share'].quantile(0.1):.4f}", f"{some['share'].min():.4f}"]
        told += [
            f"{some['passes'].median():g}",
            *(f"{each['warned'].sum()} of {len(each)}" for each in (missed, others)),
        ]
        yield f"| {method} | {steps} | {level} | {' | '.join(told)} |"
    for (method, steps), some in table.groupby(["method", "steps"], sort=False):
        wide = some.pivot(index="problem", columns="level", values="value")[list(LEVELS)].to_numpy()
        below = int((np.diff(wide) < 0).sum())
        yield f"{method}, {steps} steps: {below} of {wide[:, 1:].size} values are below the one of a smaller ball"


@one_thread()
def main(*budgets: int) -> None:
    found: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for problem in problems():
            new = list(rows(problem, budgets))
            for each in new:
                if each["steps"] == budgets[-1]:
                    print("{problem} {level} radius {radius:.3g} {method}: {share:.4f}".format(**each), file=sys.stderr)
            found += new
    print("\n".join(summary(pd.DataFrame(found))))


if __name__ == "__main__":
    main(*(map(int, sys.argv[1:]) if sys.argv[1:] else (10, 20)))
