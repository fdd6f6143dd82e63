"""What planning works on: a snapshot as flat integer tables, peers as numbers 0 .. n-1."""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import cached_property

from p2p_dtfm.core.cost_model.codings import Codings, codings_of
from p2p_dtfm.core.cost_model.links.swarm_links import (
    UNLIMITED_BYTES_PER_S as UNLIMITED_BYTES_PER_S,
)
from p2p_dtfm.core.cost_model.links.swarm_links import SwarmLinks, limit
from p2p_dtfm.core.cost_model.tables.layer_tables import (
    LayerNs,
    LayerTable,
    layer_ns_of,
)
from p2p_dtfm.core.cost_model.tables.link_tables import (
    MESSAGE_NS,
    LinkTables,
    Matrix,
    duration_ns,
    link_tables,
)
from p2p_dtfm.core.cost_model.tables.stage_memory import (
    LONE_SUMS,
    StageMemory,
    stage_memory,
)
from p2p_dtfm.core.protocol.records import ACCELERATOR, PROCESSOR, Intent, PeerRecord
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import Workload


@dataclass(frozen=True)
class DeviceTables:
    """Figures of each peer's own machine."""

    layer_ns: tuple[LayerNs, ...]
    memory_bytes: tuple[int, ...]
    """Memory for layers."""
    stages: StageMemory
    """What stages take of this memory, without sums."""
    aside_bytes: int = 0
    """Bytes that each peer sets aside of its offer, if it offers so much."""
    offered_bytes: tuple[int, ...] = ()
    """All that each peer offers, where something is set aside; else empty."""
    processors: frozenset[int] = frozenset()
    """Peers that have sums in the same memory, too."""

    @property
    def offers(self) -> tuple[int, ...]:
        """All that each peer offers, including what is set aside."""
        return self.offered_bytes or self.memory_bytes


@dataclass(frozen=True)
class StepRules:
    """What one step is made of, and how the run has it computed."""

    microbatch_count: int
    boundary_bytes: int
    """Bytes of a boundary tensor on the wire; the fewest where the run allows several codecs."""
    codings: Codings | None = None
    """The codecs of boundaries, where the run allows several."""
    unlike_boundaries: tuple[int, ...] = ()
    """Bytes on the wire behind each listed layer but the last; `boundary_bytes` is the largest."""
    splits_backwards: bool = False
    """Whether stages after the first leave the gradients of matrices for later."""
    one_stage: bool = False
    """Whether each pipeline is a single peer, which holds all layers."""
    inner_steps: int = 0
    """Inner steps of each pipeline in a step; 0: replicas do not step alone."""
    block_update_ppm: int = 0
    """Time of a block's update, in millionths of its forward."""


@dataclass(frozen=True)
class PlanningProblem:
    """Everything that the cost model knows.

    `peer_ids` are the peers that may hold a stage, sorted; `idle` are members that may not.
    """

    peer_ids: tuple[str, ...]
    idle: tuple[str, ...]
    devices: DeviceTables
    links: LinkTables
    layers: LayerTable
    """What layers take, without sums."""
    step: StepRules
    watchers: "Watchers"
    ends: frozenset[int] | None = None
    """Members, watchers among them, that alone may have the first and the last layer; None: all."""

    @property
    def peer_count(self) -> int:
        return len(self.peer_ids)

    @property
    def layer_count(self) -> int:
        return self.layers.count

    @cached_property
    def layers_alone(self) -> tuple[LayerTable, ...]:
        """What layers take at each peer in a plan of one pipeline, with sums."""
        return self._layers_beside(LONE_SUMS)

    @cached_property
    def layers_shared(self) -> tuple[LayerTable, ...]:
        """The same in a plan of several pipelines, where replicas share all stages."""
        return self._layers_beside(self.devices.stages.shared_sums)

    def _layers_beside(self, sums: int) -> tuple[LayerTable, ...]:
        with_sums = self.layers.with_sums(sums)
        beside = self.devices.processors
        return tuple(with_sums if p in beside else self.layers for p in range(self.peer_count))

    @property
    def most_stages(self) -> int:
        """Most stages in a pipeline."""
        return 1 if self.step.one_stage else self.layer_count

    def may_have(self, peer: int, layer: int) -> bool:
        """Whether the run leaves this layer to this member."""
        return self.ends is None or 0 < layer < self.layer_count - 1 or peer in self.ends

    def may_hold(self, peer: int, first: int, end: int) -> bool:
        """Whether the run leaves the layers `first .. end - 1` to this member."""
        return self.ends is None or peer in self.ends or (first > 0 and end < self.layer_count)

    def ends_meet_ns(self, placement: Iterable[tuple[int, ...]]) -> int:
        """Time until the ends of each pipeline have given each other the sums of a tied matrix."""
        shared_bytes = self.layers.head.shared_bytes
        if not shared_bytes:
            return 0
        ends = [(peers[0], peers[-1]) for peers in placement if len(peers) > 1]
        ways = [way for first, last in ends for way in ((first, last), (last, first))]
        return max(
            (
                MESSAGE_NS
                + self.links.latency_ns[one][other]
                + duration_ns(shared_bytes, self.links.bytes_per_s[one][other])
                for one, other in ways
            ),
            default=0,
        )


