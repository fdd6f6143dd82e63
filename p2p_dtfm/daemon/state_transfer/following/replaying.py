"""States that have come, rolled forward step by step with the gradients that the same donor sends,
until they are as new as everybody's."""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.daemon.peers.wire import LayersCommitted
from p2p_dtfm.daemon.state_transfer.following.arriving_gradients import ArrivingGradients
from p2p_dtfm.daemon.state_transfer.state_tools import FollowerTools
from p2p_dtfm.net.streams.frames import FrameHeader
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.optimizer import replay_outcome

COMMITTED_LIMIT = 4096
STALL_S = 5.0
"""Later steps arrive but the next one does not: part of it was lost, so ask anew."""

Tensor = Any
OnGradient = Callable[[str, int, int, Tensor], None]
MayRoll = Callable[[int], bool]


@dataclass(frozen=True)
class Coming:
    """Which layers are followed, and where they come from, at any moment."""

    layers: frozenset[int]
    missing: Collection[int]
    """Those of them whose states are not here yet."""
    donor_of: Mapping[int, str]
    came_from: dict[int, set[str]]
    """By layer: the peers that gave its state, and the gradients that have moved it on."""


class Replaying:
    """`begin_again(donor, reason)`: what the donor gives is of no use from here on, so newer states
    are asked for. `on_progress`, `on_gradient` and `may_roll` are the follower's."""

    def __init__(
        self,
        coming: Coming,
        tools: FollowerTools,
        on_progress: Callable[[], None],
        on_gradient: OnGradient | None,
        may_roll: MayRoll,
        begin_again: Callable[[str, str], None],
    ) -> None:
        self._coming = coming
        self._tools = tools
        self._on_progress = on_progress
        self._on_gradient = on_gradient
        self._may_roll = may_roll
        self._begin_again = begin_again
        self._gradients = ArrivingGradients(workload_of(tools.spec), coming.layers)
        self._committed: dict[str, dict[int, float]] = {}
        """By donor: the gradient's norm in each step that has committed."""
        self._seen: dict[int, float] = {}
        """The same for steps that this peer has seen commit itself: it needs no donor's word for
        them."""
        self.unsure: set[int] = set()
        """Layers of which others have not confirmed what is here: their states were moved on by any
        gradient, or are at this moment, or were given at a version of which nobody else spoke."""
        self._noted: set[tuple[int, int]] = set()
        self._wake = asyncio.Event()
        self._has_stopped = False

    def committed(self, sender: str, message: LayersCommitted) -> None:
        """Raises `PeerFault` for a gradient norm that is none."""
        if not 0 <= message.gradient_norm < math.inf:
            raise PeerFault(f"a gradient norm of {message.gradient_norm}", sender)
        _note(self._committed.setdefault(sender, {}), message.step, message.gradient_norm)
        self._wake.set()

    def take(self, sender: str, header: FrameHeader, payload: bytearray) -> None:
        """A chunk of a layer's reduced gradient. Raises `PeerFault` if it cannot be one."""
        self._gradients.require_possible(sender, header)
        if self._coming.donor_of.get(header.layer) != sender:
            return  # it was the donor until lately, or is that of a request that ended
        self._gradients.take(sender, header, payload)
        if self._gradients.are_too_many:
            most = self._gradients.largest_of(self._coming.donor_of)
            self._begin_again(most, "more steps wait than there is room for")
        self._wake.set()

    def drop(self, donor: str) -> None:
        """Drop what a donor has sent; what others give goes on."""
        given = {layer for layer, peer in self._coming.donor_of.items() if peer == donor}
        self._gradients.drop(given)
        self._committed.pop(donor, None)

    def note_seen(self, step: int, norm: float) -> None:
        """This peer has seen the step commit itself, with a gradient of that norm."""
        _note(self._seen, step, norm)
        self._wake.set()

    def go_on(self) -> None:
        """A state has come, or one that was held back may be moved on."""
        self._wake.set()

    def stop(self) -> None:
        """Nothing changes any more."""
        self._has_stopped = True

    async def run(self) -> None:
        """Replay for as long as layers are followed."""
        while True:
            try:
                async with asyncio.timeout(STALL_S):
                    await self._wake.wait()
            except TimeoutError:
                self._check_stall()
            self._wake.clear()
            if self._has_stopped:
                return
            for layer in sorted(self._coming.layers.difference(self._coming.missing)):
                self._note_gradient(layer)
                while await self._replay_step(layer) and not self._has_stopped:
                    self._on_progress()
                    self._note_gradient(layer)

    def _state_of(self, layer: int) -> LayerState | None:
        """None where the state is not here yet, or not any more. What was guarded goes on for a
        moment after its view, and nobody may want it in the next one."""
        return None if layer in self._coming.missing else self._tools.states.get(layer)

    def _check_stall(self) -> None:
        """Nothing has arrived for a while: is anything here that cannot be used?

        A guardian tells again what it has, in case its receipt was lost.
        """
        self._noted = set()
        for layer in self._coming.layers:
            state, donor = self._state_of(layer), self._coming.donor_of[layer]
            if state is None or not self._may_roll(version := state.version):
                continue  # it is this peer that is late
            committed = {*self._committed.get(donor, {}), *self._seen}
            if self._gradients.has_later(layer, version) or any(n > version for n in committed):
                self._begin_again(donor, f"step {version} of layer {layer} is lost")
                return

    def _note_gradient(self, layer: int) -> None:
        """Tell, once, that the next step's gradient of a layer is here whole."""
        state = self._state_of(layer)
        if self._on_gradient is None or state is None:
            return
        key = (layer, state.version)
        gradient = self._gradients.whole(*key)
        if key in self._noted or gradient is None:
            return
        self._noted = {noted for noted in self._noted if noted[0] != layer} | {key}
        self._on_gradient(self._coming.donor_of[layer], layer, state.version, gradient)

    async def _replay_step(self, layer: int) -> bool:
        tools, state = self._tools, self._state_of(layer)
        if state is None:
            return False
        donor = self._coming.donor_of[layer]
        step = state.version
        norm = self._seen.get(step, self._committed.get(donor, {}).get(step))
        gradient = self._gradients.whole(layer, step)
        if norm is None or gradient is None or not self._may_roll(step):
            return False
        self.unsure.add(layer)  # before it moves: its version changes first, and is read
        self._coming.came_from.setdefault(layer, set()).add(donor)
        await tools.compute.run(replay_outcome, tools.spec, state, gradient, step, norm)
        self._gradients.replayed(layer, step)
        return True


def _note(norms: dict[int, float], step: int, norm: float) -> None:
    norms[step] = norm
    while len(norms) > COMMITTED_LIMIT:  # what came first was replayed long ago
        del norms[next(iter(norms))]
