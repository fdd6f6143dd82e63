"""What was done before this peer came, from other members' transcripts. These are asked for slowly,
in pieces, beside training, and believed as far as they lead to this peer's own states."""

import asyncio
import logging
from collections.abc import Callable

from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.lineage import REMEMBERED_STEPS, Lineage
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.transcript.checking import NotTrue
from p2p_dtfm.core.transcript.earlier import EarlierSteps, Led, leading_to
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.wire import TranscriptPiece, TranscriptRequest
from p2p_dtfm.daemon.proof.transcript_file import MIB, Transcript
from p2p_dtfm.daemon.telemetry.contribution import Contributions
from p2p_dtfm.net.contacts.identity import verify
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.ports import chance

PIECE_BYTES = 32 << 10
PIECE_EVERY_S = 0.5
"""Half a Mbit a second: a home's line has room for that beside training."""
ASK_DEADLINE_S = 20.0
BEGIN_AFTER_S = 10.0
"""How long to wait first: a view begins with states on their way."""
MEMBERS_ASKED = 8
MEMBERS_READ = 3
"""How many are read, of transcripts that begin before what is missing."""
LIMIT_BYTES = 64 * MIB
"""How much is read of one transcript: as much as members keep, unless told to keep more."""

log = logging.getLogger("p2p_dtfm")


async def answer_with_piece(transcript: Transcript, request: TranscriptRequest) -> bytes:
    """A piece of the transcript for another member."""
    content = await asyncio.to_thread(transcript.piece, request.from_byte, PIECE_BYTES)
    return encode(TranscriptPiece(transcript.told_bytes, content))


class StepsOfOthers:
    """Makes this peer's board one of the whole run, once it takes part, and again after each time
    that the others have gone on without it. What it did before may have been done again."""

    def __init__(
        self,
        messenger: Messenger,
        spec: RunSpec,
        contributions: Contributions,
    ) -> None:
        self._messenger = messenger
        self._spec = spec
        self._contributions = contributions
        self._led: dict[str, Led] = {}
        self._known: dict[int, str] = {}

    async def keep(
        self,
        members: Callable[[], list[str]],
        lineage: Callable[[], Lineage],
        learnt: Callable[[], None],
    ) -> None:
        """As `learn`, for ever. `learnt` is called after each time."""
        while True:
            self._contributions.was_away.clear()
            await self.learn(members, lineage)
            self._led, self._known = {}, {}
            learnt()
            await self._contributions.was_away.wait()

    async def learn(self, members: Callable[[], list[str]], lineage: Callable[[], Lineage]) -> None:
        """`members`: the others of the view in force. Gives up quietly.

        It begins once this peer is in a view. Until its next life it names those who have gone on
        without it, and by their view it would lack no step, and ask nobody once it is back."""
        while not (self._contributions.is_in_view and members()):
            await asyncio.sleep(BEGIN_AFTER_S)
        await asyncio.sleep(BEGIN_AFTER_S)
        others = chance.sample(members(), min(MEMBERS_ASKED, len(members())))
        read = 0
        for peer_id in others:
            if self._contributions.unproven_steps == 0 or read == MEMBERS_READ:
                return
            self._known |= _remembered(lineage())
            reader = await self._read(peer_id)
            if reader is not None:
                read += 1
                await self._use(reader, peer_id, lineage())

    async def _read(self, peer_id: str) -> EarlierSteps | None:
        """All that a member has. None if it has nothing that is missing here, or is not to be
        believed."""
        reader = EarlierSteps(verify, self._spec)
        try:
            await self._read_all(reader, peer_id)
        except (Unreachable, Refused, PeerFault) as error:
            log.debug("no transcript of %s: %s", peer_id, error)
            return None
        except NotTrue as error:
            log.warning("the transcript of %s is not true and changes nothing: %s", peer_id, error)
            return None
        return reader if reader.led else None

    async def _read_all(self, reader: EarlierSteps, peer_id: str) -> None:
        """Read a transcript as far as it is written now. Raises `NotTrue`, `PeerFault`,
        `Unreachable`, `Refused`."""
        at, end = 0, 1
        while at < end:
            reply = await self._messenger.ask(peer_id, TranscriptRequest(at), ASK_DEADLINE_S)
            piece = decode(reply, TranscriptPiece, PIECE_BYTES + 64)
            if at == 0:
                end = min(piece.total_bytes, LIMIT_BYTES)
            if not piece.content:
                return
            at += len(piece.content)
            await asyncio.to_thread(reader.take, piece.content)
            if len(piece.content) < PIECE_BYTES:
                return  # the last one, or a drip: no other would be asked for a year
            first = reader.first_step
            if first is not None and first >= self._contributions.seen_from:
                reader.led.clear()  # it is no older than what is known here
                return
            await asyncio.sleep(PIECE_EVERY_S)

    async def _use(self, reader: EarlierSteps, peer_id: str, lineage: Lineage) -> None:
        self._led |= reader.led
        known = self._known | _remembered(lineage)
        found = await asyncio.to_thread(leading_to, self._led, known)
        more = self._contributions.settle(found)
        if more:
            log.info(
                "the board has %s more, by the transcript of %s", counted(more, "step"), peer_id
            )


def _remembered(lineage: Lineage) -> dict[int, str]:
    """The digests of the newest states, by how many steps made them."""
    first = max(1, lineage.length - REMEMBERED_STEPS)
    known = ((length, lineage.at(length)) for length in range(first, lineage.length + 1))
    return {length: digest for length, digest in known if digest}
