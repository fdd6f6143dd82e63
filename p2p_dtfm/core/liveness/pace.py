"""How long a peer may take for a piece of work and for a whole step, by the plan and past steps."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from p2p_dtfm.core.audit.judging import states_parameters
from p2p_dtfm.core.cost_model.tables.link_tables import duration_ns
from p2p_dtfm.core.protocol.layers.timings import timing_of
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES, Workload
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.units import SECOND_NS

FLOOR_NS = 5 * SECOND_NS
"""A shorter wait says nothing: a machine that does other things, too, is away for seconds."""
PIECE_FACTOR = 20
"""A peer may take this many times the planned time for one piece of its work, plus the floor."""
STEP_FACTOR = 10
"""A peer whose work gets on may hold up a step for this many times its expected length."""
FETCH_BYTES_PER_S = 250_000
FETCHING_AT_ONCE = 8
"""At most so many share a line: in a new swarm all fetch from one home, until the first of them can
give as well."""
SLOWER_FETCHES = 32
"""A thin line may carry at most this many times less than `FETCH_BYTES_PER_S`. So a peer that only
says that it fetches does not hold up the others for longer."""
SAVE_BYTES_PER_S = 10_000_000
WARM_UP_NS = SECOND_NS
"""What is done for the first time in a view takes longer."""
FIRST_FACTOR = 2
"""A peer whose work gets on may hold up a view's first step this many times as long as a later one:
nobody knows yet what else the machines do."""
AGAIN_FACTOR = 3
"""Who computes a disputed work again may take this many times as long as by its own timings."""
SLOWER_JUDGES = 32
"""For layers that it does not hold, a peer is waited for at most this many times as long as most
would be: what it says of those shows in no plan."""
GRADIENTS_ON_THEIR_WAY = 2
"""Gradients of the last step, and of the one before where lines are slow."""
MEASURED_STEPS = 8
TOLD_LIMIT = 1024


@dataclass(frozen=True)
class Patience:
    """How long one peer may take in one step."""

    stuck_ns: int
    """While it completes nothing."""
    step_ns: int
    """In all, while the others wait for nobody else."""
    fetch_ns: int
    """While it says that it fetches data or states, and none come."""
    given_ns: int = 0
    """The same if somebody says that it gives them: over the thinnest line that any here has."""
    fetch_all_ns: int = 0
    """For all that it fetches, while more and more come; 0: no longer than `fetch_ns`."""
    given_all_ns: int = 0
    """The same for what somebody gives; 0: no longer than `given_ns`."""


class Pace:
    """The pace of one view. `committed` tells it how long steps take."""

    def __init__(
        self, view: View, spec: RunSpec, largest_file_bytes: int, all_files_bytes: int = 0
    ) -> None:
        """`largest_file_bytes`, `all_files_bytes`: sizes of the run's data files."""
        self._view = view
        self._spec = spec
        self._file_bytes = largest_file_bytes
        self._all_files_bytes = all_files_bytes
        self._records = {record.peer_id: record for record in view.snapshot.records}
        self._had = view.snapshot.states()
        self._lent_bytes = _lent_bytes(view) if spec.audit.rate else 0
        self._first_step: int | None = None
        self._measured_ns: deque[int] = deque(maxlen=MEASURED_STEPS)
        self._fetch_bytes_per_s = fetch_bytes_per_s(view)
        self._given_bytes_per_s = given_bytes_per_s(view)
        self._usual_ns: dict[tuple[int, ...], int] = {}
        """By layers: there and back through them in the middle of what all say of themselves."""
        self._told: dict[tuple[str, int, int, tuple[str, ...]], Patience] = {}
        """Answers, kept until a step is over: `patience` is asked all the time while somebody is
        waited for."""

    def begin(self, step: int) -> None:
        """The view's first step, as far as this peer knows."""
        if self._first_step is None:
            self._first_step = step
            self._told.clear()

    def committed(self, took_ns: int) -> None:
        """A step of this view took so long."""
        self._measured_ns.append(took_ns)
        self._told.clear()

    @property
    def expected_ns(self) -> int:
        """The time of one step: as planned, or as measured if that is more."""
        plan = self._view.plan
        planned_ns = plan.predicted_step_ns if isinstance(plan, Plan) else 0
        measured_ns = int(median(self._measured_ns)) if self._measured_ns else 0
        return max(planned_ns, measured_ns)

    def patience(
        self, peer_id: str, step: int, borrowed: int = 0, disputed: tuple[str, ...] = ()
    ) -> Patience:
        """For what `peer_id` does in `step`. `borrowed`: how many works it is to compute again
        without holding their layers. `disputed`: makers whose works it is to compute again as
        somebody doubts them, on top of what a step takes."""
        asked = (peer_id, step, borrowed, disputed)
        told = self._told.get(asked)
        if told is None:
            if len(self._told) >= TOLD_LIMIT:
                self._told.clear()
            told = self._patience(peer_id, step, borrowed)
            again_ns = sum(self._again_ns(peer_id, it) for it in disputed)
            told = self._told[asked] = replace(told, step_ns=told.step_ns + again_ns)
        return told

    def _patience(self, peer_id: str, step: int, borrowed: int) -> Patience:
        floor_ns = FLOOR_NS + (WARM_UP_NS if step == self._first_step else 0)
        floor_ns += self._save_ns(peer_id, step)
        step_ns, factor = self.expected_ns, FIRST_FACTOR if step == self._first_step else 1
        if self._evaluates(step):
            share = self._spec.evaluation_microbatches / self._spec.microbatches_per_step
            step_ns += int(step_ns * share)
        fetch_bytes = self._fetch_bytes(step) + borrowed * self._lent_bytes
        fetch_ns, given_ns = (
            floor_ns + self._fetch_ns(peer_id, step, fetch_bytes, bytes_per_s)
            for bytes_per_s in (self._fetch_bytes_per_s, self._given_bytes_per_s)
        )
        more_bytes = max(0, self._read_bytes(peer_id, step) - self._fetch_bytes(step))
        return Patience(
            stuck_ns=floor_ns + PIECE_FACTOR * self._piece_ns(peer_id),
            step_ns=factor * (floor_ns + STEP_FACTOR * step_ns),
            fetch_ns=fetch_ns,
            given_ns=given_ns,
            fetch_all_ns=fetch_ns + duration_ns(more_bytes, self._fetch_bytes_per_s),
            given_all_ns=given_ns + duration_ns(more_bytes, self._given_bytes_per_s),
        )

    def _evaluates(self, step: int) -> bool:
        spec = self._spec
        return step == spec.total_steps or step % spec.evaluation.every_steps == 0

    def _piece_ns(self, peer_id: str) -> int:
        """One microbatch there and back through all of the peer's layers. In runs with audits, the
        longest through any stage's layers: the peer may be computing another's work again."""
        own_ns, plan = self._there_and_back_ns(peer_id, self._layers(peer_id)), self._view.plan
        if not self._spec.audit.rate or not isinstance(plan, Plan):
            return own_ns
        stages = {tuple(it.layers) for pipeline in plan.pipelines for it in pipeline.stages}
        return max([own_ns, *(self._as_judge_ns(peer_id, layers) for layers in stages)])

    def _there_and_back_ns(self, peer_id: str, layers: Iterable[int]) -> int:
        record, workload = self._records.get(peer_id), self._view.snapshot.workload
        if record is None:
            return 0
        timings = [timing_of(record.device, workload, layer) for layer in layers]
        return sum(timing.forward_ns + timing.backward_ns for timing in timings)

    def _as_judge_ns(self, peer_id: str, layers: tuple[int, ...]) -> int:
        """How long the peer may take for one microbatch of another one's work."""
        if layers not in self._usual_ns:
            each_ns = sorted(self._there_and_back_ns(it, layers) for it in self._records)
            self._usual_ns[layers] = each_ns[(len(each_ns) - 1) // 2]
        own_ns = self._there_and_back_ns(peer_id, layers)
        return min(own_ns, SLOWER_JUDGES * self._usual_ns[layers])

    def _again_ns(self, peer_id: str, maker: str) -> int:
        """How long the peer may take for the whole work of `maker`."""
        plan, once_ns = self._view.plan, 0
        if not isinstance(plan, Plan):
            return 0
        for number, position in plan.places_of(maker):
            pipeline = plan.pipelines[number]
            each_ns = self._as_judge_ns(peer_id, tuple(pipeline.stages[position].layers))
            once_ns += pipeline.microbatch_count * each_ns
        return AGAIN_FACTOR * once_ns

    def _save_ns(self, peer_id: str, step: int) -> int:
        """Time to save a checkpoint, if one is saved just before the step begins."""
        if step == 0 or not self._spec.saves_at(step):
            return 0
        return duration_ns(self._state_bytes(self._layers(peer_id)), SAVE_BYTES_PER_S)

    def _fetch_bytes(self, step: int) -> int:
        return self._file_bytes * (2 if self._evaluates(step) else 1)  # held-out data, too

    def _read_bytes(self, peer_id: str, step: int) -> int:
        """Bytes of the files that the peer may read in a step. In large data each sequence is
        likely to lie in another file, and in its first steps the peer has none of them."""
        plan = self._view.plan
        if not isinstance(plan, Plan):
            return 0
        sequences, last_layer = 0, self._view.snapshot.workload.layer_count - 1
        for number, position in plan.places_of(peer_id):
            pipeline = plan.pipelines[number]
            layers = pipeline.stages[position].layers
            if not (0 in layers or last_layer in layers or self._spec.stages_know_tokens):
                continue
            sequences += pipeline.microbatch_count * self._spec.batch.microbatch
            if self._evaluates(step):
                sequences += -(-self._spec.evaluation.sequences // len(plan.pipelines))
        return min(self._all_files_bytes, sequences * self._file_bytes)

    def _fetch_ns(self, peer_id: str, step: int, size: int, bytes_per_s: int) -> int:
        """Time to fetch `size` bytes and, in the first step, the states with which it begins."""
        if step != self._first_step:
            return duration_ns(size, bytes_per_s)
        layers = self._layers(peer_id)
        if self._view.snapshot.planned:
            return duration_ns(size + self._last_gradients_bytes(peer_id, layers), bytes_per_s)
        # states may come from a disk, or be made
        made_ns = duration_ns(self._state_bytes(layers), SAVE_BYTES_PER_S)
        if step > 0:
            size += self._state_bytes(layers - self._had.get(peer_id, set()))
        return made_ns + duration_ns(size, bytes_per_s)

    def _last_gradients_bytes(self, peer_id: str, layers: set[int]) -> int:
        """Bytes of the last gradients of the layers that the peer did not have. Their states are
        there before the view takes over. What the last steps moved these by may still be on its
        way."""
        present, workload = self._view.snapshot.present, self._view.snapshot.workload
        new = layers - set(present.layers_of(peer_id) if present is not None else ())
        parameters = sum(workload.cost(layer).parameter_count for layer in new)
        return GRADIENTS_ON_THEIR_WAY * FLOAT_BYTES * parameters

    def _layers(self, peer_id: str) -> set[int]:
        plan = self._view.plan
        return set(plan.layers_of(peer_id)) if isinstance(plan, Plan) else set()

    def _state_bytes(self, layers: set[int]) -> int:
        workload: Workload = self._view.snapshot.workload
        return sum(workload.cost(layer).state_bytes for layer in layers)


def _lent_bytes(view: View) -> int:
    """Bytes of the parameters of the largest stage: a judge of its work that has other layers
    fetches them. Frames do not count here: the judge names the peer whose frames it lacks."""
    plan, workload = view.plan, view.snapshot.workload
    if not isinstance(plan, Plan) or not states_parameters(plan):
        return 0
    stages = {stage.layers for pipeline in plan.pipelines for stage in pipeline.stages}
    counts = (sum(workload.cost(layer).parameter_count for layer in layers) for layers in stages)
    return FLOAT_BYTES * max(counts)


def fetch_bytes_per_s(view: View) -> int:
    """How fast data come to one of those that fetch at once, over the middle line in the view: a
    few members may say anything of theirs."""
    uplinks = _uplinks_bytes_per_s(view)
    return _share_of(uplinks[(len(uplinks) - 1) // 2], view) if uplinks else FETCH_BYTES_PER_S


def given_bytes_per_s(view: View) -> int:
    """The same over the thinnest line: in a new swarm the founder has all data, even over a thin
    line."""
    uplinks = _uplinks_bytes_per_s(view)
    return _share_of(uplinks[0], view) if uplinks else FETCH_BYTES_PER_S


def bytes_per_s_from(giver: str, view: View) -> int:
    """The same from `giver`, over the line that it says it has; if that is unknown, over the middle
    line."""
    for record in view.snapshot.records:
        if record.peer_id == giver and record.uplink_bytes_per_s > 0:
            return _share_of(record.uplink_bytes_per_s, view)
    return fetch_bytes_per_s(view)


def _uplinks_bytes_per_s(view: View) -> list[int]:
    """The lines that members state, the thinnest first, without those that nobody has measured."""
    return sorted(
        record.uplink_bytes_per_s
        for record in view.snapshot.records
        if record.uplink_bytes_per_s > 0
    )


def _share_of(uplink_bytes_per_s: int, view: View) -> int:
    """One fetcher's share of a line over which as many fetch as may, within bounds."""
    sharing = max(1, min(len(view.members) - 1, FETCHING_AT_ONCE))
    least = FETCH_BYTES_PER_S // SLOWER_FETCHES
    return min(FETCH_BYTES_PER_S, max(uplink_bytes_per_s // sharing, least))
