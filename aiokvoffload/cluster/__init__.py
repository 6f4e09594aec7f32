"""One scheduler and many worker processes, a rank each, over one shared memory.

The scheduler decides (`lobby.py` begins, `scheduler.py` goes on); the ranks move (`admission.py`, `port.py`). Jobs
travel inside the engine's own step messages (`jobs.py`); what is said on the library's sockets (`channel.py`,
`peer.py`, `messages.py`) are joins and completions.
"""

from aiokvoffload.cluster.joining import join_offloader
from aiokvoffload.cluster.port import WorkerPort

__all__ = ["WorkerPort", "join_offloader"]
