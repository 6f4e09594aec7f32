"""KV events over real sockets, read by a decoder that knows msgpack and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import pytest
import zmq
from offloader_rig import Rig, keys_of, on_both_loops

from aiokvoffload import ConfigurationError, InvalidRequestError, KVGroup, WrongThreadError, make_offload_key
from aiokvoffload.events import EventKind, OffloadingEvent
from aiokvoffload.integrations.kv_event_sender import MessageSender
from aiokvoffload.integrations.kv_events import KVEventOptions, KVEventPublisher, publish_kv_events
from aiokvoffload.keys import OffloadKey, offload_block_hash
from aiokvoffload.testing.strategies import make_keys

pytestmark = pytest.mark.timeout(60)
PATIENCE_MS = 20_000
LOOPBACK = "tcp://127.0.0.1:*"
END = -1
GROUP = KVGroup(block_tokens=4, layers=[0])

Batch = tuple[bytes, int, Any]
"""Topic, number and decoded payload of a message."""


class Peers:
    """The sockets of the other side."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def open(self, kind: int) -> zmq.Socket[bytes]:
        self._sockets.append(self._context.socket(kind))
        return self._sockets[-1]

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.close()


def options(**changes: Any) -> KVEventOptions:
    return KVEventOptions(**{"endpoint": LOOPBACK, "replay_endpoint": LOOPBACK, **changes})


def decode(frames: Sequence[bytes]) -> Batch:
    topic, number, payload = frames
    return topic, int.from_bytes(number, "big", signed=True), msgspec.msgpack.decode(payload) if payload else None


def replay(peers: Peers, publisher: KVEventPublisher | MessageSender[Any], first: int = 0) -> list[Batch]:
    """Ask for what is kept from a number on."""
    asking = peers.open(zmq.DEALER)
    asking.connect(publisher.replay_endpoint or "")
    asking.send_multipart([b"", first.to_bytes(8, "big")])
    found = []
    while True:
        assert asking.poll(PATIENCE_MS)
        empty, *frames = asking.recv_multipart()
        assert empty == b""
        found.append(decode(frames))
        if found[-1][1] == END:
            assert found.pop() == (b"", END, None)
            return found


def subscribe(peers: Peers, endpoint: str, topic: bytes = b"") -> zmq.Socket[bytes]:
    subscriber = peers.open(zmq.SUB)
    subscriber.subscribe(topic)
    subscriber.connect(endpoint)
    return subscriber


def probe(publisher: KVEventPublisher, subscriber: zmq.Socket[bytes]) -> None:
    """Publish clearings until the subscription works, and read all of them."""
    while not subscriber.poll(1):
        publisher(OffloadingEvent(EventKind.CLEARED, (), "CPU", 0))
    while decode(subscriber.recv_multipart())[1] + 1 < publisher.statistics().batches:
        assert subscriber.poll(PATIENCE_MS)


def read(subscriber: zmq.Socket[bytes], count: int) -> list[Batch]:
    found = []
    for _ in range(count):
        assert subscriber.poll(PATIENCE_MS)
        found.append(decode(subscriber.recv_multipart()))
    return found


def stored(*keys: OffloadKey) -> OffloadingEvent:
    return OffloadingEvent(EventKind.STORED, keys, "CPU", 0)


def removed(*keys: OffloadKey) -> OffloadingEvent:
    return OffloadingEvent(EventKind.REMOVED, keys, "CPU", 0)


CLEARED = OffloadingEvent(EventKind.CLEARED, (), "CPU", 0)


def number_of(key: OffloadKey) -> int:
    return int.from_bytes(offload_block_hash(key)[-8:], "big")


# What is said


