"""The exit codes that click does not know, and what is to be done before one of them."""

from __future__ import annotations

import os
import sys

INTERNAL_ERROR = 70  # EX_SOFTWARE: a script can tell a defect of this package from a finding
INTERRUPTED = 130
OUTPUT_CLOSED = 141  # as if ended by SIGPIPE, like other programs whose reader has left


def discard_output() -> None:
    """What is still in the buffer must not be written when Python ends: its reader has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
