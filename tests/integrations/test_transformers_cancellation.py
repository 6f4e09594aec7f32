"""A cancelled call leaves nothing pinned and no block of the scratch behind; a copy that fails is a miss."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from offloader_rig import Interrupted, on_both_loops, settle
from transformers_rig import forward, go_on, new_cache, open_cache, prompt, tiny_model

from aiokvoffload import Deadlines
from aiokvoffload.devices.base import Direction
from aiokvoffload.integrations.transformers import PrefixCache
from aiokvoffload.integrations.transformers.generation import greedy
from aiokvoffload.testing.asserts import assert_idle
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.device import ManualDevice

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60)]

TOKENS = prompt(45)
SCRATCH_TOKENS = 44
"""All of it is needed by one restore, so that a block that is not given back is noticed."""


async def reached(condition: Callable[[], object]) -> None:
    """Let other tasks and threads go on until a condition holds."""
    while not condition():
        await anyio.lowlevel.checkpoint()


async def landing(device: ManualDevice, call: Callable[[], Any]) -> Any:
    """Make a call, and let all its copies land."""
    results = []

    async def run() -> None:
        results.append(await call())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        while not results:
            device.land_all()
            await anyio.lowlevel.checkpoint()
    return results[0]


async def saved(cache: PrefixCache, model: Any, device: ManualDevice) -> Any:
    """Save the tokens, and return the cache that the model had 44 of them in."""
    kept = new_cache(model)
    forward(model, TOKENS[:44], kept)
    await landing(device, lambda: cache.save(TOKENS[:44], kept))
    return kept


@on_both_loops
async def test_generate_can_be_cancelled_at_every_await() -> None:
    model = tiny_model("gemma3")
    interruptions = 0
    async with open_cache(model, scratch_tokens=SCRATCH_TOKENS) as cache:
        expected = (await cache.generate(TOKENS, max_new_tokens=3)).token_ids
        for is_restored in (False, True):
            for suspension in range(1, 1000):
                if not is_restored:
                    await cache.offloader.reset()
                with anyio.CancelScope() as scope:
                    call = cache.generate(TOKENS, max_new_tokens=3)
                    await Interrupted(call, scope.cancel, suspension)
                await reached(lambda: not cache.offloader.statistics().sent_transfers)
                assert_idle(cache.offloader)
                again = await cache.generate(TOKENS, max_new_tokens=3)
                assert again.token_ids == expected
                if not scope.cancelled_caught:
                    break
                interruptions += 1
        assert_idle(cache.offloader)
    assert interruptions > 10


@on_both_loops
async def test_a_cancelled_generate_waits_for_the_model_and_for_nothing_else() -> None:
    model = tiny_model()
    gate, computing = threading.Event(), threading.Event()
    ends: list[str] = []

    def choose(logits: torch.Tensor) -> torch.Tensor:
        computing.set()
        gate.wait(30)
        return greedy(logits)

    async with open_cache(model) as cache, anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def serve() -> None:
            with scope:
                await cache.generate(TOKENS, choose=choose)
            ends.append("cancelled")

        tasks.start_soon(serve)
        await reached(computing.is_set)
        scope.cancel()
        await settle()
        assert not ends
        gate.set()
        await reached(lambda: ends)
        assert_idle(cache.offloader)


@pytest.mark.asyncio
async def test_cancellation_of_asyncio_itself_waits_for_the_model_too() -> None:
    model = tiny_model()
    gate, computing = threading.Event(), threading.Event()

    def choose(logits: torch.Tensor) -> torch.Tensor:
        computing.set()
        gate.wait(30)
        return greedy(logits)

    async with open_cache(model) as cache:
        task = asyncio.create_task(cache.generate(TOKENS, choose=choose))
        await reached(computing.is_set)
        for _ in range(3):
            task.cancel()
            await settle()
        assert not task.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_idle(cache.offloader)


@on_both_loops
async def test_a_call_that_waits_for_the_model_of_another_is_taken_back() -> None:
    model = tiny_model()
    gate, computing = threading.Event(), threading.Event()
    started: list[torch.Tensor] = []

    def choose(logits: torch.Tensor) -> torch.Tensor:
        computing.set()
        gate.wait(30)
        return greedy(logits)

    def never(logits: torch.Tensor) -> torch.Tensor:
        started.append(logits)
        return greedy(logits)

    async with open_cache(model) as cache, anyio.create_task_group() as tasks:

        async def first() -> None:
            await cache.generate(TOKENS, max_new_tokens=1, choose=choose)

        tasks.start_soon(first)
        await reached(computing.is_set)
        with anyio.CancelScope() as scope:
            call = cache.generate(prompt(9, 1), choose=never)
            await Interrupted(call, scope.cancel, 1)
        assert scope.cancelled_caught
        gate.set()
    assert not started


@on_both_loops
async def test_blocks_of_a_cancelled_restore_are_used_again_only_after_the_landing() -> None:
    model, device = tiny_model(), ManualDevice()
    async with open_cache(model, device=device, scratch_tokens=SCRATCH_TOKENS) as cache:
        await saved(cache, model, device)
        others, others_kept = prompt(45, seed=1), new_cache(model)
        forward(model, others[:44], others_kept)
        async with anyio.create_task_group() as tasks:
            scope, ended = anyio.CancelScope(), anyio.Event()

            async def restore() -> None:
                with scope:
                    await cache.restore(TOKENS)
                ended.set()

            tasks.start_soon(restore)
            await reached(lambda: device.pending_copies)
            scope.cancel()
            await ended.wait()
            # The load still writes into the scratch, which would spoil what a save fills it with now.
            saved_again: list[int] = []

            async def save_others() -> None:
                saved_again.append(await cache.save(others[:44], others_kept))

            tasks.start_soon(save_others)
            await settle()
            await reached(lambda: device.land_all() + len(saved_again) and saved_again)
        prefix = await landing(device, lambda: cache.restore(others))
        assert prefix.token_counts == (44,)
        assert torch.equal(go_on(model, prefix), forward(model, others[44:], others_kept))
        assert_idle(cache.offloader)


@on_both_loops
async def test_a_copy_that_fails_is_a_miss() -> None:
    model, device = tiny_model(), ManualDevice()
    async with open_cache(model, device=device, scratch_tokens=SCRATCH_TOKENS) as cache:
        await saved(cache, model, device)
        device.fail_next_copy(Direction.LOAD, "uncorrectable error")
        prefix = await landing(device, lambda: cache.restore(TOKENS))
        assert prefix.token_counts == prefix.tier_token_counts == (0,)
        assert prefix.inputs["input_ids"].shape == (1, 45)
        whole = new_cache(model)
        assert torch.equal(go_on(model, prefix), forward(model, TOKENS, whole))
        assert (await landing(device, lambda: cache.restore(TOKENS))).token_counts == (44,)
        assert_idle(cache.offloader)


@pytest.mark.asyncio
async def test_a_store_that_fails_is_no_error() -> None:
    model, device = tiny_model(), ManualDevice()
    kept = new_cache(model)
    forward(model, TOKENS[:44], kept)
    async with open_cache(model, device=device, scratch_tokens=SCRATCH_TOKENS) as cache:
        device.fail_next_copy(Direction.STORE, "uncorrectable error")
        assert await landing(device, lambda: cache.save(TOKENS[:44], kept)) == 0
        assert await landing(device, lambda: cache.save(TOKENS[:44], kept)) == 11


@pytest.mark.asyncio
async def test_a_reset_between_two_parts_of_a_prefix_is_a_miss() -> None:
    model, device = tiny_model(), ManualDevice()
    async with open_cache(model, device=device, scratch_tokens=24) as cache:
        await saved(cache, model, device)

        async def reset() -> None:
            await reached(lambda: device.pending_copies)
            await cache.offloader.reset()

        async with anyio.create_task_group() as tasks:
            found: list[Any] = []

            async def restore() -> None:
                found.append(await cache.restore(TOKENS))

            tasks.start_soon(restore)
            await reset()
            await reached(lambda: device.land_all() + len(found) and found)
        assert found[0].token_counts == (0,)
        # The first part had been copied into a cache already.
        assert torch.equal(go_on(model, found[0]), forward(model, TOKENS, new_cache(model)))
        assert_idle(cache.offloader)


@pytest.mark.asyncio
async def test_a_copy_that_is_stuck_is_a_miss_and_keeps_its_blocks_until_it_lands() -> None:
    model, device, clock = tiny_model(), ManualDevice(), ManualClock()
    options = {"device": device, "clock": clock, "deadlines": Deadlines(landing_seconds=5.0)}
    async with open_cache(model, scratch_tokens=SCRATCH_TOKENS, **options) as cache:
        await saved(cache, model, device)
        device.hang_direction(Direction.LOAD)
        found: list[Any] = []

        async def restore() -> None:
            found.append(await cache.restore(TOKENS))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(restore)
            await reached(lambda: device.pending_copies)
            clock.advance(6.0)
            await reached(lambda: found)
            assert found[0].token_counts == (0,)
            tasks.start_soon(restore)
            await settle()
            assert len(found) == 1
            device.release()
            await reached(lambda: device.land_all() + len(found) > 1 and len(found) > 1)
        assert found[1].token_counts == (44,)
