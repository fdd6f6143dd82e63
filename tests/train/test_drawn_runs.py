"""Options of a run that no other test has together, drawn by a seed: a swarm whose layers move in
mid-run comes to the losses of the plain loop, and each stage's work is the same when it is done
again."""

import math
import random
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Segment, Stage
from p2p_dtfm.core.protocol.run_spec import CodecSpec, RunSpec, parse_run_spec
from p2p_dtfm.core.schedule.tied_ends import tied_ends
from p2p_dtfm.train.codecs import codec_of
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.kinds import chunked_head, registry
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.optimizer import apply_outcome
from p2p_dtfm.train.model.reference import ReferenceRun
from p2p_dtfm.train.stage.replay.work import Frame, GivenWork, Replay, ReplayedEdge
from p2p_dtfm.train.stage.stage_runner import StageRunner
from p2p_dtfm.train.stage.tied_head import counted_once, shared_part, tie
from p2p_dtfm.train.updates.exact_sums import squared_norm
from tests.train.holders import reduce_gradients

SEEDS = range(4)
STEPS = 5
VOCABULARY = 31
CODEC = codec_of("fp32", CodecSpec())


def drawn_spec(draws: random.Random) -> RunSpec:
    """Options that go together."""
    while True:
        norm, pick = draws.choice(("layer", "rms")), draws.choice
        model = {
            **{"layers": draws.randint(1, 4), "width": 24, "heads": pick((2, 4)), "context": 11},
            **{"vocabulary": VOCABULARY, "norm": norm, "position": pick(("learned", "rope"))},
            **{"feed_forward": pick(("gelu", "swiglu")), "feed_forward_width": pick((0, 20))},
            **{"kv_heads": pick((0, 1, 2)), "head_width": pick((0, 8, 10))},
            **{"attention_bias": pick((True, False)), "feed_forward_bias": pick((True, False))},
            **{"query_key_norm": norm == "rms" and pick((True, False))},
            **pick(({"tied_head": True}, {"written_width": 13}, {})),
        }
        microbatch = draws.randint(1, 3)
        optimizer = {
            **{"peak_learning_rate": 3e-3, "warmup_steps": pick((0, 1, 3))},
            **{"clip_norm": pick((0.05, 0.5, 100.0)), "kind": pick(("adamw", "muon"))},
            **{"weight_decay": pick((0.0, 0.1, 3.0)), "beta1": pick((0.0, 0.9))},
            **{"decay_embeddings": pick((True, False)), "z_loss": pick((0.0, 1e-2))},
            **{"schedule": pick(("cosine", "wsd"))},
        }
        documents = {"packing": "documents", "end_of_document": 3}
        values = {
            **{"name": "drawn", "seed": draws.randint(0, 1 << 40), "total_steps": STEPS + 1},
            **{"model": model, "optimizer": optimizer, "data": pick(({}, documents))},
            "batch": {"global_batch": microbatch * draws.randint(1, 6), "microbatch": microbatch},
            "evaluation": {"sequences": microbatch},
        }
        try:
            return parse_run_spec(values, "test")
        except UserError:
            continue


def drawn_plan(draws: random.Random, spec: RunSpec) -> Plan:
    """Pipelines of unlike cuts, with unlike shares."""

    def cut(length: int, most: int) -> list[int]:
        inner = draws.sample(range(1, length), draws.randint(1, min(most, length)) - 1)
        return [0, *sorted(inner), length]

    names, pipelines = iter("abcdefghijkl"), []
    shares = cut(spec.microbatches_per_step, 3)
    for first, end in pairwise(shares):
        edges = cut(layer_count(spec), 4)
        stages = (Stage(next(names), a, b, 1) for a, b in pairwise(edges))
        pipelines.append(Pipeline(tuple(stages), first, end - first))
    return Plan(tuple(pipelines), (), 0)


