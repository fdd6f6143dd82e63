"""A run in virtual time that leaves its ends to two named peers. An unnamed peer trains between
them, is refused all else that it asks for, and takes over nothing when one of the two is killed."""

import math
from pathlib import Path

import pytest

from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.daemon.trainer.followers import NOT_NAMED
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.beginning import SMALL_GIB
from p2p_dtfm.testbed.virtual.seeds.judge import Reference
from p2p_dtfm.testbed.virtual.seeds.run import make_run, reference_of, with_named_ends
from p2p_dtfm.testbed.virtual.seeds.watching.words import Blames
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.train.model.checkpoint import list_checkpoints

STEPS, LAST = 30, 5
NAMED, OTHERS = "ab", "cd"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), STEPS)


@pytest.fixture(scope="module")
def reference(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference_of(run, tmp_path_factory.mktemp("reference"))


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("seed", "killed"),
    [
        (1, "b"),
        pytest.param(3, "bc", marks=NIGHTLY),
        pytest.param(2, "c", marks=NIGHTLY),
        pytest.param(4, "a", marks=NIGHTLY),
        pytest.param(5, "ad", marks=NIGHTLY),
    ],
)
def test_the_named_keep_the_ends_and_the_data(
    run: Path, reference: Reference, tmp_path: Path, seed: int, killed: str
) -> None:
    async def scene(swarm: Swarm) -> None:
        first, *_ = peers = await _begun(swarm, run)
        await swarm.until(lambda: first.step() >= 12, "twelve steps", 120)
        assert _holding_ends(peers) <= set(NAMED)
        assert any(set(_layers(swarm.named(name))) for name in OTHERS), "they help"
        for name in OTHERS:
            await _asks_for_what_it_may_not_have(swarm.named(name), swarm.named(NAMED[0]))
        for name in killed:
            swarm.kill(swarm.named(name))
        for name in killed:
            swarm.start(swarm.named(name))
        ended = lambda: all(not peer.is_running for peer in peers)  # noqa: E731
        await swarm.until(ended, "they end with the run", 300)
        for peer in peers:
            assert peer.ended is not None and peer.ended.result() == 0, peer.standing()
            assert not peer.failures()
            for step, loss in peer.losses().items():
                assert math.isclose(loss, reference.losses[step], rel_tol=1e-4)
            saved = _saved(peer)
            assert saved == set(range(LAST + 1)) - (set() if peer.name in NAMED else {0, LAST}), (
                peer.name
            )

    blames = Blames()
    with blames.heard():
        play(seed, tmp_path / "world", scene)
    blames.require_none()


async def _begun(swarm: Swarm, run: Path) -> list[Peer]:
    swarm.memory_gib, swarm.network.links.are_near = SMALL_GIB, True
    ends = ["founder", swarm.identity_of(NAMED[1]).peer_id]
    path = with_named_ends(run, ends, swarm.folder)
    first = swarm.peer(NAMED[0], run=str(path), expect_peers=4)
    swarm.start(first)
    await swarm.until(lambda: first.has_run, "the run is founded", 60)
    others = [
        swarm.peer(name, initial_peers=(swarm.address(first),)) for name in NAMED[1:] + OTHERS
    ]
    for peer in others:
        swarm.start(peer)
    return [first, *others]


def _layers(peer: Peer) -> tuple[int, ...]:
    return tuple(_participant(peer).trainer.states)


def _participant(peer: Peer) -> Participant:
    assert peer.daemon is not None and peer.daemon.status_api is not None
    found = peer.daemon.status_api.participant
    assert found is not None
    return found


def _holding_ends(peers: list[Peer]) -> set[str]:
    return {peer.name for peer in peers if {0, LAST} & set(_layers(peer))}


async def _asks_for_what_it_may_not_have(peer: Peer, member: Peer) -> None:
    """The peer asks for the data, and for the files of the ends, by their right names."""
    asking, asked = _participant(peer), _participant(member)
    manifest = asked.membership.run.manifest
    data = [digest for digest in manifest.blobs() if digest != manifest.tokenizer.digest]
    saved = [it.manifest.layers for it in list_checkpoints(_checkpoints(member))]
    ends = [files[str(layer)].digest for files in saved for layer in (0, LAST)]
    assert data and ends
    for digest in data + ends:
        with pytest.raises(BlobUnavailable, match=NOT_NAMED):
            await asking.network.blobs.fetch_bytes(digest, [member.peer_id], 1 << 24)
    between = saved[-1]["2"].digest
    assert await asking.network.blobs.fetch_bytes(between, [member.peer_id], 1 << 24)


def _saved(peer: Peer) -> set[int]:
    return {layer for found in list_checkpoints(_checkpoints(peer)) for layer in found.layers}


def _checkpoints(peer: Peer) -> Path:
    [folder] = (peer.home / "runs").iterdir()
    return folder / "checkpoints"
