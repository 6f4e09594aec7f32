"""What the manager's decisions travel in, from the scheduler to the workers, inside vLLM's own messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import LoadStoreSpec


class SlotSpec(LoadStoreSpec):
    """Slots of CPU memory.

    It is pickled, so the class lies at module level and holds numbers only.

    Attributes:
        ticket: What the manager calls the decision; 0 if there is nothing to copy.
        slots: One per offloaded block; None if the blocks have gone, so that the load has failed before it began.
    """

    def __init__(self, ticket: int, slots: Sequence[int] | None) -> None:
        self.ticket = ticket
        self.slots: NDArray[np.int64] | None = None if slots is None else np.array(slots, dtype=np.int64)

    def __repr__(self) -> str:
        return f"SlotSpec({self.ticket}, {None if self.slots is None else self.slots.tolist()})"
