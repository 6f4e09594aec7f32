"""The built-in workload: conversations that grow turn by turn, and requests that come once.

Only integer draws of `random.Random` are used, so a seed gives the same requests on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import count
from random import Random

from aiokvoffload.cli.trace import TRACE_BLOCK_TOKENS, TraceRequest
from aiokvoffload.errors import ConfigurationError

Span = tuple[int, int]
"""Lowest and highest value of a uniform draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadShape:
    """How many requests there are and how they look; lengths are tokens, times milliseconds.

    Attributes:
        session_count: Conversations.
        turns: Requests of one conversation.
        one_off_count: Requests that share nothing with any other and never come back.
        system_prompt_count: System prompts; each conversation starts with one of them, the first ones more often.
        system_prompt_tokens: Length of a system prompt.
        opening_tokens: Length of the first user text of a conversation, attached documents included.
        user_tokens: Length of each later user text.
        output_tokens: Length of each answer; it is part of the next prompt.
        one_off_tokens: Length of a one-off prompt.
        arrival_ms: When conversations and one-off requests begin.
        think_ms: From the end of an answer to the next user text.
        token_ms: Time to generate one token.
    """

    session_count: int = 300
    turns: Span = (1, 7)
    one_off_count: int = 300
    system_prompt_count: int = 6
    system_prompt_tokens: Span = (1_024, 4_096)
    opening_tokens: Span = (256, 6_144)
    user_tokens: Span = (32, 1_536)
    output_tokens: Span = (32, 1_024)
    one_off_tokens: Span = (1_024, 8_192)
    arrival_ms: Span = (0, 900_000)
    think_ms: Span = (5_000, 90_000)
    token_ms: int = 20

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            low, high = value if isinstance(value, tuple) else (value, value)
            least = 1 if field.name in {"turns", "system_prompt_count"} else 0
            if not least <= low <= high:
                raise ConfigurationError(
                    f"{field.name} is {value}; it must be at least {least}, lowest value before highest"
                )
        if not self.session_count + self.one_off_count:
            raise ConfigurationError("a workload needs at least one conversation or one-off request")


def generate_workload(
    seed: int = 0, *, shape: WorkloadShape | None = None, limit: int | None = None
) -> list[TraceRequest]:
    """Return the requests of the built-in workload in the order of their arrival.

    Only full blocks have an id. The default shape gives about 1,500 requests with 20,000 blocks, of which about
    two thirds hit in a cache without bounds.

    Args:
        seed: The same seed gives the same requests on every machine.
        shape: How the workload looks.
        limit: Keep only the first requests.
    """
    shape = shape or WorkloadShape()
    random = Random(seed)  # noqa: S311 - a workload needs to be repeatable, not secret
    new_ids = count()
    prompts: list[_Text] = []
    for _ in range(shape.system_prompt_count):
        prompts.append(_Text(new_ids))
        prompts[-1].extend(random.randint(*shape.system_prompt_tokens))
    requests: list[TraceRequest] = []
    for index in range(shape.session_count):
        # The smaller of two draws: real deployments have a few popular system prompts.
        prompt = prompts[min(random.randrange(len(prompts)), random.randrange(len(prompts)))]
        requests.extend(_conversation(random, shape, _Text(new_ids, prompt), f"session-{index:04d}"))
    for _ in range(shape.one_off_count):
        text = _Text(new_ids)
        text.extend(random.randint(*shape.one_off_tokens))
        requests.append(text.request(random.randint(*shape.arrival_ms), random.randint(*shape.output_tokens), None))
    requests.sort(key=lambda request: request.timestamp_ms)  # stable: the turns of a conversation keep their order
    return requests[:limit]


class _Text:
    """A prompt that grows; blocks get an id once they are full and keep it, as their content no longer changes."""

    def __init__(self, new_ids: Iterator[int], prefix: _Text | None = None) -> None:
        self._new_ids = new_ids
        # A block that the prefix fills only partly goes on differently in each text, so it is not shared.
        self._hash_ids: list[int] = list(prefix._hash_ids) if prefix else []
        self._token_count: int = prefix._token_count if prefix else 0

    def extend(self, token_count: int) -> None:
        self._token_count += token_count
        missing = self._token_count // TRACE_BLOCK_TOKENS - len(self._hash_ids)
        self._hash_ids.extend(next(self._new_ids) for _ in range(missing))

    def request(self, timestamp_ms: int, output_length: int, session: str | None) -> TraceRequest:
        return TraceRequest(timestamp_ms, self._token_count, output_length, tuple(self._hash_ids), session)


def _conversation(random: Random, shape: WorkloadShape, text: _Text, session: str) -> Iterator[TraceRequest]:
    now_ms = random.randint(*shape.arrival_ms)
    text.extend(random.randint(*shape.opening_tokens))
    for _ in range(random.randint(*shape.turns)):
        output_length = random.randint(*shape.output_tokens)
        yield text.request(now_ms, output_length, session)
        text.extend(output_length + random.randint(*shape.user_tokens))
        now_ms += output_length * shape.token_ms + random.randint(*shape.think_ms)
