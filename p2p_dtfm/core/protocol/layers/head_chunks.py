"""Whether a GPT's head computes its loss in chunks of tokens, and what it keeps then.

All logits of a microbatch take tokens * vocabulary values, three times over until the backward is
through: of GPT-2's vocabulary 0.6 GB for a sequence of 1,024 tokens. In chunks only one chunk's
logits exist at a time; in their place lies the gradient of the head's matrix, once.
"""

from p2p_dtfm.core.protocol.run_spec import RunSpec

CHUNK_TOKENS = 256
"""Enough for a matrix product to be as fast as of all tokens."""
CHUNK_TOKENS_OF_CARDS = 1024
"""To whose memory each chunk adds a gradient of the whole matrix."""
LEAST_LOGITS = 1 << 24
"""64 MiB of them. Fewer gain nothing, and their matrix's gradient can be left for later, as that of
other matrices (`train.model.deferred_gradients`)."""


def head_in_chunks(spec: RunSpec) -> bool:
    """The same on every peer, since it decides about the last bit of a gradient."""
    if spec.layers or _tokens(spec) * spec.model.vocabulary < LEAST_LOGITS:
        return False
    return _kept_in_chunks(spec) < _kept_whole(spec)


def head_values(spec: RunSpec) -> int:
    """Values that the logits of a microbatch and their gradients take at most."""
    return _kept_in_chunks(spec) if head_in_chunks(spec) else _kept_whole(spec)


def _tokens(spec: RunSpec) -> int:
    return spec.batch.microbatch * spec.model.context


def _kept_whole(spec: RunSpec) -> int:
    """Logits, their logarithms and their gradient."""
    return 3 * _tokens(spec) * spec.model.vocabulary


def _kept_in_chunks(spec: RunSpec) -> int:
    """The same of a chunk; the matrix's gradient, unless the head is frozen."""
    matrix = 0 if spec.trains_adapters else spec.model.vocabulary * spec.model.width
    return 3 * min(CHUNK_TOKENS, _tokens(spec)) * spec.model.vocabulary + matrix
