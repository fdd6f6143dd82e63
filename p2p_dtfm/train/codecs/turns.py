"""What both ends of a boundary know alike about a tensor that crosses it."""

import hashlib

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.codecs.codec import Turn


def boundary_turn(spec: RunSpec, step: int, layer: int, number: int, *, back: bool) -> Turn:
    """The turn of microbatch `number` before `layer`: of its activation, or with `back` of the
    activation's gradient.

    It names neither view nor peer, so a step that is made again has the same bits.
    """
    material = f"boundary\0{spec.seed}\0{layer}\0{number}\0{back:d}".encode()
    digest = hashlib.blake2b(material, digest_size=8).digest()
    return Turn(int.from_bytes(digest, "little"), step, unbiased=back)
