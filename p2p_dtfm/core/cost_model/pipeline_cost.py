"""How long one pipeline takes: the layers of each stage, and the time for each microbatch; and how
many microbatches each of several pipelines gets.

The model (times of one microbatch, S stages, k_s microbatches in flight at stage s):

    round_trip_s = F_s + B_s                                          (last stage)
    round_trip_s = F_s + B_s + there_s + back_s + round_trip_(s+1)    (others)
    elsewhere_s = round_trip_s - F_s - B_s
    period = max(F_s + B_s, transmission on each link in each direction,
                 all that an uplink or downlink carries,
                 (F_s + B_s + elsewhere_s) / k_s)
    m microbatches take round_trip_0 + (m - 1) * period
    in I inner steps, behind each of which the pipeline drains,
                        I * round_trip_0 + (m - I) * period

`there` and `back` are transmission plus latency. The first term fills and drains the pipeline,
the second is its steady state (Narayanan et al. 2019, PipeDream, section 3, with links as further
resources). k_s is planned as 1 + 2 elsewhere_s / period where memory allows; simulated pipelines
that take turns (`pipeline_order`) reach their period with 1.5 instead of 2. Textbook 1F1B has
k_s = S - s, which on long links is far fewer. A stage that splits its backwards may hold as many
more as it can end while the pipeline drains behind it. It owes their last parts, and sends its last
gradients that much earlier (Qi et al. 2023, ZB-H2). Where memory allows fewer than wanted, the last
term of the period (Little 1961) is right to a hundredth on average. Where k_s is just the round
trip over the period it is up to a tenth too short; `pipeline_timing` tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from p2p_dtfm.core.cost_model.codings import (
    Edge,
    Edges,
    coding_ns,
    edges_of_unlike_layers,
    tensor_bytes,
)
from p2p_dtfm.core.cost_model.edge_codecs import assignments
from p2p_dtfm.core.cost_model.pipeline_timing import StageTiming
from p2p_dtfm.core.cost_model.placement_problem import UNLIMITED_BYTES_PER_S, PlanningProblem
from p2p_dtfm.core.cost_model.tables.layer_tables import LayerTable, kinds_in
from p2p_dtfm.core.cost_model.tables.link_tables import MESSAGE_NS, duration_ns
from p2p_dtfm.core.cost_model.tables.stage_tables import StageNeeds, StageTable, fill_by
from p2p_dtfm.core.protocol.run_spec import Codec
from p2p_dtfm.core.schedule.dealing import Dealt, deal

IN_FLIGHT_LIMIT = 4096
_Hop = tuple[int, int, int, int]
"""Transmission and latency of an activation to the next stage, and of its gradient back."""
_NO_HOP = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """One pipeline's cut into stages and its timing; tuples are indexed by position."""

    cuts: tuple[int, ...]
    """Stage s holds the layers cuts[s] .. cuts[s + 1] - 1."""
    in_flight: tuple[int, ...]
    fill_ns: int
    """Time of the first microbatch, there and back. Each further inner step adds what this takes
    longer than a period."""
    period_ns: int
    """Time of each further microbatch."""
    drain_ns: tuple[int, ...]
    """How long after this stage's last backward stage 0 ends its own."""
    hides_ns: tuple[int, ...]
    """How long before this stage's last backward ends the gradient of its last layer is whole."""
    edges: Edges = ()
    """How boundaries are crossed, where the run allows several codecs or its layers are unlike."""

    def codecs_of(self, problem: PlanningProblem) -> tuple[tuple[Codec, Codec], ...]:
        """The codecs that a plan states: nothing where the run leaves no choice."""
        return tuple(edge.names for edge in self.edges) if problem.step.codings else ()

    def duration_ns(self, microbatches: int) -> int:
        return self.fill_ns + (microbatches - 1) * self.period_ns

    def ends_ns(self, microbatches: int) -> tuple[int, ...]:
        """When each stage has done its last backward; the first stage is the last to end."""
        end = self.duration_ns(microbatches)
        return tuple([end - drained for drained in self.drain_ns])


