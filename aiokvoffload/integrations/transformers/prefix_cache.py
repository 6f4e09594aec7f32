"""The front door: prefixes of a causal language model, kept below its own cache."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from aiokvoffload.clock import Clock, SystemClock
from aiokvoffload.devices.base import Device
from aiokvoffload.errors import ClosedError, ConfigurationError, InvalidRequestError, StateError
from aiokvoffload.integrations.transformers.batch import Batch
from aiokvoffload.integrations.transformers.compute import ComputeThread
from aiokvoffload.integrations.transformers.generation import (
    Choose,
    Generation,
    Generator,
    OnTokens,
    greedy,
    ignore_tokens,
)
from aiokvoffload.integrations.transformers.identity import identity_of
from aiokvoffload.integrations.transformers.layout import (
    CausalModel,
    check_layers,
    check_model,
    probe_layout,
)
from aiokvoffload.integrations.transformers.prefix import Request, RestoredPrefix, forward_inputs
from aiokvoffload.integrations.transformers.restoring import Restorer
from aiokvoffload.integrations.transformers.saving import Saver
from aiokvoffload.integrations.transformers.scratch import ScratchBlocks, new_block_tensors
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.offloader import Deadlines, Offloader, open_offloader
from aiokvoffload.offloader.parts import TierChoice
from aiokvoffload.specs import ReqContext

Prompts = torch.Tensor | Sequence[int] | Sequence[Sequence[int]]
"""One prompt, or several of any lengths, or a tensor with one row per prompt, padded on the left."""


class PrefixCache:
    """Keeps the prefixes of prompts that a model has seen, and restores them, equal to the bit.

    What is restored are the bytes that the model computed when the prefix was saved. So logits are equal, to the bit,
    to those of the same model that goes on, from the same token, from the cache it had then. A model that computes a
    prompt in one piece and one that computes it in two differ in the last bits anyway, with or without this; where that
    matters, `reproducible` computes every prompt in the same pieces.

    `async with PrefixCache(...)` opens it in the running event loop, asyncio or trio; any number of tasks may use it.
    The model runs in a thread, one call at a time. The model object is not changed.

    Args:
        model: A causal language model of Transformers, in evaluation mode, on one device.
        cpu_bytes: CPU memory for prefixes.
        block_tokens: Tokens of a block; prefixes are kept and restored in whole blocks.
        tiers: Below CPU memory, see `open_offloader`.
        scratch_tokens: Room on the model's device for prefixes on their way. What is longer passes in several parts; of
            a model with sliding windows no more than this is restored.
        identity: Which model it is, for tiers that others use too; by default, a digest of configuration and weights.
        reproducible: `generate` computes each prompt block by block, one prompt a call, and keeps no answers: then what
            it returns does not depend, to the bit, on what was restored. Small blocks make that slow.
        policy: Which prefix leaves first, see `open_offloader`.
        store_threshold: From 2 on, a block is kept only once that many requests have used it.
        compute_stream: On a GPU, the stream that the model runs on; by default the current one when this is opened.
        executor: Of one thread, in which you run the model too; by default this has a thread of its own. On a CPU each
            thread that runs a model has a team of threads for it, and two teams slow each other down.
        device: See `open_offloader`.
        deadlines: How long anything may take.
        clock: Where deadlines are read.

    Raises:
        ConfigurationError: Transformers is not installed, or this is no model whose cache can be cut; on entry too.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        cpu_bytes: int,
        block_tokens: int = 16,
        tiers: Sequence[TierChoice] = (),
        scratch_tokens: int = 2048,
        identity: CacheIdentity | None = None,
        reproducible: bool = False,
        policy: str = "adaptive",
        store_threshold: int = 0,
        compute_stream: torch.cuda.Stream | None = None,
        executor: Executor | None = None,
        device: Device | str | None = None,
        deadlines: Deadlines | None = None,
        clock: Clock | None = None,
    ) -> None:
        check_model(model)
        if block_tokens < 1 or scratch_tokens < block_tokens:
            raise ConfigurationError(
                f"block_tokens is {block_tokens} and scratch_tokens {scratch_tokens}; "
                "give blocks of at least one token, and room for at least one block"
            )
        self._model = model
        self._block_tokens = block_tokens
        self._scratch_count = scratch_tokens // block_tokens
        self._identity = identity
        self._piece_tokens = block_tokens if reproducible else None
        self._compute_stream = compute_stream
        self._executor = executor
        self._clock = clock or SystemClock()
        self._options: dict[str, Any] = {
            "cpu_bytes": cpu_bytes,
            "tiers": tiers,
            "policy": policy,
            "store_threshold": store_threshold,
            "device": device,
            "deadlines": deadlines,
            "clock": self._clock,
        }
        self._request_ids = itertools.count()
        self._stack: AsyncExitStack | None = None
        self._is_entered = False

    async def __aenter__(self) -> Self:
        """Open; the model computes one token, which shows what its cache is made of.

        Raises:
            StateError: It was entered before.
            ConfigurationError: The model's cache cannot be cut, or a value cannot work.
        """
        if self._is_entered:
            raise StateError("this PrefixCache was opened before; make a new one")
        self._is_entered = True
        async with AsyncExitStack() as stack:
            stream = self._compute_stream
            if stream is None and self._model.device.type == "cuda":
                stream = torch.cuda.current_stream(self._model.device)
            self._compute = ComputeThread(stream, self._executor)
            stack.callback(self._compute.close)
            layout = self._layout = await self._compute.run(probe_layout, self._model)
            identity = self._identity or await self._compute.run(identity_of, self._model)
            sizes = self._block_tokens, self._scratch_count
            scratch = ScratchBlocks(layout, await self._compute.run(new_block_tensors, layout, *sizes), *sizes)
            self._offloader = await stack.enter_async_context(
                open_offloader(scratch.kv_caches(), identity=identity, compute_stream=stream, **self._options)
            )
            limit = self._scratch_count if layout.has_windows else None
            self._restorer = Restorer(self._offloader, layout, scratch, self._compute, limit)
            self._saver = Saver(self._offloader, layout, scratch, self._compute, limit)
            self._generator = Generator(self._model, self._compute, self._clock, self._piece_tokens)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; what is being written to tiers is waited for, at most `Deadlines.drain_seconds`."""
        if self._stack is not None:
            stack, self._stack = self._stack, None
            await stack.__aexit__(kind, error, traceback)

    @property
    def offloader(self) -> Offloader:
        """What keeps the blocks: its statistics, `reset()`, `wait_written()`, and `bump_epoch()` after a weight update.

        Raises:
            ClosedError: This is not open.
        """
        self._check_open()
        return self._offloader

    async def restore(
        self,
        prompts: Prompts,
        *,
        attention_mask: torch.Tensor | None = None,
        adapter: str = "",
        salt: str = "",
        session_id: str | None = None,
    ) -> RestoredPrefix:
        """Return a cache that holds what is kept of some prompts, for a generation loop of your own.

        `model(**prefix.inputs)` goes on from there. Prompts of a batch are padded on the left and go on from the same
        column, so that the row that has least decides. At least one token of each prompt is left to be computed.
        Cancelled, it leaves nothing pinned.

        Args:
            prompts: Token ids of prompts, from their start.
            attention_mask: 0 for the padding of a tensor of prompts.
            adapter: The adapter that the model uses now, if any: prefixes of different adapters are kept apart.
            salt: Whatever else must keep prefixes apart, such as an image in the prompt, or a tenant.
            session_id: The conversation.

        Raises:
            InvalidRequestError: The prompts are no such thing.
        """
        from aiokvoffload.integrations.transformers.growing import new_growing_cache  # imports Transformers

        self._check_open()
        batch = Batch.of(prompts, attention_mask)
        request = Request(self._new_contexts(batch, session_id), adapter, salt)
        found = await self._restorer.restore(batch, request, partial(new_growing_cache, self._model.config))
        found.cache.activate_past_recording()
        return RestoredPrefix(
            batch=batch,
            cache=found.cache,
            column_count=found.column_count,
            token_counts=tuple(max(0, found.column_count - batch.padding(row)) for row in range(len(batch.rows))),
            tier_token_counts=found.tier_token_counts,
            inputs=forward_inputs(
                batch, found.cache, found.column_count, self._model.device, self._generator.padding_id
            ),
            request=request,
        )

    async def save(
        self,
        token_ids: Prompts,
        prefix: RestoredPrefix | Any,
        *,
        attention_mask: torch.Tensor | None = None,
        adapter: str = "",
        salt: str = "",
        branch_points: Iterable[int] = (),
    ) -> int:
        """Keep the whole blocks of what a cache holds, and return how many blocks are new; the cache stays yours.

        Of a layer with a sliding window only those blocks are kept that the window reaches from the end, or from one
        of the branch points. What has slid out of a cache that was not restored here is gone, so call this before the
        windows are full, or let the cache record (`cache.activate_past_recording()`). The record of a restored one ends
        here.

        Args:
            token_ids: All tokens of each row that the cache has seen, or more, from their start; rows are padded on the
                left as in the cache.
            prefix: What `restore` has returned, after the model has gone on with it; or any other `DynamicCache`. It
                may not be used until this has ended.
            attention_mask: 0 for the padding of a tensor.
            adapter: As in `restore`, for a cache that does not come from there.
            salt: The same.
            branch_points: Tokens from the start at which other prompts may part from this one, such as the end of a
                system prompt. Only models with sliding windows need them.

        Raises:
            InvalidRequestError: The cache cannot be cut, or does not fit the tokens.
        """
        self._check_open()
        batch = Batch.of(token_ids, attention_mask)
        if isinstance(prefix, RestoredPrefix):
            cache, request = prefix.cache, prefix.request
        else:
            cache, request = prefix, Request(self._new_contexts(batch), adapter, salt)
        check_layers(cache)
        column_count = self._layout.column_count(cache, len(batch.rows))
        if column_count > batch.column_count:
            raise InvalidRequestError(
                f"the cache holds {column_count} tokens, but the longest row has {batch.column_count}; "
                "give all tokens that the model has seen"
            )
        counts = [max(0, column_count - batch.padding(row)) for row in range(len(batch.rows))]
        stored = await self._saver.save(batch, request, cache, counts, branch_points)
        if isinstance(prefix, RestoredPrefix):
            cache.crop(0)
        return stored

    async def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int = 32,
        attention_mask: torch.Tensor | None = None,
        adapter: str = "",
        salt: str = "",
        session_id: str | None = None,
        branch_points: Iterable[int] = (),
        end_tokens: Collection[int] | None = None,
        choose: Choose = greedy,
        on_tokens: OnTokens = ignore_tokens,
    ) -> Generation:
        """Restore what is kept of some prompts, generate, and keep prompts and answers.

        Prompts are kept as soon as the first token is there, for others that share them. Cancelled, it ends with the
        model's present step, and leaves nothing pinned; what was kept until then stays.

        Args:
            prompts: As in `restore`.
            attention_mask: The same.
            adapter: The same.
            salt: The same.
            session_id: The same.
            max_new_tokens: At most so many for each row.
            branch_points: As in `save`.
            end_tokens: Any of them ends a row; by default those of the model's generation configuration.
            choose: Makes tokens, `(rows,)`, of logits, `(rows, vocabulary)`; runs in the model's thread.
            on_tokens: Hears the new token of each row after each step, None for a row that has ended.

        Raises:
            InvalidRequestError: The prompts are no such thing, no token is asked for, or this is
                reproducible and there are several.
        """
        started = self._clock.now()
        points = tuple(branch_points)
        prefix = await self.restore(
            prompts, attention_mask=attention_mask, adapter=adapter, salt=salt, session_id=session_id
        )

        async def save(batch: Batch, token_counts: Sequence[int]) -> None:
            await self._saver.save(batch, prefix.request, prefix.cache, token_counts, points)
            prefix.cache.crop(0)

        return await self._generator.go_on(
            prefix,
            save,
            started=started,
            max_new_tokens=max_new_tokens,
            end_tokens=self._generator.end_tokens() if end_tokens is None else end_tokens,
            choose=choose,
            on_tokens=on_tokens,
        )

    def _new_contexts(self, batch: Batch, session_id: str | None = None) -> tuple[ReqContext, ...]:
        return tuple(ReqContext(f"{next(self._request_ids)}", session_id=session_id) for _ in batch.rows)

    def _check_open(self) -> None:
        if self._stack is None:
            raise ClosedError("this PrefixCache is not open; use it inside `async with`")
