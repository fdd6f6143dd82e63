"""Does what the agreement asks for: one action after another, never one within another."""

import asyncio
import collections
from collections.abc import Callable, Mapping
from typing import Any

from p2p_dtfm.core.consensus.actions import Actions

QUEUE_LIMIT = 1 << 16
"""Far more than the agreement asks for in one turn. More is a bug of this program."""


class ActionLoop:
    """`do` is for callers outside of training. It returns when all is done. Called from within an
    action, it returns at once, and its actions come after that one.

    The trainer, whose step an action could replace meanwhile, calls `later` and awaits `settled`
    before it goes on.
    """

    def __init__(self) -> None:
        self._handlers: dict[type, Callable[[Any], object]] = {}
        self._queue: collections.deque[Any] = collections.deque()
        self._is_draining = False
        self._failure: BaseException | None = None
        self._waiting = asyncio.Event()
        self._is_settled = asyncio.Event()
        self._is_settled.set()

    def handle(self, handlers: Mapping[type, Callable[[Any], object]]) -> None:
        """Set the handler of each of these types of action. Each type has one."""
        assert not self._handlers.keys() & handlers.keys()
        self._handlers.update(handlers)

    def do(self, actions: Actions) -> None:
        """Do these actions now, or after the action that is being done."""
        self._put(actions)
        if not self._is_draining:
            self._drain()

    def later(self, actions: Actions) -> None:
        """Do these actions later, in a turn of the event loop of their own."""
        self._put(actions)
        if self._queue:
            self._is_settled.clear()
            self._waiting.set()

    async def settled(self) -> None:
        """Wait until all that was put off is done, also what was put off meanwhile."""
        while not self._is_settled.is_set():
            await self._is_settled.wait()

    async def run(self) -> None:
        """Do what is put off, for ever. Raises what went wrong with it, even if `do` did it."""
        while True:
            await self._waiting.wait()
            if self._failure is not None:
                raise self._failure
            self._drain()

    def _put(self, actions: Actions) -> None:
        self._queue.extend(actions)
        assert len(self._queue) <= QUEUE_LIMIT

    def _drain(self) -> None:
        if self._failure is not None:
            return  # the daemon is about to end
        self._is_draining = True
        try:
            while self._queue:
                action = self._queue.popleft()
                self._handlers[type(action)](action)
        except Exception as error:
            if not self._is_settled.is_set():  # it may be put-off work, whose caller is not here
                self._failure = error
            self._waiting.set()  # the rest is still done, or `run` raises
            raise
        finally:
            self._is_draining = False
        self._waiting.clear()
        self._is_settled.set()
