"""Write how near `align` comes, how low `descend_orbit` goes, and their time, or compare with an earlier file:

    python -m tests.benchmarks.orbit_before_after before.json             writes
    python -m tests.benchmarks.orbit_before_after before.json --compare   prints both

The twins that are aligned, elsewhere on their orbits with noise added, are stored beside the file, so that both runs
align the same ones. Descended is what docs/orbit.md's table descends, of a language model that is trained briefly.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

import quotient_manifolds as qm
from quotient_manifolds.symmetries import find_permutations
from studies.networks import data, trained
from studies.rounding import RATE, STEPS, WEIGHTS, encoded, minilm
from tests.nets.attention import BY_NAME, IDS, llama

NOISE = (0.0, 0.05, 0.3)
"""Relative to the typical size of each parameter."""
TRAINING = 100


def networks() -> dict[str, tuple[nn.Module, Any]]:
    """Return small models in float64, none of whose biases is 0, with a batch."""
    torch.manual_seed(0)
    made = {name: (BY_NAME[name].build(), BY_NAME[name].inputs()) for name in ("torch encoder", "BERT", "GPT-2")}
    made["llama"] = llama(), IDS
    made["encoder layer"] = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.randn(2, 6, 32)
    for model, _ in made.values():
        model.double().eval()
        with torch.no_grad():
            for w in model.parameters():
                w += 0.1 * torch.randn_like(w)
    return {name: (model, _in_double(batch)) for name, (model, batch) in made.items()}


def _in_double(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: _in_double(each) for name, each in batch.items()}
    return batch.double() if batch.is_floating_point() else batch


def timed(work: Callable[[], float]) -> dict[str, float]:
    """Return what work returns, and its processor time in seconds."""
    start = time.process_time()
    value = work()
    return {"value": value, "seconds": time.process_time() - start}


def twins(path: Path) -> dict[str, Any]:
    """Return parameters elsewhere on the orbits by network and noise, stored at the first call."""
    if not path.exists():
        found, draw = {}, torch.Generator().manual_seed(1)
        for name, (model, batch) in networks().items():
            moved = qm.find_symmetries(model, batch).transformed(model, log_scale=0.4, seed=1)
            for noise in NOISE:
                found[f"{name}, {noise:.0%}"] = {
                    key: w + noise * w.square().mean().sqrt() * torch.randn(w.shape, generator=draw, dtype=w.dtype)
                    for key, w in moved.state_dict().items()
                    if w.is_floating_point()
                }
        torch.save(found, path)
    return dict(torch.load(path))


def alignments(path: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the distance from the network, relative, of each of its twins after alignment, with its time."""
    for name, (model, batch) in networks().items():
        known = {"symmetries": qm.find_symmetries(model, batch), "permutations": find_permutations(model, batch)}
        for noise in NOISE:
            twin = copy.deepcopy(model)
            twin.load_state_dict(twins(path)[f"{name}, {noise:.0%}"], strict=False)
            yield f"align {name}, {noise:.0%}", timed(partial(aligned, twin, model, batch, known))


def aligned(twin: nn.Module, model: nn.Module, batch: Any, known: dict[str, Any]) -> float:
    """Return the distance after alignment, NaN where it is refused, as where the function would change."""
    try:
        return qm.align(twin, model, batch, condition=1e6, **known).distance
    except ValueError:
        return math.nan


def descents() -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the objective after a descent, relative to the one before, with its time."""
    inputs = {name: value[:2, :12] for name, value in encoded().items()}
    (_, _), (test, _), _ = data("language model")
    for subject, model, batch in (
        ("MiniLM, attention", minilm(), inputs),
        ("language model", trained("language model", 0, TRAINING), (test[:4],)),
    ):
        names = [name for name, w in model.named_parameters() if WEIGHTS[subject](name, w)]
        symmetries = qm.find_symmetries(model, batch)
        for objective in (qm.RoundingError(4, names=names), qm.Sparsity(names=names)):
            work = partial(descended, model, objective, batch, symmetries)
            yield f"descend {subject}, {type(objective).__name__}", timed(work)


def descended(model: nn.Module, objective: Any, batch: Any, symmetries: qm.Symmetries) -> float:
    end = qm.descend_orbit(model, objective, batch, symmetries=symmetries, steps=STEPS, learning_rate=RATE)
    return end.after / end.before


def main(path: Path, *options: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    before, found = json.loads(path.read_text(encoding="utf-8")) if options else {}, {}
    for name, each in chain(alignments(path.with_suffix(".pt")), descents()):
        found[name] = each
        parts = [f"{part['value']:.3g} in {part['seconds']:.1f} s" for part in (before.get(name), each) if part]
        print(f"{name}: {', then '.join(parts)}", flush=True)
    if not options:
        path.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
