"""Find the symmetries of small nets, one after another: python -m tests.benchmarks.finding_nets EVERY OUT.

EVERY is 1 for all nets of tests/nets/small.py, with biases and without, n for each n-th. Writes to the file OUT,
as JSON, the processor's seconds and the dimensions by family of each, so that two versions can be compared, and prints
the median of the seconds, the 90th percentile and the largest; one thread, forward passes of the nets not included.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from quotient_manifolds.symmetries import find_symmetries
from tests.nets.small import NETS, net, shown


def main(every: int, out: Path) -> None:
    torch.set_num_threads(1)
    rows = {}
    for name, bias in [(name, bias) for name in NETS for bias in (True, False)][::every]:
        model, x = net(name, bias)
        start = time.process_time()
        found = find_symmetries(model, shown(name, x))
        seconds = time.process_time() - start
        rows[f"{name}, {'with' if bias else 'without'} biases"] = {"seconds": seconds, "families": found.families}
        out.write_text(json.dumps(rows, indent=1))
    seconds = torch.tensor([row["seconds"] for row in rows.values()])
    known = {"nets": len(rows), "median": float(seconds.median()), "nine of ten": float(seconds.quantile(0.9))}
    print({**known, "largest": float(seconds.max())})


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
