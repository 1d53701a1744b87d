"""Run the command line as python -m quotient_manifolds."""

from __future__ import annotations

from quotient_manifolds.cli import main

if __name__ == "__main__":
    main()
