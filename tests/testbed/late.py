"""One message that is held back on its way between two daemons in virtual time."""

import contextvars
from collections.abc import Callable
from typing import Any

import pytest

from p2p_dtfm.testbed.virtual.seeds.watching.moments import kind_of
from p2p_dtfm.testbed.virtual.wires.network import VirtualNetwork

LOST_S = 1e6
"""Longer than a world lasts, so the message never comes."""


class Late:
    """From `begin` to `end`, messages of one kind from `origin` to `goal` come so much later. All
    other messages pass."""

    def __init__(self, patches: pytest.MonkeyPatch, kind: str, late_s: float) -> None:
        self.kind = kind
        self.late_s = late_s
        self.count = 0
        """How many messages were held back."""
        self._way = ("", "")
        self._ask = VirtualNetwork.ask
        patches.setattr(VirtualNetwork, "ask", self._held_back())

    def begin(self, origin: str, goal: str) -> None:
        self._way = (origin, goal)

    def end(self) -> None:
        self._way = ("", "")

    def _held_back(self) -> Callable[..., Any]:
        def ask(
            network: Any, host: Any, goal: str, name: str, body: bytes, reply: Any
        ) -> Callable[[bool], None]:
            if (host.peer_id, goal) != self._way or kind_of(body) != self.kind:
                return self._ask(network, host, goal, name, body, reply)
            self.count += 1
            said: list[Callable[[bool], None]] = []

            def say() -> None:
                if not reply.done():
                    said.append(self._ask(network, host, goal, name, body, reply))

            nobody = contextvars.Context()  # who says it may be dead by then
            network._loop.call_later(self.late_s, say, context=nobody)
            return lambda is_over: said[0](is_over) if said else None

        return ask
