"""What a daemon tells those who ask on its own machine."""

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from p2p_dtfm import __version__
from p2p_dtfm.core.membership.bars import bar_ends_step, barred_at
from p2p_dtfm.core.membership.weak_points import WeakPoints, weak_points
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.dashboard.waits import Wait
from p2p_dtfm.daemon.machine.devices.together import for_all_devices
from p2p_dtfm.daemon.machine.hours import for_a_while, pause_seconds
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.local import Local
from p2p_dtfm.daemon.node.network import Network
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.daemon.peers.facts.public_status import StatusTeller
from p2p_dtfm.daemon.peers.guests.desk import addresses_to_tell, new_line, revoke
from p2p_dtfm.daemon.peers.reachability import own_addresses, relay_of
from p2p_dtfm.daemon.telemetry.names import PEER_ID
from p2p_dtfm.daemon.telemetry.trace_collector import STEPS_LIMIT, peer_traces_json
from p2p_dtfm.net.contacts.addresses import is_relayed
from p2p_dtfm.net.libp2p.port import HostPort
from p2p_dtfm.ports import now
from p2p_dtfm.train.stage.emulated import emulated_flops_per_s
from p2p_dtfm.web.api import LocalApi, make_app, refusal_answer

log = logging.getLogger("p2p_dtfm")


