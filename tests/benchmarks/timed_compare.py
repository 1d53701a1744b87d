"""One process of a timed comparison: python -m tests.benchmarks.timed_compare SPEC OUT, alone or under torchrun.

The clock runs from when every process stands ready, with its libraries imported and one model loaded, until the last of
them has finished.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from quotient_manifolds.compare import Run, Store, joined, read_spec
from quotient_manifolds.load import load_checkpoint


def main(spec: Path, out: Path) -> None:
    torch.set_num_threads(1)
    wanted = read_spec(spec)
    load_checkpoint(wanted.checkpoints[0])
    with Store(out / "store.sqlite") as store, joined(torch.device("cpu")) as worker:
        run = Run(wanted, store, worker, lambda what, done, total: None)
        worker.total(0)
        start = time.perf_counter()
        run.measure_all()
        units = worker.total(run.done)
        seconds = time.perf_counter() - start
    if worker.leads:
        print(f"{units} units in {seconds} seconds, {run.done} of them by the first process")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
