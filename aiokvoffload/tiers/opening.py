"""From a URL to an open tier."""

from __future__ import annotations

from collections.abc import Iterable

from aiokvoffload.clock import Clock, SystemClock
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.registry import nearest_name
from aiokvoffload.tiers.administration import TierAdministration
from aiokvoffload.tiers.base import TIERS, Tier, TierSettings
from aiokvoffload.tiers.url import TierUrl


def open_tier(
    url: str, *, identity: CacheIdentity, block_bytes: int | Iterable[int], clock: Clock | None = None
) -> Tier:
    """Open the tier that a URL names.

    Blocks while it looks at its storage, for the time of a few system calls or requests.

    Args:
        url: Such as `file:///var/cache/kv?capacity=200GiB`.
        identity: Whose blocks; two identities never see each other's.
        block_bytes: Bytes of a block, or the sizes that blocks have where KV groups differ.
        clock: Where deadlines are read.

    Raises:
        ConfigurationError: The URL, its options, or what it leads to cannot work.
    """
    sizes = (block_bytes,) if isinstance(block_bytes, int) else tuple(block_bytes)
    if not sizes or min(sizes) < 1:
        raise ConfigurationError(f"block_bytes is {block_bytes!r}; give the size of a block, or several, at least 1")
    parsed = TierUrl.parse(url)
    settings = TierSettings(identity=identity, block_bytes=sizes, clock=clock or SystemClock())
    return tier_class(parsed).from_url(parsed, settings)


def administer_tier(url: str) -> TierAdministration:
    """Return what looks at the storage that a URL names from outside.

    Raises:
        ConfigurationError: The URL or what it leads to cannot work, or it cannot be looked at from outside.
    """
    parsed = TierUrl.parse(url)
    return tier_class(parsed).administer(parsed)


def tier_class(url: TierUrl) -> type[Tier]:
    """Return the tier of a URL's scheme.

    Raises:
        ConfigurationError: There is none.
    """
    known = TIERS.names()
    if url.scheme not in known:
        raise ConfigurationError(
            f"no tier is known for {url.scheme}://{nearest_name(url.scheme, known) or '.'} "
            f"Known: {', '.join(f'{name}://' for name in known)}"
        )
    return TIERS.resolve(url.scheme)
