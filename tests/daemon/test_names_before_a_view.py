"""A newcomer calls the member that it asks by the name that the member gives itself."""

from pathlib import Path

from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play


def test_a_joiner_knows_whom_it_asks(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = make_run(tmp_path / "run", 20)

    async def scene(swarm: Swarm) -> None:
        first = swarm.peer("first", run=str(run))
        late = swarm.peer("late", initial_peers=(swarm.address(first),))
        swarm.start(first, name="Ada")
        await swarm.until(lambda: first.step() >= 2, "it trains", 120)
        swarm.start(late, name="Grace")

        def reason() -> str:
            return late.daemon.observer.live().reason if late.daemon is not None else ""

        await swarm.until(lambda: "to be let in" in reason(), "it asks", 60)
        assert reason() == "asks Ada to be let in at the next view"
        assert late.daemon is not None
        assert late.daemon.status_json()["names"] == {first.peer_id: "Ada"}
        await swarm.until(lambda: late.step() >= 0, "it takes part", 120)
        assert first.daemon is not None
        names = {first.peer_id: "Ada", late.peer_id: "Grace"}
        assert first.daemon.status_json()["names"] == names

    play(1, tmp_path / "world", scene)
