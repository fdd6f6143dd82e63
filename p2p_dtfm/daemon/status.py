"""What this daemon is doing: always one state, why, and for how long yet."""

import logging
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

log = logging.getLogger("p2p_dtfm")


class State(StrEnum):
    STARTING = "starting"
    JOINING = "joining"
    MEASURING = "measuring"
    SYNCING = "syncing"
    WAITING = "waiting"
    SPARE = "spare"
    TRAINING = "training"
    DONE = "done"
    LEAVING = "leaving"
    PAUSED = "paused"
    STOPPED = "stopped"


LAST_STATES = (State.LEAVING, State.STOPPED)


@dataclass
class Status:
    """`say` changes the state; the rest are facts that the parts of the daemon keep up to date.

    A peer that leaves goes on training until others hold its layers, but "leaving" is what its
    user waits for: after that state only the end is told.
    """

    state: State = State.STARTING
    reason: str = ""
    since_s: float = field(default_factory=time.time)
    facts: dict[str, Any] = field(default_factory=dict)

    def say(self, state: State, reason: str) -> None:
        if (state, reason) == (self.state, self.reason):
            return
        if self.state in LAST_STATES and state not in LAST_STATES:
            return
        changed = state is not self.state
        self.state, self.reason = state, reason
        if changed:
            self.since_s = time.time()
        log.log(logging.INFO if changed else logging.DEBUG, "%s: %s", state.value, reason)

    def as_json(self) -> dict[str, Any]:
        return {
            "state": self.state.value,
            "reason": self.reason,
            "since_s": round(self.since_s, 3),
            **self.facts,
        }
