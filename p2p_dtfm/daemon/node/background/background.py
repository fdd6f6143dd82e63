"""All loops of a daemon that takes part, and what starts them."""

from p2p_dtfm.daemon.machine.disk import keep_under
from p2p_dtfm.daemon.node.background.data_copies import bring_data
from p2p_dtfm.daemon.node.background.heartbeats import Heartbeats
from p2p_dtfm.daemon.node.background.presence import PresenceKeeping
from p2p_dtfm.daemon.node.background.record_keeping import RecordKeeping
from p2p_dtfm.daemon.node.coming_and_going.departure import Departure
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.daemon.peers.guests.guest_watch import GuestWatch
from p2p_dtfm.daemon.proof.of_others import StepsOfOthers


class Background:
    """Loops that run from when this peer takes part until it ends."""

    def __init__(self, participant: Participant, departure: Departure) -> None:
        self._participant = participant
        self._membership = membership = participant.membership
        self._agreement = membership.agreement
        self._me = membership.network.me.peer_id
        self._run = membership.run
        self._local = participant.local
        self._network = participant.network
        self._heartbeats = Heartbeats(participant, departure)
        self._presence = PresenceKeeping(participant)
        self._record = RecordKeeping(participant)

    def begin(self) -> None:
        """Start all loops."""
        local, membership = self._local, self._membership
        acquaintances, trainer = membership.acquaintances, self._participant.trainer
        local.life.spawn(membership.actions.run())
        local.life.spawn(self._heartbeats.keep())
        local.life.spawn(self._presence.keep_reachable())
        local.life.spawn(self._presence.keep())
        local.life.spawn(acquaintances.keep_remembering(self._agreement))
        if membership.founds:
            local.life.spawn(acquaintances.look_for_the_lost(self._agreement))
        local.life.spawn(acquaintances.ask_nearby_for_the_lost(self._agreement))
        if local.disk_limit_bytes:
            directory = local.home.run_directory(self._run.digest)
            limit_bytes, in_use = local.disk_limit_bytes, self._participant.checkpoints.in_use
            local.life.spawn(keep_under(local.home.root, directory, limit_bytes, in_use))
        if (book := self._network.guest_book) is not None:
            watch = GuestWatch(
                book, self._agreement, self._network.messenger, membership.actions.do
            )
            local.life.spawn(watch.keep())
        local.life.spawn(self._record.keep())
        local.life.spawn(bring_data(self._participant))
        local.life.spawn(self._timeline_loop())
        local.life.spawn(self._learn_of_earlier_steps())
        local.life.spawn(trainer.run())

    async def _learn_of_earlier_steps(self) -> None:
        """Ask others who computed the earlier steps, once this peer takes part."""
        given = self._participant.contributions
        steps = StepsOfOthers(self._network.messenger, self._run.spec, given)
        evidence = self._agreement.recovery_evidence
        observer = self._local.observer
        await steps.keep(self._others, lambda: evidence.lineage, lambda: observer.tallies(given))

    def _others(self) -> list[str]:
        view = self._agreement.view
        return [it for it in view.member_ids if it != self._me] if view is not None else []

    async def _timeline_loop(self) -> None:
        """While a page is open, show it a late step of this peer's pipeline."""
        agreement = self._agreement
        await self._network.traces.keep_timeline(
            lambda: agreement.view,
            lambda: self._local.dashboard.watched,
            self._local.observer.show_timeline,
        )
