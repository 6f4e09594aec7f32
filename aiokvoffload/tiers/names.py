"""What blocks are called where they are stored: hashes in hexadecimal digits, never a caller's bytes."""

from __future__ import annotations

import dataclasses
import json
import re
from hashlib import blake2b
from typing import NewType

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import CacheIdentity, OffloadKey
from aiokvoffload.tiers.url import TierUrl

IDENTITY = "identity.json"
"""The identity in words; lies beside its blocks."""
_NAME_BYTES = 20
NAME_DIGITS = 2 * _NAME_BYTES
IDENTITY_DIGITS = 32
DEFAULT_PREFIX = "aiokvoffload"
_PREFIX_CHARACTERS = 200
_PREFIX_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_BLOCK = re.compile(rf"[0-9a-f]{{{IDENTITY_DIGITS}}}/[0-9a-f]{{2}}/[0-9a-f]{{{NAME_DIGITS}}}")

BlockId = NewType("BlockId", str)
"""The place of a block: `<identity>/<2 digits>/<name>`."""


def identity_name(identity: CacheIdentity) -> str:
    """Return the name that the places of an identity's blocks begin with."""
    return identity.fingerprint.hex()[:IDENTITY_DIGITS]


def describe_identity(identity: CacheIdentity) -> bytes:
    """Return what is written beside the blocks of an identity."""
    return json.dumps({**dataclasses.asdict(identity), "fingerprint": identity.fingerprint.hex()}, indent=2).encode()


def read_description(stored: bytes) -> dict[str, object]:
    """Return what was written about an identity; empty if that cannot be read."""
    try:
        found = json.loads(stored)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def block_name(key: OffloadKey) -> str:
    """Return the name of a block."""
    return blake2b(key, digest_size=_NAME_BYTES, person=b"aiokv-file").hexdigest()


def block_id(identity: str, name: str) -> BlockId:
    """Return the place of a block."""
    return BlockId(f"{identity}/{name[:2]}/{name}")


def is_block_id(text: str) -> bool:
    """Return whether a text is the place of a block."""
    return _BLOCK.fullmatch(text) is not None


def check_prefix(url: TierUrl, prefix: str) -> str:
    """Return what names in a store begin with, if it can.

    Raises:
        ConfigurationError: It cannot.
    """
    parts = prefix.split("/")
    if len(prefix) > _PREFIX_CHARACTERS or not all(_PREFIX_PART.fullmatch(part) for part in parts):
        raise ConfigurationError(
            f"{url.redacted}: the prefix {prefix!r} cannot be used; it is letters, digits and . _ : - in parts that "
            f"begin with a letter or digit, separated by single slashes, {_PREFIX_CHARACTERS} characters at most"
        )
    return prefix
