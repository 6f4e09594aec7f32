"""The requests of the toy engine: shared prefixes, conversations that go on, and how often things go wrong."""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field

from aiokvoffload.keys import CacheIdentity, block_hashes, root_hash
from aiokvoffload.offloader import LoadTicket, TransferHandle
from aiokvoffload.specs import ReqContext

_KEPT_CONVERSATIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyWorkload:
    """What requests look like, and how often a step brings something special; lengths are drawn up to the bound.

    Attributes:
        prefix_count: Prompts that many requests begin with.
        prefix_blocks: Blocks of such a prompt.
        suffix_blocks: Blocks of a prompt behind it.
        output_blocks: Blocks to generate.
        conversation_blocks: Conversations as long as this end.
        most_waiting: Requests in the queue; further ones do not arrive.
        most_running: Requests that run at the same time.
        chunk_blocks: Blocks of a prompt that a step computes.
        arrival_chance: That a request arrives.
        follow_up_chance: That it goes on with a conversation that was finished.
        fence_chance: That a request does not wait for its load but runs behind a fence.
        impatience_chance: That a load stops waiting for blocks which are still being written.
        forget_chance: That the prefix cache of the GPU is emptied.
        preempt_chance: That a running request is put back into the queue.
        abort_chance: That a request is aborted.
        reset_chance: That CPU memory is emptied.
        bump_chance: That the weights change.
    """

    prefix_count: int = 5
    prefix_blocks: int = 5
    suffix_blocks: int = 3
    output_blocks: int = 2
    conversation_blocks: int = 8
    most_waiting: int = 8
    most_running: int = 4
    chunk_blocks: int = 2
    arrival_chance: float = 0.5
    follow_up_chance: float = 0.4
    fence_chance: float = 0.5
    impatience_chance: float = 0.1
    forget_chance: float = 0.1
    preempt_chance: float = 0.05
    abort_chance: float = 0.1
    reset_chance: float = 0.005
    bump_chance: float = 0.005


@dataclass(slots=True, eq=False)
class ToyRequest:
    """One request: what it will have computed in the end, and how far it is.

    Attributes:
        number: Counts requests.
        ctx: Its context; a new one in each epoch.
        tokens: Prompt and output.
        hashes: Of all its GPU blocks.
        known_blocks: Blocks whose tokens are known: the prompt's, and what was generated before a preemption.
        blocks: Its GPU blocks, from the start.
        computed_blocks: How many of them hold their content.
        computed_tokens: Tokens that the next block holds already.
        offered_blocks: Offloaded blocks that it need not offer any more.
        resident_blocks: How many of its blocks came from the prefix cache of the GPU.
        generation: Resets of the offloader before `ticket` was made.
        ticket: Matched and pinned in CPU memory, while it waits.
        load: Under way; what is computed behind its fence is not shown to anyone before it is good.
        is_fenced: It runs although its load has not landed.
    """

    number: int
    ctx: ReqContext
    tokens: list[int]
    hashes: list[bytes]
    known_blocks: int
    blocks: list[int] = field(default_factory=list)
    computed_blocks: int = 0
    computed_tokens: int = 0
    offered_blocks: int = 0
    resident_blocks: int = 0
    generation: int = 0
    ticket: LoadTicket | None = None
    load: TransferHandle | None = None
    is_fenced: bool = False


class ToyArrivals:
    """Draws requests.

    Args:
        workload: What they look like.
        block_tokens: Tokens of a GPU block.
        source: Of all randomness.
    """

    def __init__(self, workload: ToyWorkload, block_tokens: int, source: random.Random) -> None:
        self._workload = workload
        self._block_tokens = block_tokens
        self._random = source
        self._root = root_hash(CacheIdentity(model="toy"))
        self._prefixes = [self._draw_tokens(workload.prefix_blocks) for _ in range(workload.prefix_count)]
        self._conversations: deque[list[int]] = deque(maxlen=_KEPT_CONVERSATIONS)
        self._numbers = itertools.count()

    def draw(self, epoch: int) -> ToyRequest:
        """Return a new request, which begins like others did."""
        workload = self._workload
        start = self._random.choice(self._prefixes)
        if self._conversations and self._random.random() < workload.follow_up_chance:
            start = self._random.choice(self._conversations)
        prompt = start + self._draw_tokens(workload.suffix_blocks)
        tokens = prompt + self._draw_tokens(workload.output_blocks)
        number = next(self._numbers)
        hashes = block_hashes(self._root, tokens, self._block_tokens)
        return ToyRequest(number, make_context(number, epoch), tokens, hashes, len(prompt) // self._block_tokens)

    def finish(self, request: ToyRequest) -> None:
        """Let later requests go on with what this one has generated."""
        if len(request.hashes) < self._workload.conversation_blocks:
            self._conversations.append(request.tokens)

    def _draw_tokens(self, most_blocks: int) -> list[int]:
        return [self._random.getrandbits(16) for _ in range(self._block_tokens * self._random.randint(1, most_blocks))]


def make_context(number: int, epoch: int) -> ReqContext:
    """Return the context of a request; it is bound to one epoch, so each epoch needs another `req_id`."""
    return ReqContext(f"request {number} in epoch {epoch}")
