"""How long one pipeline takes: which layers each stage holds, and the time per microbatch; and how
many of these each of several gets.

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
more as it can end while the pipeline drains behind it: it owes their last parts, and sends its last
gradients so much earlier (Qi et al. 2023, ZB-H2). Where memory allows fewer than wanted the last
term (Little 1961) is right to a hundredth on average, but up to a tenth too short where k_s is just
the round trip over the period; `pipeline_timing` tells.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from p2p_dtfm.core.cost_model.codings import Edges, coding_ns, tensor_bytes, unlike_edges
from p2p_dtfm.core.cost_model.edge_codecs import assignments
from p2p_dtfm.core.cost_model.pipeline_timing import StageTiming
from p2p_dtfm.core.cost_model.placement_problem import UNLIMITED_BYTES_PER_S, PlanningProblem
from p2p_dtfm.core.cost_model.tables.layer_tables import kinds_in
from p2p_dtfm.core.cost_model.tables.link_tables import MESSAGE_NS, duration_ns
from p2p_dtfm.core.protocol.run_spec import Codec

IN_FLIGHT_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """One pipeline's cut into stages and its timing; tuples are indexed by position."""

    cuts: tuple[int, ...]
    """Stage s holds the layers cuts[s] .. cuts[s + 1] - 1."""
    in_flight: tuple[int, ...]
    fill_ns: int
    """The first microbatch, there and back; of each further inner step, what this takes longer
    than a period."""
    period_ns: int
    """Each further microbatch."""
    drain_ns: tuple[int, ...]
    """How long after this stage's last backward stage 0 ends its own."""
    hides_ns: tuple[int, ...]
    """How long before this stage's last backward ends the gradient of its last layer is whole."""
    edges: Edges = ()
    """How boundaries are crossed, where the run allows several codecs or its layers are unlike."""

    def codecs_of(self, problem: PlanningProblem) -> tuple[tuple[Codec, Codec], ...]:
        """What a plan states of them: nothing where the run leaves no choice."""
        return tuple(edge.names for edge in self.edges) if problem.step.codings else ()

    def duration_ns(self, microbatches: int) -> int:
        return self.fill_ns + (microbatches - 1) * self.period_ns

    def ends_ns(self, microbatches: int) -> tuple[int, ...]:
        """When each stage has done its last backward; the first stage is the last to end."""
        end = self.duration_ns(microbatches)
        return tuple([end - drained for drained in self.drain_ns])


