"""Random tiny models made by `transformers` itself, of each family and with each choice."""

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.gpt import token_loss_sum
from p2p_dtfm.train.model.optimizer import learning_rate
from p2p_dtfm.train.model.plain_optimizers import torch_adam_w

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_STRETCHED = {"rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8}
CASES: dict[str, tuple[str, dict]] = {
    "gpt2": ("gpt2", {"n_inner": 40, "layer_norm_epsilon": 1e-6}),
    "llama": ("llama", {"rms_norm_eps": 1e-5}),
    "llama, one group": ("llama", {"num_key_value_heads": 1, "attention_bias": True}),
    "llama, biases": ("llama", {"head_dim": 10, "mlp_bias": True, "num_key_value_heads": 4}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                **_STRETCHED,
            }
        },
    ),
    "yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", **_STRETCHED}}),
    "yarn, all stated": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
                **_STRETCHED,
            }
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, biases": ("qwen3", {"head_dim": 6, "attention_bias": True}),
}


def make_model(family: str, seed: int = 2, **changes: object) -> PreTrainedModel:
    """Every parameter random and large enough to matter, norms and biases too."""
    torch.manual_seed(seed)
    model: PreTrainedModel
    if family == "gpt2":
        sizes = {"vocab_size": 61, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 4}
        config = {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
        model = GPT2LMHeadModel(GPT2Config(**(sizes | config | changes)))
    elif family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**(_SIZES | changes)))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**(_SIZES | changes)))
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    return model.eval()


def made(case: str, **changes: object) -> PreTrainedModel:
    family, choices = CASES[case]
    return make_model(family, **(choices | changes))


def losses_of(model: PreTrainedModel, spec: RunSpec, batch, steps: int) -> list[float]:
    """The loss of each step of transformers' own model under torch's AdamW; `batch(step,
    microbatch)`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch_adam_w(spec, trained)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_sum = 0.0
        for microbatch in range(spec.microbatches_per_step):
            inputs, targets = batch(step, microbatch)
            loss = token_loss_sum(model(inputs).logits, targets) / spec.tokens_per_step
            loss.backward()
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, spec.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec, step)
        optimizer.step()
        found.append(loss_sum)
    return found
