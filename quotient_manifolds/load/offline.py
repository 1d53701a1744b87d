"""Loading that never reaches for the network, whatever a configuration asks for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()
_INSIDE: list[bool] = []  # what the switch stood at, once for each block that is open in any thread


@contextmanager
def no_network() -> Iterator[None]:
    """Have huggingface_hub refuse every request inside the block; all threads together, until the last has left.

    Its libraries ask it for what a configuration names and a directory lacks: a backbone, a kernel, a list of files.
    """
    from huggingface_hub import constants

    with _LOCK:
        _INSIDE.append(constants.HF_HUB_OFFLINE)
        constants.HF_HUB_OFFLINE = True
        _forget_sessions()
    try:
        yield
    finally:
        with _LOCK:
            before = _INSIDE.pop()  # the first, which is the user's, stays to the end
            if not _INSIDE:
                constants.HF_HUB_OFFLINE = before
                _forget_sessions()


def _forget_sessions() -> None:
    """Sessions of huggingface_hub before 1.0 keep the switch as it stood when they were made."""
    from huggingface_hub import utils

    getattr(utils, "reset_sessions", lambda: None)()


def asked_network(error: BaseException) -> bool:
    """Whether an error, or one that it arose from, is a request that `no_network` refused."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OfflineModeIsEnabled):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