class PipelineModel:
    """Cuts and times pipelines of one problem, and remembers what it has worked out."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self._cuts: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...] | None] = {}
        self._costs: dict[tuple[int, ...], PipelineCost | None] = {}
        self._together = -(-problem.step.microbatch_count // max(1, problem.step.inner_steps))
        """Microbatches of a step that do not wait for one another."""
        classes: dict[object, int] = {}
        self._classes = tuple(
            classes.setdefault((times, memory, problem.may_have(peer, 0)), len(classes))
            for peer, (times, memory) in enumerate(
                zip(problem.devices.layer_ns, problem.devices.memory_bytes, strict=True)
            )
        )

    def cost(self, peers: tuple[int, ...]) -> tuple[PipelineCost | None, bool]:
        """(timing of these peers in this order, None if they cannot hold the model; if new)."""
        if peers in self._costs:
            return self._costs[peers], False
        found = self._best_cost(peers)
        if len(self._costs) > 1 << 17:
            self._costs.clear()
        self._costs[peers] = found
        return found, True

    def _best_cost(self, peers: tuple[int, ...]) -> PipelineCost | None:
        """Cut for the least memory first; where memory then starves the flight, cut anew for it."""
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
        """Timing of stages that are cut already; None if one of them no longer fits."""
        for stage, peer in enumerate(peers):
            if self.room(peer, cuts[stage], cuts[stage + 1]) < 1:
                return None
        return self.time(peers, cuts)[1]

    def time(
        self, peers: tuple[int, ...], cuts: tuple[int, ...]
    ) -> tuple[tuple[int, ...], PipelineCost]:
        """(microbatches in flight that each stage wants, timing with those that fit); in the
        codecs with which the step's microbatches take least."""
        problem = self.problem
        if problem.layers.unlike and len(peers) > 1:
            return self._time(peers, cuts, unlike_edges(problem.step.unlike_boundaries, cuts[1:-1]))
        if problem.step.codings is None or len(peers) == 1:
            return self._time(peers, cuts, ())
        busiest_ns = max(map(int.__add__, *self._compute(peers, cuts, ())))
        offers = assignments(problem, problem.step.codings, peers, busiest_ns)
        timed = [self._time(peers, cuts, edges) for edges in offers]
        return min(timed, key=lambda each: each[1].duration_ns(self._together))

    def _time(
        self, peers: tuple[int, ...], cuts: tuple[int, ...], edges: Edges
    ) -> tuple[tuple[int, ...], PipelineCost]:
        problem = self.problem
        last = len(peers) - 1
        forward, backward = self._compute(peers, cuts, edges)
        period = max(map(int.__add__, forward, backward))
        round_trips = [0] * (last + 1)
        drain = [0] * (last + 1)
        round_trips[last] = forward[last] + backward[last]
        for stage in range(last - 1, -1, -1):
            here, there = peers[stage], peers[stage + 1]
            out, back = self._hop_ns(peers, stage, edges)
            period = max(period, out, back)
            drain[stage + 1] = back + problem.links.latency_ns[there][here] + backward[stage]
            round_trips[stage] = (
                round_trips[stage + 1]
                + out
                + problem.links.latency_ns[here][there]
                + drain[stage + 1]
                + forward[stage]
            )
        for stage in range(1, last + 1):
            drain[stage] += drain[stage - 1]
        if last > 1:
            period = max(period, self._shared_links_ns(peers, edges))
        rooms = [self.room(peers[s], cuts[s], cuts[s + 1]) for s in range(last + 1)]
        limit = min(self._together, IN_FLIGHT_LIMIT)
        here_ns = list(map(int.__add__, forward, backward))
        away_ns = list(map(int.__sub__, round_trips, here_ns))
        wanted = tuple(min(limit, 1 + -(-2 * away // period)) for away in away_ns)
        fitting = tuple(map(min, wanted, rooms))
        for here, away, count in zip(here_ns, away_ns, fitting, strict=True):
            if count < limit:
                period = max(period, -(-(here + away) // count))
        owed = [
            -(-drain[s] // self.last_part_ns(peers[s], cuts[s], cuts[s + 1], s))
            if self.splits(s)
            else 0
            for s in range(last + 1)
        ]
        fitting = tuple(map(min, map(int.__add__, fitting, owed), rooms, (limit,) * (last + 1)))
        hides = tuple(
            self.last_part_ns(peers[s], cuts[s], cuts[s + 1] - 1, s) for s in range(last + 1)
        )
        if problem.step.inner_steps:
            hides = (0,) * (last + 1)  # differences set out together
        again_ns = max(0, problem.step.inner_steps - 1) * max(0, round_trips[0] - period)
        fill = round_trips[0] + again_ns
        if problem.step.block_update_ppm:
            updates = [self._update_ns(peers[s], cuts[s], cuts[s + 1]) for s in range(last + 1)]
            fill += max(1, problem.step.inner_steps) * max(updates)
        return wanted, PipelineCost(cuts, fitting, fill, period, tuple(drain), hides, edges)

    def stage_timings(self, peers: tuple[int, ...], cost: PipelineCost) -> tuple[StageTiming, ...]:
        """What timing a pipeline tasklet by tasklet needs."""
        problem = self.problem
        forward, backward = self._compute(peers, cost.cuts, cost.edges)
        timings = []
        for stage, here in enumerate(peers):
            hop = (0, 0, 0, 0)
            if stage + 1 < len(peers):
                there = peers[stage + 1]
                out, back = self._hop_ns(peers, stage, cost.edges)
                latency_ns = problem.links.latency_ns
                hop = out, latency_ns[here][there], back, latency_ns[there][here]
            shared = (0, 0)
            if 0 < stage < len(peers) - 1:  # others send and receive one thing at a time
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
        """Forward and backward nanoseconds of each stage, with what it codes."""
        forward, backward = [], []
        layer_ns, layer_count = self.problem.devices.layer_ns, self.problem.layer_count
        for stage, peer in enumerate(peers):
            kinds = kinds_in(cuts[stage], cuts[stage + 1], layer_count)
            there, back = coding_ns(edges, stage, layer_ns[peer].block_forward_ns)
            forward.append(layer_ns[peer].forward_ns(kinds) + there)
            backward.append(layer_ns[peer].backward_ns(kinds) + back)
        return forward, backward

    def _hop_ns(self, peers: tuple[int, ...], stage: int, edges: Edges) -> tuple[int, int]:
        """Transmission of an activation to the next stage, and of its gradient back."""
        here, there, links = peers[stage], peers[stage + 1], self.problem.links
        if not edges:
            return links.transmit_ns[here][there], links.transmit_ns[there][here]
        rates = links.bytes_per_s[here][there], links.bytes_per_s[there][here]
        out, back = map(duration_ns, tensor_bytes(edges, stage), rates)
        return MESSAGE_NS + out, MESSAGE_NS + back

    def _shared_links_ns(self, peers: tuple[int, ...], edges: Edges) -> int:
        """A middle stage sends, and receives, two tensors for each microbatch."""
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
        """The last part of a microbatch at the layers `first .. end - 1` of this stage."""
        kinds = kinds_in(first, end, self.problem.layer_count)
        return self.problem.devices.layer_ns[peer].last_part_ns(kinds, self.splits(stage))

    def _update_ns(self, peer: int, first: int, end: int) -> int:
        """Of the layers `first .. end - 1`."""
        problem = self.problem
        kinds = kinds_in(first, end, problem.layer_count)
        return problem.devices.layer_ns[peer].update_ns(kinds, problem.step.block_update_ppm)

    def _limited_ns(self, bytes_per_s: int, size_bytes: int) -> int:
        """Of one boundary tensor through a shared limit; 0 if there is none."""
        if bytes_per_s >= UNLIMITED_BYTES_PER_S:
            return 0
        return duration_ns(size_bytes, bytes_per_s)

    def room(self, peer: int, first: int, end: int) -> int:
        """Microbatches in flight for which this peer has memory; below 1 if it has too little, or
        may not hold these layers."""
        problem = self.problem
        if not problem.may_hold(peer, first, end):
            return 0
        saved = problem.layers.saved_bytes(first, end)
        spare = problem.devices.memory_bytes[peer] - problem.layers.state_bytes(first, end)
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
        times = [problem.devices.layer_ns[peer] for peer in peers]
        whole = kinds_in(0, problem.layer_count, problem.layer_count)
        alone = [t.forward_ns(whole) + t.backward_ns(whole) for t in times]
        low = (1 << 80) // sum((1 << 80) // duration for duration in alone)
        high, most = low + low // 8 + 1, max(alone)
        best = self._fill(peers, kept, high)
        while best is None and high < most:
            low, high = high, min(2 * high, most)
            best = self._fill(peers, kept, high)
        while best is not None and high - low > max(1, high >> 9):
            middle = (low + high) // 2
            cuts = self._fill(peers, kept, middle)
            if cuts is None:
                low = middle
            else:
                high, best = middle, cuts
        return best

    def _fill(
        self, peers: tuple[int, ...], kept: tuple[int, ...], budget_ns: int
    ) -> tuple[int, ...] | None:
        """Give each stage in turn as many layers as `budget_ns` and its memory allow.

        Each stage leaves at least one layer for each that follows. For a fixed order this finds a
        cut whenever one exists.
        """
        problem = self.problem
        layer_count, stages = problem.layer_count, len(peers)
        if problem.layers.unlike:
            return self._fill_unlike(peers, kept, budget_ns)
        embedding, block, head = problem.layers.embedding, problem.layers.block, problem.layers.head
        cuts = [0]
        layer = 0
        for position, peer in enumerate(peers):
            times, count = problem.devices.layer_ns[peer], kept[position]
            left_ns, left_bytes = budget_ns, problem.devices.memory_bytes[peer]
            if layer == 0:
                left_ns -= times.embedding_ns
                left_bytes -= embedding.state_bytes + count * embedding.saved_bytes
                layer = 1
            if position == stages - 1:
                left_ns -= times.head_ns
                left_bytes -= head.state_bytes + count * head.saved_bytes
            if left_ns < 0 or left_bytes < 0:
                return None
            block_bytes = block.state_bytes + count * block.saved_bytes
            layer += min(left_ns // times.block_ns, left_bytes // block_bytes)
            layer = min(layer, layer_count - max(1, stages - 1 - position))
            if position == stages - 1:
                layer += 1
            if layer == cuts[-1]:
                return None
            cuts.append(layer)
        return tuple(cuts) if layer == layer_count else None

    def _fill_unlike(
        self, peers: tuple[int, ...], kept: tuple[int, ...], budget_ns: int
    ) -> tuple[int, ...] | None:
        """The same, layer by layer."""
        problem = self.problem
        cuts, layer = [0], 0
        for position, peer in enumerate(peers):
            left_ns, left_bytes = budget_ns, problem.devices.memory_bytes[peer]
            end = problem.layer_count - (len(peers) - 1 - position)
            times, count = problem.devices.layer_ns[peer], kept[position]
            while layer < end:
                kinds = kinds_in(layer, layer + 1, problem.layer_count)
                left_ns -= times.forward_ns(kinds) + times.backward_ns(kinds)
                size = problem.layers.unlike[layer]
                left_bytes -= size.state_bytes + count * size.saved_bytes
                if left_ns < 0 or left_bytes < 0:
                    break
                layer += 1
            if layer == cuts[-1]:
                return None
            cuts.append(layer)
        return tuple(cuts) if layer == problem.layer_count else None


def split_microbatches(
    costs: list[PipelineCost], count: int, tails_ns: Sequence[int] = ()
) -> tuple[int, ...]:
    """Microbatches for each pipeline so that the last to end ends soonest; some may get none.

    `tails_ns`: for each pipeline, what follows on its end.
    """
    fills = [cost.fill_ns for cost in costs]
    if tails_ns:
        fills = list(map(int.__add__, fills, tails_ns))
    periods = [cost.period_ns for cost in costs]
    dealt = _dealt_at_once(fills, periods, count)
    queue = [
        (fill + own * period, index)
        for index, (fill, period, own) in enumerate(zip(fills, periods, dealt, strict=True))
    ]
    heapq.heapify(queue)
    for _ in range(count - sum(dealt)):
        end_ns, index = queue[0]
        dealt[index] += 1
        heapq.heapreplace(queue, (end_ns + periods[index], index))
    return tuple(dealt)


def _dealt_at_once(fills: list[int], periods: list[int], count: int) -> list[int]:
    """A little fewer than each gets in the end: the solution in fractions, rounded down."""
    active = list(range(len(fills)))
    while True:
        rates = {index: (1 << 80) // periods[index] for index in active}
        lost = sum((fills[i] - periods[i]) * rates[i] for i in active)
        end_ns = ((count << 80) + lost) // sum(rates.values())
        remaining = [index for index in active if fills[index] <= end_ns]
        if len(remaining) == len(active) or not remaining:
            break
        active = remaining
    dealt = [0] * len(fills)
    for index in active:
        dealt[index] = max(0, (end_ns - fills[index]) // periods[index])
    return dealt if sum(dealt) <= count else [0] * len(fills)
