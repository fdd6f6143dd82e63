"""Waits of less than a millisecond, by a timer of the kernel's. Event loops round such waits.

uvloop takes a fifth less processor than asyncio's own loop. But its timers are whole milliseconds,
by a clock that stands still while it runs what is due. A link of a millisecond needs better ones.
"""

import asyncio
import contextlib
import ctypes
import heapq
import itertools
import os
import weakref

from p2p_dtfm.ports import now

SOON_S = 0.0001
"""A wait as short as this counts as over: to set a timer takes as long."""
_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    """`struct itimerspec`."""

    _fields_ = (("interval", _Time), ("at", _Time))


class FineTimer:
    """The timer of one event loop. All who wait share one descriptor."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._timer = _LIBC.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "no timer for shaped links")
        weakref.finalize(self, os.close, self._timer)
        loop.add_reader(self._timer, _ring, weakref.ref(self))

    async def until(self, at_s: float) -> None:
        """Wait until `at_s`, by `now.monotonic_s`."""
        if at_s - now.monotonic_s() <= SOON_S:
            return
        reached = asyncio.get_running_loop().create_future()
        waiting = (at_s, next(self._numbers), reached)
        heapq.heappush(self._waiting, waiting)
        if self._waiting[0] is waiting:
            self._set(at_s)
        try:
            await reached
        except asyncio.CancelledError:
            self._drop_given_up()
            raise

    def _drop_given_up(self) -> None:
        """Drop waits that were given up. Once all are, nothing here holds on to the loop, which may
        be gone."""
        while self._waiting and self._waiting[0][2].done():
            heapq.heappop(self._waiting)

    def ring(self) -> None:
        """Wake those whose time has come, and set the timer for the next."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._timer, 8)
        until_s = now.monotonic_s() + SOON_S
        while self._waiting and (self._waiting[0][0] <= until_s or self._waiting[0][2].done()):
            _, _, reached = heapq.heappop(self._waiting)
            if not reached.done():  # a cancelled waiter waits no more
                reached.set_result(None)
        if self._waiting:
            self._set(self._waiting[0][0])

    def _set(self, at_s: float) -> None:
        at_ns = max(1, round(at_s * 1e9))  # 0 would stop it
        setting = _Setting(at=_Time(*divmod(at_ns, 1_000_000_000)))
        if _LIBC.timerfd_settime(self._timer, _ABSOLUTE, ctypes.byref(setting), None):
            raise OSError(ctypes.get_errno(), "a timer for shaped links cannot be set")


def _ring(timer: "weakref.ref[FineTimer]") -> None:
    if (held := timer()) is not None:
        held.ring()


_timers: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, FineTimer]"
_timers = weakref.WeakKeyDictionary()


async def until(at_s: float) -> None:
    """Wait until `at_s`, by `now.monotonic_s`, in whatever loop this is."""
    loop = asyncio.get_running_loop()
    if (timer := _timers.get(loop)) is None:
        timer = _timers[loop] = FineTimer(loop)
    await timer.until(at_s)
