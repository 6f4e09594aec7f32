"""What lies where in the directory of a file tier.

::

    aiokvoffload.json                           says whose directory this is, and the version of its layout
    lock                                        held by the process that evicts
    blocks/<identity>/identity.json             the identity, in words
    blocks/<identity>/<2 digits>/<name>         one block: header, payload, padding
    writers/<writer>/lock                       held by a process that writes, as long as it lives
    writers/<writer>/<number>                   a block that it is writing
    reports/<identity>.<name>.<bytes>.<writer>  a block that the process that evicts has not counted yet;
                                                `.finished` once it stands in its place

Names are hashes of fingerprints and keys, in hexadecimal digits.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.tiers.fs.files import Files, write_small_file
from aiokvoffload.tiers.names import (
    IDENTITY,
    IDENTITY_DIGITS,
    NAME_DIGITS,
    BlockId,
    block_id,
    describe_identity,
    identity_name,
    is_block_id,
    read_description,
)

MARKER = "aiokvoffload.json"
FORMAT = {"format": "aiokvoffload blocks", "version": 1}
_FINISHED = ".finished"
_REPORT = re.compile(
    rf"([0-9a-f]{{{IDENTITY_DIGITS}}})\.([0-9a-f]{{{NAME_DIGITS}}})\.([0-9]{{1,19}})\.([0-9a-f]+)(\{_FINISHED})?"
)


@dataclass(frozen=True, slots=True)
class Report:
    """A block that was or is being written by a process that does not evict.

    Attributes:
        block: The block.
        byte_count: Bytes of its file.
        writer: Who writes it.
        is_finished: It stands in its place.
    """

    block: BlockId
    byte_count: int
    writer: str
    is_finished: bool = False

    @property
    def name(self) -> str:
        """Name of the report's file."""
        identity, _, name = self.block.split("/")
        return f"{identity}.{name}.{self.byte_count}.{self.writer}{_FINISHED if self.is_finished else ''}"

    @classmethod
    def parse(cls, name: str) -> Report | None:
        """Return the report of this name, None if it is none."""
        match = _REPORT.fullmatch(name)
        if match is None:
            return None
        identity, block_name, byte_count, writer, ending = match.groups()
        return cls(block_id(identity, block_name), int(byte_count), writer, ending is not None)


class Layout:
    """Paths below one directory.

    Args:
        root: The directory.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.lock = f"{root}/lock"
        self.blocks = f"{root}/blocks"
        self.writers = f"{root}/writers"
        self.reports = f"{root}/reports"

    def path(self, block: BlockId) -> str:
        """Return the path of a block."""
        return f"{self.blocks}/{block}"

    def report(self, report: Report) -> str:
        """Return the path of a report."""
        return f"{self.reports}/{report.name}"

    def writer(self, writer: str) -> str:
        """Return the directory of a writer."""
        return f"{self.writers}/{writer}"

    def create(self, files: Files) -> None:
        """Make the directory, or check that it is one of ours.

        Raises:
            ConfigurationError: It cannot be made or written, or holds something else.
        """
        try:
            files.make_directories(self.root)
            if not self.check(files):
                # Whoever comes in between finds nothing but this file and its like.
                write_small_file(files, self.root, MARKER, json.dumps(FORMAT).encode())
            for path in (self.blocks, self.writers, self.reports):
                files.make_directories(path)
        except OSError as exc:
            raise ConfigurationError(
                f"{self.root} cannot be used as a directory for blocks: {exc.strerror}; "
                "give a directory that this process may write"
            ) from exc

    def check(self, files: Files) -> bool:
        """Return whether a directory is one of ours, or False if it is empty.

        Raises:
            ConfigurationError: It holds something else, or blocks in another layout.
        """
        names = [name for name in files.list(self.root) if not name.startswith(f".{MARKER}")]
        if not names:
            return False
        try:
            with open(f"{self.root}/{MARKER}", "rb") as file:
                found = json.loads(file.read(4096))
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict) or found.get("format") != FORMAT["format"]:
            raise ConfigurationError(
                f"{self.root} holds something else, such as {sorted(names)[0]!r}; give an empty directory, "
                "a new one, or one with blocks of this library"
            )
        if found != FORMAT:
            raise ConfigurationError(
                f"{self.root} holds blocks in layout {found.get('version')!r}, this version knows layout "
                f"{FORMAT['version']}; give another directory, or remove it"
            )
        return True

    def describe(self, files: Files, identity: CacheIdentity) -> None:
        """Write what an identity is beside its blocks."""
        directory = f"{self.blocks}/{identity_name(identity)}"
        files.make_directories(directory)
        if IDENTITY not in files.list(directory):
            write_small_file(files, directory, IDENTITY, describe_identity(identity))

    def identities(self, files: Files) -> list[str]:
        """Return the names of the identities that have blocks."""
        return sorted(name for name in files.list(self.blocks) if len(name) == IDENTITY_DIGITS)

    def description(self, identity: str) -> dict[str, object]:
        """Return what was written about an identity; empty if that cannot be read."""
        try:
            with open(f"{self.blocks}/{identity}/{IDENTITY}", "rb") as file:
                return read_description(file.read(1 << 20))
        except OSError:
            return {}

    def stored_blocks(self, files: Files, identity: str) -> Iterator[tuple[BlockId, os.stat_result]]:
        """Yield the block files of one identity; one that vanishes meanwhile is left out."""
        for digits in files.list(f"{self.blocks}/{identity}"):
            for name in files.list(f"{self.blocks}/{identity}/{digits}"):
                block = BlockId(f"{identity}/{digits}/{name}")
                if is_block_id(block):
                    try:
                        found = files.stat(self.path(block))
                    except FileNotFoundError:
                        continue
                    if stat.S_ISREG(found.st_mode):
                        yield block, found