@on_both_loops
async def test_an_offloader_is_followed_from_its_first_block_to_its_reset() -> None:
    peers = Peers()
    rig = Rig(cpu_blocks=3)
    async with rig.open() as offloader:
        with publish_kv_events(offloader, options(topic="kv@pod-0@model", data_parallel_rank=2)) as publisher:
            keys = keys_of(offloader, 3)
            publisher.note_request(keys, range(12), adapter="fox")
            offloader.store_soon(keys, [0, 1, 2])
            await rig.land()
            other = keys_of(offloader, 1, salt="unknown to the publisher")
            offloader.store_soon(other, [3])
            await rig.land()
            await offloader.reset()
            batches = await anyio.to_thread.run_sync(replay, peers, publisher)
            statistics = publisher.statistics()
    peers.close()
    assert [(topic, number) for topic, number, _ in batches] == [(b"kv@pod-0@model", number) for number in range(4)]
    assert [batch[2] for _, _, batch in batches] == [2] * 4
    events = [event for _, _, batch in batches for event in batch[1]]
    assert events[0] == {
        "type": "BlockStored",
        "block_hashes": [number_of(key) for key in keys],
        "parent_block_hash": None,
        "token_ids": list(range(12)),
        "block_size": 4,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": "fox",
        "extra_keys": [["fox"]] * 3,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert events[1] == {
        "type": "BlockRemoved",
        "block_hashes": [number_of(keys[2])],
        "medium": "CPU",
        "group_idx": 0,
    }
    assert events[2] == {
        "type": "BlockStored",
        "block_hashes": [number_of(other[0])],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 0,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert events[3:] == [{"type": "AllBlocksCleared"}]
    assert (statistics.batches, statistics.named_blocks, statistics.dropped_batches) == (4, 1, 0)
    times = [batch[0] for _, _, batch in batches]
    assert times == sorted(times)
    assert times[0] > 1.7e9


def test_a_host_without_a_loop_publishes_the_same(peers: Peers) -> None:
    rig = Rig(factor=2)
    with rig.open() as offloader, publish_kv_events(offloader, options(block_names="bytes")) as publisher:
        keys = keys_of(offloader, 2)
        publisher.note_request(keys, range(16))
        offloader.store_soon(keys[1:], [2, 3], first_block=1)
        rig.manual_device.land_all()
        offloader.poll()
        ((_, _, (_, [event], _)),) = replay(peers, publisher)
    assert event["block_hashes"] == [offload_block_hash(keys[1])]
    assert event["parent_block_hash"] == offload_block_hash(keys[0])
    assert event["token_ids"] == list(range(8, 16))
    assert event["block_size"] == 8
    assert "extra_keys" not in event


def said(peers: Peers, publisher: KVEventPublisher) -> list[Any]:
    return [event for _, _, batch in replay(peers, publisher) for event in batch[1]]


def test_blocks_that_do_not_follow_each_other_are_told_apart(peers: Peers) -> None:
    first, second = make_keys(1, 2, 3, 4), make_keys(1, 12, 13)
    with KVEventPublisher(options(), [GROUP]) as publisher:
        publisher.note_request(first, range(16))
        publisher.note_request(second, [*range(4), *range(104, 112)], salt="pepper")
        publisher(stored(first[0], first[1], first[3], second[1], second[2], *make_keys(8, 9)))
        events = said(peers, publisher)
    assert [(event["token_ids"], event["parent_block_hash"], len(event["block_hashes"])) for event in events] == [
        (list(range(8)), None, 2),
        (list(range(12, 16)), number_of(first[2]), 1),
        (list(range(104, 112)), number_of(first[0]), 2),
        ([], None, 2),
    ]
    assert not any("extra_keys" in event for event in events)


def test_a_salt_is_told_with_the_first_block_alone(peers: Peers) -> None:
    with KVEventPublisher(options(), [GROUP]) as publisher:
        publisher.note_request(make_keys(1, 2), range(8), salt="pepper")
        publisher(stored(*make_keys(1, 2)))
        (event,) = said(peers, publisher)
    assert event["extra_keys"] == [["pepper"], None]


def test_groups_are_told_apart(peers: Peers) -> None:
    window = KVGroup(block_tokens=8, layers=[1], kind="window", window_tokens=32)
    state = KVGroup(block_tokens=8, layers=[2], kind="state")
    keys = [
        *(make_offload_key(bytes([number]) * 16, 0) for number in range(4)),
        *(make_offload_key(bytes([number]) * 16, group) for group in (1, 2) for number in (1, 3)),
    ]
    with KVEventPublisher(options(), [GROUP, window, state]) as publisher:
        publisher.note_request(keys, range(17))
        publisher(stored(*keys))
        publisher(removed(keys[0], keys[4], keys[1]))
        events = said(peers, publisher)
    assert [
        (event["group_idx"], event["kv_cache_spec_kind"], event.get("kv_cache_spec_sliding_window"))
        for event in events[:3]
    ] == [(0, "full_attention", None), (1, "sliding_window", 32), (2, "mamba", None)]
    assert [event["token_ids"] for event in events[:3]] == [list(range(16))] * 3
    assert [(event["group_idx"], event["block_hashes"]) for event in events[3:]] == [
        (0, [number_of(keys[0]), number_of(keys[1])]),
        (1, [number_of(keys[4])]),
    ]


def test_beside_an_engine_that_announces_too_a_reset_names_the_blocks(
    peers: Peers,
) -> None:
    keys = make_keys(1, 2, 3)
    with KVEventPublisher(options(is_sole_source=False), [GROUP]) as publisher:
        publisher(stored(*keys))
        publisher(removed(keys[1]))
        publisher(CLEARED)
        publisher(stored(keys[1]))
        publisher(CLEARED)
        events = said(peers, publisher)
    assert [event.get("block_hashes") for event in events if event["type"] == "BlockRemoved"] == [
        [number_of(keys[1])],
        [number_of(keys[0]), number_of(keys[2])],
        [number_of(keys[1])],
    ]
    assert {event["type"] for event in events} == {"BlockStored", "BlockRemoved"}


def test_the_oldest_requests_are_forgotten_first(peers: Peers) -> None:
    with KVEventPublisher(options(known_blocks=3), [GROUP]) as publisher:
        publisher.note_request(make_keys(1, 2), range(8))
        publisher.note_request(make_keys(3), range(4))
        publisher.note_request(make_keys(1), range(4))
        publisher.note_request(make_keys(4), range(4))
        for number in (1, 2, 3, 4):
            publisher(stored(*make_keys(number)))
        assert publisher.statistics().known_blocks == 3
        assert [len(event["token_ids"]) for event in said(peers, publisher)] == [4, 0, 4, 4]


@pytest.mark.parametrize(
    ("keys", "tokens", "message"),
    [
        (make_keys(1, 2), range(7), "2 blocks of 4 tokens need as many tokens, not 7"),
        ([make_offload_key(b"x" * 16, 1)], range(8), "a key is of KV group 1, but there are 1"),
        (make_keys(1), [0.5] * 4, "flat sequence of integers"),
    ],
)
def test_facts_that_cannot_be_are_refused_and_change_nothing(keys: list[OffloadKey], tokens: Any, message: str) -> None:
    with KVEventPublisher(options(), [GROUP]) as publisher:
        with pytest.raises(InvalidRequestError, match=message):
            publisher.note_request(keys, tokens)
        assert publisher.statistics().known_blocks == 0


# How it is sent


def test_subscribers_get_batches_as_they_come_by_topic(peers: Peers, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    with KVEventPublisher(options(endpoint=endpoint, topic="kv@a@m"), [GROUP]) as publisher:
        mine, others = subscribe(peers, endpoint, b"kv@a"), subscribe(peers, endpoint, b"kv@b")
        probe(publisher, mine)
        first = publisher.statistics().batches
        publisher(stored(*make_keys(1)))
        publisher(removed(*make_keys(1)))
        batches = read(mine, 2)
        assert [number for _, number, _ in batches] == [first, first + 1]
        assert [batch[1][0]["type"] for _, _, batch in batches] == ["BlockStored", "BlockRemoved"]
        assert not others.poll(0)


def test_a_router_may_offer_the_endpoint(peers: Peers) -> None:
    router = peers.open(zmq.SUB)
    router.subscribe(b"")
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with KVEventPublisher(options(endpoint=f"tcp://127.0.0.1:{port}"), [GROUP]) as publisher:
        probe(publisher, router)
        publisher(stored(*make_keys(1)))
        ((_, _, (_, [event], _)),) = read(router, 1)
        assert event["type"] == "BlockStored"


def test_a_replay_has_what_is_kept_from_the_number_on(peers: Peers) -> None:
    with KVEventPublisher(options(replay_batches=3), [GROUP]) as publisher:
        for number in range(5):
            publisher(stored(*make_keys(number)))
        assert [number for _, number, _ in replay(peers, publisher)] == [2, 3, 4]
        assert [number for _, number, _ in replay(peers, publisher, 4)] == [4]
        assert replay(peers, publisher, 5) == []


def test_what_is_no_request_for_a_replay_is_ignored(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    with KVEventPublisher(options(), [GROUP]) as publisher:
        publisher(CLEARED)
        asking = peers.open(zmq.DEALER)
        asking.connect(publisher.replay_endpoint or "")
        for frames in ([b"hello"], [b"", b"short"], [b"", b"", b"", b""]):
            asking.send_multipart(frames)
        asking.send_multipart([b"", bytes(8)])
        assert asking.poll(PATIENCE_MS)
        assert asking.recv_multipart()[2] == bytes(8)
    assert sum("is none for a replay" in record.message for record in caplog.records) == 3


class Gate:
    """An encoder that stops in the middle until it is told to go on."""

    def __init__(self) -> None:
        self.is_inside = threading.Event()
        self.is_open = threading.Event()

    def encode(self, message: int) -> bytes:
        self.is_inside.set()
        assert self.is_open.wait(PATIENCE_MS / 1000)
        if message == 1:
            raise ValueError("this one cannot be encoded")
        return msgspec.msgpack.encode(message)


def gated_sender(gate: Gate, queue_messages: int) -> MessageSender[int]:
    return MessageSender(
        LOOPBACK,
        binds=True,
        replay_endpoint=LOOPBACK,
        topic="",
        encode=gate.encode,
        queue_messages=queue_messages,
        replay_messages=100,
        subscriber_messages=100,
    )


def test_a_full_queue_loses_batches_and_the_numbers_have_a_gap(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    sender = gated_sender(gate, queue_messages=3)
    sender.submit(0)
    assert gate.is_inside.wait(PATIENCE_MS / 1000)
    for message in range(1, 7):
        sender.submit(message)
    assert (sender.queued_count, sender.dropped_count) == (3, 3)
    gate.is_open.set()
    assert [number for _, number, _ in replay(peers, sender)] == [0, 2, 3]
    sender.submit(7)
    assert [(number, message) for _, number, message in replay(peers, sender)] == [(0, 0), (2, 2), (3, 3), (7, 7)]
    assert sender.failed_count == 1
    assert "this one cannot be encoded" in caplog.text
    sender.close(PATIENCE_MS / 1000)


def test_closing_sends_what_is_queued_and_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    sender = gated_sender(gate, queue_messages=3)
    sender.submit(0)
    assert gate.is_inside.wait(PATIENCE_MS / 1000)
    sender.submit(2)
    sender.close(0.01)
    assert "closed after 0.01 s with messages on their way" in caplog.text
    sender.submit(3)
    assert (sender.next_number, sender.queued_count) == (2, 1)
    gate.is_open.set()
    sender._thread.join(PATIENCE_MS / 1000)
    assert (sender._thread.is_alive(), sender.queued_count) == (False, 0)
    sender.close(1)


def test_a_slow_subscriber_loses_batches_and_hinders_nobody(peers: Peers, tmp_path: Path) -> None:
    count = 64
    sender: MessageSender[int] = MessageSender(
        f"ipc://{tmp_path}/events",
        binds=True,
        replay_endpoint=f"ipc://{tmp_path}/replay",
        topic="",
        encode=lambda message: msgspec.msgpack.encode([message, bytes(1 << 18)]),
        queue_messages=2 * count,
        replay_messages=2 * count,
        subscriber_messages=2,
    )
    slow = peers.open(zmq.SUB)
    slow.set_hwm(1)
    slow.subscribe(b"")
    slow.connect(sender.endpoint)
    while not slow.poll(1):
        sender.submit(0)
    first = sender.next_number
    for message in range(count):
        sender.submit(message)
    assert [number for _, number, _ in replay(peers, sender, first)] == list(range(first, first + count))
    numbers: list[int] = []
    while not numbers or numbers[-1] < first + count:  # what is sent later fits again
        if slow.poll(1):
            numbers.append(decode(slow.recv_multipart())[1])
        else:
            sender.submit(0)
    assert numbers == sorted(set(numbers))
    assert len(set(range(first, first + count)) & set(numbers)) < count
    assert (sender.dropped_count, sender.failed_count) == (0, 0)
    sender.close(PATIENCE_MS / 1000)


def test_a_closed_publisher_ignores_events_and_the_manager_goes_on() -> None:
    rig = Rig()
    with rig.open() as offloader:
        publisher = publish_kv_events(offloader, options())
        publisher.close()
        publisher.close()
        offloader.store(keys_of(offloader, 1), [0])
        assert publisher.statistics().batches == 0
        assert offloader.statistics().manager.detached_sinks == 0


def test_a_forked_process_closes_nothing_of_its_parent(peers: Peers) -> None:
    with KVEventPublisher(options(), [GROUP]) as publisher:
        child = os.fork()
        if not child:
            publisher.close(timeout_seconds=PATIENCE_MS)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        publisher(stored(*make_keys(1)))
        assert [event["type"] for event in said(peers, publisher)] == ["BlockStored"]


@on_both_loops
async def test_another_thread_is_refused() -> None:
    with KVEventPublisher(options(), [GROUP]) as publisher:
        publisher.note_request(make_keys(1), range(4))
        with pytest.raises(WrongThreadError, match="this publisher of KV events belongs to another thread"):
            await anyio.to_thread.run_sync(publisher.note_request, make_keys(2), range(4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_names": "hex"}, "block_names is 'hex'; it must be one of int, bytes"),
        ({"known_blocks": 0}, "known_blocks is 0"),
        ({"queue_batches": 0}, "queue_batches is 0"),
        ({"endpoint": "nowhere"}, "the endpoint 'nowhere' cannot be"),
        ({"replay_endpoint": "tcp://0.0.0.1:1"}, r"the endpoint 'tcp://0\.0\.0\.1:1' cannot be offered"),
    ],
)
def test_options_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        KVEventPublisher(options(**changes), [GROUP])


def test_an_endpoint_that_is_taken_is_refused() -> None:
    with KVEventPublisher(options(), [GROUP]) as publisher:
        taken = options(endpoint=publisher.endpoint, binds=True)
        with pytest.raises(ConfigurationError, match=r"cannot be offered: Address already in use"):
            KVEventPublisher(taken, [GROUP])


@pytest.mark.parametrize("name", ["zmq", "msgspec"])
def test_a_missing_extra_is_the_command_that_installs_it(name: str) -> None:
    program = f"import sys; sys.modules[{name!r}] = None; import aiokvoffload.integrations.kv_events"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install 'aiokvoffload[kv-events]'" in done.stderr.splitlines()[-1]


LEAVES = """
import sys, torch, zmq
from aiokvoffload import open_offloader
from aiokvoffload.integrations.kv_events import KVEventOptions, publish_kv_events

context = open_offloader([torch.zeros((4, 64), dtype=torch.int8)], cpu_bytes=256)
offloader = context.__enter__()
loopback = "tcp://127.0.0.1:*"
publisher = publish_kv_events(offloader, KVEventOptions(endpoint=loopback, replay_endpoint=loopback))
with zmq.Context() as other_side, other_side.socket(zmq.SUB) as subscriber:
    subscriber.subscribe(b"")
    subscriber.connect(publisher.endpoint)
    while not subscriber.poll(1):
        offloader.reset()
offloader.store(offloader.keys(range(16)), [0])
print("leaves")
if sys.argv[1] == "raises":
    raise SystemExit(3)
"""


@pytest.mark.parametrize(("ending", "status"), [("returns", 0), ("raises", 3)])
def test_a_process_that_leaves_without_closing_ends_without_a_word(ending: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(LEAVES), ending],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "leaves\n", "")
