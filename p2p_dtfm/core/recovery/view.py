"""A view: one snapshot, its plan, and who takes part."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from p2p_dtfm.core.cost_model.cuts import CutPace
from p2p_dtfm.core.cost_model.guardians import (
    cut_pace,
    guarded_at_once,
    guards_in,
    unguarded_layers,
)
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.snapshot import Member, Snapshot, ViewId


@dataclass(frozen=True)
class View:
    snapshot: Snapshot
    plan: Plan | NoPlan
    certificate: Certificate | None = field(default=None, compare=False)
    """The signed Ready of all contributors that agreed on the view."""

    @cached_property
    def id(self) -> ViewId:
        return self.snapshot.view_id

    @cached_property
    def members(self) -> tuple[Member, ...]:
        return self.snapshot.members

    @cached_property
    def member_ids(self) -> tuple[str, ...]:
        return tuple(member.peer_id for member in self.members)

    def layers_of(self, peer_id: str) -> range:
        """The layers that a peer holds in this view."""
        return self._layers.get(peer_id, range(0))

    @cached_property
    def guards(self) -> dict[int, str]:
        """The guardian of each layer that a single member holds."""
        return _guards(self._named)

    def guarded_by(self, peer_id: str) -> set[int]:
        """The layers of which a peer is the guardian."""
        return {layer for layer, guardian in self.guards.items() if guardian == peer_id}

    @cached_property
    def guarded_at_once(self) -> frozenset[int]:
        """Layers whose guardian the first step already waits for."""
        if self.cut_pace is not None:
            return frozenset()
        return guarded_at_once(self.snapshot, self.guards)

    @cached_property
    def starts_with_two_copies(self) -> bool:
        """Whether members already have two copies of each layer's state. After a failure, a new
        holder of a layer may still have to fetch it."""
        if self.snapshot.planned or self.snapshot.step == 0:
            return True
        states = self.snapshot.states()
        here = Counter(layer for it in self.member_ids for layer in states.get(it, ()))
        return all(here[layer] >= 2 for layer in range(self.snapshot.workload.layer_count))

    def guarded_before_takeover(self, before: "View | None") -> frozenset[int]:
        """Layers whose guardian fetches the state during the last steps of the view before.

        Where guardians may lag, this delays the takeover. So it is done there only if some layer
        would have no copy but its holder's, since the layer's guardian has left. Otherwise a crash
        of the holder before the first whole cut would lose all since the last checkpoint."""
        if self.cut_pace is None:
            return self.guarded_at_once
        if before is None or not self.snapshot.planned or not isinstance(before.plan, Plan):
            return frozenset()
        is_covered = all(before._copy_holders(layer) & self._others(layer) for layer in self.guards)
        return frozenset() if is_covered else frozenset(self.guards)

    def _copy_holders(self, layer: int) -> set[str]:
        """The peers that hold or guard the layer."""
        holders = {peer_id for peer_id, layers in self._layers.items() if layer in layers}
        return holders | ({self.guards[layer]} if layer in self.guards else set())

    def _others(self, layer: int) -> set[str]:
        """Members that do not hold the layer."""
        return {peer_id for peer_id in self.member_ids if layer not in self.layers_of(peer_id)}

    @cached_property
    def cut_pace(self) -> CutPace | None:
        """How often copies of all layers are taken for guardians that lag; None where all guardians
        keep up with each step."""
        return _pace(self._named)

    def goes_on_with_cuts_of(self, before: "View") -> bool:
        """Whether this view goes on with a cut that is under way in the view before. It does if all
        layers and their guardians stay where they are."""
        if not self.snapshot.planned or self.snapshot.previous != before.id:
            return False
        if self.cut_pace is None or before.cut_pace is None or self.guards != before.guards:
            return False
        plans = self.plan, before.plan
        return all(isinstance(plan, Plan) for plan in plans) and self._layers == before._layers

    def guardians_of(self, peer_id: str) -> dict[int, str]:
        """The guardian of each layer that a peer alone holds."""
        layers = self.layers_of(peer_id)
        return {layer: peer for layer, peer in self.guards.items() if layer in layers}

    def state_bytes_of(self, peer_id: str) -> int:
        """Bytes of the states of all layers that a peer holds or guards in this view."""
        layers = set(self.layers_of(peer_id)) | self.guarded_by(peer_id)
        return sum(self.snapshot.workload.cost(layer).state_bytes for layer in layers)

    @cached_property
    def unguarded(self) -> tuple[int, ...]:
        """Layers that a single member holds and no other member has room for."""
        return unguarded_layers(self.snapshot, self.plan)

    @cached_property
    def _named(self) -> "_Named":
        return _Named(self.id, self.plan.digest(), self)

    @cached_property
    def _layers(self) -> dict[str, range]:
        if not isinstance(self.plan, Plan):
            return {}
        return {s.peer_id: s.layers for pipeline in self.plan.pipelines for s in pipeline.stages}


@dataclass(frozen=True)
class _Named:
    """Names a snapshot and a plan: equal names mean equal ones. So what follows from these is
    computed once in a process, however many peers run in it."""

    id: ViewId
    plan_digest: str
    view: View = field(compare=False)


@lru_cache(maxsize=8)
def _guards(named: _Named) -> dict[int, str]:
    return guards_in(named.view.snapshot, named.view.plan)


@lru_cache(maxsize=8)
def _pace(named: _Named) -> CutPace | None:
    return cut_pace(named.view.snapshot, named.view.plan, named.view.guards)
