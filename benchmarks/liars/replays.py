"""Whether a stage's work, computed again as an audit does, is ever unlike the first time.

    python -m benchmarks.liars.replays [--count 100] [--threads 4] [--run tiny] [--width 32]
        [--json]

Each stage-step has layers, threads, codec and order of work drawn by its number: with or without
recomputation, with split backwards where the stage can, and some begun anew. The second time it
is what `train.stage.replay` makes of its parameters, half of the times as another peer is lent
them, and of what came into it. One unequal digest falsifies audits that judge by equality.
"""

import argparse
import json
import random
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import cast

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.train.codecs import Turn, boundary_turn, codec_of
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.replay.work import (
    ACTIVATION,
    GRADIENT,
    Frame,
    GivenWork,
    LentLayer,
    Replay,
    ReplayedEdge,
    bytes_of,
    chunk_digest,
)
from p2p_dtfm.train.stage.stage_runner import StageRunner

MICROBATCHES = 3
CODECS = ("fp32", "bf16")
CPU = torch.device("cpu")
SHORT_CONTEXT = 16


@dataclass
class Compared:
    replays: int = 0
    unequal: list[str] = field(default_factory=list)
    threads: Counter[int] = field(default_factory=Counter)
    recomputed: int = 0
    begun_anew: int = 0
    lent: int = 0


@dataclass(frozen=True)
class StageStep:
    """One stage's work in one step, drawn by its number."""

    spec: RunSpec
    layers: range
    threads: int
    codec: str
    recompute: bool
    begins_anew: bool
    is_lent: bool
    """The auditor does not have the stage's layers, and only gets parameters, as bytes."""
    seed: int

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        shape = (2, self.spec.batch.microbatch, self.spec.model.context)
        tokens = torch.randint(
            0, self.spec.model.vocabulary, shape, generator=self._chance(number, 0)
        )
        return tokens[0], tokens[1]

    def edge(self, number: int) -> ReplayedEdge:
        return ReplayedEdge(self._frame(number, 1), self._frame(number, 2), self.codec, self.codec)

    def _frame(self, number: int, kind: int) -> Frame:
        model = self.spec.model
        shape = (self.spec.batch.microbatch, model.context, model.boundary_width)
        values = torch.randn(shape, generator=self._chance(number, kind))
        payload = codec_of(self.codec, self.spec.codecs).encode(values)
        return Frame(self.codec, bytes(memoryview(payload).cast("B")))

    def _chance(self, *numbers: int) -> torch.Generator:
        seed = self.seed
        for number in numbers:
            seed = seed * 101 + number
        return torch.Generator().manual_seed(seed)

    def states(self) -> dict[int, LayerState]:
        return {layer: LayerState.genesis(self.spec, layer) for layer in self.layers}

    def first(self) -> list[bytes]:
        """The first computation, as a stage-holder works: all forwards before the backwards."""
        torch.set_num_threads(self.threads)
        states = self.states()
        runner = StageRunner(self.spec, states, self.recompute)
        runner.zero_gradients()
        if self.begins_anew:
            self._forward(runner, 0, {})
            runner.discard()
            runner.zero_gradients()
        sent: dict[tuple[str, int], bytes] = {}
        loss_sum = sum((self._forward(runner, n, sent) for n in range(MICROBATCHES)), 0.0)
        for number in range(MICROBATCHES):
            near = self.edge(number)
            gradient = None
            if not runner.has_head:
                gradient = near.decoded(self.spec, near.gradient, self._turn(number, 1, back=True))
            backward = runner.input_backward if runner.splits else runner.backward
            back = backward(number, gradient)
            if not runner.has_embedding:
                turn = self._turn(number, 0, back=True)
                sent[GRADIENT, number] = near.digest(self.spec, self.codec, back, turn)
        if runner.splits:
            for layer in reversed(self.layers):
                for number in range(MICROBATCHES):
                    runner.weight_backward_layer(number, layer)
        gradients = {layer: state.gradient_vector() for layer, state in states.items()}
        return _digests(gradients, loss_sum, sent)

    def _forward(
        self, runner: StageRunner, number: int, sent: dict[tuple[str, int], bytes]
    ) -> float:
        near, (tokens, targets) = self.edge(number), self.batch(number)
        entry = tokens
        if not runner.has_embedding:
            entry = near.decoded(self.spec, near.activation, self._turn(number, 0, back=False))
        result = runner.forward(number, entry, targets if runner.has_head else None, tokens)
        if runner.has_head:
            return float(cast(float, result))
        turn = self._turn(number, 1, back=False)
        sent[ACTIVATION, number] = near.digest(self.spec, self.codec, cast(Tensor, result), turn)
        return 0.0

    def _turn(self, number: int, end: int, *, back: bool) -> Turn:
        """`end`: 0 where the stage begins, 1 where it ends."""
        layer = (self.layers.start, self.layers.stop)[end]
        return boundary_turn(self.spec, 0, layer, number, back=back)

    def again(self) -> list[bytes]:
        torch.set_num_threads(1)
        states: dict[int, LayerState | LentLayer] = dict(self.states())
        if self.is_lent:
            states = {n: LentLayer(n, bytes_of(it.parameters), CPU) for n, it in states.items()}
        replay = Replay(self.spec, states, GivenWork(self.batch, self.threads, self.edge))
        for number in range(MICROBATCHES):
            replay.train(number)
        done = replay.replayed()
        return _digests(done.gradients, done.loss_sum, done.sent)


def _digests(
    gradients: dict[int, Tensor], loss_sum: float, sent: dict[tuple[str, int], bytes]
) -> list[bytes]:
    mine = [chunk_digest(bytes_of(gradients[layer].contiguous())) for layer in sorted(gradients)]
    return [*mine, loss_sum.hex().encode(), *(sent[key] for key in sorted(sent))]


def drawn(spec: RunSpec, number: int, threads: int) -> StageStep:
    chance = random.Random(number)
    first = chance.randrange(layer_count(spec))
    end = chance.randint(first + 1, layer_count(spec))
    return StageStep(
        spec,
        range(first, end),
        chance.randint(1, threads),
        chance.choice(CODECS),
        chance.random() < 0.5,
        chance.random() < 0.25,
        chance.random() < 0.5,
        number + 1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--run", default="tiny")
    parser.add_argument("--width", type=int, help="another than the run's, with few tokens")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    spec, found = read_run_spec(arguments.run), Compared()
    if arguments.width:
        smaller = {"width": arguments.width, "context": SHORT_CONTEXT}
        spec = spec.model_copy(update={"model": spec.model.model_copy(update=smaller)})
    for number in range(arguments.count):
        each = drawn(spec, number, arguments.threads)
        found.replays += 1
        found.threads[each.threads] += 1
        found.recomputed += each.recompute
        found.begun_anew += each.begins_anew
        found.lent += each.is_lent
        if each.first() != each.again():
            found.unequal.append(f"{number}: {each.layers}, {each.threads} threads, {each.codec}")
    if arguments.json:
        print(json.dumps(asdict(found)))
    else:
        threads = dict(sorted(found.threads.items()))
        print(
            f"{found.replays} replays, {found.recomputed} of work that recomputed, "
            f"{found.begun_anew} of work begun anew, {found.lent} by parameters that were lent; by "
            f"threads {threads}"
        )
        print(f"{len(found.unequal)} unequal", *found.unequal, sep="\n")
    if found.unequal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
