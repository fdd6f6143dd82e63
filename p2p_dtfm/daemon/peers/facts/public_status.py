"""What a public page shows of a run. Members that allow it tell it to the node that serves the
page.

It has a protocol name of its own, beside the messages of members. A member that does not allow it
does not serve the protocol, and nothing that members say to each other changes with it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.facts.in_words import duration
from p2p_dtfm.net.directory.port import DirectoryPort
from p2p_dtfm.net.directory.values import Presence
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.port import HostPort
from p2p_dtfm.ports import chance, now
from p2p_dtfm.web.public_facts import PublicFacts, facts_told, nothing_heard

KIND = "public-status"
MADE_ANEW_S = 2.0
ASK_EVERY_S = 10.0
ASKED_LIMIT = 8
DEADLINE_S = 5.0
STALE_S = 45.0
"""Older words are shown with their age."""
NOBODY_YET = (
    "No member that lets this run be shown has answered yet. A member allows it with --tell-status."
)

log = logging.getLogger("p2p_dtfm")


class StatusTeller:
    """A member's side: answers anybody that asks with what its own public page would show."""

    def __init__(self, host: HostPort, facts: Callable[[], PublicFacts]) -> None:
        self._facts = facts
        self._plane = ControlPlane(host, self._answer, KIND)
        self._made: tuple[float, bytes] | None = None

    async def ready(self) -> "StatusTeller":
        """Begin to answer."""
        await self._plane.ready()
        return self

    async def close(self) -> None:
        await self._plane.close()

    async def _answer(self, sender: str, body: bytes) -> bytes:
        now_s = now.monotonic_s()
        if self._made is None or now_s - self._made[0] >= MADE_ANEW_S:
            self._made = now_s, msgspec.json.encode(self._facts())
        return self._made[1]


class StatusHeard:
    """A bootstrap node's side: asks some members of one run now and then, and keeps what one
    said."""

    def __init__(
        self, host: HostPort, directory: DirectoryPort, run_digest: str, join_line: str
    ) -> None:
        self._host = host
        self._directory = directory
        self._run_digest = run_digest
        self._join_line = join_line
        """The line to join through the node itself: no member's address gets onto the page."""
        self._plane = ControlPlane(host, _tell_nothing, KIND)
        self._tellers: list[str] = []
        """Members that answered last time. They are asked again before others."""
        self._heard: tuple[float, PublicFacts] | None = None

    def facts(self) -> PublicFacts:
        """The newest words, and how old they are where that matters."""
        if self._heard is None:
            return nothing_heard(self._run_digest, self._join_line, NOBODY_YET)
        heard_s, facts = self._heard
        age_s = now.monotonic_s() - heard_s
        if age_s < STALE_S or facts.state == "done":
            return facts
        note = f"No member answers now. What stands here is {duration(age_s)} old."
        return msgspec.structs.replace(
            facts, state="nobody answers", note=note, tokens_per_s=None, left_s=None
        )

    async def keep(self) -> None:
        """Ask now and then, until cancelled."""
        while True:
            try:
                await self.ask()
            except Unreachable as error:
                log.debug("%s", error)
            except Exception:  # else the page would stand still for good
                log.exception("bug while asking for the run's status")
            await asyncio.sleep(ASK_EVERY_S)

    async def ask(self) -> None:
        """Ask once. Raises `Unreachable` if the directory cannot be read."""
        present = await self._directory.present_peers(self._run_digest)
        asked = self._chosen(present)
        answers = await asyncio.gather(*map(self._ask_one, asked))
        told = {
            peer.peer_id: facts
            for peer, facts in zip(asked, answers, strict=True)
            if facts is not None
        }
        self._tellers = list(told)
        if told:
            self._heard = now.monotonic_s(), self._believed(told)

    def _chosen(self, present: Sequence[Presence]) -> list[Presence]:
        """Some of the members that answered last time, and others by lot."""
        drawn = chance.sample(present, len(present))
        before = frozenset(self._tellers)
        rest = [peer for peer in drawn if peer.peer_id != self._host.peer_id]
        known = [peer for peer in rest if peer.peer_id in before][: ASKED_LIMIT // 2]
        new = [peer for peer in rest if peer not in known]
        return [*known, *new][:ASKED_LIMIT]

    async def _ask_one(self, peer: Presence) -> PublicFacts | None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._host.connect(peer.peer_id, peer.addresses, DEADLINE_S)
                answer = await self._plane.call(peer.peer_id, b"", DEADLINE_S)
            facts = facts_told(answer, self._run_digest)
        except (TimeoutError, Unreachable, Refused):
            return None  # most members do not allow it, which is no fault
        except PeerFault as fault:
            log.debug("%s says of the run: %s", peer.peer_id, fault.cause)
            return None
        return msgspec.structs.replace(facts, join_line=self._join_line)

    def _believed(self, told: dict[str, PublicFacts]) -> PublicFacts:
        """The answer in the middle by steps. A liar that invents one answer does not write the page
        while others are honest. No peer's answer counts for more: the digest names what the run's
        founder has signed, and anybody may sign the same."""
        by_step = sorted(told.values(), key=lambda facts: facts.step)
        return by_step[len(by_step) // 2]


async def _tell_nothing(sender: str, body: bytes) -> bytes:
    raise PeerFault("it is a bootstrap node and takes part in no run", sender)
