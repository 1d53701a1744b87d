"""Settings every test runs under: one torch thread a worker, no network, no progress bars, reproducible examples."""

from __future__ import annotations

import gc
import os
import signal

# Read when a Hugging Face library is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Read when numpy is imported, by workers and by commands that tests run: two threads each would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would the commands that they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: two workers share two cores, and the first call in a process pays for imports.
settings.register_profile(
    "ci",
    deadline=None,
    max_examples=25,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# Garbage is collected less often, and never among what was imported before the first test.
gc.set_threshold(20_000)


def pytest_collection_finish() -> None:
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test that draws from torch's global generator draws the same whatever ran before it."""
    torch.manual_seed(0)
