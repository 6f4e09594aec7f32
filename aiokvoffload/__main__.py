"""`python -m aiokvoffload` and the console script."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line and return its exit status."""
    from aiokvoffload.cli.interrupts import leave_when_interrupted

    leave_when_interrupted()  # before the imports that take long

    from aiokvoffload.cli.main import run

    return run()


if __name__ == "__main__":
    sys.exit(main())
