"""What peers send one another in a step, as the wire plan says: who sums what, in which codec."""

import itertools
from collections import defaultdict
from collections.abc import Iterator

from p2p_dtfm.core.cost_model.cuts import STATE_PARTS
from p2p_dtfm.core.cost_model.guardians import cut_pace, guards_in
from p2p_dtfm.core.planner.wire_plan import WirePlan, wire_plan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import CODEC_BYTES_PER_KIBI, FLOAT_BYTES, KIBI
from p2p_dtfm.web.state import Flow

DRAWN = 150
"""More lines between others would hide one another on a map. Of 400 peers they were ten megabytes
for each page, at each view."""
Loads = dict[tuple[str, str], int]
"""Bytes in a step by (sender, receiver)."""


def flows(spec: RunSpec, snapshot: Snapshot, plan: Plan, me: str) -> tuple[tuple[Flow, ...], bool]:
    """Each pair of peers once for each kind of flow, but each way to a guardian by itself; in
    canonical order. Returns as well whether some are left out: of very many, only those of this
    peer are there, and those of pipelines."""
    wire = wire_plan(spec, plan, snapshot)
    piped = _flows(snapshot, plan, "pipeline", _boundaries(snapshot, plan, wire))
    summed = [it.holders for it in plan.segments() if it.first_layer in wire.chunks]
    are_many = any(len(it) * (len(it) - 1) > 2 * DRAWN for it in summed)
    reductions = _reductions(snapshot, wire, plan, me if are_many else None)
    others = (
        *_flows(snapshot, plan, "reduction", reductions),
        *_flows(snapshot, plan, "guard", _guarded(snapshot, plan)),
    )
    if are_many := are_many or len(others) > DRAWN:
        records = snapshot.records
        others = tuple(
            it for it in others if me in (records[it.here].peer_id, records[it.there].peer_id)
        )
    return (*piped, *others), are_many


def _boundaries(snapshot: Snapshot, plan: Plan, wire: WirePlan) -> Loads:
    """Activations one way, their gradients the other."""
    loads: Loads = defaultdict(int)
    values = snapshot.workload.boundary_bytes // FLOAT_BYTES
    for pipeline in plan.pipelines:
        for before, after in itertools.pairwise(stage.peer_id for stage in pipeline.stages):
            codecs = wire.boundaries[before, after]
            for way, codec in (((before, after), codecs[0]), ((after, before), codecs[1])):
                encoded_bytes = _encoded_bytes(values, CODEC_BYTES_PER_KIBI[codec])
                loads[way] += pipeline.microbatch_count * encoded_bytes
    return loads


def _reductions(snapshot: Snapshot, wire: WirePlan, plan: Plan, of: str | None) -> Loads:
    """Every holder sends its part of a chunk to the chunk's owner, and gets the sum back. With
    `of`: only what this peer sends and gets."""
    loads: Loads = defaultdict(int)
    for segment in plan.segments():
        if segment.first_layer not in wire.chunks:
            continue
        owned: dict[str, int] = defaultdict(int)
        for (start, end), owner in zip(*wire.chunks[segment.first_layer], strict=True):
            owned[owner] += end - start
        for one, other in itertools.permutations(segment.holders, 2):
            if of is not None and of not in (one, other):
                continue
            values = owned[one] + owned[other]
            loads[one, other] += _encoded_bytes(values, snapshot.workload.gradient_bytes_per_kibi)
    return loads


def _guarded(snapshot: Snapshot, plan: Plan) -> Loads:
    """Reduced gradients that a layer's only holder sends its guardian; these are never encoded.
    Guardians that lag get each step's part of a cut."""
    loads: Loads = defaultdict(int)
    guards = guards_in(snapshot, plan)
    pace = cut_pace(snapshot, plan, guards)
    for layer, guardian in guards.items():
        size = FLOAT_BYTES * snapshot.workload.cost(layer).parameter_count
        if pace is not None:
            size = STATE_PARTS * size // pace.apart_steps
        loads[plan.holders(layer)[0], guardian] += size
    return loads


def _encoded_bytes(values: int, bytes_per_kibi: int) -> int:
    return -(-values * bytes_per_kibi // KIBI)


def _flows(snapshot: Snapshot, plan: Plan, kind: str, loads: Loads) -> Iterator[Flow]:
    numbers = {record.peer_id: number for number, record in enumerate(snapshot.records)}
    shown: set[frozenset[str]] = set()
    for one, other in sorted(loads, key=lambda way: (numbers[way[0]], numbers[way[1]])):
        back_bytes = loads.get((other, one), 0) if kind != "guard" else 0
        if back_bytes and frozenset((one, other)) in shown:
            continue
        shown.add(frozenset((one, other)))
        records = snapshot.records[numbers[one]], snapshot.records[numbers[other]]
        links = (records[0].link_to(other), records[1].link_to(one))
        measured = [link for link in links if link is not None]
        rates = [None if link is None else link.bytes_per_s for link in links]
        sent = (loads[one, other], back_bytes)
        yield Flow(
            here=numbers[one],
            there=numbers[other],
            kind=kind,
            there_bytes=sent[0],
            here_bytes=sent[1],
            bytes_per_s=min((link.bytes_per_s for link in measured), default=None),
            round_trip_ns=min((link.round_trip_ns for link in measured), default=None),
            use=_use(sent, rates, plan.predicted_step_ns),
        )


def _use(sent: tuple[int, int], rates: list[int | None], step_ns: int) -> float | None:
    """The share of a step in which the busier direction transmits. Where one end alone has
    measured, its rate stands for both."""
    known = [rate for rate in rates if rate]
    if not known or not step_ns:
        return None
    times_ns = [size * 1e9 / (rate or known[0]) for size, rate in zip(sent, rates, strict=True)]
    longest_ns = max(times_ns)  # a plan made before the link was measured may say less
    return round(longest_ns / max(step_ns, longest_ns), 4)
