"""Measure a random Llama of half a billion parameters: python -m tests.benchmarks.large GEOMETRY [TYPE [STEPS]].

GEOMETRY is "bare", for forward and backward passes alone, "euclidean", "adaptive", "inv" or "mix"; TYPE that of the
weights, such as bfloat16. On 1 x 128 tokens. Prints a dict: parameters, bytes of weights, seconds of a bare forward and
backward pass in single precision, of finding and proving symmetries with the checks, of the ascent, and of a step of
it, bytes of peak resident memory, and the sharpness.
"""

from __future__ import annotations

import os
import sys
import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.geometry import as_geometry
from quotient_manifolds.sharpness import PreparedModel, WorstCase, next_token_cross_entropy
from tests.benchmarks.finding import llama
from tests.benchmarks.running import peak

WORDS, TOKENS, RADIUS = 32000, 128, 0.05


def main(geometry: str, kind: str = "bfloat16", steps: str = "5") -> dict[str, Any]:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    model = llama("medium", getattr(torch, kind))
    words = torch.randint(WORDS, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    batch: dict[str, Tensor] = {"input_ids": words, "labels": words}
    parameters = list(model.parameters())
    result: dict[str, Any] = {
        "parameters": sum(w.numel() for w in parameters),
        "weights": sum(w.numel() * w.element_size() for w in parameters),
        "threads": torch.get_num_threads(),
    }
    if geometry == "bare":
        model = model.float()
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            torch.autograd.grad(next_token_cross_entropy(model, batch), list(model.parameters()))
            seconds.append(round(time.perf_counter() - start, 2))
        return result | {"bare": seconds, "peak": peak()}
    measure = WorstCase(as_geometry(geometry), RADIUS, int(steps))
    start = time.perf_counter()
    prepared = PreparedModel.of(model, next_token_cross_entropy, [batch], measure.geometry)
    result |= {"prepare": round(time.perf_counter() - start, 1), "peak_prepared": peak()}
    start, ticks = time.perf_counter(), [time.perf_counter()]
    found = measure.on(prepared, 0, lambda: ticks.append(time.perf_counter()), {})
    passes = [round(later - earlier, 2) for earlier, later in pairwise(ticks)]
    return result | {
        "ascent": round(time.perf_counter() - start, 1),
        "passes": passes,
        "peak": peak(),
        "value": found.value,
        "base": found.base_loss,
    }


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
