"""Run the command line. This module needs nothing installed, so that it can say what is missing."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Any

from quotient_manifolds.cli.exits import INTERNAL_ERROR, INTERRUPTED, OUTPUT_CLOSED, discard_output

# Read by the Hugging Face libraries when they are imported: no downloads, and no bars or warnings between our lines.
QUIET_AND_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}


def main() -> None:
    """Run the console script `quotient-manifolds`; leave by SystemExit with one of the documented exit codes."""
    os.environ.update(QUIET_AND_OFFLINE)
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict":  # an ASCII terminal gets ? for what it cannot show
            with contextlib.suppress(AttributeError):
                stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = _run()
        if sys.stdout is not None:  # None where it was closed from the start
            sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        code = OUTPUT_CLOSED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception:
        traceback.print_exc()
        code = INTERNAL_ERROR
    sys.exit(code)


def _run() -> int:
    try:
        import click

        from quotient_manifolds.cli.app import cli
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"click", "rich"}:
            raise
        print('The command line needs click and rich: pip install "quotient-manifolds[cli]".', file=sys.stderr)
        return 2
    try:
        # click's own standalone mode makes 1 of Ctrl-C and of a closed pipe.
        answer: Any = cli(prog_name="quotient-manifolds", standalone_mode=False)
    except click.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    return answer if isinstance(answer, int) else 0
