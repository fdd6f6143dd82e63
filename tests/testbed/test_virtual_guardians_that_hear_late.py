"""Real daemons in virtual time: a holder's word to its guardian about a committed step is late, as
on a line that died unnoticed. All members know the step's result by themselves. The guardian waited
for its holder's word, all others for the guardian, and the guardian was blamed."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import BytesValue

from p2p_dtfm.daemon.peers.wire import LayersCommitted, Unreadable, unpack
from p2p_dtfm.testbed.virtual import worlds
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.testbed.virtual.wires.network import VirtualNetwork
from tests.testbed.begun import begun
from tests.testbed.test_virtual_safe_steps import SEED, all_at
from tests.testbed.test_virtual_speed import view_of

LATE_S = 12.0


def test_who_knows_what_came_of_a_step_needs_no_word_of_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, late, honest = make_run(tmp_path, 400, saves_every_steps=1000), [False], VirtualNetwork.ask
    lost: list[LayersCommitted] = []

    def ask(network: Any, host: Any, peer_id: str, name: str, body: bytes, reply: Any) -> Any:
        with contextlib.suppress(Unreadable):
            message = unpack(BytesValue.FromString(body).value)[1]
            if late[0] and name.endswith("control") and isinstance(message, LayersCommitted):
                lost.append(message)
                return lambda is_over: None
        return honest(network, host, peer_id, name, body, reply)

    monkeypatch.setattr(VirtualNetwork, "ask", ask)

    async def scene(swarm: Swarm) -> None:
        holder_id = swarm.identity_of("b").peer_id
        monkeypatch.setattr(worlds, "compute_plan", all_at(holder_id))
        peers = await begun(swarm, run, "abc")
        holder = next(it for it in peers if it.peer_id == holder_id)
        await swarm.until(lambda: holder.step() >= 5, "steps", 60)
        view = view_of(holder)
        assert view.cut_pace is None and view.guards, "guardians keep up"
        late[0], since, ends_s = True, holder.step(), swarm.now_s + LATE_S
        await swarm.until(lambda: swarm.now_s > ends_s, "it is late", 60)
        assert lost and holder.step() > since + 10
        assert view_of(holder) is view, "nobody is blamed"

    play(SEED, tmp_path / "world", scene)
