"""How many passes each ascent needs for 99 % of the maximum, and how well a tolerance is kept.

The models are of the kinds that zoos are made of, each with a batch and its loss, made in seconds from fixed seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from quotient_manifolds import Quotient, Symmetries, declare_pair
from quotient_manifolds.demo.zoo import draw_recipe, load_digits, one_thread, train
from quotient_manifolds.geometry import Adaptive, Geometry, as_geometry
from quotient_manifolds.load import load_object
from quotient_manifolds.messages import Progress
from quotient_manifolds.sharpness import (
    AutoPGD,
    LegacyWorstCase,
    Loss,
    PreparedModel,
    QuasiNewton,
    cross_entropy,
    next_token_cross_entropy,
)
from quotient_manifolds.symmetries import Params
from studies.common import Record, Tables, pretrained_encoder, read_record, resume, table, write_record
from studies.diagonal.networks import Regression, Setting, draw_networks
from studies.sentiment.sentences import fetched, read_sentences
from studies.sentiment.training import encode, fine_tune
from studies.sentiment.zoo import PLAIN, TRAINING

BUDGETS: Final = (5, 10, 20, 40)  # steps of Auto-PGD, whose schedule depends on them
STEPS: Final = 40  # of the quasi-Newton ascent
TOLERANCE: Final = 0.01
REACHED: Final = 0.99  # of the maximum
RELEASED_STEPS: Final = 20
EXAMPLES: Final = 8  # of a batch of language
LENGTH: Final = 32  # characters that a language model takes as input


# ---- models


class Made(NamedTuple):
    """Hold a model in eval mode, its loss and the batch that it is measured on."""

    model: nn.Module
    loss: Loss
    batch: Any


@final
class Diagonal(nn.Module):
    """Hold a diagonal network x'(u * v), as a symmetric pair of width 1 for each coordinate."""

    def __init__(self, u: Tensor, v: Tensor) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(u.clone()), nn.Parameter(v.clone())

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ (self.u * self.v)


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return |X beta - y|^2, the loss of the diagonal networks."""
    loss: Tensor = (model(batch[0]) - batch[1]).square().sum()
    return loss


def vision(index: int, steps: int | None = None) -> Made:
    """Return a vision transformer of the demonstration's zoo, on 64 training images."""
    digits = load_digits(train_points=300)
    model = train(draw_recipe(index, steps=steps), digits.train_images, digits.train_labels)
    return Made(model, cross_entropy, {"pixel_values": digits.train_images[:64], "labels": digits.train_labels[:64]})


