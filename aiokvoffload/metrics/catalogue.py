"""Every metric of an offloader; knows no library that reports them.

Names follow Prometheus: base units as suffixes, `_total` for what only grows. Labels are bounded: by the tiers of an
offloader, and by the words of this library.
"""

from __future__ import annotations

from aiokvoffload.metrics.metric import Metric, counter, gauge, value_of, values_of
from aiokvoffload.metrics.tier_catalogue import TIER_METRICS

_CPU_MEMORY = (
    gauge("cpu_capacity_blocks", "Slots of CPU memory, one block each.", "", value_of(lambda s: s.manager.total)),
    gauge(
        "cpu_blocks",
        "Slots of CPU memory by state; they add up to the capacity.",
        "state",
        values_of(
            lambda s: {
                "free": s.manager.free,
                "ready": s.manager.ready,
                "writing": s.manager.writing,
                "promoting": s.manager.promoting,
                "leased": s.manager.leased_without_key,
            }
        ),
    ),
    gauge("cpu_pinned_blocks", "Ready blocks that somebody uses.", "", value_of(lambda s: s.manager.pinned)),
    gauge("cpu_kept_blocks", "Ready blocks that a hint keeps.", "", value_of(lambda s: s.manager.kept)),
    gauge(
        "cpu_memory_is_pinned",
        "1 where the device copies CPU memory at full speed.",
        "",
        value_of(lambda s: s.memory_is_pinned),
    ),
    counter("hit_blocks", "Blocks pinned for loading.", "", value_of(lambda s: s.manager.hit_blocks)),
    counter(
        "missed_blocks",
        "Blocks asked for by loads that come after the prefix which was found.",
        "reason",
        values_of(lambda s: s.manager.misses_by_reason),
    ),
    counter("stored_blocks", "Blocks committed to CPU memory.", "", value_of(lambda s: s.manager.stored_blocks)),
    counter(
        "evicted_blocks", "Blocks that left CPU memory for others.", "", value_of(lambda s: s.manager.evicted_blocks)
    ),
    counter("refused_blocks", "Blocks offered that found no room.", "", value_of(lambda s: s.manager.refused_blocks)),
    counter("failed_blocks", "Blocks whose write failed.", "", value_of(lambda s: s.manager.failed_blocks)),
    counter(
        "taken_along_blocks",
        "Blocks put first in line because a load has taken them along.",
        "",
        value_of(lambda s: s.manager.taken_along_blocks),
    ),
    counter(
        "rescued_blocks",
        "Blocks given up by the GPU that were stored already.",
        "",
        value_of(lambda s: s.manager.rescued_blocks),
    ),
)

_MOVING = (
    counter(
        "transferred_bytes",
        "Bytes that have landed.",
        "direction",
        values_of(lambda s: {"store": s.stored_bytes, "load": s.loaded_bytes}),
    ),
    counter(
        "transfer_seconds",
        "Device time of the transfers that have landed.",
        "direction",
        values_of(lambda s: {"store": s.store_seconds, "load": s.load_seconds}),
    ),
    counter(
        "transfers",
        "Transfers with copies of their own that have landed.",
        "direction",
        values_of(lambda s: {"store": s.landed_stores, "load": s.landed_loads}),
    ),
    counter(
        "transfer_queue_seconds",
        "Time that transfers stood in the queue before they were sent.",
        "direction",
        values_of(lambda s: {"store": s.store_queue_seconds, "load": s.load_queue_seconds}),
    ),
    gauge(
        "pending_transfers",
        "Transfers that have not landed.",
        "state",
        values_of(lambda s: {"queued": s.queued_transfers, "sent": s.sent_transfers}),
    ),
    gauge("in_flight_bytes", "Bytes sent and not landed.", "", value_of(lambda s: s.in_flight_bytes)),
    counter("joined_blocks", "GPU blocks whose load joined a copy under way.", "", value_of(lambda s: s.joined_blocks)),
    gauge(
        "waiting_calls",
        "Loads that wait for blocks, and offers that wait for room.",
        "direction",
        values_of(lambda s: {"store": s.manager.waiting_stores, "load": s.manager.waiting_loads}),
    ),
    counter(
        "waits",
        "Waits of loads and offers that are over.",
        "direction",
        values_of(lambda s: {"store": s.manager.waited_stores, "load": s.manager.waited_loads}),
    ),
    counter(
        "wait_seconds",
        "Time of the waits that are over.",
        "direction",
        values_of(lambda s: {"store": s.manager.store_wait_seconds, "load": s.manager.load_wait_seconds}),
    ),
)

_HEALTH = (
    gauge(
        "fault",
        "1 after a fault, since when everything is a miss and a refusal.",
        "",
        value_of(lambda s: s.fault is not None),
    ),
    counter("polls", "Polls of the background task.", "", value_of(lambda s: s.poll_count)),
    counter(
        "loop_stall_seconds",
        "Time that the event loop kept the background task waiting for its turn.",
        "",
        value_of(lambda s: s.loop_stall_seconds),
    ),
    gauge(
        "loop_stall_longest_seconds",
        "The longest of these waits since opening.",
        "",
        value_of(lambda s: s.longest_loop_stall_seconds),
    ),
    counter(
        "rejected_completions",
        "Completions that came late, twice, or with another manager's ticket.",
        "",
        value_of(lambda s: s.manager.rejected_completions),
    ),
    counter(
        "detached_sinks", "Event sinks that raised and were detached.", "", value_of(lambda s: s.manager.detached_sinks)
    ),
    gauge(
        "statistics_age_seconds",
        "How old these numbers are; above 0 where the offloader's thread did not answer.",
        "",
        lambda snapshot: [((), snapshot.age_seconds)],
    ),
)

METRICS: tuple[Metric, ...] = (*_CPU_MEMORY, *_MOVING, *_HEALTH, *TIER_METRICS)
