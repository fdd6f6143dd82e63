"""Members that lie lose their place. Nobody's daemon ends, nobody's states part, and the others'
losses are those of one machine. Each run of the tests has some liars in virtual time
(`tests/testbed/test_virtual_lies.py`)."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.testbed.lies.lie import Lie
from p2p_dtfm.testbed.lies.played import MODULE, OPTIONS, environment, told
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from tests.e2e.helpers import logged, losses, step_of, wait_until, write_spec
from tests.e2e.parity import assert_equals_the_plain_loop

STEPS = 40
HELD_UP_LIMIT_S = 10.0
NORM, NAN = Lie("norm", 5), Lie("nan", 20)
TOLD = {
    NORM: "another norm than the other holders",
    NAN: "not finite",
    Lie("loss", 5, 1e30): "a loss that no model has",
    Lie("unlike-sums", 5): "are not those that",
    Lie("unlike-norms", 5): "two different Prepared",
}


@contextmanager
def swarm(
    directory: Path,
    data: Path,
    liars: dict[int, Lie],
    steps: int = STEPS,
    more: Mapping[str, Any] | None = None,
) -> Iterator[tuple[LocalSwarm, str]]:
    """Four members; `liars` says which child lies about what, and from which step on."""
    spec = write_spec(
        directory,
        total_steps=steps,
        data={"source": str(data)},
        checkpoint={"every_steps": 10, "keep": 2},
        **(more or {}),
    )
    with LocalSwarm(directory, OPTIONS, MODULE) as local:
        _, address = local.found(["--run", str(spec), "--expect-peers", "4"])
        for number in (1, 2, 3):
            with environment(told(liars[number]) if number in liars else {}):
                local.join(address)
        yield local, address


def watch(
    honest: list[Child],
    others: list[Child],
    told: list[str],
    steps: int = STEPS,
    is_last_new: bool = False,
) -> None:
    """Watch until the honest daemons are done: none ends, and no commit is long in coming. A
    newcomer has seen no earlier steps."""
    wait_until(lambda: all(step_of(child) >= 0 for child in honest), "the first step")
    newest, since_s = 0, time.monotonic()
    while min(step_of(child) for child in honest) < steps - 1:
        step = max(step_of(child) for child in honest)
        newest, since_s = (step, time.monotonic()) if step > newest else (newest, since_s)
        assert time.monotonic() - since_s < HELD_UP_LIMIT_S, f"held up at step {newest}"
        assert all(child.running for child in (*honest, *others))
        time.sleep(0.05)
    for text in told:
        assert any(logged(child, text) for child in honest), text
    curves = [losses(child) for child in honest]
    since = min(curves[-1]) if is_last_new else 0
    from_then = {step: loss for step, loss in curves[0].items() if step >= since}
    assert from_then == {step: loss for step, loss in curves[-1].items() if step in curves[0]}


@pytest.mark.nightly
def test_two_liars_of_four(tmp_path: Path, prepared_data: Path) -> None:
    """One liar sends gradients that are none, and the other says of its own what is not so."""
    with swarm(tmp_path, prepared_data, {1: NORM, 2: NAN}) as (local, _):
        first, norm, nan, last = local.children
        watch([first, last], [norm, nan], [TOLD[NORM], TOLD[NAN]])
        wait_until(lambda: (first.status() or {}).get("state") == "done", "the checkpoint")
    assert_equals_the_plain_loop(first, STEPS)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "lie", [lie for lie in TOLD if lie not in (NORM, NAN)], ids=lambda lie: lie.kind
)
def test_one_liar_of_four(tmp_path: Path, prepared_data: Path, lie: Lie) -> None:
    with swarm(tmp_path, prepared_data, {2: lie}) as (local, _):
        honest = [child for number, child in enumerate(local.children) if number != 2]
        watch(honest, [local.children[2]], [TOLD[lie]])
        wait_until(lambda: (honest[0].status() or {}).get("state") == "done", "the checkpoint")
    assert_equals_the_plain_loop(honest[0], STEPS)


@pytest.mark.nightly
def test_a_donor_that_gives_noise(tmp_path: Path, prepared_data: Path) -> None:
    with swarm(tmp_path, prepared_data, {1: Lie("state", 0)}, 500) as (local, address):
        wait_until(lambda: step_of(local.children[0]) >= 10, "ten steps")
        newcomer = local.join(address)
        honest = [child for number, child in enumerate(local.children) if number != 1]
        wait_until(lambda: step_of(newcomer) >= 0, "the newcomer takes part")
        watch([honest[0], *honest[1:3], newcomer], [local.children[1]], [], 500, is_last_new=True)
    assert_equals_the_plain_loop(honest[0], 500)
