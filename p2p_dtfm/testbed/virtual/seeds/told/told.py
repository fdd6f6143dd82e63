"""Asks each daemon what it tells, and remembers for how long each falsehood lasts."""

from p2p_dtfm.daemon.node.returning import IN_VAIN
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.told.figures import figures
from p2p_dtfm.testbed.virtual.seeds.told.states import states
from p2p_dtfm.testbed.virtual.seeds.told.whom import TrueWaits, waits, whom
from p2p_dtfm.testbed.virtual.seeds.told.world import Falsehood, Truth, Word
from p2p_dtfm.testbed.virtual.seeds.told.wrong import STANDS_S, stands_still, wrong
from p2p_dtfm.testbed.virtual.swarm import Swarm


class Comparison:
    """Compares all words of one seed. Nothing is asked of `liars`."""

    def __init__(self, swarm: Swarm, total_steps: int, liars: tuple[str, ...] = ()) -> None:
        self.world = Truth(swarm, total_steps)
        self._swarm = swarm
        self._liars = liars
        self._since_s: dict[tuple[str, str], float] = {}
        """Since when each falsehood lasts, by process and name."""
        self._waits = TrueWaits()
        self._stands_since_s: float | None = None
        self.words = 0
        """How many words were compared."""

    def look(self, now_s: float) -> str:
        """What is told and has been false for too long; empty, if nothing."""
        world, lasting = self.world, dict[tuple[str, str], float]()
        world.look()
        self._look_at_waits(now_s)
        for peer in self._swarm.peers:
            if problem := _away(peer):
                return problem
        words = [word for peer in self._swarm.peers if (word := self._word_of(peer)) is not None]
        self.words += len(words)
        for word in words:
            assert word.peer.process is not None
            for found in self._falsehoods(word):
                key = word.peer.process.name, found.name
                lasting[key] = self._since_s.get(key, now_s)
                if now_s - lasting[key] >= found.bound_s:
                    lasts = f" (for {now_s - lasting[key]:.0f} s)" if found.bound_s else ""
                    return f"{word.peer.name} {found.text}{lasts}"
        self._since_s = lasting
        return self._stands_still(words, now_s)

    def _falsehoods(self, word: Word) -> list[Falsehood]:
        world = self.world
        found = [*states(word, world), *whom(word, world), *figures(word, world)]
        return [*found, *wrong(word, world), *waits(word, self._waits)]

    def _look_at_waits(self, now_s: float) -> None:
        awake = {
            peer.process.name: self.world.awake_s[peer.peer_id]
            for peer in self._swarm.peers
            if peer.process is not None and peer.peer_id in self.world.awake_s
        }
        self._waits.look(list(self._swarm.loop.tasks()), now_s, awake)

    def _word_of(self, peer: Peer) -> Word | None:
        """What the peer tells; None if nobody could ask it now."""
        daemon, process = peer.daemon, peer.process
        if daemon is None or daemon.status_api is None or process is None or peer.is_away:
            return None
        if not peer.is_running or not process.takes_turns or peer.name in self._liars:
            return None
        api = daemon.status_api
        told = process.here(lambda: (api.status_json(), daemon.observer.live(), api.peers_json()))
        if told[0]["state"] == State.STOPPED:
            return None
        return Word(peer, self._swarm.now_s, *told, api.participant)

    def _stands_still(self, words: list[Word], now_s: float) -> str:
        """No step for long since anybody told of one, and nobody says why; empty otherwise."""
        silent = stands_still(words, self.world)
        if not silent or self.world.step_s > now_s - STANDS_S:
            self._stands_since_s = None
            return ""
        self._stands_since_s = self._stands_since_s or now_s
        if now_s - self._stands_since_s < STANDS_S / 2:
            return ""
        return f"no step for {STANDS_S:.0f} s, and nobody says why: {silent}"


def _away(peer: Peer) -> str:
    """What a peer that its owner paused tells that is false; empty, if nothing."""
    resident, process = peer.resident, peer.process
    if not peer.is_away or resident is None or process is None or not process.takes_turns:
        return ""
    live = process.here(resident.state).live
    if live.state not in (State.PAUSED, State.STARTING):  # it is to take part again
        return f"{peer.name} is away, and says {live.state}: {live.reason}"
    if live.state == State.PAUSED and not live.reason:
        return f"{peer.name} is away, and says not why"
    of_steps = [it for it in live.problems if it.name != IN_VAIN]
    if of_steps or live.waits_for or live.tokens_per_s or live.heard_s_ago:
        return f"{peer.name} is away, and tells of steps: {live}"
    return ""
