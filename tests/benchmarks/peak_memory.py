"""Peak resident memory of a process with one kind of work: python -m tests.benchmarks.peak_memory KIND SIZE.

KIND is "bare", for forward and backward passes on a batch of SIZE x 64 tokens, or the index of a geometry, for
worst-case sharpness in it, all that the function does. Prints bytes before the work, at its peak, and of parameters.
"""

from __future__ import annotations

import sys

import torch

from quotient_manifolds.sharpness import worst_case_sharpness
from tests.benchmarks.pretrained import GEOMETRIES, batch_of, loss, pretrained
from tests.benchmarks.running import peak

STEPS = 20


def main(kind: str, size: int) -> None:
    torch.set_num_threads(1)
    model, batch = pretrained(), batch_of(size)
    parameters = tuple(model.parameters())
    for w in parameters:  # weights in a mapped file count once they are read, and bare passes do not read all
        w.detach().sum()
    before = peak()
    if kind == "bare":
        for _ in range(3):
            torch.autograd.grad(loss(model, batch), parameters, allow_unused=True)
    else:
        geometry = GEOMETRIES[int(kind)]
        worst_case_sharpness(model, loss, [batch], geometry=geometry, radius=0.1, steps=STEPS)
    print(before, peak(), sum(w.numel() * w.element_size() for w in parameters))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