class PipelineModel:
    """Cuts and times pipelines of one problem, and remembers what it has worked out."""

    def __init__(
        self, problem: PlanningProblem, layers: Sequence[LayerTable], known: set[tuple[int, ...]]
    ) -> None:
        """`layers`: what layers take at each peer. `known`: pipelines whose cost was worked out by
        any model of the problem: where memory is not short it is the same, and new only once."""
        self.problem = problem
        self._layers = layers
        self._known = known
        self._cuts: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...] | None] = {}
        self._costs: dict[tuple[int, ...], PipelineCost | None] = {}
        self.forgotten = 0
        """How often costs were dropped, so that a known pipeline would count as new again."""
        self._timings: dict[tuple[object, ...], tuple[StageTiming, ...]] = {}
        self._rooms: dict[tuple[int, int, int], int] = {}
        self._hops: dict[tuple[int, int, Edge | None], _Hop] = {}
        self._together = -(-problem.step.microbatch_count // max(1, problem.step.inner_steps))
        """Microbatches of a step that do not wait for one another."""
        self._stages = StageTable(problem.devices.layer_ns, problem.layer_count)
        whole = [
            self._stages.of(peer, 0, problem.layer_count) for peer in range(problem.peer_count)
        ]
        self._alone_ns = [stage.forward + stage.backward for stage in whole]
        classes: dict[object, int] = {}
        self._classes = tuple(
            classes.setdefault(
                (times, memory, peer in problem.devices.processors, problem.may_have(peer, 0)),
                len(classes),
            )
            for peer, (times, memory) in enumerate(
                zip(problem.devices.layer_ns, problem.devices.memory_bytes, strict=True)
            )
        )

    @property
    def is_never_short(self) -> bool:
        """Whether every peer has memory for the whole model, with all in flight that are ever
        wanted."""
        limit, count = min(self._together, IN_FLIGHT_LIMIT), self.problem.layer_count
        memory = zip(self._layers, self.problem.devices.memory_bytes, strict=True)
        return all(
            layers.state_bytes(0, count) + limit * layers.saved_bytes(0, count) <= room
            for layers, room in memory
        )

    def cost(self, peers: tuple[int, ...]) -> tuple[PipelineCost | None, bool]:
        """(timing of these peers in this order, or None if the model does not fit; whether new)."""
        if peers in self._costs:
            return self._costs[peers], False
        found = self._best_cost(peers)
        if len(self._costs) > 1 << 17:
            self._costs.clear()
            self._known.clear()
            self.forgotten += 1
        self._costs[peers] = found
        is_new = peers not in self._known
        self._known.add(peers)
        return found, is_new

    def _best_cost(self, peers: tuple[int, ...]) -> PipelineCost | None:
        """The better of two cuts: with one microbatch in flight at each stage; and, if memory then
        allows too few in flight, with as many as that cut wants."""
        cuts = self._cut(peers, (1,) * len(peers))
        if cuts is None:
            return None
        wanted, first = self.time(peers, cuts)
        if all(map(int.__ge__, first.in_flight, wanted)):
            return first
        roomier = self._cut(peers, wanted)
        if roomier is None:
            return first
        _, second = self.time(peers, roomier)
        return second if second.period_ns < first.period_ns else first

    def time_fixed(self, peers: tuple[int, ...], cuts: tuple[int, ...]) -> PipelineCost | None:
        """Timing of stages that are already cut. None if one of them no longer fits, or if a
        pipeline may not have so many: a peer may tell of any cuts."""
        if len(peers) > self.problem.most_stages:
            return None
        for stage, peer in enumerate(peers):
            if self.room(peer, cuts[stage], cuts[stage + 1]) < 1:
                return None
        return self.time(peers, cuts)[1]

    def time(
        self, peers: tuple[int, ...], cuts: tuple[int, ...]
    ) -> tuple[tuple[int, ...], PipelineCost]:
        """(microbatches in flight that each stage wants, timing with those that fit), in the codecs
        with which the step's microbatches take least."""
        problem = self.problem
        if problem.layers.unlike and len(peers) > 1:
            return self._time(
                peers, cuts, edges_of_unlike_layers(problem.step.unlike_boundaries, cuts[1:-1])
            )
        if problem.step.codings is None or len(peers) == 1:
            return self._time(peers, cuts, ())
        busiest_ns = max(map(int.__add__, *self._compute(peers, cuts, ())))
        offers = assignments(problem, problem.step.codings, peers, busiest_ns)
        timed = [self._time(peers, cuts, edges) for edges in offers]
        return min(timed, key=lambda each: each[1].duration_ns(self._together))

    def _time(
        self, peers: tuple[int, ...], cuts: tuple[int, ...], edges: Edges
    ) -> tuple[tuple[int, ...], PipelineCost]:
        problem, last = self.problem, len(peers) - 1
        forward, backward = self._compute(peers, cuts, edges)
        here_ns = list(map(int.__add__, forward, backward))
        period, round_trip = max(here_ns), here_ns[last]
        away_ns, drain = [0] * (last + 1), [0] * (last + 1)
        for stage in range(last - 1, -1, -1):
            out, out_latency, back, back_latency = self._hop_ns(peers, stage, edges)
            period = max(period, out, back)
            drain[stage + 1] = drained = back + back_latency + backward[stage]
            round_trip += out + out_latency + drained + forward[stage]
            away_ns[stage] = round_trip - here_ns[stage]
        for stage in range(1, last + 1):
            drain[stage] += drain[stage - 1]
        if last > 1:
            period = max(period, self._shared_links_ns(peers, edges))
        rooms = [self.room(peer, cuts[at], cuts[at + 1]) for at, peer in enumerate(peers)]
        limit = min(self._together, IN_FLIGHT_LIMIT)
        wanted = tuple([min(limit, 1 + -(-2 * away // period)) for away in away_ns])
        fitting = list(map(min, wanted, rooms))
        for here, away, count in zip(here_ns, away_ns, fitting, strict=True):
            if count < limit:
                period = max(period, -(-(here + away) // count))
        for at in range(1, last + 1) if problem.step.splits_backwards else ():
            part_ns = max(1, self.last_part_ns(peers[at], cuts[at], cuts[at + 1], at))
            owed = -(-drain[at] // part_ns)
            fitting[at] = min(fitting[at] + owed, rooms[at], limit)
        if problem.step.inner_steps:
            hides: tuple[int, ...] = (0,) * (last + 1)  # differences set out together
        else:
            each = enumerate(peers)
            hides = tuple([self.last_part_ns(p, cuts[s], cuts[s + 1] - 1, s) for s, p in each])
        fill = round_trip + max(0, problem.step.inner_steps - 1) * max(0, round_trip - period)
        if problem.step.block_update_ppm:
            updates = [self._update_ns(peers[s], cuts[s], cuts[s + 1]) for s in range(last + 1)]
            fill += max(1, problem.step.inner_steps) * max(updates)
        return wanted, PipelineCost(cuts, tuple(fitting), fill, period, tuple(drain), hides, edges)

    def stage_timings(self, peers: tuple[int, ...], cost: PipelineCost) -> tuple[StageTiming, ...]:
        """What timing a pipeline tasklet by tasklet needs."""
        key = peers, cost.cuts, cost.in_flight, cost.edges
        found = self._timings.get(key)
        if found is None:
            if len(self._timings) > 1 << 12:
                self._timings.clear()
            found = self._timings[key] = self._new_timings(peers, cost)
        return found

    def _new_timings(self, peers: tuple[int, ...], cost: PipelineCost) -> tuple[StageTiming, ...]:
        problem = self.problem
        forward, backward = self._compute(peers, cost.cuts, cost.edges)
        timings = []
        for stage, here in enumerate(peers):
            hop = self._hop_ns(peers, stage, cost.edges) if stage + 1 < len(peers) else _NO_HOP
            shared = (0, 0)
            if 0 < stage < len(peers) - 1:  # the ends send and receive one tensor at a time
                up, down = self._two_tensors(stage, cost.edges)
                shared = (
                    self._limited_ns(problem.links.uplink_bytes_per_s[here], -(-up // 2)),
                    self._limited_ns(problem.links.downlink_bytes_per_s[here], -(-down // 2)),
                )
            out_bytes, back_bytes = tensor_bytes(cost.edges, stage)
            weight = self.last_part_ns(here, cost.cuts[stage], cost.cuts[stage + 1], stage)
            timings.append(
                StageTiming(
                    forward[stage],
                    backward[stage],
                    cost.in_flight[stage],
                    *hop,
                    *shared,
                    weight_ns=weight if self.splits(stage) else 0,
                    update_ns=self._update_ns(here, cost.cuts[stage], cost.cuts[stage + 1]),
                    out_bytes=out_bytes,
                    back_bytes=back_bytes,
                )
            )
        return tuple(timings)

    def _compute(
        self, peers: tuple[int, ...], cuts: tuple[int, ...], edges: Edges
    ) -> tuple[list[int], list[int]]:
        """Forward and backward nanoseconds of each stage, including encoding and decoding."""
        of, layer_ns = self._stages.of, self.problem.devices.layer_ns
        stages = [of(peer, cuts[at], cuts[at + 1]) for at, peer in enumerate(peers)]
        forward, backward = [it.forward for it in stages], [it.backward for it in stages]
        if edges:
            for at, peer in enumerate(peers):
                there, back = coding_ns(edges, at, layer_ns[peer].block_forward_ns)
                forward[at] += there
                backward[at] += back
        return forward, backward

    def _hop_ns(self, peers: tuple[int, ...], stage: int, edges: Edges) -> _Hop:
        """The hop to the next stage and back."""
        here, there = peers[stage], peers[stage + 1]
        key = here, there, edges[stage] if edges else None
        found = self._hops.get(key)
        if found is None:
            if len(self._hops) > 1 << 16:
                self._hops.clear()
            found = self._hops[key] = self._new_hop(*key)
        return found

    def _new_hop(self, here: int, there: int, edge: Edge | None) -> _Hop:
        links = self.problem.links
        if edge is None:
            out, back = links.transmit_ns[here][there], links.transmit_ns[there][here]
        else:
            rates = links.bytes_per_s[here][there], links.bytes_per_s[there][here]
            out, back = map(duration_ns, tensor_bytes((edge,), 0), rates)
            out, back = MESSAGE_NS + out, MESSAGE_NS + back
        return out, links.latency_ns[here][there], back, links.latency_ns[there][here]

    def _shared_links_ns(self, peers: tuple[int, ...], edges: Edges) -> int:
        """The longest time for which a microbatch takes the uplink or downlink of a middle stage,
        which sends, and receives, two tensors for each."""
        up, down = self.problem.links.uplink_bytes_per_s, self.problem.links.downlink_bytes_per_s
        if not edges:
            slowest = min(min(up[peer], down[peer]) for peer in peers[1:-1])
            return duration_ns(2 * self.problem.step.boundary_bytes, slowest)
        longest = 0
        for stage, peer in enumerate(peers[1:-1], start=1):
            sent, received = self._two_tensors(stage, edges)
            longest = max(longest, duration_ns(sent, up[peer]), duration_ns(received, down[peer]))
        return longest

    def _two_tensors(self, stage: int, edges: Edges) -> tuple[int, int]:
        """Bytes that a middle stage sends, and receives, for each microbatch."""
        if not edges:
            return 2 * self.problem.step.boundary_bytes, 2 * self.problem.step.boundary_bytes
        before, after = tensor_bytes(edges, stage - 1), tensor_bytes(edges, stage)
        return after[0] + before[1], before[0] + after[1]

    def splits(self, stage: int) -> bool:
        """Whether the stage at this position leaves a part of its backwards for later."""
        return self.problem.step.splits_backwards and stage > 0

    def last_part_ns(self, peer: int, first: int, end: int, stage: int) -> int:
        """Time of the last part of a microbatch at the layers `first .. end - 1` of this stage."""
        found = self._stages.of(peer, first, end)
        return found.last_part_of_split if self.splits(stage) else found.last_part

    def _update_ns(self, peer: int, first: int, end: int) -> int:
        """Time of an update of the layers `first .. end - 1`."""
        problem = self.problem
        kinds = kinds_in(first, end, problem.layer_count)
        return problem.devices.layer_ns[peer].update_ns(kinds, problem.step.block_update_ppm)

    def _limited_ns(self, bytes_per_s: int, size_bytes: int) -> int:
        """Time of one boundary tensor through a shared limit; 0 if there is none."""
        if bytes_per_s >= UNLIMITED_BYTES_PER_S:
            return 0
        return duration_ns(size_bytes, bytes_per_s)

    def room(self, peer: int, first: int, end: int) -> int:
        """Microbatches in flight for which this peer has memory; below 1 if it has too little, or
        may not hold these layers."""
        found = self._rooms.get((peer, first, end))
        if found is None:
            if len(self._rooms) > 1 << 16:
                self._rooms.clear()
            found = self._rooms[peer, first, end] = self._new_room(peer, first, end)
        return found

    def _new_room(self, peer: int, first: int, end: int) -> int:
        problem = self.problem
        if not problem.may_hold(peer, first, end):
            return 0
        layers = self._layers[peer]
        saved = layers.saved_bytes(first, end)
        spare = problem.devices.memory_bytes[peer] - layers.state_bytes(first, end)
        if saved == 0 and spare >= 0:
            return IN_FLIGHT_LIMIT
        return spare // max(1, saved)

    def _cut(self, peers: tuple[int, ...], kept: tuple[int, ...]) -> tuple[int, ...] | None:
        key = (tuple(map(self._classes.__getitem__, peers)), kept)
        if key not in self._cuts:
            if len(self._cuts) > 1 << 17:
                self._cuts.clear()
            self._cuts[key] = self._fastest_cut(peers, kept)
        return self._cuts[key]

    def _fastest_cut(self, peers: tuple[int, ...], kept: tuple[int, ...]) -> tuple[int, ...] | None:
        """The cut whose slowest stage is fastest, to within 1/512 of its time."""
        problem = self.problem
        if len(peers) > problem.most_stages:
            return None
        if not all(problem.may_have(peer, 0) for peer in (peers[0], peers[-1])):
            return None
        fill = fill_by(list(map(self._needs, peers, kept)))
        alone = [self._alone_ns[peer] for peer in peers]
        low = (1 << 80) // sum((1 << 80) // duration for duration in alone)
        high, most = low + low // 8 + 1, max(alone)
        best = fill(high)
        while best is None and high < most:
            low, high = high, min(2 * high, most)
            best = fill(high)
        while best is not None and high - low > max(1, high >> 9):
            middle = (low + high) // 2
            cuts = fill(middle)
            if cuts is None:
                low = middle
            else:
                high, best = middle, cuts
        return best

    def _needs(self, peer: int, kept: int) -> StageNeeds:
        devices = self.problem.devices
        memory_bytes = devices.memory_bytes[peer]
        return StageNeeds(devices.layer_ns[peer], memory_bytes, kept, self._layers[peer])


def pipeline_models(problem: PlanningProblem) -> tuple[PipelineModel, PipelineModel]:
    """The models for plans of one pipeline, and of several, whose stages take more memory. They are
    the same object where that makes no difference."""
    known: set[tuple[int, ...]] = set()
    shared = PipelineModel(problem, problem.layers_shared, known)
    if problem.layers_alone == problem.layers_shared or shared.is_never_short:
        return shared, shared
    return PipelineModel(problem, problem.layers_alone, known), shared


def are_alike(costs: list[PipelineCost]) -> bool:
    """Whether there are several pipelines, all cut alike."""
    cuts = costs[0].cuts
    return len(costs) > 1 and all(cost.cuts == cuts for cost in costs)


def split_microbatches(
    costs: list[PipelineCost], count: int, tails_ns: Sequence[int] = ()
) -> Dealt:
    """Microbatches for each pipeline so that the last pipeline ends soonest; some may get none.

    `tails_ns`: for each pipeline, the time of what follows on its end.
    """
    fills = [cost.fill_ns for cost in costs]
    if tails_ns:
        fills = list(map(int.__add__, fills, tails_ns))
    return deal(fills, [cost.period_ns for cost in costs], count)


def can_end_by(costs: list[PipelineCost], count: int, bound_ns: int) -> bool:
    """Whether these pipelines can compute `count` microbatches by `bound_ns`, however dealt."""
    room = 0
    for cost in costs:
        left_ns = bound_ns - cost.fill_ns
        if left_ns >= 0:
            room += left_ns // cost.period_ns + 1
    return room >= count
