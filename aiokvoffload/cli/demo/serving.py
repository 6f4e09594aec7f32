"""Serves the conversations of the demo, with and without offloading, in one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import torch

from aiokvoffload.cli.demo.chat_model import ChatModel, Conversation, Turn
from aiokvoffload.cli.demo.options import DemoOptions
from aiokvoffload.cli.demo.report import DemoReport, RequestReport, medium_of
from aiokvoffload.cli.demo.script import (
    AFTER_RESTART,
    BAR_AFTER_RESTART,
    BAR_FROM_DISK,
    BAR_GUESTS,
    CONVERSATION,
    OTHER_GUESTS,
    SHORT_SYSTEM_PROMPT,
    SYSTEM_PROMPT,
)
from aiokvoffload.cli.report import TierReport
from aiokvoffload.cli.stall import LoopStallMeter
from aiokvoffload.clock import Clock, SystemClock
from aiokvoffload.integrations.transformers import PrefixCache
from aiokvoffload.integrations.transformers.compute import ComputeThread

_STALL_INTERVAL_SECONDS = 0.01
_SECONDS_TO_FALL_ASLEEP = 0.02
"""OpenMP's threads keep the processors busy for some milliseconds after the work that was shared."""
_WARM_UP_TOKENS = 64
_BLOCK_TOKENS = 16

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """What the model says without offloading, and how soon."""

    tokens: tuple[int, ...]
    seconds_to_first_token: float


class _FirstToken:
    """Notes when Transformers has the first new token; takes what its generation streams."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._put_count = 0
        self.came_at = 0.0

    def put(self, tokens: object) -> None:
        self._put_count += 1
        if self._put_count == 2:  # the prompt is streamed first
            self.came_at = self._clock.now()

    def end(self) -> None:
        pass


class Desk:
    """Answers prompts, each once without offloading and then with it.

    Args:
        chat: The model.
        compute: Where it runs.
        cache: Keeps prefixes.
        new_tokens: Tokens of an answer, at most.
        say: Hears what happens, line by line.
        clock: Tells how long things take.
        meter: Watches the event loop.
    """

    def __init__(
        self,
        chat: ChatModel,
        compute: ComputeThread,
        cache: PrefixCache,
        new_tokens: int,
        say: Say,
        clock: Clock,
        meter: LoopStallMeter,
    ) -> None:
        self._chat = chat
        self._compute = compute
        self._cache = cache
        self._new_tokens = new_tokens
        self._say = say
        self._clock = clock
        self._meter = meter

    async def warm_up(self, prompt: Sequence[int]) -> None:
        """Let the model answer a short piece of a prompt, both ways: first answers take longer than later ones."""
        start = prompt[:_WARM_UP_TOKENS]
        await self.answer_plainly(start)
        for _ in range(2):  # the second time it is restored; the salt keeps it from what is measured
            await self._cache.generate(start, max_new_tokens=self._new_tokens, salt="warm-up")

    async def answer_plainly(self, prompt: Sequence[int]) -> PlainAnswer:
        """Let Transformers compute the whole prompt and generate."""
        called = self._clock.now()
        first = _FirstToken(self._clock)
        tokens = await self._compute.run(self._generate, prompt, first)
        return PlainAnswer(tokens, first.came_at - called)

    async def answer(self, name: str, prompt: Sequence[int], plain: PlainAnswer, session: str) -> RequestReport:
        """Restore what is kept of a prompt, generate, and compare."""
        before = self._promoted()
        found = await self._cache.generate(prompt, max_new_tokens=self._new_tokens, session_id=session)
        after = self._promoted()
        places = ["CPU memory"] if found.restored_tokens[0] > found.tier_tokens[0] else []
        places += [medium_of(url) for url, count in after.items() if count > before[url] and found.tier_tokens[0]]
        report = RequestReport(
            name=name,
            prompt_tokens=len(prompt),
            restored_tokens=found.restored_tokens[0],
            restored_from=" and ".join(places) if found.restored_tokens[0] else "",
            first_token_seconds_without=plain.seconds_to_first_token,
            first_token_seconds=found.seconds_to_first_token,
            are_tokens_equal=found.token_ids[0] == plain.tokens,
        )
        self._say(report.describe())
        return report

    async def serve(self, name: str, prompt: Sequence[int], session: str) -> tuple[RequestReport, PlainAnswer]:
        """Answer one prompt both ways, while nothing is being written."""
        await self._rest()
        plain = await self.answer_plainly(prompt)
        await self._rest()
        return await self.answer(name, prompt, plain, session), plain

    async def serve_at_bar(self, name: str, question: str) -> RequestReport:
        """Answer a question that comes after the short system prompt, both ways."""
        report, _ = await self.serve(name, Conversation(self._chat, SHORT_SYSTEM_PROMPT).ask(question), name)
        return report

    async def serve_all(self, prompts: dict[str, list[int]]) -> list[RequestReport]:
        """Answer several prompts at the same time, first all without offloading and then all with it."""
        await self._rest()
        plain: dict[str, PlainAnswer] = {}
        reports: dict[str, RequestReport] = {}

        async def serve_plainly(name: str) -> None:
            plain[name] = await self.answer_plainly(prompts[name])

        async def serve(name: str) -> None:
            reports[name] = await self.answer(name, prompts[name], plain[name], name)

        for serve_one in (serve_plainly, serve):
            async with anyio.create_task_group() as tasks:
                for name in prompts:
                    tasks.start_soon(serve_one, name)
        return [reports[name] for name in prompts]

    async def empty_memory(self) -> None:
        """Forget what is in CPU memory, once all of it is in the tiers too."""
        await self._rest()
        await self._cache.offloader.reset()

    def report(self, requests: Sequence[RequestReport]) -> DemoReport:
        """Return what was found so far."""
        return DemoReport(
            model=self._chat.name,
            requests=tuple(requests),
            p99_loop_stall_ms=self._meter.p99_stall_ms,
            max_loop_stall_ms=self._meter.max_stall_ms,
            tiers=tuple(map(TierReport.of, self._cache.offloader.statistics().tiers)),
        )

    async def _rest(self) -> None:
        """Wait until nothing is being written, and PyTorch's threads have gone to sleep."""
        await self._cache.offloader.wait_written()
        await anyio.sleep(_SECONDS_TO_FALL_ASLEEP)

    def _generate(self, prompt: Sequence[int], streamer: _FirstToken) -> tuple[int, ...]:
        model = self._chat.model
        ids = torch.tensor([prompt], device=model.device)
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self._new_tokens,
            do_sample=False,
            streamer=streamer,
        )
        return tuple(made[0, len(prompt) :].tolist())

    def _promoted(self) -> dict[str, int]:
        return {use.tier.url: use.promoted for use in self._cache.offloader.statistics().tiers}