def diagonal(seed: int, dimension: int = 200) -> Made:
    """Return a diagonal network fitted to a regression problem of 100 points, on all of them."""
    generator = torch.Generator().manual_seed(seed)
    regression = Regression.draw(dimension // 2, generator, dimension=dimension)
    setting = Setting(dimension // 2, (0.1, 0.1), (0.01, 0.01))
    u, v, _ = draw_networks(regression, setting, generator, networks=1)
    return Made(Diagonal(u[0], v[0]).eval(), squares, (regression.X, regression.y))


def _films() -> list[Any]:
    return read_sentences(fetched(), pretrained_encoder())["films"][:TRAINING]


def fine_tuned() -> Made:
    """Return a BERT fine-tuned to tell good film reviews from bad ones, on 8 of them."""
    films = _films()
    return Made(fine_tune(PLAIN, films), cross_entropy, encode(films[:EXAMPLES]))


SMALL: Final = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
CAUSAL: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "GPT2": (
        "GPT2LMHeadModel",
        {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "Llama": (
        "LlamaForCausalLM",
        {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"num_key_value_heads": 4, "max_position_embeddings": LENGTH},
    ),
}


@one_thread()
def causal(name: str, steps: int = 600) -> Made:
    """Return a small causal language model trained on the letters of film reviews, on 8 stretches of them."""
    kind, settings = CAUSAL[name]
    config = load_object(f"transformers:{name}Config", "a configuration")(**SMALL, **settings)
    text = "\n".join(each.text for each in _films()).encode("ascii", "ignore")
    letters = torch.tensor(list(text))[: len(text) // LENGTH * LENGTH].reshape(-1, LENGTH)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = load_object(f"transformers:{kind}", "a model")(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        rows = letters[torch.randperm(len(letters), generator=generator)[:32]]
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        schedule.step()
    batch = letters[:EXAMPLES]
    return Made(model.eval(), next_token_cross_entropy, {"input_ids": batch, "labels": batch})


GEOMETRIES: Final = ("euclidean", "adaptive", "inv", "mix")
Radii = Mapping[str, tuple[float, ...]]


def _radii(*found: tuple[float, ...]) -> Radii:
    return dict(zip(GEOMETRIES, found, strict=True))


_VISION: Final = _radii((0.05, 0.15, 0.3), (0.5, 1.0, 2.0), (0.1, 0.3, 0.6), (0.1, 0.3, 0.6))
_LANGUAGE: Final = _radii((0.02, 0.1, 0.3), (0.2, 0.8, 2.5), (0.04, 0.15, 0.5), (0.015, 0.03, 0.05))
_BERT: Final = _radii((0.05,), (1.0,), (0.1,), (0.1,))

Model = tuple[Callable[[], Made], Radii, tuple[int, int]]
"""How a model is made, the radii at which the loss rises by about 0.1, 1 and 4, and the steps and restarts of the
ascents whose best is taken for the maximum."""

MODELS: Final[dict[str, Model]] = {
    "diagonal network": (partial(diagonal, 0), dict.fromkeys(GEOMETRIES, (0.1, 0.5, 1.0)), (60, 1)),
    "vision transformer 0": (partial(vision, 0), _VISION, (60, 1)),
    "GPT-2": (partial(causal, "GPT2"), _LANGUAGE, (60, 1)),
    "Llama": (partial(causal, "Llama"), _LANGUAGE, (60, 1)),
    "vision transformer 1": (partial(vision, 1), _VISION, (60, 1)),
    "fine-tuned BERT": (fine_tuned, _BERT, (40, 0)),
}
FAST: Final[dict[str, Model]] = {
    "vision transformer": (partial(vision, 0, 5), {"inv": (0.3,), "euclidean": (0.1,)}, (5, 0)),
    "diagonal network": (partial(diagonal, 0, 20), {"adaptive": (0.1,)}, (5, 1)),
}


# ---- the study


@one_thread()
def run(out: Path, *, fast: bool, command: str, progress: Progress) -> Record:
    """Ascend in all cases and write OUT/passes.json; OUT/cases holds one file for each, from which a run continues."""
    chosen = FAST if fast else MODELS
    make = lru_cache(maxsize=1)(lambda name: chosen[name][0]())  # one model at a time
    cells = {
        f"{name} {geometry} {radius:g}": partial(_case, make, name, geometry, radius, thorough)
        for name, (_, radii, thorough) in chosen.items()
        for geometry in radii
        for radius in radii[geometry]
    }
    cases = resume(out / "cases", cells, what="passes", progress=progress)
    return write_record(out / "passes.json", {"cases": cases}, command)


def load(folder: Path) -> Record:
    """Read the record in a folder."""
    return read_record(folder / "passes.json")


def _case(make: Callable[[str], Made], name: str, geometry: str, radius: float, thorough: tuple[int, int]) -> Record:
    """Return the trajectories of all ascents in one ball around one model: the best increases in loss after 1, 2, ...
    evaluations of loss and gradient, the model's own first.

    maximum: the best increase that any ascent found. auto_pgd: by its steps. released: one iteration an entry, three
    passes each (two forward, one backward), in Euclidean and adaptive balls. stopped: of methods with the tolerance.
    """
    made = make(name)
    resolved = _geometry(made, geometry)
    objective = PreparedModel.of(made.model, made.loss, [made.batch], resolved).objective(0)

    def ascended(method: Any) -> list[float]:
        traced = _Traced(objective)
        method.maximise(traced, radius, torch.Generator().manual_seed(0))
        return _best_so_far(traced.losses)

    found = {str(steps): ascended(AutoPGD(steps=steps)) for steps in BUDGETS}
    newton = ascended(QuasiNewton(steps=STEPS))
    stopped = {
        "auto_pgd": ascended(AutoPGD(steps=STEPS, tolerance=TOLERANCE)),
        "quasi_newton": ascended(QuasiNewton(steps=STEPS, tolerance=TOLERANCE)),
    }
    steps, restarts = thorough
    most = [ascended(AutoPGD(steps=steps, restarts=restarts)), ascended(QuasiNewton(steps=steps, restarts=restarts))]
    everything, released = [*found.values(), newton, *stopped.values(), *most], None
    if geometry in ("euclidean", "adaptive"):
        legacy = LegacyWorstCase(resolved, radius, RELEASED_STEPS).of(made.model, made.loss, [made.batch])
        released = _best_so_far(legacy.loss_steps[0])
        # The released ascent leaves the ball where a weight is 0: its increases count only where it stays inside.
        if (legacy.norms[0] or math.inf) <= radius * (1 + 1e-6):
            everything.append(released)
    return {
        "model": name,
        "geometry": geometry,
        "radius": radius,
        "loss": objective.value(objective.zero()),
        "maximum": max(each[-1] for each in everything),
        "auto_pgd": {steps: {"rises": rises} for steps, rises in found.items()},
        "quasi_newton": {"rises": newton},
        "released": None if released is None else {"rises": released},
        "stopped": {method: {"rises": rises} for method, rises in stopped.items()},
    }


@final
class _Traced:
    """An objective whose losses are kept."""

    def __init__(self, objective: Any) -> None:
        self.zero, self.sample, self._objective = objective.zero, objective.sample, objective
        self.losses: list[float] = []

    def value(self, z: Params) -> float:
        self.losses.append(self._objective.value(z))
        return self.losses[-1]

    def value_and_gradient(self, z: Params) -> tuple[float, Params]:
        loss, gradient = self._objective.value_and_gradient(z)
        self.losses.append(loss)
        return loss, gradient


def _best_so_far(losses: Sequence[float]) -> list[float]:
    return (np.maximum.accumulate(losses) - losses[0]).tolist()


def _geometry(made: Made, name: str) -> Geometry:
    if name == "adaptive":
        return Adaptive()
    if isinstance(made.model, Diagonal) and name in ("inv", "mix"):
        sides = [lambda w, side=side: w[side][:, None, None] for side in ("u", "v")]
        pair = declare_pair(made.model, "diagonal", "u/v", G=sides[0], H=sides[1])
        return Quotient(name, "exact", symmetries=Symmetries((pair,)))
    return as_geometry(name)


# ---- what a case says, and the tables


def rises_of(case: Record, method: str) -> list[float]:
    """Return the trajectory of a method: "quasi_newton", "released", or the steps of Auto-PGD."""
    return (case[method] if method in case else case["auto_pgd"][method])["rises"]


def passes(case: Record, method: str) -> float:
    """Return the passes to 99 % of the maximum, a forward and a backward one counting as one; infinite if never."""
    reached = np.flatnonzero(np.array(rises_of(case, method)) >= REACHED * case["maximum"])
    if not len(reached):
        return math.inf
    return 1.5 * int(reached[0]) if method == "released" else int(reached[0]) + 1


def ratio(case: Record, steps: int) -> float:
    """Return the quasi-Newton ascent's increase over that of Auto-PGD with so many steps, at equal passes."""
    newton = rises_of(case, "quasi_newton")
    return newton[min(steps, len(newton) - 1)] / rises_of(case, str(steps))[-1]


def misses(case: Record, method: str) -> bool:
    """Return whether the ascent that was stopped by the tolerance lacks more than that of the maximum."""
    return bool(case["stopped"][method]["rises"][-1] < (1 - TOLERANCE) * case["maximum"])


def quantile(taken: Sequence[float], share: float) -> tuple[float, float, float]:
    """Return a quantile of the passes over cases, with a bootstrap interval (95 %)."""
    draw, values = np.random.default_rng(0), np.minimum(taken, 1e6)  # an order, so that "never" has a place in it
    found = partial(np.quantile, q=share, method="higher")
    drawn = [float(found(draw.choice(values, len(values)))) for _ in range(2000)]
    low, high = np.quantile(drawn, (0.025, 0.975), method="nearest")
    return float(found(values)), float(low), float(high)


def missed(cases: Sequence[Record], method: str) -> tuple[int, float, float]:
    """Return in how many cases a stopped ascent lacks more than the tolerance; an interval of the share (95 %)."""
    count = sum(misses(case, method) for case in cases)
    found = stats.binomtest(count, len(cases)).proportion_ci(0.95, "exact")
    return count, float(found.low), float(found.high)


METHODS: Final = {
    "quasi_newton": "quasi-Newton",
    "20": "Auto-PGD, 20 steps",
    "40": "Auto-PGD, 40 steps",
    "released": "released ascent, 20 iterations",
}
STOPPED: Final = {"quasi_newton": ("quasi-Newton", "quasi_newton"), "auto_pgd": ("Auto-PGD", "40")}


def tables(record: Record) -> Tables:
    """Return passes to the maximum, the quasi-Newton ascent at equal passes, and what a tolerance keeps."""
    cases = record["cases"]
    to_maximum, budgets, stops = [], [], []
    for method, name in METHODS.items():
        taken = [passes(case, method) for case in cases if method != "released" or case["released"] is not None]
        if taken:
            spread = [_interval(*quantile(taken, share)) for share in (0.5, 0.9)]
            to_maximum.append([name, *spread, f"{np.isinf(taken).sum()} of {len(taken)}"])
    for steps in BUDGETS:
        ratios = np.array([ratio(case, steps) for case in cases])
        spread = [f"{ratios.min():.3f}", f"{np.median(ratios):.3f}", f"{ratios.max():.3f}"]
        budgets.append([str(steps), *spread, f"{(ratios < 0.99).sum()} of {len(ratios)}", str((ratios > 1.01).sum())])
    for method, (name, unstopped) in STOPPED.items():
        lengths = [len(case["stopped"][method]["rises"]) for case in cases]
        count, low, high = missed(cases, method)
        share = f"{count} of {len(cases)} [{100 * low:.0f} %, {100 * high:.0f} %]"
        within = [
            case["stopped"][method]["rises"][-1] >= (1 - TOLERANCE) * rises_of(case, unstopped)[-1]
            for case in cases
            if misses(case, method)
        ]
        ends = (f"{np.median(lengths):.0f}", f"{np.quantile(lengths, 0.9, method='higher'):.0f}")
        stops.append([name, *ends, share, str(sum(within))])
    return {
        "passes": table(["Ascent", "Median of passes to 99 %", "90th percentile", "Never"], to_maximum),
        "budgets": table(["Steps", "Smallest", "Median", "Largest", "Over 1 % less", "Over 1 % more"], budgets),
        "stops": table(
            ["Ascent", "Median of passes", "90th percentile", "More than 1 % below the maximum", "Of them as 40 steps"],
            stops,
        ),
    }


def _interval(*ends: float) -> str:
    value, low, high = ("never" if each == 1e6 else f"{each:g}" for each in ends)
    return f"{value} [{low}, {high}]"
