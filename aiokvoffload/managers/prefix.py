"""Where a prefix can end so that every KV group has what it needs to go on from there.

A full-attention group needs an unbroken run of blocks from the start, a window group the last blocks before the
end, a last-state group only the block that ends there. A boundary is a number of tokens at which a block of
every group ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from aiokvoffload.errors import InvalidRequestError
from aiokvoffload.keys import OffloadKey
from aiokvoffload.kv_caches import KVGroup

Keys = Sequence[OffloadKey]
AreUsable = Callable[[Keys], Sequence[bool]]
"""Says of each of some blocks whether it can be loaded."""

_ASKED_AT_ONCE = 256


class PrefixMatcher:
    """Finds the largest boundary that all groups agree on.

    Args:
        groups: The KV groups; without any, one full group that counts blocks instead of tokens.
        block_size_factor: GPU blocks per offloaded block.
    """

    def __init__(self, groups: Sequence[KVGroup] = (), block_size_factor: int = 1) -> None:
        groups = tuple(groups) or (KVGroup(block_tokens=1, layers=()),)
        self.block_tokens = tuple(group.block_tokens * block_size_factor for group in groups)
        self._needed_counts = tuple(
            group.blocks_needed(tokens) for group, tokens in zip(groups, self.block_tokens, strict=True)
        )
        self._alignment = math.lcm(*self.block_tokens)

    def split(self, keys: Keys, group_sizes: Sequence[int] | None) -> list[Keys]:
        """Return the keys of each group, each key once.

        Raises:
            InvalidRequestError: The sizes are not one per group, or do not add up to the number of keys.
        """
        if group_sizes is None and len(self.block_tokens) == 1:
            group_sizes = (len(keys),)
        if (
            group_sizes is None
            or len(group_sizes) != len(self.block_tokens)
            or sum(group_sizes) != len(keys)
            or min(group_sizes) < 0
        ):
            raise InvalidRequestError(
                f"{len(keys)} keys of {len(self.block_tokens)} KV groups need group_sizes, "
                f"one per group and adding up to {len(keys)}, not {group_sizes}"
            )
        parts: list[Keys] = []
        start = 0
        for size in group_sizes:
            part = keys[start : start + size]
            parts.append(part if len(set(part)) == size else list(dict.fromkeys(part)))
            start += size
        return parts

    def boundary(self, parts: Sequence[Keys], are_usable: AreUsable, resident_tokens: int = 0) -> int:
        """Return the largest boundary that can be reached, in tokens; `resident_tokens` if none lies beyond it.

        Args:
            parts: Keys of each group from the start of the request.
            are_usable: Which blocks can be loaded; asked in batches, that end soon after the first one that cannot.
            resident_tokens: Tokens from the start that need not be loaded.

        Raises:
            InvalidRequestError: `resident_tokens` is negative.
        """
        if resident_tokens < 0:
            raise InvalidRequestError(f"resident_tokens is {resident_tokens}, it must be at least 0")
        limit = min(len(part) * tokens for part, tokens in zip(parts, self.block_tokens, strict=True))
        for part, tokens, needed in zip(parts, self.block_tokens, self._needed_counts, strict=True):
            if needed is None:
                index = _unbroken_end(part, resident_tokens // tokens, limit // tokens, are_usable)
                limit = min(limit, max(index * tokens, resident_tokens))
        end_tokens = self._align(limit)
        if self._needed_counts.count(None) == len(parts):
            return max(end_tokens, resident_tokens)
        while end_tokens > resident_tokens:
            lower = min(
                (
                    self._last_missing_end(part, group, end_tokens, are_usable, resident_tokens)
                    for group, part in enumerate(parts)
                ),
                default=end_tokens,
            )
            if lower == end_tokens:
                break
            end_tokens = self._align(lower)
        return max(end_tokens, resident_tokens)

    def needed(self, group: int, end_tokens: int, resident_tokens: int = 0) -> range:
        """Return which blocks of a group must be loaded for a prefix of `end_tokens` tokens."""
        tokens = self.block_tokens[group]
        end = end_tokens // tokens
        count = self._needed_counts[group]
        start = resident_tokens // tokens
        if count is not None:
            start = max(start, end - count)
        return range(min(start, end) if end_tokens > resident_tokens else end, end)

    def _last_missing_end(
        self,
        part: Keys,
        group: int,
        end_tokens: int,
        are_usable: AreUsable,
        resident_tokens: int,
    ) -> int:
        """Return `end_tokens` if the group can go on from there, else the start of its last missing block.

        Every boundary between that start and `end_tokens` needs the missing block too.
        """
        if self._needed_counts[group] is not None:
            needed = self.needed(group, end_tokens, resident_tokens)
            usable = are_usable(part[needed.start : needed.stop])
            for index, is_usable in zip(reversed(needed), reversed(usable), strict=True):
                if not is_usable:
                    return index * self.block_tokens[group]
        return end_tokens

    def _align(self, tokens: int) -> int:
        return tokens // self._alignment * self._alignment


def _unbroken_end(part: Keys, start: int, end: int, are_usable: AreUsable) -> int:
    """Return where the run of usable blocks ends that begins at `start`."""
    while start < end:
        usable = list(are_usable(part[start : min(end, start + _ASKED_AT_ONCE)]))
        if False in usable:
            return start + usable.index(False)
        start += len(usable)
    return start