async def serve_conversations(
    options: DemoOptions, chat: ChatModel, executor: Executor, tiers: Sequence[str], say: Say
) -> tuple[DemoReport, list[Turn]]:
    """Serve a conversation turn by turn, other guests at the same time, those of the bar, and from the tiers.

    Args:
        options: Of the demo.
        chat: The model.
        executor: Of the one thread that the model runs in, with and without offloading.
        tiers: Below CPU memory.
        say: Hears what happens, line by line.

    Returns:
        What was found, and the conversation.
    """
    conversation = Conversation(chat, SYSTEM_PROMPT)
    reports = []
    async with _desk(options, chat, executor, tiers, say) as desk:
        for turn, question in enumerate(CONVERSATION, start=1):
            prompt = conversation.ask(question)
            if turn == 1:
                await desk.warm_up(prompt)
            report, plain = await desk.serve(f"turn {turn}", prompt, "conversation")
            reports.append(report)
            say(f"    {question} {conversation.hear(plain.tokens)!r}")
        others = {name: Conversation(chat, SYSTEM_PROMPT).ask(text) for name, text in OTHER_GUESTS.items()}
        reports += await desk.serve_all(others)
        reports += [await desk.serve_at_bar(name, text) for name, text in BAR_GUESTS.items()]
        await desk.empty_memory()
        reports.append(await desk.answer(f"turn {turn} again", prompt, plain, "conversation"))
        for name, text in BAR_FROM_DISK.items():
            await desk.empty_memory()
            reports.append(await desk.serve_at_bar(name, text))
        return desk.report(reports), conversation.turns


async def go_on_after_restart(
    options: DemoOptions, chat: ChatModel, executor: Executor, tiers: Sequence[str], turns: Sequence[Turn], say: Say
) -> DemoReport:
    """Serve the next turn of a conversation that another process has served so far."""
    conversation = Conversation(chat, SYSTEM_PROMPT, turns)
    async with _desk(options, chat, executor, tiers, say) as desk:
        prompt = conversation.ask(AFTER_RESTART)
        await desk.warm_up(prompt)
        report, plain = await desk.serve(f"turn {len(turns) + 1}, new process", prompt, "conversation")
        say(f"    {AFTER_RESTART} {conversation.hear(plain.tokens)!r}")
        return desk.report([report, await desk.serve_at_bar(*BAR_AFTER_RESTART)])


@asynccontextmanager
async def _desk(
    options: DemoOptions, chat: ChatModel, executor: Executor, tiers: Sequence[str], say: Say
) -> AsyncIterator[Desk]:
    clock = SystemClock()
    async with (
        PrefixCache(
            chat.model, cpu_bytes=options.cpu_bytes, block_tokens=_BLOCK_TOKENS, tiers=tiers, executor=executor
        ) as cache,
        LoopStallMeter(clock, interval_seconds=_STALL_INTERVAL_SECONDS) as meter,
    ):
        yield Desk(chat, ComputeThread(executor=executor), cache, options.new_tokens, say, clock, meter)
