"""Real daemons in virtual time, in one pipeline with audits. Each layer has one holder, which alone
signs a digest of what it saves. It computed with the parameters that it had claimed, and gave
others a file of other ones: what was evaluated, and audited, was not what they kept."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.commit.judgement import DIGEST_BYTES
from p2p_dtfm.core.messages.prepared import Prepared, SignedPrepared, sign_prepared
from p2p_dtfm.core.protocol.canonical import decode, digest_bytes
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.daemon.peers.wire import CheckpointFiles
from p2p_dtfm.daemon.state_transfer.checkpoints.checkpoints import Checkpoints
from p2p_dtfm.testbed.virtual.lies.lying import Lying
from p2p_dtfm.testbed.virtual.lies.putting import put_in
from p2p_dtfm.testbed.virtual.patches import Patches
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.seeds.saved import checkpoint_roots, list_at
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import begun, participant_of
from tests.testbed.pairs import planned_in_rows

NAMES, CUTS = "abc", (0, 2, 4)
LIAR, LAYERS = "b", (2, 3)
STEPS, SAVED_AT, SEED = 60, 4, 1
KIND = "other parameters saved"


class OtherFiles:
    """Files of the liar's layers, each with the sign of one parameter changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.paths: dict[str, Path] = {}
        self.digests: dict[int, bytes] = {}

    def made_of(self, layer: int, path: Path) -> str:
        payload = bytearray(path.read_bytes())
        values = 8 + int.from_bytes(payload[:8], "little")
        payload[values + 3] ^= 0x80
        blob = digest_bytes(bytes(payload))
        self.paths[blob] = self._folder / blob
        self.paths[blob].write_bytes(payload)
        self.digests[layer] = bytes.fromhex(blob)[:DIGEST_BYTES]
        return blob


def _put_in(patches: Patches, lying: Lying, made: OtherFiles, given: set[str]) -> None:
    """The liar announces the other files to those in `given`, and signs their digests for them."""

    def announce(self: Any, files: CheckpointFiles) -> None:
        own = set(LAYERS) & files.files.keys()
        if lying.kind() != KIND or files.step != SAVED_AT or not own:
            announced(self, files)
            return
        paths = {n: path_of(self.checkpoints, files.files[n][0]) for n in own}
        other = {n: (made.made_of(n, path), files.files[n][1]) for n, path in paths.items() if path}
        for peer_id in self._agreement.view.member_ids:
            told = files.files | (other if peer_id in given else {})
            self.network.messenger.tell(peer_id, msgspec.structs.replace(files, files=told))

    def say_prepared(self: Any, signed: Any, view: Any) -> None:
        prepared = decode(signed.payload, Prepared)
        if lying.kind() != KIND or prepared.step != SAVED_AT:
            said(self, signed, view)
            return
        lying.tell()
        other = msgspec.structs.replace(prepared, states=dict(made.digests))
        unlike = sign_prepared(other, self.membership.sign)
        for peer_id in view.member_ids:
            self.network.messenger.tell(
                peer_id, SignedPrepared(unlike if peer_id in given else signed)
            )

    def find(self: Any, blob: str) -> Path | None:
        return (made.paths.get(blob) if lying.kind() == KIND else None) or path_of(self, blob)

    announced = patches.put(Participant, "_announce", announce)
    said = patches.put(Participant, "say_prepared", say_prepared)
    path_of = patches.put(Checkpoints, "path_of", find)


def _saved_at(peer: Peer) -> dict[str, str]:
    """The digests of the files that the peer has of the step, by layer."""
    found = [it for root in checkpoint_roots(peer.home) for it in list_at(root, SAVED_AT)]
    return {n: it.digest for each in found for n, it in each.manifest.layers.items()}


@pytest.mark.parametrize("whom", ["c", "ac"])
def test_what_is_saved_is_what_the_step_was_computed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whom: str
) -> None:
    run = with_audits(make_run(tmp_path, STEPS, saves_every_steps=SAVED_AT), 1.0)
    planned_in_rows(monkeypatch, SEED, (NAMES,), CUTS)
    made = OtherFiles(tmp_path)

    async def scene(swarm: Swarm) -> None:
        ids = {name: swarm.identity_of(name).peer_id for name in NAMES}
        lying, patches = Lying({LIAR: ids[LIAR]}, together=False), Patches()
        lying.kinds = {LIAR: KIND}
        with put_in(lying):
            _put_in(patches, lying, made, {ids[it] for it in whom})
            try:
                peers = await begun(swarm, run, NAMES)
                await swarm.until(lambda: peers[0].step() >= 2 * SAVED_AT - 1, "steps", 120)
            finally:
                patches.undo()
        assert lying.count == 1 and made.paths
        for peer in peers:
            got = {n: it for n, it in _saved_at(peer).items() if it in made.paths}
            assert not got, f"{peer.name} has saved what nobody computed with"
        honest = [it for it in peers if it.name != LIAR and it.name not in whom]
        assert all(len(_saved_at(it)) == 6 for it in honest)

    play(SEED, tmp_path / "world", scene)


def test_what_was_said_of_states_counts_where_the_step_was_rolled_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One member hears the last Prepared of the step, and has all agree anew. The others take the
    step as committed: any file of that step would have done for them."""
    run = with_audits(make_run(tmp_path, STEPS, saves_every_steps=SAVED_AT), 1.0)
    planned_in_rows(monkeypatch, SEED, (NAMES,), CUTS)

    async def scene(swarm: Swarm) -> None:
        ids = {name: swarm.identity_of(name).peer_id for name in NAMES}

        def say_prepared(self: Any, signed: Any, view: Any) -> None:
            prepared = decode(signed.payload, Prepared)
            if prepared.peer_id != ids[LIAR] or prepared.step != SAVED_AT:
                said(self, signed, view)
                return
            self.network.messenger.tell(ids["a"], SignedPrepared(signed))

        said = Participant.say_prepared
        monkeypatch.setattr(Participant, "say_prepared", say_prepared)
        peers = await begun(swarm, run, NAMES)
        first, _, last = peers
        await swarm.until(lambda: first.step() == SAVED_AT, "the first one commits", 120)
        assert last.step() < SAVED_AT
        participant_of(first).contradiction("a step that fails just then")
        await swarm.until(lambda: last.step() > SAVED_AT + 1, "the others go on", 120)
        for peer in (first, last):
            announced = participant_of(peer).checkpoints._announced
            assert all(announced.parameters_of(SAVED_AT, layer) for layer in range(6)), peer.name

    play(SEED, tmp_path / "world", scene)
