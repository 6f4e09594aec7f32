from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from aiokvoffload.errors import ClosedError, WrongThreadError
from aiokvoffload.managers.base import OffloadingManager
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.ownership import Owner
from aiokvoffload.specs import Completion, LookupResult
from aiokvoffload.testing.manager_contract import BACKENDS, assert_at_rest
from aiokvoffload.testing.strategies import make_keys


def in_a_thread(call: Callable[[], object]) -> BaseException | None:
    """Call in a thread of its own and return what it raised."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(call).exception()


def test_the_first_caller_owns() -> None:
    owner = Owner("thing")
    assert in_a_thread(owner.check) is None
    with pytest.raises(WrongThreadError, match="this thing belongs to another thread; call it from there"):
        owner.check()
    with pytest.raises(WrongThreadError):
        owner.check_thread()


def test_a_closed_thing_knows_its_owner() -> None:
    owner = Owner("thing")
    owner.check()
    owner.is_closed = True
    owner.check_thread()
    with pytest.raises(ClosedError, match="this thing is closed; open a new one"):
        owner.check()
    assert isinstance(in_a_thread(owner.check), WrongThreadError)


def test_a_call_from_another_thread_is_refused_and_changes_nothing() -> None:
    manager = CPUOffloadingManager(4)
    manager.complete_store_nowait(manager.prepare_store_nowait(make_keys(1)))
    writing, load = manager.prepare_store_nowait(make_keys(2)), manager.prepare_load_nowait(make_keys(1))
    waiting = manager.prepare_load_nowait(make_keys(2))
    before = manager.statistics()
    calls: list[Callable[[], object]] = [
        lambda: manager.lookup_nowait(make_keys(1)),
        lambda: manager.lookup_prefix_nowait(make_keys(1)),
        lambda: manager.touch(make_keys(1)),
        lambda: manager.prepare_store_nowait(make_keys(3)),
        lambda: manager.prepare_load_nowait(make_keys(1)),
        lambda: manager.watch_nowait(make_keys(2)),
        lambda: manager.complete_store_nowait(writing),
        lambda: manager.complete_load_nowait(load),
        lambda: manager.settle_nowait(waiting),
        lambda: manager.hold([0]),
        lambda: manager.release([0]),
        writing.lease,
        manager.reset_nowait,
        manager.bump_epoch_nowait,
        manager.close_nowait,
    ]
    for call in calls:
        error = in_a_thread(call)
        assert isinstance(error, WrongThreadError)
        assert "this manager belongs to another thread" in str(error)
        assert manager.statistics() == before
    manager.complete_store_nowait(writing)
    manager.complete_load_nowait(load)
    manager.complete_load_nowait(waiting)
    assert_at_rest(manager)


def test_a_manager_may_be_made_in_one_thread_and_used_in_another() -> None:
    manager = CPUOffloadingManager(4)

    def use() -> None:
        assert manager.complete_store_nowait(manager.prepare_store_nowait(make_keys(1))) is Completion.APPLIED

    assert in_a_thread(use) is None
    with pytest.raises(WrongThreadError):
        manager.lookup_nowait(make_keys(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_remedy_in_the_message_works(backend: str) -> None:
    async def main() -> None:
        manager: OffloadingManager = CPUOffloadingManager(4)
        manager.complete_store_nowait(manager.prepare_store_nowait(make_keys(1)))

        def work() -> list[LookupResult]:
            with pytest.raises(WrongThreadError, match=r"anyio\.from_thread\.run"):
                manager.lookup_nowait(make_keys(1))
            return anyio.from_thread.run(manager.lookup, make_keys(1))

        assert await anyio.to_thread.run_sync(work) == [LookupResult.HIT]

    anyio.run(main, backend=backend)


FORK = """
import os, sys, traceback
from aiokvoffload.errors import WrongThreadError
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.testing.strategies import make_keys

used, unused = CPUOffloadingManager(4), CPUOffloadingManager(4)
ticket = used.prepare_store_nowait(make_keys(1))
child = os.fork()
if child == 0:
    status = 1
    try:
        refused = 0
        for call in (
            lambda: used.lookup_nowait(make_keys(1)),
            lambda: used.complete_store_nowait(ticket),
            lambda: used.close_nowait(),
            lambda: ticket.lease(),
            lambda: unused.lookup_nowait(make_keys(1)),
            lambda: unused.lookup_nowait(make_keys(1)),
        ):
            try:
                call()
            except WrongThreadError as error:
                assert "belongs to the parent process; open a new one after the fork" in str(error), error
                refused += 1
        own = CPUOffloadingManager(1)
        own.prepare_store_nowait(make_keys(1))
        status = 0 if refused == 6 else 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
_, status = os.waitpid(child, 0)
used.complete_store_nowait(ticket)
unused.lookup_nowait(make_keys(1))
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
