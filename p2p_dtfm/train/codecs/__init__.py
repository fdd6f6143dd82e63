"""Tensors in fewer bytes: named, versioned codecs that peers agree on through the run spec."""

from p2p_dtfm.core.protocol.run_spec import CodecSpec
from p2p_dtfm.train.codecs.codec import Codec, Turn
from p2p_dtfm.train.codecs.dense import Bf16, Fp16, Fp32, Int8
from p2p_dtfm.train.codecs.packing import Buffer
from p2p_dtfm.train.codecs.rotated import Rotated
from p2p_dtfm.train.codecs.sign import Sign
from p2p_dtfm.train.codecs.sparse import Sparse
from p2p_dtfm.train.codecs.subspace import Subspace, require_directions
from p2p_dtfm.train.codecs.turns import boundary_turn

__all__ = ["Buffer", "Codec", "Turn", "boundary_turn", "codec_of", "require_directions"]

_ROTATED = Rotated("rotated4", 14, 400), Rotated("rotated6", 64, 110)
_DENSE: dict[str, Codec] = {
    codec.name: codec for codec in (Fp32(), Fp16(), Bf16(), Int8(), Sign(), Subspace(), *_ROTATED)
}


def codec_of(name: str, spec: CodecSpec) -> Codec:
    """The codec that a run calls `name`."""
    return Sparse(spec.sparse) if name == Sparse.name else _DENSE[name]