class Data:
    """Sequences with something to learn; of some runs only a part of the tokens counts."""

    def __init__(self, draws: random.Random, spec: RunSpec) -> None:
        self._spec, self._seed = spec, draws.randint(0, 1 << 30)
        self._part = 1.0 if spec.data.masks_documents else draws.choice((0.05, 0.5, 1.0))
        self.batch = cache(self.batch)  # type: ignore[method-assign]
        self.weight = cache(self.weight)  # type: ignore[method-assign]

    def batch(self, step: int, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self._seed + 1000 * step + number)
        shape = (self._spec.batch.microbatch, 1)
        start = torch.randint(VOCABULARY, shape, generator=generator)
        stride = torch.randint(1, 4, shape, generator=generator)
        tokens = (start + stride * torch.arange(self._spec.model.context + 1)) % VOCABULARY
        counts = torch.rand(tokens[:, 1:].shape, generator=generator) < self._part
        counts[:, 0] |= number == 0
        return tokens[:, :-1].contiguous(), torch.where(counts, tokens[:, 1:], -100)

    def weight(self, step: int, number: int) -> float:
        numbers = range(self._spec.microbatches_per_step)
        counted = sum(int((self.batch(step, n)[1] >= 0).sum()) for n in numbers)
        return self._spec.tokens_per_step / counted


