"""Threads that there is no room for: nothing waits for them, and what they were for is done all the same."""

import _thread
import sys
import threading
import weakref

import pytest
from support.no_threads import die_at_birth, refuse_thread

from torch_offload.system.threads import BackgroundThread, BackgroundWork

pytestmark = pytest.mark.any_torch


@pytest.mark.parametrize(("start", "is_started"), [(refuse_thread, False), (die_at_birth, True)])
def test_a_thread_without_room_is_not_waited_for(monkeypatch, start, is_started):
    monkeypatch.setattr(_thread, "start_new_thread", start)
    thread = BackgroundThread(lambda: None)
    assert thread.start() is is_started
    assert thread.join()
    assert thread.join()


class Body:
    def __call__(self) -> None:
        pass


def test_a_thread_is_waited_for_until_its_end():
    began, may_end, seen = threading.Event(), threading.Event(), []

    def body() -> None:
        seen.append(thread.is_current())
        began.set()
        may_end.wait()

    thread = BackgroundThread(body)
    assert thread.start()
    began.wait()
    assert not thread.join(timeout_seconds=0.01)
    may_end.set()
    assert thread.join()
    assert not thread.is_current()
    assert seen == [True]


def test_a_thread_that_was_waited_for_holds_nothing():
    """An engine would be kept open by it. Method: threads change all the time."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(1000):
            body = Body()
            known = weakref.ref(body)
            thread = BackgroundThread(body)
            del body
            thread.start()
            thread.join()
            assert known() is None
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("start", [_thread.start_new_thread, refuse_thread, die_at_birth])
def test_work_is_done_once_whether_there_are_threads_or_not(monkeypatch, start):
    monkeypatch.setattr(_thread, "start_new_thread", start)
    done: list[int] = []
    work = BackgroundWork(3)
    submitted = [work.submit(lambda number=number: done.append(number)) for number in range(20)]
    for each in submitted:
        each.finish()
    work.close()
    assert sorted(done) == list(range(20))


def test_an_error_outlives_its_thread():
    """It holds the frames of that thread, which must not count as the thread."""

    def fail() -> None:
        raise OSError("the disk is full")

    work = BackgroundWork(1)
    failing, following = work.submit(fail), work.submit(lambda: None)
    with pytest.raises(OSError, match="the disk is full"):
        failing.finish()
    following.finish()
    failing.leave_out()
    work.close()


def test_work_that_is_left_out_is_not_done(monkeypatch):
    monkeypatch.setattr(_thread, "start_new_thread", refuse_thread)
    done: list[int] = []
    work = BackgroundWork(1)
    work.submit(lambda: done.append(1)).leave_out()
    work.close()
    assert done == []
