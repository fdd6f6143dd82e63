"""The microbatches of a simulated stage: tensors between neighbours, and what outlives a view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from p2p_dtfm.core.messages.stage_progress import StageProgress, as_runs
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.partial_replay import PartialReplay, StageReplay, whole_step
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.sim.faults.hash_training import BoundaryTensors
from p2p_dtfm.sim.faults.invariants import Violation
from p2p_dtfm.sim.faults.simulated_process import Key, SimulatedProcess

UNSAID = 0.5
"""The chance that the last tasklet of a burst is not yet reported when the next message comes
in."""


@dataclass
class StageWork:
    """What a stage-holder has computed of the open step. It outlives a view."""

    step: int = -1
    layers: range = range(0)
    forwarded: list[int] = field(default_factory=list)
    """Microbatches in the order of their forwards, with the activations that were sent."""
    backwards: int = 0
    """How many of the first ones have had their backward. What was sent is kept."""
    buffers: list[int] = field(default_factory=list)
    """Microbatches whose gradients are in the buffers."""


class SimulatedMicrobatches:
    """Does what the microbatch loop does in the daemon. `all_computed` is told of a step at its
    end."""

    def __init__(self, peer: SimulatedProcess, all_computed: Callable[[Key], None]) -> None:
        self.peer = peer
        self._all_computed = all_computed
        self.work = StageWork()
        self.replay: PartialReplay | None = None
        self.part: tuple[Key, StageReplay] | None = None
        """This stage's part in the step that it computes."""
        self.is_computed = False
        """Whether all of `part` is done."""
        self.works = False
        """Whether a burst of tasklets is under way."""
        self.arrived: dict[Key, set[tuple[bool, int]]] = {}
        """By step: (is an activation, microbatch) of each tensor that has arrived."""

    def begin(self, view: View, plan: Plan, key: Key) -> None:
        peer = self.peer
        replay, layers = self.replay, view.layers_of(peer.name)
        mine = (
            replay.stage(plan, peer.name) if replay is not None and replay.step == key[1] else None
        )
        mine = mine or whole_step(plan, peer.name)
        if mine.forwards:
            self._go_on(key[1], layers, mine)
        else:
            self.work = StageWork(key[1], layers)
        self.part, self.is_computed = (key, mine), False
        self._say_progress()
        self._send_boundaries(range(len(self.work.forwarded)), range(self.work.backwards))
        self._next_burst()

    def _go_on(self, step: int, layers: range, mine: StageReplay) -> None:
        work = self.work
        same = 0
        while work.forwarded[same : same + 1] == list(mine.microbatches[same : same + 1]) != []:
            same += 1
        enough = mine.forwards <= same and mine.backwards <= work.backwards <= same
        if (work.step, work.layers) != (step, layers) or not enough:
            raise Violation(f"{self.peer.name} is to keep {mine} of step {step}, and has {work}")
        del work.forwarded[same:]

    def _say_progress(self) -> None:
        work = self.work
        progress = None
        if work.forwarded:
            runs = as_runs(work.forwarded)
            progress = StageProgress(work.layers.start, work.layers.stop, runs, work.backwards)
        self.peer.agreement.computed(work.step, progress)

    def _next_burst(self) -> None:
        peer = self.peer
        if self.works or self.part is None or self.is_computed:
            return
        key, mine = self.part
        work = self.work
        done = work.backwards == len(mine.microbatches)
        if not done and not self._possible():
            return
        self.works = True
        _, plan = peer.in_training()
        assert plan is not None
        place = plan.place_of(peer.name)
        assert place is not None
        low, high = peer.world.compute_ns
        share = 2 * len(plan.pipelines[place[0]].stages)
        delay_ns = int(peer.world.chance.randrange(low, high) * peer.slowness) // share
        peer.later(delay_ns, lambda: self._burst(key))

    def _burst(self, key: Key) -> None:
        peer = self.peer
        self.works = False
        if self.part is None or self.part[0] != key or peer.computing != key:
            self._next_burst()
            return
        work, mine = self.work, self.part[1]
        peer.progress += 1
        self._say_progress()
        before = len(work.forwarded), work.backwards
        at_once = 1 + peer.world.chance.randrange(2 * len(mine.microbatches) + 1)
        for left in reversed(range(at_once)):
            possible = self._possible()
            if not possible:
                break
            if peer.world.chance.choice(possible):
                work.forwarded.append(mine.microbatches[len(work.forwarded)])
            else:
                work.buffers.append(mine.microbatches[work.backwards])
                work.backwards += 1
            if left or peer.world.chance.random() >= UNSAID:
                self._say_progress()
        self._send_boundaries(
            range(before[0], len(work.forwarded)), range(before[1], work.backwards)
        )
        if work.backwards == len(mine.microbatches):
            self._say_progress()
            self.is_computed = True
            self._all_computed(key)
        else:
            self._next_burst()

    def _possible(self) -> list[bool]:
        """Whether a forward (True) or a backward (False) can be computed now."""
        peer = self.peer
        assert self.part is not None
        key, mine = self.part
        view, plan = peer.in_training()
        if view is None or plan is None or key[0] != view.id:
            return []
        work, arrived = self.work, self.arrived.get(peer.tensor_key(*key), set())
        layers, last = view.layers_of(peer.name), peer.world.workload.layer_count
        possible = []
        if len(work.forwarded) < len(mine.microbatches):
            number = mine.microbatches[len(work.forwarded)]
            if layers.start == 0 or (True, number) in arrived:
                possible.append(True)
        if work.backwards < len(work.forwarded):
            number = work.forwarded[work.backwards]
            if layers.stop == last or (False, number) in arrived:
                possible.append(False)
        return possible

    def _send_boundaries(self, forwards: range, backwards: range) -> None:
        """Send what the neighbours have not kept of the microbatches in these places."""
        peer = self.peer
        view, plan = peer.in_training()
        if view is None or plan is None or self.part is None:
            return
        key, mine = self.part
        if key[0] != view.id:
            return
        for at, (pipeline, position) in enumerate(plan.places_of(peer.name)):
            stages = plan.pipelines[pipeline].stages
            base = peer.states[stages[position].first_layer].value
            sent = (
                (position + 1, True, forwards, mine.next_has),
                (position - 1, False, backwards, mine.previous_has),
            )
            for to, is_activation, places, has in sent:
                done = (self.work.forwarded[n] for n in places)
                numbers = tuple(n for n in done if mine.place(n) == at and n not in has)
                if 0 <= to < len(stages) and numbers:
                    message = BoundaryTensors(peer.agreement.me, *key, is_activation, numbers, base)
                    peer.send(stages[to].peer_id, message)

    def resend(self) -> None:
        self._send_boundaries(range(len(self.work.forwarded)), range(self.work.backwards))

    def receive(self, message: BoundaryTensors) -> None:
        peer = self.peer
        view, plan = peer.in_training()
        present = peer.agreement.view
        if present is not None and message.view.number < present.id.number:
            return
        key = peer.tensor_key(message.view, message.step)
        arrived = self.arrived.setdefault(key, set())
        arrived |= {(message.is_activation, number) for number in message.microbatches}
        if view is None or plan is None or message.view != view.id:
            return
        mine = peer.states.get(view.layers_of(peer.name).start)
        at_step = mine is not None and message.step == peer.agreement.step == mine.version
        if at_step and mine is not None and mine.value != message.base:
            raise Violation(f"{peer.name} takes tensors that were computed on another state")
        if self.part is not None and self.part[0] == (view.id, peer.agreement.step):
            self._next_burst()
