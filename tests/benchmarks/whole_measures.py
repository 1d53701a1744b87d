"""What a whole measure costs in passes: forward and backward of the same batch, on the pretrained BERT, one thread.

    python -m tests.benchmarks.whole_measures [ROWS TOKENS [ROUNDS]]

Bare passes and measures take turns in one process, in processor time; printed are medians, in passes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import quotient_manifolds as qm
from quotient_manifolds.symmetries import propose_symmetries
from tests.benchmarks.pretrained import batch_of, loss, pretrained
from tests.benchmarks.running import seconds


def main(rows: int = 16, tokens: int = 32, rounds: int = 3) -> None:
    torch.set_num_threads(1)
    model, batch = pretrained(), batch_of(rows, tokens)
    parameters = tuple(model.parameters())

    def bare() -> None:
        torch.autograd.grad(loss(model, batch), parameters, allow_unused=True)

    def one_pass() -> float:
        return statistics.median(seconds(bare, time.process_time) for _ in range(3))

    symmetries = propose_symmetries(model, batch, evaluate=loss)
    geometries: dict[str, Any] = {
        "euclidean": "euclidean",
        "inv, known": qm.Quotient("inv", symmetries=symmetries),
        "inv, found": "inv",
        "inv, full": qm.Quotient("inv", symmetries=symmetries, verify="full"),
    }
    measures: dict[str, Callable[..., qm.Result]] = {
        "gradient norm": qm.gradient_norm,
        "worst case, 20 steps": partial(qm.worst_case_sharpness, radius=0.1, steps=20),
    }
    bare()
    print(f"{rows} x {tokens} tokens, passes")
    for name, measure in measures.items():
        for kind, geometry in geometries.items():
            found = []
            for _ in range(rounds):
                before = one_pass()
                taken = seconds(partial(measure, model, loss, [batch], geometry=geometry), time.process_time)
                found.append(2 * taken / (before + one_pass()))
            print(f"{name}, {kind}: {statistics.median(found):.1f}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
