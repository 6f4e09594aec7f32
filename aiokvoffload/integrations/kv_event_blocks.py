"""What routers are told of blocks: events of a manager, with what the engine has told of the blocks before."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.errors import ConfigurationError, InvalidRequestError
from aiokvoffload.events import EventKind, OffloadingEvent
from aiokvoffload.integrations.kv_event_wire import (
    AllBlocksCleared,
    BlockName,
    BlockNameFormat,
    BlockRemoved,
    BlockStored,
    WireEvent,
    name_of,
)
from aiokvoffload.keys import OffloadKey, offload_block_hash, offload_group_index
from aiokvoffload.kv_caches import KVGroup

_TOKEN = np.dtype("<i8")
_WIRE_KIND = {"full": "full_attention", "window": "sliding_window", "state": "mamba"}


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """What a router wants to know of a block, and its hash does not say.

    Attributes:
        parent_hash: Hash of the block before it; None for the first of a request.
        token_bytes: Its token ids, 8 bytes each, little-endian.
        adapter: The adapter of its request.
        extra_keys: What else its content depends on.
    """

    parent_hash: bytes | None
    token_bytes: bytes
    adapter: str
    extra_keys: tuple[str, ...]

    def token_ids(self) -> list[int]:
        """Return the token ids."""
        ids: list[int] = np.frombuffer(self.token_bytes, _TOKEN).tolist()
        return ids


Facts = Sequence[BlockFacts | None]
"""For each block of an event what is known of it, or None."""


class BlockFactTable:
    """Remembers the facts of blocks, of the latest requests first.

    Args:
        group_block_tokens: Tokens of an offloaded block of each KV group.
        capacity: How many blocks are remembered.
    """

    def __init__(self, group_block_tokens: Sequence[int], capacity: int) -> None:
        if capacity < 1:
            raise ConfigurationError(f"known_blocks is {capacity}; it must be at least 1")
        self._group_block_tokens = group_block_tokens
        self._capacity = capacity
        self._facts: OrderedDict[OffloadKey, BlockFacts] = OrderedDict()

    def __len__(self) -> int:
        return len(self._facts)

    def note(
        self, keys: Sequence[OffloadKey], token_ids: Sequence[int] | NDArray[np.integer], adapter: str, salt: str
    ) -> None:
        """Remember the blocks of a request.

        Raises:
            InvalidRequestError: A key is of no KV group, or there are more keys than the tokens fill blocks.
        """
        tokens = np.asarray(token_ids)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise InvalidRequestError("token ids must be a flat sequence of integers")
        self._check_fit(keys, len(tokens))
        token_bytes = tokens.astype(_TOKEN).tobytes()
        counts: Counter[int] = Counter()
        parents: dict[int, bytes] = {}
        for key in keys:
            group = offload_group_index(key)
            width = self._group_block_tokens[group] * _TOKEN.itemsize
            start = counts[group] * width
            if key in self._facts:
                self._facts.move_to_end(key)
            else:
                extra = (adapter,) if adapter else ()
                if salt and not start:
                    extra = (*extra, salt)  # of the first block alone: all later hashes follow from it
                self._facts[key] = BlockFacts(parents.get(group), token_bytes[start : start + width], adapter, extra)
            counts[group] += 1
            parents[group] = offload_block_hash(key)
        while len(self._facts) > self._capacity:
            self._facts.popitem(last=False)

    def facts_of(self, keys: Sequence[OffloadKey]) -> list[BlockFacts | None]:
        """Return what is known of blocks."""
        return [self._facts.get(key) for key in keys]

    def _check_fit(self, keys: Sequence[OffloadKey], token_count: int) -> None:
        for group, count in Counter(map(offload_group_index, keys)).items():
            if group >= len(self._group_block_tokens):
                raise InvalidRequestError(
                    f"a key is of KV group {group}, but there are {len(self._group_block_tokens)}"
                )
            if count * self._group_block_tokens[group] > token_count:
                raise InvalidRequestError(
                    f"{count} blocks of {self._group_block_tokens[group]} tokens need as many tokens, "
                    f"not {token_count}; give all tokens from the start of the request"
                )


class EventTranslator:
    """Says events of a manager in the words of the wire.

    Args:
        groups: The KV groups.
        block_size_factor: GPU blocks per offloaded block.
        block_names: How blocks are called.
        is_sole_source: Nobody else announces blocks under the same name. Where somebody does, a clearing must name the
            blocks: "all blocks" would be those of the others too.
    """

    def __init__(
        self, groups: Sequence[KVGroup], block_size_factor: int, block_names: BlockNameFormat, *, is_sole_source: bool
    ) -> None:
        self._groups = groups
        self._factor = block_size_factor
        self._block_names = block_names
        self._announced: dict[tuple[str, int], dict[BlockName, None]] | None = None if is_sole_source else {}

    def translate(self, event: OffloadingEvent, facts: Facts) -> list[WireEvent]:
        """Return what is said of an event; `facts` belong to its keys, for blocks that were stored."""
        said: list[WireEvent]
        if event.kind is EventKind.STORED:
            said = list(self._say_stored(event, facts))
        elif event.kind is EventKind.REMOVED:
            said = self._say_removed(event)
        elif self._announced is None:
            return [AllBlocksCleared()]
        else:
            cleared = {place: names for place, names in self._announced.items() if place[0] == event.medium}
            said = [BlockRemoved(list(names), medium, group) for (medium, group), names in cleared.items() if names]
        self._keep_count(said)
        return said

    def _say_stored(self, event: OffloadingEvent, facts: Facts) -> Iterator[BlockStored]:
        """Say what was stored, as runs of blocks that follow each other."""
        run: list[tuple[OffloadKey, BlockFacts | None]] = []
        for block in zip(event.keys, facts, strict=True):
            if run and not _follows(run[-1], block):
                yield self._say_run(run, event.medium)
                run = []
            run.append(block)
        if run:
            yield self._say_run(run, event.medium)

    def _say_run(self, run: Sequence[tuple[OffloadKey, BlockFacts | None]], medium: str) -> BlockStored:
        index = offload_group_index(run[0][0])
        group = self._groups[index]
        known = [facts for _, facts in run if facts is not None]
        first = known[0] if known else None
        parent = None if first is None or first.parent_hash is None else self._name(first.parent_hash)
        has_extra_keys = any(facts.extra_keys for facts in known)
        return BlockStored(
            block_hashes=[self._name(offload_block_hash(key)) for key, _ in run],
            parent_block_hash=parent,
            token_ids=[token for facts in known for token in facts.token_ids()],
            # Readers take blocks of no tokens for what it is; a size without tokens would send them past the end.
            block_size=group.block_tokens * self._factor if known else 0,
            lora_id=None,
            medium=medium,
            lora_name=first.adapter or None if first is not None else None,
            extra_keys=[facts.extra_keys or None for facts in known] if has_extra_keys else None,
            group_idx=index,
            kv_cache_spec_kind=_WIRE_KIND[group.kind],
            kv_cache_spec_sliding_window=group.window_tokens,
        )

    def _say_removed(self, event: OffloadingEvent) -> list[WireEvent]:
        names_of: dict[int, list[BlockName]] = {}
        for key in event.keys:
            names_of.setdefault(offload_group_index(key), []).append(self._name(offload_block_hash(key)))
        return [BlockRemoved(names, event.medium, group) for group, names in names_of.items()]

    def _keep_count(self, said: Sequence[WireEvent]) -> None:
        """Remember what is announced, where a clearing must name it."""
        if self._announced is None:
            return
        for event in said:
            if isinstance(event, BlockStored):
                place = event.medium or "", event.group_idx or 0
                self._announced.setdefault(place, {}).update(dict.fromkeys(event.block_hashes))
            elif isinstance(event, BlockRemoved):
                held = self._announced.get((event.medium or "", event.group_idx or 0), {})
                for name in event.block_hashes:
                    held.pop(name, None)

    def _name(self, block_hash: bytes) -> BlockName:
        return name_of(block_hash, self._block_names)


def _follows(before: tuple[OffloadKey, BlockFacts | None], block: tuple[OffloadKey, BlockFacts | None]) -> bool:
    """Return whether a block can be told together with the one before it."""
    (before_key, before_facts), (key, facts) = before, block
    if offload_group_index(before_key) != offload_group_index(key):
        return False
    if before_facts is None or facts is None:
        return before_facts is facts
    return facts.parent_hash == offload_block_hash(before_key) and facts.adapter == before_facts.adapter
