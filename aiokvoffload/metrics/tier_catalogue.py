"""The metrics of each tier."""

from __future__ import annotations

from aiokvoffload.metrics.metric import counter, gauge, of_each_tier, of_each_tier_by
from aiokvoffload.tiers.breaker import BreakerState

TIER_METRICS = (
    gauge(
        "tier_info",
        "1 for each tier, with its URL.",
        "tier url",
        of_each_tier_by(lambda use: {use.tier.url: 1}),
    ),
    counter(
        "tier_hit_blocks",
        "Blocks that the tier had, by what was asked of it.",
        "tier operation",
        of_each_tier_by(lambda use: {"lookup": use.tier.hits, "read": use.tier.loaded_blocks}),
    ),
    counter(
        "tier_missed_blocks",
        "Blocks that a lookup or a read of the tier missed.",
        "tier reason",
        of_each_tier_by(lambda use: use.tier.misses_by_reason),
    ),
    counter(
        "tier_refused_blocks",
        "Blocks that the tier was given and did not store.",
        "tier reason",
        of_each_tier_by(lambda use: use.tier.refusals_by_reason),
    ),
    counter(
        "tier_bytes",
        "Payload read and written.",
        "tier operation",
        of_each_tier_by(lambda use: {"read": use.tier.bytes_read, "write": use.tier.bytes_written}),
    ),
    counter(
        "tier_call_seconds",
        "Time of calls from posting to their answer.",
        "tier operation",
        of_each_tier_by(
            lambda use: {
                "lookup": use.tier.lookup_seconds,
                "read": use.tier.read_seconds,
                "write": use.tier.write_seconds,
            }
        ),
    ),
    counter(
        "tier_promoted_blocks",
        "Blocks read into CPU memory, or found by a lookup and then not readable.",
        "tier outcome",
        of_each_tier_by(lambda use: {"promoted": use.promoted, "failed": use.failed_promotions}),
    ),
    counter(
        "tier_write_blocks",
        "Blocks that were to be written, by what became of them.",
        "tier outcome",
        of_each_tier_by(
            lambda use: {
                "written": use.written,
                "refused": use.refused_writes,
                "dropped": use.dropped_writes,
                "evicted_unwritten": use.dirty_evictions,
            }
        ),
    ),
    counter(
        "tier_skipped_blocks",
        "Blocks not asked for, because computing them again is faster.",
        "tier",
        of_each_tier(lambda use: use.too_slow),
    ),
    gauge(
        "tier_pending_bytes",
        "Bytes on their way to or from the tier.",
        "tier state",
        of_each_tier_by(
            lambda use: {
                "waiting": use.waiting_write_bytes,
                "writing": use.writing_bytes,
                "reading": use.reading_bytes,
            }
        ),
    ),
    gauge("tier_pending_calls", "Calls that are not over.", "tier", of_each_tier(lambda use: use.tier.calls_in_flight)),
    gauge(
        "tier_breaker_state",
        "1 for the state that the tier's breaker is in.",
        "tier state",
        of_each_tier_by(lambda use: {state.value: use.tier.breaker is state for state in BreakerState}),
    ),
    counter(
        "tier_breaker_openings",
        "How often the breaker has opened.",
        "tier",
        of_each_tier(lambda use: use.tier.breaker_openings),
    ),
    gauge(
        "tier_stuck_threads",
        "Threads that have not come back from a call past its deadline.",
        "tier",
        of_each_tier(lambda use: use.tier.stuck_threads),
    ),
    counter(
        "tier_late_blocks",
        "Blocks whose work ended after they had been answered.",
        "tier",
        of_each_tier(lambda use: use.tier.late_blocks),
    ),
    counter(
        "tier_removed_blocks",
        "Blocks removed because something was wrong with them.",
        "tier reason",
        of_each_tier_by(lambda use: use.tier.removed_by_reason),
    ),
    counter(
        "tier_evicted_blocks",
        "Blocks that left the tier for others.",
        "tier",
        of_each_tier(lambda use: use.tier.holdings.evicted_blocks),
    ),
    gauge(
        "tier_blocks",
        "Blocks that the tier holds, where it knows.",
        "tier",
        of_each_tier(lambda use: use.tier.holdings.block_count),
    ),
    gauge(
        "tier_used_bytes",
        "Bytes that they take, where it knows.",
        "tier",
        of_each_tier(lambda use: use.tier.holdings.used_bytes),
    ),
    gauge(
        "tier_capacity_bytes",
        "Bytes that they may take, where there is a limit.",
        "tier",
        of_each_tier(lambda use: use.tier.holdings.capacity_bytes),
    ),
)
