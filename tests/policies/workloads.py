"""Generated workloads of shapes that no trace at hand has.

`documents` and `cycles` were looked at while `adaptive` was developed; `retrieval` and `nightly` were written when it
was finished.
"""

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


def retrieval(seed: int = 0, request_count: int = 6_000) -> list[TraceRequest]:
    """Questions with a few retrieved documents in changing order, and few-shot prompts that branch like a tree.

    A block's id depends on all that stands before it, so a document hits only behind the same documents. What is
    asked about drifts.
    """
    random = Random(seed)
    new_ids = count()
    blocks_behind: dict[tuple[str, ...], list[int]] = {}

    def blocks_of(parts: list[str], sizes: dict[str, int]) -> list[int]:
        blocks: list[int] = []
        for end in range(1, len(parts) + 1):
            path = tuple(parts[:end])
            if path not in blocks_behind:
                blocks_behind[path] = [next(new_ids) for _ in range(sizes[parts[end - 1]])]
            blocks += blocks_behind[path]
        return blocks

    sizes = {f"system {number}": random.randint(2, 8) for number in range(4)}
    sizes |= {f"document {number}": random.randint(2, 10) for number in range(400)}
    sizes |= {f"task {number}": random.randint(2, 6) for number in range(30)}
    sizes |= {f"example {number}": random.randint(1, 4) for number in range(240)}
    requests = []
    now_ms = 0
    for number in range(request_count):
        now_ms += random.randint(0, 1_000)
        if random.randrange(3):
            topic = number // 25
            found = {(topic + int(random.expovariate(0.12))) % 400 for _ in range(random.randint(1, 4))}
            order = sorted(found) if random.randrange(2) else random.sample(sorted(found), len(found))
            parts = [f"system {min(random.randrange(4), random.randrange(4))}"]
            parts += [f"document {document}" for document in order]
        else:
            task = min(29, int(random.expovariate(0.2)))
            parts = ["system 0", f"task {task}"]
            for depth in range(random.randint(1, 4)):
                parts.append(f"example {8 * task + 2 * depth + (random.randrange(4) == 0)}")
        question = [next(new_ids) for _ in range(random.randint(0, 4))]
        requests.append(_request(now_ms, blocks_of(parts, sizes) + question))
    return requests


def nightly(seed: int = 0, day_count: int = 4) -> list[TraceRequest]:
    """Chats by day, and every night a batch that reads the same corpus once, a part of it new each time."""
    random = Random(seed)
    new_ids = count()
    system = [next(new_ids) for _ in range(6)]
    corpus = [[next(new_ids) for _ in range(random.randint(5, 40))] for _ in range(300)]
    requests = []
    now_ms = 0
    for _ in range(day_count):
        chats: list[list[int]] = []
        for _ in range(1_500):
            now_ms += random.randint(0, 20_000)
            if len(chats) < 5 or not random.randrange(4):
                chats.append(system + [next(new_ids) for _ in range(random.randint(1, 12))])
            # The latest chats go on, and each ends at some time.
            index = max(0, len(chats) - 1 - int(random.expovariate(0.08)))
            chats[index] = chats[index] + [next(new_ids) for _ in range(random.randint(1, 5))]
            requests.append(_request(now_ms, chats[index]))
        for index in random.sample(range(300), 60):
            corpus[index] = [next(new_ids) for _ in range(random.randint(5, 40))]
        instruction = [next(new_ids) for _ in range(4)]
        for document in corpus:
            now_ms += random.randint(0, 2_000)
            # First the batch asks about the document alone, then some of them again with tonight's instruction.
            requests.append(_request(now_ms, [*document, next(new_ids)]))
            if not random.randrange(3):
                requests.append(_request(now_ms, [*document, *instruction]))
    return requests
