"""Whether a GPT's head computes its loss in chunks of tokens, and what it keeps then.

All logits of a microbatch take tokens * vocabulary values, three times over until the backward is
through. With GPT-2's vocabulary that is 0.6 GB for a sequence of 1,024 tokens. In chunks, only one
chunk's logits exist at a time; but the gradient of the head's matrix is kept, once.
"""

from p2p_dtfm.core.protocol.run_spec import RunSpec

CHUNK_TOKENS = 256
"""Tokens in a chunk: enough for a matrix product to be as fast as with all tokens."""
CHUNK_TOKENS_OF_CARDS = 1024
"""Tokens in a chunk on a card, where each chunk adds a gradient of the whole matrix in memory."""
LEAST_LOGITS = 1 << 24
"""64 MiB of logits. Chunks of fewer gain nothing. Without chunks the matrix's gradient can be left
for later, as that of other matrices (`train.model.deferred_gradients`)."""


def head_in_chunks(spec: RunSpec) -> bool:
    """Whether the head works in chunks. It is the same on every peer, since it decides about the
    last bit of a gradient."""
    if spec.layers or _tokens(spec) * spec.model.vocabulary < LEAST_LOGITS:
        return False
    return _kept_in_chunks(spec) < _kept_whole(spec)


def head_values(spec: RunSpec) -> int:
    """Values that the logits of a microbatch and their gradients take at most."""
    return _kept_in_chunks(spec) if head_in_chunks(spec) else _kept_whole(spec)


def _tokens(spec: RunSpec) -> int:
    return spec.batch.microbatch * spec.model.context


def _kept_whole(spec: RunSpec) -> int:
    """Values kept without chunks: logits, their logarithms and their gradient."""
    return 3 * _tokens(spec) * spec.model.vocabulary


def _kept_in_chunks(spec: RunSpec) -> int:
    """Values kept with chunks: the same of one chunk, and the matrix's gradient, unless the head is
    frozen."""
    matrix = 0 if spec.trains_adapters else spec.model.vocabulary * spec.model.width
    return 3 * min(CHUNK_TOKENS, _tokens(spec)) * spec.model.vocabulary + matrix
