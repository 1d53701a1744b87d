"""What a whole measure costs in passes: forward and backward of the same batch, on the pretrained BERT, one thread.

    python -m tests.benchmarks.whole_measures [ROWS TOKENS [ROUNDS]]

Bare passes and measures take turns in one process, in processor time; printed are medians, in passes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import quotient_manifolds as qm
from quotient_manifolds.symmetries import propose_symmetries
from tests.benchmarks.pretrained import bare_pass, batch_of, loss, pretrained
from tests.benchmarks.running import in_passes


def main(rows: int = 16, tokens: int = 32, rounds: int = 3) -> None:
    torch.set_num_threads(1)
    model, batch = pretrained(), batch_of(rows, tokens)
    bare = bare_pass(model, batch)
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
            cost = in_passes(partial(measure, model, loss, [batch], geometry=geometry), bare, rounds)
            print(f"{name}, {kind}: {cost:.1f}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
