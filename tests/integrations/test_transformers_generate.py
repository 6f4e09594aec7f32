"""Generating with a prefix cache, from many tasks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest
import torch
from offloader_rig import on_both_loops
from torch.utils._python_dispatch import TorchDispatchMode
from transformers_rig import MODELS, WITH_WINDOWS, forward, go_on, new_cache, open_cache, prompt, tiny_model

from aiokvoffload.errors import ClosedError, ConfigurationError, InvalidRequestError, StateError
from aiokvoffload.integrations.transformers import PrefixCache
from aiokvoffload.integrations.transformers.generation import greedy

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = prompt(45)
BLOCK_BYTES = 2 * 4 * 8 * 4  # heads, tokens, elements, bytes; for the keys or the values of a layer


def greedy_tokens(model: Any, tokens: list[int], count: int) -> list[int]:
    """Return what Transformers itself generates."""
    ids = torch.tensor([tokens])  # with its mask, or token 0 would be taken for padding
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    new: list[int] = made[0, len(tokens) :].tolist()
    return new


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@on_both_loops
async def test_a_conversation_of_turns_gets_the_tokens_it_gets_without(name: str) -> None:
    model = tiny_model(name)
    conversation = list(TOKENS)
    restored = []
    async with open_cache(model) as cache:
        for turn in range(3):
            answer = await cache.generate(conversation, max_new_tokens=9)
            assert list(answer.token_ids[0]) == greedy_tokens(model, conversation, 9)
            restored.append(answer.restored_tokens[0])
            assert answer.tier_tokens == (0,)
            assert 0 < answer.seconds_to_first_token <= answer.seconds
            conversation += [*answer.token_ids[0], *prompt(5, turn)]
    assert restored == [0, 52, 64]  # 45 tokens and 8 of the answer; the last one was never fed to the model


@pytest.mark.asyncio
async def test_logits_of_the_second_call_are_those_of_going_on_from_the_first_ones_cache() -> None:
    model = tiny_model("gemma3")
    seen: list[torch.Tensor] = []

    def choose(logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.clone())
        return greedy(logits)

    kept = new_cache(model)
    forward(model, TOKENS, kept)
    kept.crop(-1)
    async with open_cache(model) as cache:
        await cache.generate(TOKENS, max_new_tokens=1)
        await cache.generate(TOKENS, max_new_tokens=1, choose=choose)
    assert torch.equal(seen[-1], forward(model, TOKENS[44:], kept)[:, -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.asyncio
async def test_a_reproducible_cache_gives_equal_logits_whatever_was_restored(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name, dtype)
    seen: list[torch.Tensor] = []

    def choose(logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.clone())
        return greedy(logits)

    async def logits_of(cache: PrefixCache, length: int) -> tuple[int, torch.Tensor]:
        seen.clear()
        answer = await cache.generate(TOKENS[:length], max_new_tokens=6, choose=choose, branch_points=[20])
        return answer.restored_tokens[0], torch.cat(seen)

    alone = {}
    for length in (45, 44, 21, 23):
        async with open_cache(model, reproducible=True) as cache:
            restored, alone[length] = await logits_of(cache, length)
            assert restored == 0
    async with open_cache(model, reproducible=True) as cache:
        before = 20 if name in WITH_WINDOWS else 40  # a block before the end, no window is kept
        for length, expected in ((45, 0), (45, 44), (44, before), (44, 40), (21, 20), (23, 20)):
            restored, logits = await logits_of(cache, length)
            assert restored == expected
            assert torch.equal(logits, alone[length])
        with pytest.raises(InvalidRequestError, match="2 prompts were given; to be reproducible, give one a call"):
            await cache.generate([TOKENS, TOKENS])


@pytest.mark.asyncio
async def test_the_blocks_of_a_row_are_pinned_once() -> None:
    """The ticket that matched a row also loads it, so that its use is not counted again."""
    async with open_cache(tiny_model("llama")) as cache:
        await cache.generate(TOKENS, max_new_tokens=1)
        before = cache.offloader.statistics().manager.hit_blocks
        await cache.restore(TOKENS)
        assert cache.offloader.statistics().manager.hit_blocks - before == 11


@pytest.mark.asyncio
async def test_the_generation_of_transformers_goes_on_from_a_restored_cache() -> None:
    model = tiny_model("gemma3")
    async with open_cache(model) as cache:
        await cache.generate(TOKENS, max_new_tokens=1)
        prefix = await cache.restore(TOKENS)
        assert prefix.token_counts == (44,)
        ids = torch.tensor([TOKENS])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), cache=prefix.cache, max_new_tokens=20, do_sample=False
        )
    assert made[0, 45:].tolist() == greedy_tokens(model, TOKENS, 20)


@on_both_loops
async def test_many_tasks_generate_while_the_loop_lives() -> None:
    model = tiny_model()
    rows = [TOKENS[:40] + prompt(5, seed) for seed in range(5)]
    results: dict[int, tuple[int, ...]] = {}
    threads = set()
    beats = 0

    def choose(logits: torch.Tensor) -> torch.Tensor:
        threads.add(threading.get_ident())
        return greedy(logits)

    async with open_cache(model, scratch_tokens=16) as cache:

        async def serve(number: int) -> None:
            results[number] = (await cache.generate(rows[number], max_new_tokens=4, choose=choose)).token_ids[0]

        async def beat(scope: anyio.CancelScope) -> None:
            nonlocal beats
            with scope:
                while True:
                    await anyio.lowlevel.checkpoint()
                    beats += 1

        await serve(0)
        async with anyio.create_task_group() as beating:
            scope = anyio.CancelScope()
            beating.start_soon(beat, scope)
            async with anyio.create_task_group() as tasks:
                for number in range(1, 5):
                    tasks.start_soon(serve, number)
            scope.cancel()
    assert [list(results[number]) for number in range(5)] == [greedy_tokens(model, row, 4) for row in rows]
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert beats > 100


@pytest.mark.asyncio
async def test_adapters_and_salts_keep_prefixes_apart() -> None:
    async with open_cache(tiny_model()) as cache:
        await cache.generate(TOKENS, max_new_tokens=1, adapter="french")
        counts = {
            (adapter, salt): (await cache.restore(TOKENS, adapter=adapter, salt=salt)).token_counts
            for adapter in ("", "french", "german")
            for salt in ("", "a tenant")
        }
        assert {names for names, count in counts.items() if count == (44,)} == {("french", "")}
        assert {count for names, count in counts.items() if names != ("french", "")} == {(0,)}


@pytest.mark.asyncio
async def test_a_loop_of_ones_own_saves_under_the_adapter_it_restored_with() -> None:
    model = tiny_model()
    async with open_cache(model) as cache:
        prefix = await cache.restore(TOKENS, adapter="french")
        go_on(model, prefix)
        assert await cache.save(TOKENS, prefix) == 11
        assert (await cache.restore(TOKENS, adapter="french")).token_counts == (44,)
        assert (await cache.restore(TOKENS)).token_counts == (0,)


@pytest.mark.asyncio
async def test_a_weight_update_makes_prefixes_unreachable() -> None:
    model = tiny_model()
    async with open_cache(model) as cache:
        await cache.generate(TOKENS, max_new_tokens=1)
        await cache.offloader.bump_epoch()
        assert (await cache.restore(TOKENS)).token_counts == (0,)


@pytest.mark.asyncio
async def test_a_row_ends_at_the_models_own_end_token() -> None:
    model = tiny_model()
    first, second, *_ = greedy_tokens(model, TOKENS, 2)
    assert first != second
    for configured in (second, [second, 0]):
        model.generation_config.eos_token_id = configured
        async with open_cache(model) as cache:
            assert (await cache.generate(TOKENS)).token_ids == ((first, second),)
            assert len((await cache.generate(TOKENS, end_tokens=(), max_new_tokens=5)).token_ids[0]) == 5


@pytest.mark.asyncio
async def test_a_full_memory_is_no_error() -> None:
    """What finds no room is computed again."""
    model = tiny_model()
    async with open_cache(model, cpu_bytes=5 * 2 * 2 * BLOCK_BYTES) as cache:
        assert (await cache.generate(TOKENS, max_new_tokens=1)).restored_tokens == (0,)
        assert (await cache.generate(TOKENS, max_new_tokens=1)).restored_tokens[0] < 44


@pytest.mark.asyncio
async def test_the_model_object_is_left_as_it_was() -> None:
    model = tiny_model()
    before = set(vars(model))
    async with open_cache(model) as cache:
        await cache.generate(TOKENS, max_new_tokens=2)
    assert set(vars(model)) == before


@pytest.mark.asyncio
async def test_no_token_is_refused() -> None:
    async with open_cache(tiny_model()) as cache:
        with pytest.raises(InvalidRequestError, match="max_new_tokens is 0"):
            await cache.generate(TOKENS, max_new_tokens=0)


@pytest.mark.asyncio
async def test_a_fault_of_the_model_comes_out_and_leaves_the_cache_usable() -> None:
    async with open_cache(tiny_model()) as cache:
        with pytest.raises(IndexError):
            await cache.generate([10_000], max_new_tokens=1)
        assert len((await cache.generate(TOKENS, max_new_tokens=1)).token_ids[0]) == 1


@pytest.mark.asyncio
async def test_it_is_open_once_and_inside_its_context() -> None:
    cache = PrefixCache(tiny_model(), cpu_bytes=1 << 20)
    with pytest.raises(ClosedError, match="use it inside `async with`"):
        await cache.restore(TOKENS)
    async with cache:
        with pytest.raises(StateError, match="opened before"):
            await cache.__aenter__()
    for call in (cache.restore(TOKENS), cache.generate(TOKENS), cache.save(TOKENS, None)):
        with pytest.raises(ClosedError, match="not open"):
            await call
    with pytest.raises(ConfigurationError, match="room for at least one block"):
        PrefixCache(tiny_model(), cpu_bytes=1 << 20, scratch_tokens=8)
    with pytest.raises(ConfigurationError, match="cpu_bytes is 1"):
        await PrefixCache(tiny_model(), cpu_bytes=1).__aenter__()


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]  # not typed by PyTorch
    """Notes the most elements that an operation of this thread has returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
        return made


@on_both_loops
async def test_keys_and_values_are_only_handled_in_the_models_thread() -> None:
    """They would block the event loop, and PyTorch would keep a team of threads for the thread of that, too."""
    async with open_cache(tiny_model()) as cache:
        with LargestTensor() as largest:
            first, second = [await cache.generate(TOKENS, max_new_tokens=2) for _ in range(2)]
    assert (first.restored_tokens, second.restored_tokens) == ((0,), (44,))
    assert largest.elements == len(TOKENS) + 1  # the tokens themselves


@on_both_loops
async def test_the_model_runs_in_the_executor_that_is_given_which_goes_on_after_it() -> None:
    threads = set()

    def choose(logits: torch.Tensor) -> torch.Tensor:
        threads.add(threading.current_thread().name)
        return greedy(logits)

    with ThreadPoolExecutor(1, thread_name_prefix="mine") as executor:
        async with open_cache(tiny_model(), executor=executor) as cache:
            await cache.generate(TOKENS, max_new_tokens=2, choose=choose)
        assert executor.submit(lambda: threads).result() == {"mine_0"}