@dataclass(frozen=True)
class Watchers:
    """Members that hold no stage but may guard. They have the numbers from `peer_count` on. Links
    to them are indexed [peer][number - peer_count]."""

    order: tuple[int, ...]
    """The numbers of peers and watchers, sorted by their ids."""
    accelerated: frozenset[int]
    """Peers whose stage is not in the processor's memory, where guarded layers are."""
    memory_bytes: tuple[int, ...]
    beside_bytes: dict[int, int]
    """The memory of their hosts, for accelerated peers that say it."""
    downlink_bytes_per_s: tuple[int, ...]
    bytes_per_s: Matrix
    round_trip_ns: Matrix


def problem_of(snapshot: Snapshot, held_back: Container[str] = ()) -> PlanningProblem:
    """The tables of a snapshot. Only peers that intend to train, and are not `held_back`, may hold
    a stage."""
    records = sorted(snapshot.records, key=lambda record: record.peer_id)
    able = [r for r in records if r.intent is Intent.TRAIN and r.peer_id not in held_back]
    chosen = {record.peer_id for record in able}
    idle = tuple(record.peer_id for record in records if record.peer_id not in chosen)
    workload = snapshot.workload
    links, stages = SwarmLinks(records), stage_memory(workload)
    return PlanningProblem(
        peer_ids=tuple(record.peer_id for record in able),
        idle=idle,
        devices=DeviceTables(
            layer_ns=tuple(layer_ns_of(record.device, workload) for record in able),
            memory_bytes=tuple(record.device.memory_bytes for record in able),
            stages=stages,
            processors=frozenset(n for n, r in enumerate(able) if r.device.kind == PROCESSOR),
        ),
        links=link_tables(able, links, workload.boundary_wire_bytes),
        layers=stages.layers,
        step=_step_rules(workload),
        watchers=_watchers(able, records, links),
        ends=_ends(workload, [*able, *_others(records)]),
    )


def _step_rules(workload: Workload) -> StepRules:
    return StepRules(
        microbatch_count=workload.microbatch_count,
        boundary_bytes=workload.boundary_wire_bytes,
        codings=codings_of(workload),
        unlike_boundaries=workload.unlike_wire_bytes,
        splits_backwards=workload.splits_backwards,
        one_stage=workload.one_stage,
        inner_steps=workload.inner_steps,
        block_update_ppm=workload.block_update_ppm,
    )


def _watchers(able: list[PeerRecord], records: list[PeerRecord], links: SwarmLinks) -> Watchers:
    others = _others(records)
    numbers = {record.peer_id: number for number, record in enumerate([*able, *others])}
    flows = [[links.flow(peer, other) for other in others] for peer in able]
    return Watchers(
        order=tuple(numbers[record.peer_id] for record in records if record.peer_id in numbers),
        accelerated=frozenset(
            number for number, record in enumerate(able) if record.device.kind == ACCELERATOR
        ),
        memory_bytes=tuple(record.device.guarding_bytes for record in others),
        beside_bytes={
            number: record.device.guarding_bytes
            for number, record in enumerate(able)
            if record.device.guarding_bytes != record.device.memory_bytes
        },
        downlink_bytes_per_s=tuple(limit(record.downlink_bytes_per_s) for record in others),
        bytes_per_s=tuple(tuple(rate for rate, _ in row) for row in flows),
        round_trip_ns=tuple(tuple(round_trip for _, round_trip in row) for row in flows),
    )


def _others(records: list[PeerRecord]) -> list[PeerRecord]:
    """The watchers, in the order of their numbers."""
    return [r for r in records if r.intent not in (Intent.TRAIN, Intent.LEAVING)]


def _ends(workload: Workload, members: list[PeerRecord]) -> frozenset[int] | None:
    named = () if workload.confined is None else workload.confined.ends
    if not named:
        return None
    return frozenset(n for n, record in enumerate(members) if record.peer_id in named)
