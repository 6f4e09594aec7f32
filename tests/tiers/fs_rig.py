"""A file tier in a directory of its own."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiokvoffload.clock import Clock
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.testing.faulty_files import FaultyFiles
from aiokvoffload.testing.strategies import make_keys
from aiokvoffload.testing.tier_contract import BLOCK_BYTES, IDENTITY, payload
from aiokvoffload.tiers.fs.tier import FileTier, FileTierOptions, file_bytes
from aiokvoffload.tiers.names import block_id, block_name, identity_name
from aiokvoffload.tiers.outcomes import BlockResult

FILE_BYTES = file_bytes(BLOCK_BYTES)
PATIENCE_SECONDS = 60.0


class Directory:
    """Opens tiers on one directory; their upkeep is done by hand unless `upkeep_seconds` is given.

    Args:
        path: The directory.
        capacity_blocks: Room.
    """

    def __init__(self, path: Path, capacity_blocks: int = 8) -> None:
        self.path = path
        self.capacity_blocks = capacity_blocks
        self.files = FaultyFiles()
        self.tiers: list[FileTier] = []

    def open(
        self,
        identity: CacheIdentity = IDENTITY,
        *,
        is_known: bool = True,
        clock: Clock | None = None,
        **options: Any,
    ) -> FileTier:
        chosen = FileTierOptions(
            **{
                "capacity_bytes": self.capacity_blocks * FILE_BYTES,
                "block_bytes": (BLOCK_BYTES,),
                "keep_free_bytes": 0,
                "upkeep_seconds": None,
                **options,
            }
        )
        tier = FileTier(str(self.path), identity, chosen, clock=clock, files=self.files)
        self.tiers.append(tier)
        if is_known and chosen.upkeep_seconds is None:
            tier.upkeep_step()
        return tier

    def close(self) -> None:
        self.files.heal()
        self.files.let_go()
        for tier in self.tiers:
            tier.close()

    def file(self, number: int, identity: CacheIdentity = IDENTITY) -> Path:
        return self.path / "blocks" / block_id(identity_name(identity), block_name(make_keys(number)[0]))

    def block_files(self) -> list[Path]:
        return [path for path in self.path.glob("blocks/*/??/*") if path.is_file()]

    def used_bytes(self) -> int:
        """What `du --apparent-size` says of the block files, at a moment after they were all listed."""
        total = 0
        for path in self.block_files():
            with suppress(FileNotFoundError):
                total += os.lstat(path).st_size
        return total

    def leftovers(self) -> list[Path]:
        """What is neither a block nor belongs there."""
        return [*self.path.glob("writers/*/[0-9]*"), *self.path.glob("reports/*")]


def store(tier: FileTier, *numbers: int, request_id: str | None = None, depth: int = 0) -> list[BlockResult]:
    """Store blocks one after the other."""
    return [
        tier.wait(tier.start_put(make_keys(number), [payload(number)], request_id=request_id, depths=[depth]))[0]
        for number in numbers
    ]


def load(tier: FileTier, number: int) -> BlockResult:
    """Load a block, and check every byte of a hit."""
    buffer = bytearray(BLOCK_BYTES)
    result = tier.wait(tier.start_get_into(make_keys(number), [buffer]))[0]
    assert not result.is_good or buffer == payload(number)
    return result


def held(tier: FileTier, *numbers: int) -> list[int]:
    """Return which of the blocks are there."""
    results = tier.wait(tier.start_contains(make_keys(*numbers)))
    return [number for number, result in zip(numbers, results, strict=True) if result.is_good]


def touch(tier: FileTier, *numbers: int, request_id: str | None = None) -> None:
    """Use blocks."""
    tier.wait(tier.start_touch(make_keys(*numbers), request_id=request_id))