class StatusApi:
    """Plain data for `p2p-dtfm status`, `plan`, `peers`, `trace` and the dashboard. There is no
    `participant` before this peer takes part in a run."""

    def __init__(self, local: Local, network: Network) -> None:
        self._local = local
        self._network = network
        self.participant: Participant | None = None
        self._weak_points: tuple[ViewId | None, WeakPoints] = (None, WeakPoints((), ()))

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Answer those who ask on this machine."""
        local, life = self._local, self._local.life

        def left_for_a_pause(reason: str, until_s: float | None = None) -> dict[str, Any]:
            is_pause = life.pause(reason, until_s, is_asked=True)
            return {"state": "leaving"} if is_pause else refusal_answer(_ENDS)

        async def pause() -> dict[str, Any]:
            return left_for_a_pause("its user asked for it; p2p-dtfm resume ends it")

        async def pause_for(parameters: Mapping[str, str]) -> dict[str, Any]:
            until_s = now.wall_s() + pause_seconds(parameters)
            return left_for_a_pause(for_a_while(until_s, now.wall_s()), until_s)

        async def resume() -> dict[str, Any]:
            return {"state": "leaving"} if life.resume() else refusal_answer(_NOT_PAUSED)

        async def leave() -> dict[str, Any]:
            life.leave()
            return {"state": "leaving"}

        readers = {
            "status": self.status_json,
            "plan": self.plan_json,
            "peers": self.peers_json,
            "history": self.history_json,
            "dashboard": local.dashboard.invitation,
        }
        actions = {"pause": pause, "leave": leave}
        local.observer.marks = laboratory_marks(local.settings, self._network.host)
        local.dashboard.show(local.observer.state, for_all_devices(local.home.root, actions))
        await local.dashboard.start(local.settings.dashboard, local.home.root)
        await local.dashboard.start_public(local.settings.public_status)
        if local.settings.public_status or local.settings.tell_status:
            teller = await StatusTeller(self._network.host, local.dashboard.public_facts).ready()
            stack.push_async_callback(teller.close)
        api = LocalApi(
            make_app(
                readers,
                {**actions, "resume": resume},
                {"trace": self.trace_json},
                {"pause-for": pause_for, "invite": self.invite, "revoke": self.revoke},
            ),
            local.home.socket,
        )
        await api.start()
        stack.push_async_callback(api.close)
        if local.dashboard.address is not None:
            log.info("dashboard %s", local.dashboard.address)

    async def invite(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """A line for others to join with, or why there is none. A founder that still waits for
        others in no view invites them to itself."""
        participant, view = self.participant, self._last_view
        if participant is None or (view is None and self._local.settings.initial_peers):
            return refusal_answer(_IN_NO_VIEW)
        network, me = self._network, self._network.me.peer_id
        records = view.snapshot.records if view is not None else ()
        others = {record.peer_id: network.messenger.where(record.peer_id) for record in records}
        memory = participant.membership.acquaintances.memory
        points = memory.meeting_points if memory is not None else ()
        own = await own_addresses(network.host)
        told = addresses_to_tell(own, {k: v for k, v in others.items() if k != me}, points)
        digest = participant.membership.run.digest
        try:
            line = new_line(network.guest_book, digest, parameters, told)
        except UserError as error:
            return refusal_answer(error)
        return {**line, "is_complete": participant.trainer.done.is_set()}

    async def revoke(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        view, names = self._last_view, self._local.observer.seen.names
        members = view.member_ids if view is not None else ()
        try:
            return revoke(self._network.guest_book, parameters.get("who", ""), members, names.of)
        except UserError as error:
            return refusal_answer(error)

    @property
    def _last_view(self) -> View | None:
        """In which this peer is, or was before the others went on without it."""
        participant = self.participant
        return participant.membership.agreement.view if participant is not None else None

    @property
    def _view(self) -> View | None:
        """In which this peer is."""
        participant = self.participant
        if participant is None or participant.membership.agreement.is_outside:
            return None
        return self._last_view

    def status_json(self) -> dict[str, Any]:
        """What `p2p-dtfm status --json` prints."""
        local, network, participant = self._local, self._network, self.participant
        reachability = network.reachability
        shaper = network.host.shaper
        return {
            "version": __version__,
            "dashboard": local.dashboard.address,
            "peer_id": network.me.peer_id,
            "name": local.observer.seen.names.of(network.me.peer_id),
            "reachability": {**reachability.finding.as_json(), "relays": list(reachability.relays)},
            "life": participant.membership.me.life if participant else network.me.life,
            "shaped_links": shaper.label if shaper else None,
            "this_machine": list(local.home.of_this_machine()),
            "emulated_device": emulated_flops_per_s(local.settings.device) is not None,
            **self._run_json(),
            **local.status.as_json(),
            "step": local.observer.step(),
            "given": self._given_json(),
            "problems": msgspec.to_builtins(local.observer.problems()),
            "refused": [msgspec.to_builtins(each) for each in network.keeper.refused_most()],
            "names": self._names_json(),
            "estimates": self._estimates_json(),
            **self._view_json(),
            **self._states_json(),
            "agreement": self._agreement_json(),
            "waits": [_wait_json(wait) for wait in local.waits.told()],
        }

    def _given_json(self) -> dict[str, float]:
        """What this peer has given, in tokens. Each is one token taken through as many layers as
        the model has."""
        given = self._local.observer.contribution()
        return {
            "today": given.today.tokens,
            "ever": given.ever.tokens,
            "repeated": given.repeated_tokens,
        }

    def _run_json(self) -> dict[str, Any]:
        if self.participant is None:
            return dict.fromkeys(("run", "run_digest", "data", "checkpoints", "admission"))
        run = self.participant.membership.run
        return {
            "run": run.spec.name,
            "run_digest": run.digest,
            "data": run.manifest.describe(),
            "checkpoints": str(self._local.home.checkpoints(run.digest)),
            "admission": run.spec.admission.mode,
        }

    def _view_json(self) -> dict[str, Any]:
        view = self._view
        return {
            "view": view.id.number if view else None,
            "snapshot": view.id.snapshot if view else None,
            "plan": view.plan.digest() if view else None,
            "members": list(view.member_ids) if view else [],
            "addresses": self._addresses_in(view),
            "tensors_over": self.participant.bulk.carriers() if self.participant else {},
            "stage": list(view.layers_of(self._network.me.peer_id)) if view else [],
            "barred": self._barred_json(),
            "weak_points": msgspec.to_builtins(self._weak_points_of(view)),
        }

    def _barred_json(self) -> list[dict[str, Any]]:
        """Members that are barred for false work, and until which step."""
        agreement = self.participant.membership.agreement if self.participant else None
        if agreement is None:
            return []
        bars = barred_at(agreement.bars, agreement.step).values()
        return [
            {"peer_id": it.peer_id, "until_step": bar_ends_step(it), "reason": it.reason}
            for it in bars
        ]

    def _estimates_json(self) -> object:
        """How far off estimated links were, once they were measured; None where none was."""
        participant = self.participant
        return msgspec.to_builtins(participant.membership.estimates.errors) if participant else None

    def _weak_points_of(self, view: View | None) -> WeakPoints | None:
        """The weak points of a view. They are found once for each view, since a swarm of hundreds
        has many links."""
        if view is None:
            return None
        known, found = self._weak_points
        if known != view.id:
            found = weak_points(view.snapshot.records)
            self._weak_points = (view.id, found)
        return found

    def _names_json(self) -> dict[str, str]:
        """Names of the members, and of the peers that the status speaks of."""
        names, view = self._local.observer.seen.names, self._view
        spoken_of = PEER_ID.findall(self._local.status.reason)
        return {it: names.of(it) for it in (*(view.member_ids if view else ()), *spoken_of)}

    def _agreement_json(self) -> dict[str, Any] | None:
        """Where this peer stands, what it waits for, and what became of the last message."""
        if self.participant is None:
            return None
        agreement = self.participant.membership.agreement
        outlook, heard = agreement.outlook(now.monotonic_ns()), agreement.last_heard
        return {
            "phase": outlook.phase.value,
            "reason": outlook.reason,
            "last_message": msgspec.to_builtins(heard) if heard is not None else None,
        }

    def _states_json(self) -> dict[str, Any]:
        participant = self.participant
        if participant is None:
            return {"safe_step": None, "layers": [], "whole_checkpoint_step": None}
        return {
            "safe_step": participant.trainer.tell_safe_step() if self._view is not None else None,
            "layers": sorted(participant.trainer.states),
            "whole_checkpoint_step": participant.checkpoints.whole_step,
        }

    def _addresses_in(self, view: View | None) -> list[str]:
        """Where others reach this peer, once it is a member. Each address is a way into the
        swarm."""
        if self.participant is None or view is None:
            return []
        is_member = self._network.me.peer_id in view.member_ids
        return list(self.participant.membership.self_record.addresses) if is_member else []

    def plan_json(self) -> dict[str, Any]:
        """The snapshot and plan in force, as plain data."""
        view = self._view
        if view is None:
            return {"view": None}
        return {
            "view": view.id.number,
            "snapshot": msgspec.to_builtins(view.snapshot),
            "snapshot_digest": view.id.snapshot,
            "plan": msgspec.to_builtins(view.plan),
            "plan_digest": view.plan.digest(),
        }

    def peers_json(self) -> list[dict[str, Any]]:
        view = self._view
        records = view.snapshot.records if view else ()
        heard = self._local.observer.heard_s_ago([record.peer_id for record in records])
        me = self._network.me.peer_id
        return [
            {
                **msgspec.to_builtins(msgspec.structs.replace(record, brief=msgspec.UNSET)),
                "links": msgspec.to_builtins(record.links_among(view.member_ids if view else ())),
                "name": self._local.observer.seen.names.of(record.peer_id),
                "is_this_peer": record.peer_id == me,
                "heard_s_ago": heard_s_ago,
                "way": way_words(self._network.far_ends.get(record.peer_id)),
                "layers": list(view.layers_of(record.peer_id)) if view else [],
            }
            for record, heard_s_ago in zip(records, heard, strict=True)
        ]

    async def trace_json(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """The newest steps of all stage-holders by one clock; `steps` says how many."""
        view = self._view
        if view is None or not isinstance(view.plan, Plan):
            return {"peers": [], "missing": [], "names": {}}
        asked = parameters.get("steps", "1")
        count = min(max(int(asked), 1), STEPS_LIMIT) if asked.isdecimal() else 1
        newest = self._local.recorder.newest
        first = None if newest is None else max(0, newest - count + 1)
        traces, missing = await self._network.traces.collect(
            view.plan.stage_holders(), first, count
        )
        peers = peer_traces_json(view.plan, traces)
        return {"peers": peers, "missing": missing, "names": self._names_json()}

    def history_json(self) -> dict[str, Any]:
        """Views, losses and held-out losses so far."""
        participant, step = self.participant, self._local.observer.step()
        if participant is None:
            return {"step": step, "views": [], "losses": [], "held_out_losses": []}
        history = participant.trainer.history
        return {
            "step": step,
            "views": participant.views,
            "losses": list(history.losses),
            "held_out_losses": list(history.held_out),
        }


def _wait_json(wait: Wait) -> dict[str, Any]:
    return {**asdict(wait), "waited_s": round(wait.waited_s, 1), "is_overdue": wait.is_overdue}


_NOT_PAUSED = UserError("the daemon is not paused", "see what it does: p2p-dtfm status")
_ENDS = UserError(
    "the daemon ends just now: it was told to leave", "start it again when it has: p2p-dtfm"
)
_IN_NO_VIEW = UserError(
    "the daemon is in no view yet, so it cannot say where the run is",
    "try again in a moment: p2p-dtfm status shows how far it is",
)


def way_words(far_end: str | None) -> str | None:
    """How bytes travel to a peer; None where that is not known."""
    if far_end is None:
        return None
    return f"relayed by {relay_of(far_end)}" if is_relayed(far_end) else "direct"


def laboratory_marks(settings: Settings, host: HostPort) -> tuple[str, ...]:
    """Marks for figures that come from a laboratory: shaped links, an emulated device."""
    marks = []
    if host.shaper is not None and host.shaper.label is not None:  # else its owner's limits alone
        marks.append(f"shaped links: {host.shaper.label}")
    if emulated_flops_per_s(settings.device) is not None:
        marks.append("emulated device: it computes nothing, so losses mean nothing")
    return tuple(marks)
