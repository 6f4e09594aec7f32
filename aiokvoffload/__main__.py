"""`python -m aiokvoffload` and the console script."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line and return its exit status."""
    from aiokvoffload.cli.interrupts import ignore_interrupts, leave_when_interrupted

    leave_when_interrupted()  # before the imports that take long

    from aiokvoffload.cli.main import run

    try:
        return run()
    finally:
        ignore_interrupts()


if __name__ == "__main__":
    sys.exit(main())
