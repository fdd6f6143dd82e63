"""A run by invitation, and the line by which others come to it.

Keys and lines that daemons make themselves come from the operating system: with them no seed would
have the same trace twice. So the founder finds a spec that names it already, and its line is drawn.
"""

from pathlib import Path

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.invited.chains import ChainLink, run_mark, sign_link
from p2p_dtfm.core.protocol.invited.line import InvitationLine
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.net.contacts.identity import Identity, identity_of_seed
from p2p_dtfm.testbed.virtual.peer import Peer

EXPIRES_S = 4_000_000_000
"""Later than any clock that a fault sets."""


def by_invitation(run: Path, founder: Identity, folder: Path) -> Path:
    """The same run, in which `founder` says who may be in it. Its steps are the same."""
    spec = RunSpec.model_validate_json(run.read_text())
    key = directory_key(founder).hex()
    admission = {"mode": "invited", "founder": founder.peer_id, "key": key}
    invited = RunSpec.model_validate({**spec.model_dump(), "admission": admission})
    path = folder / "invited.json"
    path.write_text(invited.model_dump_json())
    return path


def line_of(founder: Peer, identity: Identity, address: str) -> dict[str, object]:
    """The settings of a peer that has pasted the founder's line. It may invite others in turn."""
    assert founder.daemon is not None
    run_digest, key = founder.daemon.run_digest, directory_key(identity)
    seed = bytes.fromhex(digest_bytes(b"line of " + identity.peer_id.encode()))
    link = ChainLink(run_mark(run_digest), identity_of_seed(seed).peer_id, True, True, EXPIRES_S)
    signed = sign_link(link, identity.peer_id, identity.sign)
    line = InvitationLine(bytes.fromhex(run_digest), key, seed, (signed,), (address,))
    return {"invite": line.text(), "run_digest": run_digest}


def directory_key(founder: Identity) -> bytes:
    return bytes.fromhex(digest_bytes(b"directory of " + founder.peer_id.encode()))
