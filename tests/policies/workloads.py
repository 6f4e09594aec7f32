"""Two workloads that `adaptive` was not developed on, of shapes that no trace at hand has."""

from __future__ import annotations

from itertools import count
from random import Random

from aiokvoffload.cli.trace import TRACE_BLOCK_TOKENS, TraceRequest


def _request(timestamp_ms: int, blocks: list[int]) -> TraceRequest:
    return TraceRequest(timestamp_ms, len(blocks) * TRACE_BLOCK_TOKENS, 100, tuple(blocks))


def documents(seed: int = 0, request_count: int = 6_000) -> list[TraceRequest]:
    """Questions about documents: a few are asked about all the time, new ones for some minutes, most never again."""
    random = Random(seed)
    new_ids = count()

    def document() -> list[int]:
        return [next(new_ids) for _ in range(random.randint(8, 60))]

    popular = [document() for _ in range(40)]
    recent = [document() for _ in range(12)]
    requests = []
    now_ms = 0
    for _ in range(request_count):
        now_ms += random.randint(0, 600)
        draw = random.randrange(100)
        if draw < 35:
            blocks = popular[min(random.randrange(40), random.randrange(40), random.randrange(40))]
        elif draw < 70:
            blocks = recent[random.randrange(len(recent))]
        else:
            blocks = document()
            if draw < 75:
                recent[random.randrange(len(recent))] = blocks
        question = [next(new_ids) for _ in range(random.randint(0, 3))]
        requests.append(_request(now_ms, blocks + question))
    return requests


def cycles(seed: int = 0, round_count: int = 40) -> list[TraceRequest]:
    """Batch jobs that run over the same prompts in the same order, again and again, between short chats."""
    random = Random(seed)
    new_ids = count()
    jobs = [[[next(new_ids) for _ in range(random.randint(10, 30))] for _ in range(size)] for size in (40, 120, 300)]
    chats: list[list[int]] = [[] for _ in range(60)]
    requests = []
    now_ms = 0
    for _ in range(round_count):
        for prompt in jobs[min(random.randrange(3), random.randrange(3))]:
            now_ms += random.randint(10, 400)
            requests.append(_request(now_ms, prompt))
            if not random.randrange(3):
                index = random.randrange(len(chats))
                if len(chats[index]) > 40:
                    chats[index] = []
                chats[index] = chats[index] + [next(new_ids) for _ in range(random.randint(1, 6))]
                requests.append(_request(now_ms, chats[index]))
    return requests
