"""`aiokvoffload replay --workers` in which a rank tells on standard output that it is in full swing."""

from __future__ import annotations

import sys
from functools import partial

from aiokvoffload.cli import replay_workers
from aiokvoffload.cli.interrupts import leave_when_interrupted
from aiokvoffload.cli.main import run
from aiokvoffload.cli.rank_process import RankProcess, Step
from aiokvoffload.cluster import WorkerPort

TOLD_STEP = 10


class TellingRank(RankProcess):
    """Tells when it takes a certain step."""

    step_count = 0

    def take(self, port: WorkerPort, step: Step) -> None:
        self.step_count += 1
        if self.rank == 0 and self.step_count == TOLD_STEP:
            print("in full swing", flush=True)
        super().take(port, step)


if __name__ == "__main__":
    leave_when_interrupted()
    replay_workers.replay_workers = partial(replay_workers.replay_workers, rank_class=TellingRank)
    sys.exit(run(sys.argv[1:]))
