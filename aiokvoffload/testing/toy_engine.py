"""A small LLM server over an offloader, in the shape of the real ones, that checks every byte it reads.

It has GPU blocks with reference counts, a prefix cache of its own, a waiting queue and running requests. Its only
model is a function from a block's hash to bytes: a step writes these bytes on the compute stream, and reads all
blocks of the prefix before, as attention does.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import shake_128

import numpy as np

from aiokvoffload.devices.base import Event, Stream
from aiokvoffload.keys import CacheIdentity, OffloadKey, block_hashes, offload_keys, root_hash
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.offloader import LoadTicket, TransferHandle
from aiokvoffload.offloader.machine import OffloaderMachine
from aiokvoffload.specs import LookupResult, ReqContext
from aiokvoffload.testing.order import OrderChecker
from aiokvoffload.testing.toy_blocks import ToyBlocks

_KEPT_CONVERSATIONS = 8
_Place = tuple[OffloadKey, bytes]
"""Where a load finds a GPU block: the offloaded block, and which block of it."""


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


@dataclass(frozen=True, slots=True)
class _Check:
    """A block that a step has read with the wrong content; excused if the load it came from fails."""

    block: int
    load: TransferHandle | None


@dataclass(frozen=True, slots=True)
class _Write:
    """Tokens that a step writes: the half-open range `tokens` of one block."""

    block: int
    block_hash: bytes
    tokens: slice


class ToyEngine:
    """Serves random requests, a step at a time; the same seed gives the same requests.

    Each step polls the offloader first. How far copies land between steps is up to the driver.

    Args:
        offloader: Of `kv_caches`, with `compute_stream`; either front door, for a step waits for nothing.
        kv_caches: The GPU blocks, in CPU tensors, of one KV group.
        checker: Runs and watches the steps, and was given to the offloader.
        compute_stream: Runs the steps.
        source: Of all randomness.
        workload: The requests.
        free_too_early: Give GPU blocks back without waiting until the handles that touch them are idle. Wrong on
            purpose, to see it found.

    Attributes:
        counts: How often each thing has happened.
        waiting: Requests that hold at most a ticket and blocks of the prefix cache.
        running: Requests that are loading or computing.
    """

    def __init__(
        self,
        offloader: OffloaderMachine,
        kv_caches: CanonicalKVCaches,
        checker: OrderChecker,
        compute_stream: Stream,
        source: random.Random,
        *,
        workload: ToyWorkload | None = None,
        free_too_early: bool = False,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.waiting: deque[ToyRequest] = deque()
        self.running: list[ToyRequest] = []
        self.blocks = ToyBlocks(kv_caches.block_count, free_too_early=free_too_early)
        self._offloader = offloader
        self._checker = checker
        self._compute_stream = compute_stream
        self._random = source
        self._workload = workload or ToyWorkload()
        self._factor = offloader.block_size_factor
        self._block_tokens = kv_caches.groups[0].block_tokens
        self._pages = [canonical.tensor.numpy() for canonical in kv_caches.tensors]
        self._regions = [f"GPU tensor {index}" for index in range(len(self._pages))]
        self._root = root_hash(CacheIdentity(model="toy"))
        self._prefixes = [
            self._draw_tokens(self._workload.prefix_blocks) for _ in range(self._workload.prefix_count)
        ]
        self._conversations: deque[list[int]] = deque(maxlen=_KEPT_CONVERSATIONS)
        self._numbers = itertools.count()
        self._generation = self._epoch = 0
        self._loading: dict[_Place, tuple[int, TransferHandle]] = {}
        self._failed_checks: list[_Check] = []
        self._watch(kv_caches)

    @property
    def is_drained(self) -> bool:
        """All requests are over and all GPU blocks free."""
        return not self.waiting and not self.running and self.blocks.free_count == self.blocks.block_count

    @property
    def wrong_block_count(self) -> int:
        """How many blocks were read with the wrong content; known once everything has landed."""
        return sum(
            check.load is None or (check.load.result is not None and check.load.result.success)
            for check in self._failed_checks
        )

    def step(self, *, is_open: bool = True) -> Event:
        """Do one step and return the event of its work on the compute stream.

        Args:
            is_open: New requests may arrive.
        """
        workload = self._workload
        self._offloader.poll()
        for request in list(self.running):
            self._settle_load(request)
        if is_open and len(self.waiting) < workload.most_waiting and self._chance(workload.arrival_chance):
            self.waiting.append(self._make_request())
        if self.running and self._chance(workload.preempt_chance):
            self._preempt(self._random.choice(self.running))
        if (self.running or self.waiting) and self._chance(workload.abort_chance):
            self._abort(self._random.choice([*self.running, *self.waiting]))
        if self._chance(workload.forget_chance):
            self.blocks.forget()
        if self._chance(workload.reset_chance):
            self._reset()
        if self._chance(workload.bump_chance):
            self._bump_epoch()
        for request in list(self.waiting):
            if len(self.running) < workload.most_running:
                self._admit(request)
        self._compute()
        return self._checker.record(self._compute_stream)

    # Requests come, wait and go

    def _make_request(self) -> ToyRequest:
        workload = self._workload
        start = self._random.choice(self._prefixes)
        if self._conversations and self._chance(workload.follow_up_chance):
            start = self._random.choice(self._conversations)
        prompt = start + self._draw_tokens(workload.suffix_blocks)
        tokens = prompt + self._draw_tokens(workload.output_blocks)
        number = next(self._numbers)
        hashes = block_hashes(self._root, tokens, self._block_tokens)
        return ToyRequest(number, self._make_context(number), tokens, hashes, len(prompt) // self._block_tokens)

    def _admit(self, request: ToyRequest) -> None:
        """Match the prefix on the GPU, then in CPU memory, and start to load; or try again in a later step."""
        ticket = request.ticket
        if ticket is None:
            known = request.hashes[: request.known_blocks]
            request.blocks = self.blocks.match(known)
            request.resident_blocks = len(request.blocks)
            request.generation = self._generation
            ticket = request.ticket = self._offloader.prepare_load(
                self._keys(known), request.ctx, resident_tokens=len(request.blocks) * self._block_tokens
            )
            self.counts["GPU hits"] += len(request.blocks)
        if ticket.result is LookupResult.PENDING:
            self.counts["pending"] += 1
            if not self._chance(self._workload.impatience_chance):
                return
            ticket.settle()
        if ticket.result is LookupResult.HIT and not self._start_load(request, ticket):
            self.counts["no room to load"] += 1
            self._leave(request)
            return
        request.ticket = None
        ticket.abort()
        request.computed_blocks = request.resident_blocks
        request.offered_blocks = request.computed_blocks // self._factor
        self.waiting.remove(request)
        self.running.append(request)
        if request.load is not None and request.load.is_sent and self._chance(self._workload.fence_chance):
            request.load.fence()
            request.is_fenced = True
            request.computed_blocks = len(request.blocks)
            self.counts["fenced"] += 1

    def _start_load(self, request: ToyRequest, ticket: LoadTicket) -> bool:
        """Load behind the blocks that the GPU has; False if there are not enough blocks to load into.

        A block that is being loaded for another request from the same place is shared: the copies join.
        """
        first, size = ticket.block_indices[0], ticket.group_sizes[0]
        keys = self._keys(request.hashes)
        # One GPU block can lie in several offloaded blocks, behind which the requests part.
        wanted = [(keys[index // self._factor], request.hashes[index]) for index in range(first, first + size)]
        shared: dict[_Place, int] = {}
        for place in wanted:
            block, load = self._loading.get(place, (-1, None))
            if load is not None and not load.is_settled and request.generation == self._generation:
                shared[place] = block
        fresh = self.blocks.allocate(size - len(shared))
        if fresh is None:
            return False
        self.blocks.refer_to(shared.values())
        blocks = [shared[place] if place in shared else fresh.pop() for place in wanted]
        request.blocks[first:] = blocks
        request.load = ticket.start(blocks)
        self.blocks.follow(request.load)
        for place, block in zip(wanted, blocks, strict=True):
            if request.generation == self._generation and place not in shared:
                self._loading[place] = block, request.load
        self.counts["loads"] += 1
        self.counts["shared blocks"] += len(shared)
        return True

    def _settle_load(self, request: ToyRequest) -> None:
        """Go on with what was loaded; if it has failed, or is overdue, with what was there before."""
        load = request.load
        if load is None or not load.is_settled:
            return
        request.load = None
        if load.result is not None and load.result.success:
            if not request.is_fenced:
                request.computed_blocks = load.result.token_count // self._block_tokens
            request.offered_blocks = load.result.token_count // (self._block_tokens * self._factor)
            request.is_fenced = False
            self._show(request)
            return
        self.counts["failed loads" if load.is_idle else "overdue loads"] += 1
        request.is_fenced = False
        request.computed_blocks, request.computed_tokens = request.resident_blocks, 0
        self.blocks.release(request.blocks[request.resident_blocks :])
        del request.blocks[request.resident_blocks :]

    def _preempt(self, request: ToyRequest) -> None:
        """Store what a running request has computed, whatever the reuse filter thinks, and let it wait."""
        self.counts["preemptions"] += 1
        if request.load is None:
            self._store(request, first=0, filtered=False)
            request.known_blocks = max(request.known_blocks, request.computed_blocks)
        self._leave(request)
        self.running.remove(request)
        self.waiting.appendleft(request)

    def _abort(self, request: ToyRequest) -> None:
        self.counts["aborts while loading" if request.load is not None else "aborts"] += 1
        self._leave(request)
        (self.running if request in self.running else self.waiting).remove(request)

    def _leave(self, request: ToyRequest) -> None:
        """Let go of all that a request holds; what is still being copied becomes free when that is over."""
        if request.ticket is not None:
            request.ticket.abort()
        if request.load is not None:
            self.counts["withdrawn loads"] += request.load.cancel()
        self.blocks.release(request.blocks)
        request.ticket = request.load = None
        request.blocks = []
        request.computed_blocks = request.computed_tokens = request.offered_blocks = 0
        request.is_fenced = False

    # A step of computing

    def _compute(self) -> None:
        """Launch one step: a chunk of each prompt, a token of each output."""
        reads: list[tuple[int, bytes, TransferHandle | None]] = []
        writes: list[_Write] = []
        done: list[ToyRequest] = []
        for request in list(self.running):
            if request not in self.running or (request.load is not None and not request.is_fenced):
                continue
            missing = request.known_blocks - request.computed_blocks
            count = min(missing, self._workload.chunk_blocks) if missing > 0 else 1
            is_decoding = missing <= 0
            if not self._make_room(request, request.computed_blocks + count):
                continue
            first = request.computed_blocks
            hashes = request.hashes
            reads += [(request.blocks[index], hashes[index], request.load) for index in range(first)]
            token = request.computed_tokens
            tokens = slice(token, token + 1) if is_decoding else slice(0, self._block_tokens)
            writes += [_Write(request.blocks[index], hashes[index], tokens) for index in range(first, first + count)]
            request.computed_tokens = tokens.stop % self._block_tokens
            if not request.computed_tokens:
                request.computed_blocks += count
                done.append(request)
        rows = [block for block, _, _ in reads], [write.block for write in writes]
        accesses = [[(region, side) for region in self._regions] for side in rows]
        work = self._make_work(reads, writes)
        self._checker.launch(self._compute_stream, work, *accesses, label="a step")
        self.counts["steps"] += 1
        for request in done:
            if request.load is None:
                self._show(request)

    def _make_work(
        self, reads: Sequence[tuple[int, bytes, TransferHandle | None]], writes: Sequence[_Write]
    ) -> Callable[[], None]:
        epoch, block_tokens = self._epoch, self._block_tokens

        def work() -> None:
            for layer, pages in enumerate(self._pages):
                for block, block_hash, load in reads:
                    if not np.array_equal(pages[block], _content(block_hash, layer, epoch, pages.shape[1])):
                        self._failed_checks.append(_Check(block, load))
                for write in writes:
                    content = _content(write.block_hash, layer, epoch, pages.shape[1])
                    written = pages[write.block].reshape(block_tokens, -1)
                    written[write.tokens] = content.reshape(block_tokens, -1)[write.tokens]
            self.counts["verified blocks"] += len(reads)

        return work

    def _make_room(self, request: ToyRequest, block_count: int) -> bool:
        """Give a request that many GPU blocks; if there are none, preempt the last one in line."""
        missing = block_count - len(request.blocks)
        if missing <= 0:
            return True
        blocks = self.blocks.allocate(missing)
        if blocks is None:
            self.counts["no room to compute"] += 1
            if self.running[-1] is not request or len(self.running) == 1:
                self._preempt(self.running[-1])
            return False
        request.blocks += blocks
        return True

    def _show(self, request: ToyRequest) -> None:
        """Let others have what a request has computed: on the GPU, and in CPU memory."""
        self.blocks.publish(request.hashes[: request.computed_blocks], request.blocks)
        self._store(request, first=request.offered_blocks)
        request.offered_blocks = request.computed_blocks // self._factor
        if request.computed_blocks == len(request.hashes):
            self.counts["finished"] += 1
            if len(request.hashes) < self._workload.conversation_blocks:
                self._conversations.append(request.tokens)
            self._leave(request)
            self.running.remove(request)

    def _store(self, request: ToyRequest, *, first: int, filtered: bool = True) -> None:
        keys = self._keys(request.hashes[: request.computed_blocks])[first:]
        if not keys:
            return
        blocks = request.blocks[first * self._factor : (first + len(keys)) * self._factor]
        handle = self._offloader.store_soon(keys, blocks, request.ctx, filtered=filtered, first_block=first)
        self.counts.update(f"{outcome.value} stores" for outcome in handle.outcomes)
        self.blocks.follow(handle)
        handle.on_idle(self._count_store)

    def _count_store(self, handle: TransferHandle) -> None:
        if handle.result is not None and not handle.result.success:
            self.counts["failed stores"] += 1

    # The whole

    def _reset(self) -> None:
        self.counts["resets"] += 1
        self._generation += 1
        self._loading.clear()
        self._offloader.reset_nowait()

    def _bump_epoch(self) -> None:
        """Change the weights: nothing that was computed before is worth anything."""
        self.counts["epochs"] += 1
        self._generation += 1
        self._epoch += 1
        self._loading.clear()
        self._offloader.bump_epoch_nowait()
        self.blocks.forget()
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        for request in self.waiting:
            self._leave(request)
            request.ctx = self._make_context(request.number)

    def _make_context(self, number: int) -> ReqContext:
        return ReqContext(f"request {number} in epoch {self._epoch}")

    def _keys(self, hashes: Sequence[bytes]) -> list[OffloadKey]:
        return offload_keys(hashes, block_size_factor=self._factor)

    def _draw_tokens(self, most_blocks: int) -> list[int]:
        return [self._random.getrandbits(16) for _ in range(self._block_tokens * self._random.randint(1, most_blocks))]

    def _chance(self, chance: float) -> bool:
        return self._random.random() < chance

    def _watch(self, kv_caches: CanonicalKVCaches) -> None:
        memory = self._offloader.memory
        smallest = min(canonical.page_bytes for canonical in kv_caches.tensors)
        self._checker.watch("slots", memory.address, memory.slot_count, memory.slot_bytes, cell_bytes=smallest)
        for region, canonical in zip(self._regions, kv_caches.tensors, strict=True):
            tensor = canonical.tensor
            self._checker.watch(
                region, tensor.data_ptr(), len(tensor), canonical.page_bytes, row_stride_bytes=tensor.stride(0)
            )


@lru_cache(maxsize=4096)
def _content(block_hash: bytes, layer: int, epoch: int, byte_count: int) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    """Return what a layer of a block holds in an epoch."""
    digest = shake_128(block_hash + bytes([layer]) + epoch.to_bytes(4, "big")).digest(byte_count)
    return np.frombuffer(digest, np.int8)