class Drawn:
    """All peers of one plan after the other; what travels is handed over."""

    def __init__(self, draws: random.Random, spec: RunSpec, data: Data) -> None:
        self.spec, self._draws, self._data = spec, draws, data
        self.states: dict[str, dict[int, LayerState]] = {}
        self._came: dict[tuple[str, str, int], Frame] = {}

    def enter(self, plan: Plan) -> None:
        """Each peer gets the states of its place as bytes, wherever they are."""
        held = {layer: it for states in self.states.values() for layer, it in states.items()}

        def here(layer: int) -> LayerState:
            if layer not in held:
                return LayerState.genesis(self.spec, layer)
            return LayerState.from_bytes(self.spec, layer, held[layer].to_bytes())

        stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
        self._plan = plan
        self.states = {it.peer_id: {layer: here(layer) for layer in it.layers} for it in stages}
        self._runners = {
            peer: StageRunner(self.spec, states, recompute=self._draws.random() < 0.4)
            for peer, states in self.states.items()
        }

    def step(self, step: int) -> float:
        loss_sum = sum(self._flow(pipeline, step) for pipeline in self._plan.pipelines)
        for pipeline in self._plan.pipelines:
            self._require_the_same_again(pipeline, step)
        self._update(step)
        return loss_sum / self.spec.tokens_per_step

    def _flow(self, pipeline: Pipeline, step: int) -> float:
        """Some forwards, then their backwards, and so on; weights whenever chance wants them."""
        runners, loss_sum = [self._runners[stage.peer_id] for stage in pipeline.stages], 0.0
        peers = [stage.peer_id for stage in pipeline.stages]
        numbers, at_once = list(pipeline.microbatches), self._draws.randint(1, 4)
        owed: dict[StageRunner, list[int]] = {runner: [] for runner in runners}
        for first in range(0, len(numbers), at_once):
            for number in numbers[first : first + at_once]:
                tokens, targets = self._data.batch(step, number)
                stream, weight = tokens, self._data.weight(step, number)
                for runner, after in zip(runners, peers[1:], strict=False):
                    result = runner.forward(number, stream, tokens=tokens)
                    stream = self._sent(after, "there", number, result)
                loss_sum += runners[-1].forward(number, stream, targets, tokens) * weight
                runners[-1].weigh(number, weight)
            for number in numbers[first : first + at_once]:
                gradient = None
                for runner, before in zip(runners[::-1], [*peers[-2::-1], ""], strict=True):
                    part = runner.input_backward if runner.splits else runner.backward
                    owed[runner] += [number] if runner.splits else []
                    if (gradient := part(number, gradient)) is not None:
                        gradient = self._sent(before, "back", number, gradient)
                    if self._draws.random() < 0.4:
                        while owed[runner]:
                            runner.weight_backward(owed[runner].pop(0))
        for runner in runners:
            for number in owed[runner]:
                runner.weight_backward(number)
            assert runner.in_flight == 0
        return loss_sum

    def _sent(self, to: str, way: str, number: int, values: Tensor) -> Tensor:
        frame = Frame("fp32", bytes(memoryview(CODEC.encode(values)).cast("B")))
        self._came[to, way, number] = frame
        return CODEC.decode(bytearray(frame.payload), tuple(values.shape))

    def _require_the_same_again(self, pipeline: Pipeline, step: int) -> None:
        for stage in pipeline.stages:
            peer, states = stage.peer_id, self.states[stage.peer_id]

            def edge(number: int, peer: str = peer) -> ReplayedEdge:
                there, back = (self._came.get((peer, way, number)) for way in ("there", "back"))
                return ReplayedEdge(there, back, "fp32", "fp32")

            given = GivenWork(
                batch=lambda number: self._data.batch(step, number),
                threads=torch.get_num_threads(),
                edge=edge,
                recompute=self._draws.random() < 0.5,
                weight=lambda number: self._data.weight(step, number),
                step=step,
            )
            replay = Replay(self.spec, states, given)
            for number in pipeline.microbatches:
                replay.train(number)
            for layer, gradient in replay.replayed().gradients.items():
                assert torch.equal(gradient, states[layer].gradient), (peer, layer)

    def _update(self, step: int) -> None:
        reduced = {
            part: it for each in self._plan.segments() for part, it in self._sums(step, each)
        }
        if ends := tied_ends(self.spec):
            sums = {end: it.clone() for (_, end), it in reduced.items() if end in ends}
            for peer, states in self.states.items():
                mine = {end: reduced[peer, end] for end in ends if end in states}
                lacks = [end for end in ends if end not in mine]
                other = shared_part(self.spec, lacks[0], sums[lacks[0]]) if lacks else None
                tied = tie(self.spec, mine, other) if mine else {}
                reduced |= {(peer, end): it for end, it in tied.items()}
        of_layers = {layer: it for (_, layer), it in reduced.items()}
        norms = (squared_norm(counted_once(self.spec, *each)) for each in of_layers.items())
        norm = math.sqrt(math.fsum(norms))
        for peer, states in self.states.items():
            for layer, state in states.items():
                apply_outcome(self.spec, state, reduced[peer, layer], step, norm)

    def _sums(self, step: int, segment: Segment) -> Iterator[tuple[tuple[str, int], Tensor]]:
        held = [[self.states[peer][layer] for layer in segment.layers] for peer in segment.holders]
        sides = reduce_gradients(self.spec, step, held)
        for peer, side in zip(segment.holders, sides, strict=True):
            for layer, gradient in side.reduced_layers().items():
                yield (peer, layer), gradient


@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_options_equal_the_plain_loop(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = random.Random(seed)
    spec = drawn_spec(draws)
    data, in_chunks = Data(draws, spec), draws.random() < 0.3
    monkeypatch.setattr(registry, "head_in_chunks", lambda spec: in_chunks)
    monkeypatch.setattr(chunked_head, "CHUNK_TOKENS", draws.choice((1, 5, 16)))
    expected = list(ReferenceRun(spec, data.batch, weight=data.weight).losses(STEPS))
    swarm, seen = Drawn(draws, spec, data), []
    for step in range(STEPS):
        if step % 2 == 0:
            swarm.enter(drawn_plan(draws, spec))
        seen.append(swarm.step(step))
    assert seen == pytest.approx(expected, abs=3e-5)
    for layer in range(layer_count(spec)):
        held = {it[layer].digest() for it in swarm.states.values() if layer in it}
        assert len(held) == 1, "replicas must stay byte-equal"
