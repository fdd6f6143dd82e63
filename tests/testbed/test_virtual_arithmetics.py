"""Real daemons in virtual time: three members compute by one arithmetic, three by another. Two more
name arithmetics of their own, which nobody can audit. From the second step of each view on they
named that of the first three, who so were most. The other three lost their places for theirs."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2p_dtfm.daemon.trainer.audited import audits
from p2p_dtfm.testbed.lies import late_claims
from p2p_dtfm.testbed.lies.daemon import INSTALLED
from p2p_dtfm.testbed.virtual.process import PROCESS
from p2p_dtfm.testbed.virtual.seeds.playing import Play
from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.lying_to_the_end import (
    lying_to_the_end,
    of_single_sequences,
    views_with_all_honest,
    with_lies,
)

STEPS = 12
NAMES = {**dict.fromkeys("abc", "cpu-1"), **dict.fromkeys("def", "cpu-2")}


def named_here(device: Any) -> str:
    process = PROCESS.get()
    name = process.peer_name if process is not None else ""
    return NAMES.get(name, f"cpu-of-{name}")


def name_that_of_others(lie: Any) -> None:
    """Names an arithmetic of its own in a view's first step, in which all is audited; then that of
    some others."""
    liar, honest = late_claims._known_where(lie, in_first=False), audits.Audits._claim

    async def claim(self: Any, here: Any, local: Any) -> Any:
        said = await honest(self, here, local)
        if not liar.lies:
            return said
        share = msgspec.structs.replace(said.share, arithmetic=NAMES["a"])
        return msgspec.structs.replace(said, share=share)

    late_claims.put(audits.Audits, "_claim", claim)


@pytest.mark.nightly
def test_liars_make_no_arithmetic_that_of_most_by_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audits, "arithmetic_name", named_here)
    monkeypatch.setitem(INSTALLED, "late-alien", name_that_of_others)
    run = with_audits(of_single_sequences(make_run(tmp_path, STEPS)), 1e-6, 5)
    schedule = lying_to_the_end("late-alien", "abcdefgh", "gh", 1e-6)

    async def scene(swarm: Swarm) -> Play:
        return await with_lies(swarm, run, schedule)

    one = play(1, tmp_path / "world", scene)
    assert one.lying.count
    views_with_all_honest(one)
