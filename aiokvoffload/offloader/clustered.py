"""The parts of an offloader whose bytes are moved by the ranks of an engine, each a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from aiokvoffload.clock import Clock
from aiokvoffload.cluster.lobby import Lobby
from aiokvoffload.cluster.scheduler import ClusterWorker, OnLostRank, check_on_lost_rank
from aiokvoffload.errors import ConfigurationError, OffloadError, StateError
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.kv_caches import CacheShape
from aiokvoffload.managers.reuse import with_reuse_filter
from aiokvoffload.memory.base import Report
from aiokvoffload.memory.region_shape import RegionShape
from aiokvoffload.memory.shared import SharedOffloadRegion
from aiokvoffload.offloader.deadlines import Deadlines
from aiokvoffload.offloader.parts import Parts, SlotViews, TierChoice, build_cpu_manager, identity_of, with_tiers
from aiokvoffload.offloader.subscriptions import EventHub
from aiokvoffload.policies.base import CachePolicy
from aiokvoffload.specs import Placement, check_placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """How an engine of several processes is opened; see `open_offloader`.

    Attributes:
        engine_id: What its ranks name too.
        world_size: How many ranks there are.
        cache: What the KV caches must look like; by default what the ranks agree on.
        cpu_bytes: CPU memory of all ranks together.
        identity: Model and revision.
        policy: Who leaves first.
        placement: Where blocks live.
        store_threshold: Uses before a block is stored.
        tiers: Below CPU memory.
        recompute_tokens_per_second: How fast the engine computes what is not loaded.
        is_replicated: All ranks hold the same bytes.
        on_lost_rank: What a lost rank means.
        deadlines: How long anything may take.
        clock: Where they are read.
        directory: Where sockets are.
    """

    engine_id: str
    world_size: int
    cache: CacheShape | None
    cpu_bytes: int
    identity: CacheIdentity
    policy: str | type[CachePolicy] | CachePolicy
    placement: Placement
    store_threshold: int
    tiers: Sequence[TierChoice]
    recompute_tokens_per_second: float | None
    is_replicated: bool
    on_lost_rank: OnLostRank
    deadlines: Deadlines
    clock: Clock
    directory: Path | None


class ClusterOpening:
    """Waits for the ranks of an engine, and builds an offloader over them.

    Args:
        options: Which engine, and how.
    """

    prepares_at_once = False

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        self._lobby: Lobby | None = None

    def prepare(self, report: Report) -> None:
        """Wait, blocking, until all ranks have joined.

        Raises:
            ConfigurationError: An option cannot work, the engine is open already, or its ranks do not agree.
            StateError: A rank has not joined in time, or has gone again.
        """
        options = self._options
        check_on_lost_rank(options.on_lost_rank)
        self._lobby = Lobby(
            options.engine_id,
            options.world_size,
            clock=options.clock,
            join_seconds=options.deadlines.join_seconds,
            cache=options.cache,
            dtype=options.identity.dtype,
            layout=options.identity.layout,
            directory=options.directory,
        )
        self._lobby.prepare(report)

    def build(self) -> Parts:
        """Return the parts once all ranks have joined, and let these go on; the memory is not yet prepared.

        Raises:
            ConfigurationError: An option does not go with what the ranks have, or there is no room for the memory.
        """
        lobby = self._waited_lobby()
        try:
            return self._build(lobby)
        except OffloadError as exc:
            lobby.refuse_all(str(exc))
            raise

    def guard(self, report: Report) -> Report:
        """Return a report that also ends the preparation of the memory when a rank has gone."""
        return self._waited_lobby().guard(report)

    def close(self) -> None:
        """Give name and sockets back; idempotent."""
        if self._lobby is not None:
            self._lobby.close()

    def _waited_lobby(self) -> Lobby:
        if self._lobby is None:
            raise StateError("nobody has waited for the ranks yet")
        return self._lobby

    def _build(self, lobby: Lobby) -> Parts:
        options, cache = self._options, lobby.cache
        check_placement(options.placement, cache.block_size_factor)
        copies = 1 if options.is_replicated else options.world_size
        slot_count = options.cpu_bytes // (cache.slot_bytes * copies)
        if slot_count < 1:
            raise ConfigurationError(
                f"cpu_bytes is {options.cpu_bytes}, but one block of {cache.block_size_factor} GPU blocks needs "
                f"{cache.slot_bytes * copies} on all ranks together"
            )
        memory = SharedOffloadRegion(
            lobby.engine,
            RegionShape(
                block_count=slot_count,
                slice_bytes=cache.slot_bytes,
                world_size=options.world_size,
                is_replicated=options.is_replicated,
                has_scheduler=True,
            ),
            None,
            None,
            join_seconds=options.deadlines.join_seconds,
            prepare_seconds=options.deadlines.prepare_seconds,
            clock=options.clock,
        )
        with ExitStack() as unfinished:
            unfinished.callback(memory.close)
            identity = self._identity(lobby)
            hub = EventHub()
            cpu_manager = build_cpu_manager(
                cache,
                slot_count,
                policy=options.policy,
                placement=options.placement,
                hub=hub,
                clock=options.clock,
            )
            manager, tiers = with_tiers(
                cpu_manager,
                options.tiers,
                SlotViews(memory, _block_bytes(cache, memory)),
                identity=identity,
                recompute_tokens_per_second=options.recompute_tokens_per_second,
                clock=options.clock,
            )
            for tier in tiers:
                unfinished.callback(tier.close)
            manager = with_reuse_filter(manager, options.store_threshold)
            unfinished.pop_all()
        lobby.welcome(
            slot_count,
            is_replicated=options.is_replicated,
            landing_seconds=options.deadlines.landing_seconds,
        )
        return Parts(
            cache=cache,
            memory=memory,
            manager=manager,
            worker=ClusterWorker(
                cache,
                lobby.members,
                lobby.inbox,
                options.clock,
                engine=lobby.engine,
                landing_seconds=options.deadlines.landing_seconds,
                is_replicated=options.is_replicated,
                on_lost_rank=options.on_lost_rank,
                can_fence=lobby.can_fence,
                close_channel=lobby.close,
            ),
            identity=identity,
            clock=options.clock,
            deadlines=options.deadlines,
            hub=hub,
            placement=options.placement,
            tiers=tiers,
        )

    def _identity(self, lobby: Lobby) -> CacheIdentity:
        """Return the identity with what the ranks have said filled in."""
        given = self._options.identity
        is_split = self._options.world_size > 1 and not self._options.is_replicated
        return replace(
            identity_of(given, lobby.cache),
            dtype=given.dtype or lobby.words["dtype"],
            layout=given.layout or lobby.words["layout"],
            parallel_shape=given.parallel_shape or ((("rank", self._options.world_size),) if is_split else ()),
        )


def _block_bytes(cache: CacheShape, memory: SharedOffloadRegion) -> tuple[int, ...]:
    """Return how much of a row tiers keep for a block of each KV group; all ranks have a part in it."""
    if memory.shape.slice_count == 1:
        return cache.group_slot_bytes
    return (memory.slot_bytes,) * len(cache.groups)
