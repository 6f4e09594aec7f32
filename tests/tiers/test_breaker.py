"""The breaker, on a clock that stands still."""

from __future__ import annotations

from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.tiers.breaker import Breaker, BreakerLimits, BreakerState

LIMITS = BreakerLimits(failures=3, pause_seconds=5.0, longest_pause_seconds=15.0, latency_seconds=1.0)


def make_breaker(limits: BreakerLimits = LIMITS) -> tuple[Breaker, ManualClock]:
    clock = ManualClock(100.0)
    return Breaker(clock, limits), clock


def open_breaker() -> tuple[Breaker, ManualClock]:
    breaker, clock = make_breaker()
    breaker.record_stall("stalled", is_probe=False)
    return breaker, clock


def test_a_new_breaker_lets_calls_through() -> None:
    breaker, _ = make_breaker()
    assert breaker.admit()
    assert (breaker.state, breaker.reason) == (BreakerState.CLOSED, "")


def test_it_opens_after_failures_in_a_row() -> None:
    breaker, _ = make_breaker()
    for _ in range(2):
        breaker.record_failure("no", is_probe=False)
    breaker.record_success(0.1, is_probe=False)
    for _ in range(2):
        breaker.record_failure("no", is_probe=False)
    assert breaker.admit()
    breaker.record_failure("the disk is gone", is_probe=False)
    assert not breaker.admit()
    assert breaker.reason == "3 failures in a row, the last: the disk is gone"
    assert breaker.opened_count == 1


def test_a_stall_opens_it_at_once() -> None:
    breaker, _ = open_breaker()
    assert not breaker.admit()
    assert (breaker.state, breaker.reason) == (BreakerState.OPEN, "stalled")


def test_one_call_probes_after_the_pause() -> None:
    breaker, clock = open_breaker()
    clock.advance(4.9)
    assert not breaker.admit()
    clock.advance(0.1)
    assert breaker.admit()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.admit()


def test_a_good_probe_closes_it() -> None:
    breaker, clock = open_breaker()
    clock.advance(5.0)
    assert breaker.admit()
    breaker.record_success(0.1, is_probe=True)
    breaker.end_probe()
    assert breaker.admit()
    assert (breaker.state, breaker.reason) == (BreakerState.CLOSED, "")


def test_failed_probes_double_the_pause_up_to_a_bound() -> None:
    breaker, clock = open_breaker()
    for pause in (5.0, 10.0, 15.0, 15.0):
        clock.advance(pause - 0.1)
        assert not breaker.admit()
        clock.advance(0.1)
        assert breaker.admit()
        breaker.record_failure("still no", is_probe=True)
        breaker.end_probe()
    assert breaker.reason == "still no"
    clock.advance(15.0)
    assert breaker.admit()
    breaker.record_success(0.1, is_probe=True)
    breaker.record_stall("again", is_probe=False)
    clock.advance(5.0)
    assert breaker.admit()


def test_a_stalled_probe_opens_it_again() -> None:
    breaker, clock = open_breaker()
    clock.advance(5.0)
    assert breaker.admit()
    breaker.record_stall("stalled again", is_probe=True)
    clock.advance(9.9)
    assert not breaker.admit()


def test_a_probe_that_found_out_nothing_is_followed_by_another() -> None:
    breaker, clock = open_breaker()
    clock.advance(5.0)
    assert breaker.admit()
    breaker.end_probe()
    assert breaker.admit()


def test_late_news_from_before_it_opened_changes_nothing() -> None:
    breaker, clock = open_breaker()
    breaker.record_success(0.1, is_probe=False)
    breaker.record_failure("late", is_probe=False)
    assert not breaker.admit()
    clock.advance(5.0)
    assert breaker.admit()
    breaker.record_success(0.1, is_probe=False)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.record_failure("late", is_probe=False)
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_slow_tier_opens_it() -> None:
    breaker, _ = make_breaker()
    for _ in range(20):
        breaker.record_success(0.5, is_probe=False)
    assert breaker.admit()
    breaker.record_success(3.0, is_probe=False)
    assert breaker.admit()  # 1.0 s on average is not above
    breaker.record_success(3.0, is_probe=False)
    assert not breaker.admit()
    assert breaker.reason == "answers take 1.4 s on average, more than 1 s"


def test_the_first_answers_are_no_average() -> None:
    breaker, _ = make_breaker()
    for _ in range(4):
        breaker.record_success(9.0, is_probe=False)
    assert breaker.admit()
    breaker.record_success(9.0, is_probe=False)
    assert not breaker.admit()


def test_without_a_limit_it_may_be_as_slow_as_it_likes() -> None:
    breaker, _ = make_breaker(BreakerLimits())
    for _ in range(20):
        breaker.record_success(900.0, is_probe=False)
    assert breaker.admit()
