"""The truth while a seed is played: what no daemon can know as a whole."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.judge import Reference
from p2p_dtfm.testbed.virtual.swarm import Swarm
from p2p_dtfm.web.state import Live


@dataclass(frozen=True)
class Falsehood:
    """Something false that a daemon tells."""

    name: str
    """Stays the same for as long as the falsehood lasts."""
    text: str
    bound_s: float
    """What a daemon cannot know yet is no lie. It becomes one if it lasts for longer."""


@dataclass(frozen=True)
class Word:
    """What a daemon tells at one moment, and where it really stands."""

    peer: Peer
    now_s: float
    status: dict[str, Any]
    """What `p2p-dtfm status --json` prints."""
    live: Live
    members: list[dict[str, Any]]
    """What `p2p-dtfm peers --json` prints."""
    participant: Participant | None

    @property
    def me(self) -> str:
        return self.peer.peer_id

    @property
    def state(self) -> str:
        return str(self.status["state"])

    @property
    def reason(self) -> str:
        return str(self.status["reason"])

    @property
    def agreement(self) -> AgreementState | None:
        it = self.participant
        return it.membership.agreement._state if it is not None else None

    @property
    def trainer(self) -> TrainerState | None:
        return self.participant.trainer._state if self.participant is not None else None

    @property
    def view(self) -> View | None:
        return self.agreement.view if self.agreement is not None else None

    @property
    def plan(self) -> Plan | None:
        plan = self.view.plan if self.view is not None else None
        return plan if isinstance(plan, Plan) else None

    @property
    def suspected(self) -> tuple[str, ...]:
        """The peers that it holds for lost."""
        it = self.participant
        return it.membership.agreement.suspected if it is not None else ()

    @property
    def is_frozen(self) -> bool:
        return self.agreement is not None and self.agreement.view is not None and self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """A failure is dealt with."""
        return self.participant is not None and self.participant.membership.agreement.frozen


class Truth:
    """The truth of one seed. Call `look` before anything is compared."""

    def __init__(self, swarm: Swarm, total_steps: int) -> None:
        self.swarm = swarm
        self.total_steps = total_steps
        self.reference: Reference | None = None
        self.by_id: dict[str, Peer] = {}
        self.awake_s: dict[str, float] = {}
        """Since when each running peer takes turns, by peer id. A peer that stands still is not in
        it."""
        self._gone_s: dict[str, float] = {}
        self._seen = defaultdict[str, int](int)
        """How many events of each peer were looked at."""
        self.step_s = -math.inf
        """When anybody last told of a step."""
        self.steps = 0
        """How many steps anybody has told of."""
        self.is_complete = False
        self.full_s: dict[str, float] = {}
        """When each peer's disk was last seen full."""

    @property
    def now_s(self) -> float:
        return self.swarm.now_s

    def look(self) -> None:
        """Looks at what has happened since the last call."""
        now_s = self.now_s
        for peer in self.swarm.peers:
            self.by_id[peer.peer_id] = peer
            if peer.is_running and not peer.is_away:
                self._gone_s.pop(peer.peer_id, None)
            elif peer.started_s > self._gone_s.setdefault(peer.peer_id, now_s):
                self._gone_s[peer.peer_id] = now_s  # it was there between two looks
            if peer.is_running and peer.process is not None and peer.process.takes_turns:
                self.awake_s.setdefault(peer.peer_id, now_s)
            else:
                self.awake_s.pop(peer.peer_id, None)
            if peer.disk.is_full:
                self.full_s[peer.peer_id] = now_s
            events = peer.events()
            for event in events[self._seen[peer.name] :]:
                if event["event"] == "step":
                    self.step_s = max(self.step_s, event["at_s"])
                    self.steps = max(self.steps, event["step"] + 1)
            self._seen[peer.name] = len(events)
        self.is_complete = self.steps >= self.total_steps

    def gone_for_s(self, peer_id: str) -> float:
        """How long the peer has not run; 0 if it runs."""
        gone_s = self._gone_s.get(peer_id)
        return 0.0 if gone_s is None else self.now_s - gone_s

    def awake_for_s(self, peer_id: str) -> float:
        """How long the peer has taken turns in this life; 0 if it takes none."""
        awake_s = self.awake_s.get(peer_id)
        return 0.0 if awake_s is None else self.now_s - max(awake_s, self.by_id[peer_id].started_s)

    def participant_of(self, peer_id: str) -> Participant | None:
        """The participant of a peer that runs and does not stand still."""
        peer = self.by_id.get(peer_id)
        if peer is None or peer_id not in self.awake_s or peer.daemon is None:
            return None
        api = peer.daemon.status_api
        return api.participant if api is not None else None

    def is_clear(self, origin: str, goal: str) -> bool:
        """Whether what one peer says now soon comes to the other: both are there, and nothing is
        done to the line between them."""
        if origin not in self.awake_s or goal not in self.awake_s:
            return False
        link = self.swarm.network.links.of(origin, goal)
        is_held = link.is_cut or link.is_slow or link.loss > 0 or bool(link.held)
        return not is_held and not any(self.by_id[it].has_dumb_p2pd for it in (origin, goal))

    def arrived_s(self, origin: str, goal: str) -> float:
        """When anything last came from one peer to the other."""
        return self.swarm.network.links.arrived_s.get((origin, goal), -math.inf)

    def name(self, peer_id: str) -> str:
        peer = self.by_id.get(peer_id)
        return peer.name if peer is not None else peer_id


def names_in(world: Truth, told: Sequence[str]) -> str:
    return ", ".join(map(world.name, told))
