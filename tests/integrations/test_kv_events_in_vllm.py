"""vLLM's own classes read our events, and write the same bytes for the same events."""

from __future__ import annotations

import importlib
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from aiokvoffload import KVGroup, make_offload_key
from aiokvoffload.events import EventKind, OffloadingEvent
from aiokvoffload.integrations.kv_event_blocks import BlockFactTable, EventTranslator
from aiokvoffload.integrations.kv_event_wire import BlockNameFormat, EventBatch, encode_batch
from aiokvoffload.keys import offload_block_hash

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore:::")]  # importing vllm warns
GROUPS = [KVGroup(4, [0]), KVGroup(4, [1], kind="window", window_tokens=8)]
KEYS = [make_offload_key(sha256(bytes([number])).digest(), group) for group in (0, 1) for number in range(3)]
UNKNOWN_HASH = sha256(b"unknown").digest()


@pytest.fixture
def vllm_events() -> Any:
    return importlib.import_module("vllm.distributed.kv_events")


def payload(block_names: BlockNameFormat) -> bytes:
    table = BlockFactTable([4, 4], capacity=100)
    table.note(KEYS, range(12), "fox", "pepper")
    translator = EventTranslator(GROUPS, 1, block_names, is_sole_source=True)
    unknown = make_offload_key(UNKNOWN_HASH)
    events = [
        OffloadingEvent(EventKind.STORED, (*KEYS[1:], unknown), "CPU", 0),
        OffloadingEvent(EventKind.REMOVED, (KEYS[1], KEYS[4]), "CPU", 1),
        OffloadingEvent(EventKind.CLEARED, (), "CPU", 2),
    ]
    said = [wire for event in events for wire in translator.translate(event, table.facts_of(event.keys))]
    return encode_batch(EventBatch(1234.5, said, 3))


@pytest.mark.parametrize("block_names", ["int", "bytes"])
def test_vllm_reads_our_events_and_writes_the_same_bytes(
    vllm_events: Any, block_names: BlockNameFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(block_names == "int")))
    name_of = importlib.import_module("vllm.v1.core.kv_cache_utils").maybe_convert_block_hash
    names = [name_of(offload_block_hash(key)) for key in KEYS]
    stored = [
        vllm_events.BlockStored(
            block_hashes=names[1:3],
            parent_block_hash=names[0],
            token_ids=list(range(4, 12)),
            block_size=4,
            lora_id=None,
            medium=vllm_events.MEDIUM_CPU,
            lora_name="fox",
            extra_keys=[("fox",), ("fox",)],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        ),
        vllm_events.BlockStored(
            block_hashes=names[3:],
            parent_block_hash=None,
            token_ids=list(range(12)),
            block_size=4,
            lora_id=None,
            medium=vllm_events.MEDIUM_CPU,
            lora_name="fox",
            extra_keys=[("fox", "pepper"), ("fox",), ("fox",)],
            group_idx=1,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=8,
        ),
        vllm_events.BlockStored(
            block_hashes=[name_of(UNKNOWN_HASH)],
            parent_block_hash=None,
            token_ids=[],
            block_size=0,
            lora_id=None,
            medium=vllm_events.MEDIUM_CPU,
            lora_name=None,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        ),
    ]
    removed = [
        vllm_events.BlockRemoved(block_hashes=[names[position]], medium=vllm_events.MEDIUM_CPU, group_idx=group)
        for group, position in enumerate((1, 4))
    ]
    theirs = vllm_events.KVEventBatch(1234.5, [*stored, *removed, vllm_events.AllBlocksCleared()], 3)
    ours = payload(block_names)
    read = msgspec.msgpack.Decoder(vllm_events.KVEventBatch).decode(ours)
    # The decoder of a struct that allows both makes lists of what was written as tuples.
    assert msgspec.to_builtins(read) == msgspec.to_builtins(theirs)
    assert ours == msgspec.msgpack.encode(theirs)


def test_the_kinds_of_groups_are_vllms(vllm_events: Any) -> None:
    kinds = importlib.import_module("vllm.v1.kv_cache_interface").KVCacheSpecKind
    translator = EventTranslator([*GROUPS, KVGroup(4, [2], kind="state")], 1, "int", is_sole_source=True)
    event = OffloadingEvent(EventKind.STORED, tuple(make_offload_key(b"k" * 16, group) for group in range(3)), "CPU", 0)
    for said in translator.translate(event, [None] * 3):
        assert kinds(getattr(said, "kv_cache_spec_kind")).value  # noqa: B009  only one kind of event has it


def test_a_socket_of_ours_answers_as_vllms_does(vllm_events: Any) -> None:
    publisher = vllm_events.ZmqEventPublisher
    sender = importlib.import_module("aiokvoffload.integrations.kv_event_sender")
    assert sender._END_OF_REPLAY == publisher.END_SEQ
