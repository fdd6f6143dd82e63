"""What the layers of a GPT hold, compute and keep, in whole numbers."""

from p2p_dtfm.core.protocol.model_spec import ModelSpec


def block_flops(model: ModelSpec, tokens: int, context: int) -> int:
    """Operations of a block's forward for `tokens` tokens in sequences of `context`."""
    return tokens * (2 * block_matrices(model) + 4 * context * model.query_width)


def block_parameters(model: ModelSpec) -> int:
    """Parameters of a block: matrices, biases and norms."""
    count = block_matrices(model) + 2 * norm_parameters(model)
    if model.attention_bias:
        count += model.query_width + 2 * model.key_width + model.boundary_width
    if model.feed_forward_bias:
        count += hidden_inputs(model) * model.hidden_width + model.boundary_width
    if model.query_key_norm:
        count += 2 * model.each_head
    return count


def norm_parameters(model: ModelSpec) -> int:
    """Parameters of one norm over the width: a scale, and LayerNorm's shift."""
    return model.width * (2 if model.norm == "layer" else 1)


def saved_values(model: ModelSpec) -> int:
    """How many values autograd keeps of a block for each token.

    A GPT-2 keeps 17 times its width: input, two norms, queries, keys and values, attention output,
    two residuals, and the hidden layer before and after its non-linearity. A gated network keeps
    both inputs, the gate after its non-linearity, and the product. An RMS norm keeps its quotient
    as well. Where only some channels are written, the input has these alone, and the full input of
    each norm is put together and kept. Rotated queries and keys are kept besides. Attention weights
    are not kept (fused attention).
    """
    norms = 2 if model.norm == "layer" else 4
    hidden = 2 if model.feed_forward == "gelu" else 4
    attention = 2 * model.query_width + 2 * model.key_width
    if model.position == "rope":
        attention += model.query_width + model.key_width
    if model.query_key_norm:
        attention += 2 * (model.query_width + model.key_width)
    return (
        (2 + norms) * model.width + model.boundary_width + attention + hidden * model.hidden_width
    )


def read_by_head(model: ModelSpec) -> int:
    """Values that the head keeps for each token, besides its input: the norm's output, and the
    norm's input where that is put together of the written channels and the code."""
    return 2 * model.width if model.written_width else model.width


def block_matrices(model: ModelSpec) -> int:
    """Values of a block's matrices. Matrices that write into the residual stream have a row for
    each written channel."""
    queries, hidden = model.query_width, model.hidden_width
    read = model.width * (queries + 2 * model.key_width + hidden_inputs(model) * hidden)
    return read + model.boundary_width * (queries + hidden)


def hidden_inputs(model: ModelSpec) -> int:
    """Matrices that lead into the hidden layer: SwiGLU has a second one for its gate."""
    return 1 if model.feed_forward == "gelu" else 2
