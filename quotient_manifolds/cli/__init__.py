"""Run the command line. This module needs only Python, so that it can say which packages are missing."""

from __future__ import annotations

import os
import sys

# The Hugging Face libraries read these when they are imported: no downloads, no progress bars or warnings of their own.
QUIET_AND_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}


def main() -> None:
    """Run the console script `quotient-manifolds`, and raise SystemExit with one of the documented exit codes."""
    os.environ.update(QUIET_AND_OFFLINE)
    try:
        from quotient_manifolds.cli.app import cli
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"click", "rich"}:
            raise
        print('The command line needs click and rich: pip install "quotient-manifolds[cli]".', file=sys.stderr)
        sys.exit(2)
    cli(prog_name="quotient-manifolds")
