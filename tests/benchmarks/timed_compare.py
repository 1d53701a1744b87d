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
        start, busy = time.perf_counter(), time.process_time()
        run.measure_all()
        busy = time.process_time() - busy
        units = worker.total(run.done)
        seconds = time.perf_counter() - start
    print(f"{run.done} of {units} units, {busy} seconds of processor, {seconds} seconds in all", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
