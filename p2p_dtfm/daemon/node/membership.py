"""This peer's part in the agreement on views: its record, its votes, and what comes of them."""

import asyncio
import logging

from p2p_dtfm.core.commit.step_terms import terms_of
from p2p_dtfm.core.consensus.actions import LAN, WAN, ComputePlan, PassOnSoon, Report, SendMessage
from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.consensus.agreement_state import RunConstants
from p2p_dtfm.core.messages.agreement_messages import Standing
from p2p_dtfm.core.protocol.records import Intent, PeerRecord
from p2p_dtfm.core.protocol.signed import signing_in, verifying_in
from p2p_dtfm.core.protocol.snapshot import Member, Snapshot
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.daemon.machine.view_history import ViewHistory
from p2p_dtfm.daemon.node.acquaintances import Acquaintances
from p2p_dtfm.daemon.node.action_loop import ActionLoop
from p2p_dtfm.daemon.node.join.run_joining import RunJoining
from p2p_dtfm.daemon.node.local import Local
from p2p_dtfm.daemon.node.network import Network
from p2p_dtfm.daemon.peers.facts.estimates_kept import EstimatesKept
from p2p_dtfm.daemon.peers.run_source import Run
from p2p_dtfm.daemon.peers.self_record import SelfRecord
from p2p_dtfm.daemon.telemetry.event_log import RecoveryMarks
from p2p_dtfm.daemon.telemetry.plan_times import PlanTimes
from p2p_dtfm.net.contacts.identity import verify
from p2p_dtfm.ports import now, rarely

log = logging.getLogger("p2p_dtfm")

TICK_S = 0.1
"""How often the agreement hears that time has passed, and waiting loops look again."""


class Membership:
    """The agreement and its action loop. The `Participant` does what concerns training."""

    self_record: SelfRecord
    """Set once this machine is measured. Others are answered before that."""

    def __init__(
        self,
        local: Local,
        network: Network,
        acquaintances: Acquaintances,
        run: Run,
        joining: RunJoining,
    ) -> None:
        self.local = local
        self.network = network
        self.acquaintances = acquaintances
        self.run = run
        self.founds = joining.founds
        self.goes_on_from_own = joining.goes_on_from_own
        self.has_lost_memory = joining.has_lost_memory
        self.may_go_on_alone = joining.may_go_on_alone
        self.me = network.me
        """This peer, with its life in the agreement."""
        self.sign = signing_in(run.digest, network.host.identity.sign)
        self.verify = verifying_in(run.digest, verify)
        self.workload = workload_of(run.spec)
        self.view_history = ViewHistory(local.home.root, run.digest)
        timing, terms = LAN if local.settings.is_near else WAN, terms_of(run.spec)
        self.agreement = Agreement(
            self.me,
            RunConstants(run.digest, self.workload, self.sign, self.verify, terms, timing),
            self.view_history.read(),
        )
        self.agreement.recall_bars(self.view_history.read_bars())
        self.agreement.recall_signatures(self.view_history.read_signatures())
        acquaintances.tell_whom_it_follows(self.agreement, run.digest)
        self.plan_times = PlanTimes()
        self.recovery_marks = RecoveryMarks()
        self.estimates = EstimatesKept()
        self.asked_first = ""
        """The sender whose word has made this peer come back as a newcomer."""
        self.waiting_too: tuple[str, ...] = ()
        """Other newcomers that wait with this one."""
        self.actions = ActionLoop()
        self.actions.handle(
            {
                SendMessage: self._send,
                PassOnSoon: self._pass_on_soon,
                ComputePlan: self._begin_plan,
                Report: self._report,
            }
        )
        network.messenger.run_digest = run.digest
        network.keeper.attach(self.agreement, run.spec.admission.mode == "open")

    def set_record(self, intent: Intent | None = None) -> None:
        """Sign what is known of this peer now. The next view has it."""
        self.self_record.state_steps(self.plan_times.told())
        if members := self.members():
            joiners = {joiner.peer_id for joiner in self.joiners()}
            self.self_record.state_swarm(members | joiners | {self.me.peer_id})
        record, signed = self.self_record.make(self.sign, intent)
        self.agreement.set_record(record, signed)

    def begin_life(self, life: int) -> None:
        """Come back as a newcomer. Nothing that was said in an earlier life counts."""
        self.me = Member(self.me.peer_id, life)
        self.self_record.begin_life(self.me)
        record, signed = self.self_record.make(self.sign)
        self.agreement.begin_life(record, signed)

    def members(self) -> set[str]:
        """Members of the view in force, and of the one that is to follow it."""
        views = (self.agreement.view, self.agreement.next_view)
        return {peer_id for view in views if view is not None for peer_id in view.member_ids}

    def lives(self) -> dict[str, int]:
        """The life of each other member, and of each newcomer that waits to be let in."""
        views = (self.agreement.view, self.agreement.next_view)
        members = (member for view in views if view is not None for member in view.members)
        lives = {member.peer_id: member.life for member in members}
        lives |= {joiner.peer_id: joiner.life for joiner in self.joiners()}
        lives.pop(self.me.peer_id, None)
        return lives

    def acquainted(self) -> set[str]:
        """Peers that this one has to do with: members, newcomers that wait, and those that its home
        remembers."""
        memory = self.acquaintances.memory
        met = () if memory is None else (item.peer_id for item in memory.members)
        return {*self.members(), *self.lives(), *self.waiting_too, *met}

    def has_stage(self) -> bool:
        view = self.agreement.view
        return view is not None and bool(view.layers_of(self.me.peer_id))

    def lets_in(self) -> bool:
        """Whether this peer may let others in. Two newcomers that take each other for members would
        wait for ever. So would a newcomer for a peer that hears nothing until its next life: for
        that it may need room on its disk, or wait for minutes."""
        is_there = self.founds or self.agreement.view is not None
        return is_there and not self.agreement.is_outside

    def joiners(self) -> tuple[PeerRecord, ...]:
        """Newcomers that wait to be let in."""
        return self.agreement.joiners

    # what the agreement asks for -----------------------------------------------------------------

    def _send(self, action: SendMessage) -> None:
        book, messenger = self.network.guest_book, self.network.messenger
        may_hear = self.network.keeper.may_hear
        for peer_id in action.to:
            if book is None or not isinstance(action.message, Standing) or may_hear(peer_id):
                messenger.tell(peer_id, action.message)
            elif (told := book.told_instead(peer_id)) is not None:
                messenger.tell(peer_id, told)

    def _pass_on_soon(self, action: PassOnSoon) -> None:
        self.local.life.spawn(self._pass_on(action.after_ns))

    async def _pass_on(self, after_ns: int) -> None:
        await asyncio.sleep(after_ns / 1e9)
        self.actions.do(self.agreement.pass_on(now.monotonic_ns()))

    def _begin_plan(self, action: ComputePlan) -> None:
        self.recovery_marks.gathered()
        self.local.life.spawn(self._compute_plan(action.snapshot))

    async def _compute_plan(self, snapshot: Snapshot) -> None:
        plan = await asyncio.to_thread(self.local.world.plan, snapshot)
        await rarely.lingers("plan late")
        self.recovery_marks.planned()
        self.actions.do(self.agreement.plan_computed(snapshot, plan, now.monotonic_ns()))

    def _report(self, action: Report) -> None:
        self.local.tell(action.text)
