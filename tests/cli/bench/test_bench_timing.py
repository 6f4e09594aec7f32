"""What is charged to a call, and what is not."""

from __future__ import annotations

import gc

import anyio
import pytest

from aiokvoffload.cli.bench.rounds import shorter_calls
from aiokvoffload.cli.bench.tables import Table, blocks_label
from aiokvoffload.cli.bench.timing import CallTimer, CallTimes, CollectorPause, without_rebuilds


def test_no_call_is_charged_with_a_collection() -> None:
    kept = [[number] for number in range(200_000)]
    with CallTimer() as timer:
        called = timer.seconds(gc.collect)
        assert 0 <= called < timer.collector_seconds
        assert timer.longest_collection_ms == pytest.approx(1e3 * timer.collector_seconds)

        async def collect() -> int:
            return gc.collect() * 0 + len(kept)

        awaited, answer = anyio.run(timer.awaited, collect())
        assert answer == len(kept)
        assert 0 <= awaited < timer.collector_seconds


def test_a_timer_leaves_no_callback_behind() -> None:
    before = list(gc.callbacks)
    with CallTimer() as timer:
        assert len(gc.callbacks) == len(before) + 1
        with pytest.raises(ZeroDivisionError):
            timer.seconds(lambda: 1 // 0)
    assert gc.callbacks == before


def test_a_pause_counts_only_what_was_made_since() -> None:
    with CollectorPause() as pause:
        frozen_count = gc.get_freeze_count()
        assert frozen_count > 0
        assert pause.milliseconds() >= 0
    assert gc.get_freeze_count() == 0


def test_calls_are_summed_up() -> None:
    times = CallTimes.of([0.004, 0.001, 0.002, 0.001], keys_per_call=2)
    assert times.blocks_per_second == pytest.approx(1000)
    assert (times.p50_ms, times.p99_ms, times.max_ms) == (2.0, 4.0, 4.0)


def test_a_rebuild_counts_as_a_usual_call() -> None:
    assert without_rebuilds([1.0, 1.5, 2.0, 40.0, 1.5]) == [1.0, 1.5, 2.0, 1.5, 1.5]


def test_a_table_is_text_and_markdown() -> None:
    table = Table("Speeds", ("", "blocks/s"), [("lookup", "12"), ("all of it", "3")])
    assert table.to_text() == "Speeds\n             blocks/s\n  lookup           12\n  all of it         3\n"
    assert table.to_markdown() == "Speeds:\n\n|  | blocks/s |\n| --- | ---: |\n| lookup | 12 |\n| all of it | 3 |\n"


@pytest.mark.parametrize(
    ("count", "label"), [(256, "256"), (1_024, "1,024"), (10_000, "10k"), (1_000_000, "1M"), (1_500_000, "1500k")]
)
def test_sizes_have_short_names(count: int, label: str) -> None:
    assert blocks_label(count) == label


def test_of_the_same_call_the_shorter_time_counts() -> None:
    first = [{"lookup": 1.0, "touch": 9.0}, {}, {"lookup": 4.0}, {"lookup": 7.0}]
    second = [{"lookup": 2.0, "touch": 3.0}, {}, {"lookup": 3.0, "touch": 1.0}]
    assert shorter_calls([first, second]) == [{"lookup": 1.0, "touch": 3.0}, {}, {}]
