"""What it costs to go where a measure begins, in passes: forward and backward on the pretrained BERT, one thread.

    python -m tests.benchmarks.start_cost [ROWS TOKENS [ROUNDS]]

Bare passes and work take turns in one process, in processor time; printed are medians, in passes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from quotient_manifolds.geometry import Quotient
from quotient_manifolds.symmetries import balance, propose_symmetries
from quotient_manifolds.symmetries.canonical import canonical
from tests.benchmarks.pretrained import bare_pass, batch_of, loss, pretrained
from tests.benchmarks.running import in_passes


def main(rows: int = 16, tokens: int = 32, rounds: int = 5) -> None:
    torch.set_num_threads(1)
    model, batch = pretrained(), batch_of(rows, tokens)
    bare = bare_pass(model, batch)
    symmetries = propose_symmetries(model, batch, evaluate=loss)
    quotient = Quotient("inv", symmetries=symmetries)

    params = {name: w.detach() for name, w in model.named_parameters()}
    works: dict[str, Callable[[], object]] = {
        "canonical point": lambda: canonical(symmetries.groups, params),
        "tangent space, canonical point included": lambda: quotient.tangent_space(model),
        "balance": lambda: balance(model, symmetries),
        "transformed": lambda: symmetries.transformed(model, seed=1),
    }
    bare()
    print(f"{rows} x {tokens} tokens, passes")
    for name, work in works.items():
        print(f"{name}: {in_passes(work, bare, rounds):.2f}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
