"""What this peer tells anybody who asks the directory: its record, and its part in the plan."""

import logging

from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Sign
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.peers.self_record import SelfRecord
from p2p_dtfm.net.directory.facts import PublishedPart
from p2p_dtfm.net.directory.port import DirectoryPort
from p2p_dtfm.ports import now

REFRESH_S = 80.0
"""A third of what published facts live for. They are published sooner where there is news."""

log = logging.getLogger("p2p_dtfm")


def place_of(view: View | None, peer_id: str, step: int) -> PublishedPart | None:
    """A member's part in the view in force; None where the peer is no member."""
    if view is None or peer_id not in view.member_ids:
        return None
    plan = view.plan
    place = plan.place_of(peer_id) if isinstance(plan, Plan) else None
    number, digest = view.id.number, view.id.snapshot
    if not isinstance(plan, Plan) or place is None:
        step_ns = plan.predicted_step_ns if isinstance(plan, Plan) else 0
        return PublishedPart(number, digest, 0, 0, 0, 0, 0, step, step_ns)
    pipeline = plan.pipelines[place[0]]
    stage = pipeline.stages[place[1]]
    return PublishedPart(
        number,
        digest,
        *place,
        stage.first_layer,
        stage.end_layer,
        pipeline.microbatch_count,
        step,
        plan.predicted_step_ns,
    )


class Publishing:
    """Publishes this peer's facts. Call `publish` now and then: it says something where there is
    something to say."""

    def __init__(self, directory: DirectoryPort, run_digest: str, is_on: bool) -> None:
        self._directory = directory
        self._run_digest = run_digest
        self._is_on = is_on
        self._said: tuple[object, ...] = ()
        self._said_s = 0.0

    async def publish(self, record: SelfRecord, signer: Sign, view: View | None, step: int) -> bool:
        """Returns False if the directory refused it. Raises `Unreachable`."""
        if not self._is_on:
            return True
        signed = record.make_public(signer)
        news = (signed.payload, view.id if view is not None else None)
        if news == self._said and now.monotonic_s() - self._said_s < REFRESH_S:
            return True
        place = place_of(view, signed.peer_id, step)
        accepted = await self._directory.publish_facts(self._run_digest, signed, place)
        if accepted:
            self._said, self._said_s = news, now.monotonic_s()
        return accepted
