"""Name the exit codes of all commands, without click, which may not be installed."""

from __future__ import annotations

import os
import sys

NEGATIVE_FINDING = 1
INTERNAL_ERROR = 70  # EX_SOFTWARE: a script can tell a defect of this package from a finding
INTERRUPTED = 130
OUTPUT_CLOSED = 141  # as if ended by SIGPIPE, like other programs whose reader has left


def discard_output() -> None:
    """Discard what is still in the buffer: when Python ends, it would be written to a reader that has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
