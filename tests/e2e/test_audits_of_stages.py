"""Audits of stages that are not the whole model. In three pipelines of two stages, two replicas of
each stage compute its work again. Nothing that was found wrong stays."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.testbed.lies.lie import MEMORY_VARIABLE, Lie
from p2p_dtfm.testbed.lies.played import MODULE, OPTIONS, environment, told, two_thirds_bytes
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from tests.e2e.helpers import logged, step_of, wait_until, write_spec
from tests.e2e.parity import assert_equals_the_plain_loop

STEPS = 20
LIED_AT = 4
LIAR = 2
FOUND = "works otherwise than those who computed it again"
UNLIKE = "are not those that"
TOLD = {
    "flip": FOUND,
    "zeros": FOUND,
    "bend": FOUND,
    "activation": FOUND,
    "accuse": "otherwise than those who computed it again",
    "edge-out": FOUND,
    "edge-in": UNLIKE,
}


@contextmanager
def swarm(directory: Path, data: Path, kind: str, count: int, steps: int) -> Iterator[LocalSwarm]:
    spec = write_spec(
        directory,
        total_steps=steps,
        data={"source": str(data)},
        checkpoint={"every_steps": 10, "keep": 2},
        audit={"rate": 1.0},
        batch={"global_batch": 12, "microbatch": 2},
    )
    memory_bytes = two_thirds_bytes(RunSpec.model_validate_json(spec.read_text()))
    with (
        environment({MEMORY_VARIABLE: str(memory_bytes)}),
        LocalSwarm(directory, OPTIONS, MODULE) as local,
    ):
        _, address = local.found(["--run", str(spec), "--expect-peers", str(count)])
        for number in range(1, count):
            with environment(told(Lie(kind, LIED_AT)) if kind and number == LIAR else {}):
                local.join(address)
        wait_until(lambda: step_of(local.children[0]) >= 0, "the first step")
        yield local


def until(honest: list[Child], step: int, limit_s: float = 150) -> None:
    end_s = time.monotonic() + limit_s
    while min(step_of(child) for child in honest) < step:
        assert time.monotonic() < end_s, [step_of(child) for child in honest]
        time.sleep(0.05)


def doubted(children: list[Child]) -> set[str]:
    """The members in doubt: each was one of two between which nobody could decide."""
    texts = [(child.home / "stderr").read_text(errors="replace") for child in children]
    pairs = [re.findall(r"leaves out one of (\w+) and (\w+):", text) for text in texts]
    return {peer_id for found in pairs for pair in found for peer_id in pair}


def layers(local: LocalSwarm) -> list[tuple[int, ...]]:
    return sorted(tuple((child.status() or {})["layers"]) for child in local.children)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", sorted(TOLD))
def test_one_liar_of_six(tmp_path: Path, prepared_data: Path, kind: str) -> None:
    with swarm(tmp_path, prepared_data, kind, 6, STEPS) as local:
        honest = [child for number, child in enumerate(local.children) if number != LIAR]
        assert len(set(layers(local))) == 2, layers(local)
        wait_until(lambda: any(logged(child, TOLD[kind]) for child in honest), "it is found")
        if TOLD[kind] == UNLIKE:  # one of the two has lost its place, and it may be the honest one
            wait_until(lambda: bool(doubted(honest)), "one of two is left out")
            honest = [it for it in honest if (it.status() or {})["peer_id"] not in doubted(honest)]
            assert len(honest) >= 3
        until(honest, STEPS - 1)
        assert all(child.running for child in local.children)
        ids = [(child.status() or {})["peer_id"] for child in honest]
        assert not any(logged(child, f"{it}: works otherwise") for it in ids for child in honest)
        wait_until(lambda: (honest[0].status() or {}).get("state") == "done", "the checkpoint")
    assert_equals_the_plain_loop(honest[0], STEPS)


@pytest.mark.nightly
def test_two_pipelines_of_two_lose_a_member_and_nobody_is_blamed(
    tmp_path: Path, prepared_data: Path
) -> None:
    with swarm(tmp_path, prepared_data, "", 4, STEPS) as local:
        first, *_, last = local.children
        until([first], 5)
        assert len(set(layers(local))) == 2, layers(local)
        assert all((child.status() or {}).get("audits", 0) > 0 for child in local.children)
        last.process.kill()
        until(local.children[:-1], STEPS - 1)
        for child in local.children[:-1]:
            assert not logged(child, "something else than was claimed")
            assert not logged(child, "an audit did not come to an end")
        wait_until(lambda: (first.status() or {}).get("state") == "done", "the checkpoint")
    assert_equals_the_plain_loop(first, STEPS)
