"""What a daemon tells those who ask on its own machine."""

import logging
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from p2p_dtfm import __version__
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.peer_state import PeerState
from p2p_dtfm.daemon.peers.reachability import relay_of
from p2p_dtfm.daemon.telemetry.trace_collector import STEPS_LIMIT, peer_traces_json
from p2p_dtfm.net.contacts.addresses import is_relayed
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.train.stage.emulated import emulated_flops_per_s

log = logging.getLogger("p2p_dtfm")


class StatusApi(PeerState):
    """Plain data for `p2p-dtfm status`, `plan`, `peers`, `trace` and the dashboard."""

    def status_json(self) -> dict[str, Any]:
        """What `p2p-dtfm status --json` prints."""
        view = self._agreement.view if self._agreement else None
        return {
            "version": __version__,
            "dashboard": self._dashboard.address,
            "peer_id": self._me.peer_id,
            "way_in": {
                **self._reachability.finding.as_json(),
                "relays": list(self._reachability.relays),
            },
            "life": self._life,
            "shaped_links": self._host.shaper.label if self._host.shaper else None,
            "emulated_device": emulated_flops_per_s(self.settings.device) is not None,
            "run": self._run.spec.name if self._run else None,
            "run_digest": self._run.digest if self._run else None,
            "data": self._run.manifest.notes.describe() if self._run else None,
            **self.status.as_json(),
            "step": self.observer.step(),
            "problems": msgspec.to_builtins(self.observer.problems()),
            "safe_step": self._trainer.safe_step if self._trainer else None,
            "refused": [msgspec.to_builtins(each) for each in self._keeper.refused_most()],
            "view": view.id.number if view else None,
            "snapshot": view.id.snapshot if view else None,
            "plan": view.plan.digest() if view else None,
            "members": list(view.member_ids) if view else [],
            "addresses": self._addresses_in(view),
            "layers": sorted(self._trainer.states) if self._trainer else [],
            "stage": list(view.layers_of(self._me.peer_id)) if view else [],
            "whole_checkpoint_step": self._checkpoints.whole_step if self._checkpoints else None,
            "checkpoints": str(self.home.checkpoints(self._run.digest)) if self._run else None,
        }

    def _addresses_in(self, view: View | None) -> list[str]:
        """Where others reach this peer, once it is a member: each is a way into the swarm."""
        records = view.snapshot.records if view is not None else ()
        mine = [record for record in records if record.peer_id == self._me.peer_id]
        return [address for record in mine for address in record.addresses]

    def plan_json(self) -> dict[str, Any]:
        """The snapshot and plan in force, as plain data."""
        view = self._agreement.view if self._agreement else None
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
        view = self._agreement.view if self._agreement else None
        records = view.snapshot.records if view else ()
        now_s = time.monotonic()
        heard = self._messenger.heard_s
        return [
            {
                **msgspec.to_builtins(record),
                "heard_s_ago": round(now_s - heard[record.peer_id], 1)
                if record.peer_id in heard
                else None,
                "way": way_words(self._far_ends.get(record.peer_id)),
                "layers": list(view.layers_of(record.peer_id)) if view else [],
            }
            for record in records
        ]

    async def _trace_json(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """The newest steps of all stage-holders by one clock; `steps` says how many."""
        view = self._agreement.view if self._agreement else None
        if view is None or not isinstance(view.plan, Plan):
            return {"peers": [], "missing": []}
        asked = parameters.get("steps", "1")
        count = min(max(int(asked), 1), STEPS_LIMIT) if asked.isdecimal() else 1
        newest = self._recorder.newest
        first = None if newest is None else max(0, newest - count + 1)
        traces, missing = await self._traces.collect(view.plan.stage_holders(), first, count)
        return {"peers": peer_traces_json(view.plan, traces), "missing": missing}

    def history_json(self) -> dict[str, Any]:
        """Views, losses and held-out losses so far."""
        trainer = self._trainer
        return {
            "step": self.observer.step(),
            "views": self.views,
            "losses": list(trainer.history.losses) if trainer else [],
            "held_out_losses": list(trainer.history.held_out) if trainer else [],
        }


def way_words(far_end: str | None) -> str | None:
    """How bytes travel to a peer; None where that is not known."""
    if far_end is None:
        return None
    return f"relayed by {relay_of(far_end)}" if is_relayed(far_end) else "direct"


def laboratory_marks(settings: Settings, host: Host) -> tuple[str, ...]:
    """What makes a daemon's figures those of a laboratory."""
    marks = []
    if host.shaper is not None and host.shaper.label is not None:  # not only its owner's limits
        marks.append(f"shaped links: {host.shaper.label}")
    if emulated_flops_per_s(settings.device) is not None:
        marks.append("emulated device: it computes nothing, so losses mean nothing")
    return tuple(marks)
