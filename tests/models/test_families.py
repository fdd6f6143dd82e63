"""Llama, Qwen3 and GPT-2 go in and out, train as `transformers` trains them, or are refused."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.train.data.byte_pairs import KNOWN_PATTERNS, BytePairTokenizer
from p2p_dtfm.train.hugging_face.export import export_hugging_face, export_safetensors
from p2p_dtfm.train.hugging_face.model_import import Training, import_hugging_face
from p2p_dtfm.train.hugging_face.tokenizer_json import read_tokenizer_json
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.optimizer import apply_outcome, learning_rate
from p2p_dtfm.train.model.plain_optimizers import torch_adam_w
from p2p_dtfm.train.stage.stage_runner import StageRunner
from p2p_dtfm.train.stage.tied_head import counted_once, tie
from p2p_dtfm.train.updates.exact_sums import squared_norm
from tests.models.conftest import make_spec, own_logits, random_states
from tests.models.families import CASES, made, make_model
from tests.models.test_hugging_face import imported_states, tokens_of
from tests.train.saved_layers import save_layers

STEPS = 6
TRAINING = Training("python-standard-library", 20, 4, 2, 3e-3)


def logits_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens).logits


def their_model(directory: Path) -> torch.nn.Module:
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("case", CASES)
def test_the_circle_gives_the_same_logits(case: str, tmp_path: Path) -> None:
    theirs = made(case)
    theirs.save_pretrained(tmp_path / "hf")
    spec = import_hugging_face(tmp_path / "hf", tmp_path / "in", "", TRAINING)
    states = imported_states(tmp_path / "in", spec)
    for state in states:
        assert state.parameter_count == workload_of(spec).cost(state.layer).parameter_count
    tokens = tokens_of(spec)
    assert tokens.shape[1] == 32
    expected = logits_of(theirs, tokens)
    assert expected.abs().max() > 1
    assert (own_logits(states, tokens) - expected).abs().max() < 1e-5
    export_hugging_face(tmp_path / "in", tmp_path / "out", None)
    again = their_model(tmp_path / "out")
    assert type(again) is type(theirs)
    assert torch.equal(logits_of(again, tokens), expected), "the same parameters"
    assert again.config.eos_token_id == 2
    before, after = theirs.config.to_dict(), again.config.to_dict()
    for name in ("rope_parameters", "max_position_embeddings", "n_positions", "head_dim"):
        stated = (
            {k: v for k, v in after.get(name, {}).items() if k in before[name]}
            if (isinstance(before.get(name), dict))
            else after.get(name)
        )
        if case != "yarn, all stated":
            assert stated == before.get(name), name
    checkpoint = save_layers(tmp_path / "checkpoints", spec, 0, 0, states)
    export_hugging_face(checkpoint, tmp_path / "trained", None)
    assert torch.equal(logits_of(their_model(tmp_path / "trained"), tokens), expected)


def test_a_run_may_train_shorter_sequences_than_the_model_is_made_for(tmp_path: Path) -> None:
    theirs = made("dynamic", max_position_embeddings=4096)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file()
    notes: list[str] = []
    spec = import_hugging_face(tmp_path / "hf", tmp_path / "in", "", TRAINING, tell=notes.append)
    assert spec.model.context == 1024 and spec.model.rope.positions == 4096
    assert "up to 4096" in notes[0]
    short = Training("python-standard-library", 20, 4, 2, 3e-3, context=16)
    spec = import_hugging_face(tmp_path / "hf", tmp_path / "short", "", short)
    assert spec.model.context == 16
    export_hugging_face(tmp_path / "short", tmp_path / "out", None)
    tokens = tokens_of(spec)
    again = their_model(tmp_path / "out")
    assert torch.equal(logits_of(again, tokens), logits_of(theirs, tokens))
    assert again.config.max_position_embeddings == 4096
    made("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match="has learned 32 positions"):
        import_hugging_face(tmp_path / "gpt2", tmp_path / "no", "", short)


@pytest.mark.parametrize("untie", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_a_tied_head_stays_so_or_becomes_one_of_its_own(
    family: str, untie: bool, tmp_path: Path
) -> None:
    theirs = make_model(family, tie_word_embeddings=True)
    theirs.save_pretrained(tmp_path / "hf")
    notes: list[str] = []
    training = replace(TRAINING, untie=untie)
    spec = import_hugging_face(tmp_path / "hf", tmp_path / "in", "", training, tell=notes.append)
    assert any(("a copy of it" if untie else "--untie") in note for note in notes)
    assert spec.model.tied_head is not untie
    tokens = tokens_of(spec)
    expected = logits_of(theirs, tokens)
    assert (
        own_logits(imported_states(tmp_path / "in", spec), tokens) - expected
    ).abs().max() < 1e-5
    export_hugging_face(tmp_path / "in", tmp_path / "out", None)
    again = their_model(tmp_path / "out")
    assert torch.equal(logits_of(again, tokens), expected)
    assert again.config.tie_word_embeddings is not untie
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in weights) is untie


def test_a_tied_model_of_two_unlike_matrices_is_not_exported(tmp_path: Path) -> None:
    spec = make_spec(tied_head=True)
    states = [LayerState.genesis(spec, layer) for layer in range(layer_count(spec))]
    whole = save_layers(tmp_path / "whole", spec, 0, 0, states)
    export_hugging_face(whole, tmp_path / "out", None)
    states[-1].parameters[-1] += 1
    torn = save_layers(tmp_path / "torn", spec, 0, 0, states)
    with pytest.raises(UserError, match="unlike matrices"):
        export_hugging_face(torn, tmp_path / "no", None)


class TwoStages:
    """The stages of two peers in one process, as the daemon runs them; one stage where the head is
    tied."""

    def __init__(self, spec: RunSpec, states: list[LayerState]) -> None:
        self.spec = spec
        self.states = states
        cut = len(states) // 2
        parts = [states] if spec.model.tied_head else [states[:cut], states[cut:]]
        self.runners = [StageRunner(spec, {state.layer: state for state in it}) for it in parts]

    def step(self, step: int, inputs: Tensor, targets: Tensor) -> float:
        first, last = self.runners[0], self.runners[-1]
        loss_sum = 0.0
        parts = zip(inputs.split(2), targets.split(2), strict=True)
        for microbatch, (given, wanted) in enumerate(parts):
            if first is last:
                loss_sum += last.forward(microbatch, given, wanted)
                last.backward(microbatch)
                continue
            loss_sum += last.forward(microbatch, first.forward(microbatch, given), wanted)
            gradient = last.input_backward(microbatch)
            first.backward(microbatch, gradient)
            last.weight_backward(microbatch)
        reduced = {state.layer: state.gradient.clone() for state in self.states}
        if self.spec.model.tied_head:
            reduced |= tie(self.spec, reduced)
        counted = [counted_once(self.spec, layer, it) for layer, it in reduced.items()]
        norm = math.sqrt(math.fsum(map(squared_norm, counted)))
        for state in self.states:
            apply_outcome(self.spec, state, reduced[state.layer], step, norm)
        return loss_sum / self.spec.tokens_per_step


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", ["gpt2", "llama, biases", "llama3", "qwen3"])
def test_stages_train_as_transformers_own_model_under_torchs_optimizer(
    case: str, tied: bool, tmp_path: Path
) -> None:
    theirs = made(case, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path / "hf")
    spec = import_hugging_face(tmp_path / "hf", tmp_path / "in", "", TRAINING)
    ours = TwoStages(spec, imported_states(tmp_path / "in", spec))
    optimizer = torch_adam_w(spec, list(theirs.parameters()))
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(61, (4, 33), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    losses = []
    for step in range(STEPS):
        measured = ours.step(step, inputs, targets)
        optimizer.zero_grad()
        loss = functional.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), spec.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec, step)
        optimizer.step()
        losses.append((measured, loss.item()))
    assert max(abs(a - b) for a, b in losses) < 1e-4, losses
    assert losses[-1][1] < losses[0][1] - 0.05, "nothing was learnt, so nothing was compared"
    shared = ours.states[0].parameters[: 61 * 24]
    assert torch.equal(shared, ours.states[-1].parameters[-61 * 24 :]) is tied


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope type 'su'"),
        ({"rope_parameters": {"rope_type": ["linear"], "factor": 2.0}}, "rope type"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "factor is 'x'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "rope.factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is None"),
        ({"rope_parameters": {"short_mscale": 2.0}}, "'short_mscale' is unknown"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope.theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": 32}, "has the shape"),
        ({"head_dim": 7}, "one too many"),
        ({"num_key_value_heads": 3}, "must divide"),
        ({"num_attention_heads": 0}, "model.heads"),
        ({"num_hidden_layers": 3}, r"lacks model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"holds model\.layers\.1"),
        ({"intermediate_size": None}, "does not describe"),
        ({"vocab_size": 1 << 40}, "model.vocabulary"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "slides"),
    ],
)
def test_configurations_that_cannot_be_trained_are_refused(
    change: dict, cause: str, llama: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "hf"
    copy.mkdir()
    (copy / "model.safetensors").symlink_to(llama / "model.safetensors")
    content = json.loads((llama / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(UserError, match=cause) as caught:
        import_hugging_face(copy, tmp_path / "in", "", TRAINING)
    assert caught.value.fixes
    assert not list(tmp_path.glob("in*")), "nothing half-imported stays"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    made("llama").save_pretrained(directory)
    return directory


def without(name: str) -> Callable[[dict], dict]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def with_tensor(name: str, tensor: Tensor) -> Callable[[dict], dict]:
    return lambda tensors: tensors | {name: tensor}


LAST = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (without("lm_head.weight"), r"lacks lm_head\.weight"),
        (without(LAST), "lacks model.layers.1.mlp.down_proj.weight"),
        (with_tensor(LAST, torch.ones(24, 41)), "has the shape"),
        (with_tensor(LAST, torch.full((24, 40), math.nan)), "no numbers"),
        (with_tensor(LAST, torch.full((24, 40), math.inf, dtype=torch.float16)), "no numbers"),
        (with_tensor(LAST, torch.ones(24, 40, dtype=torch.int8)), "is stored as I8"),
        (with_tensor("model.layers.1.self_attn.q_proj.bias", torch.ones(24)), "does not have"),
    ],
)
def test_damaged_weights_are_refused(
    change: Callable[[dict], dict], cause: str, llama: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "hf"
    copy.mkdir()
    (copy / "config.json").symlink_to(llama / "config.json")
    save_file(change(load_file(llama / "model.safetensors")), copy / "model.safetensors")
    with pytest.raises(UserError, match=cause) as caught:
        import_hugging_face(copy, tmp_path / "in", "", TRAINING)
    assert caught.value.fixes
    assert not list(tmp_path.glob("in*")), "nothing half-imported stays"


def test_a_pickle_is_not_opened(llama: Path, tmp_path: Path) -> None:
    copy = tmp_path / "hf"
    copy.mkdir()
    (copy / "config.json").symlink_to(llama / "config.json")
    torch.save({"x": torch.ones(2)}, copy / "pytorch_model.bin")
    with pytest.raises(UserError, match="is a pickle") as caught:
        import_hugging_face(copy, tmp_path / "in", "", TRAINING)
    assert "save_pretrained" in caught.value.fixes[0]
    (copy / "pytorch_model.bin").rename(copy / "model.safetensors")
    with pytest.raises(UserError, match="cannot read"):
        import_hugging_face(copy, tmp_path / "in", "", TRAINING)
    assert not list(tmp_path.glob("in*"))


def test_a_model_that_transformers_does_not_know_goes_out_under_our_names(tmp_path: Path) -> None:
    spec = make_spec(norm="rms", feed_forward="swiglu", feed_forward_width=32)
    saved = save_layers(tmp_path / "c", spec, 0, 0, random_states(spec))
    with pytest.raises(UserError, match="position is 'learned'") as caught:
        export_hugging_face(saved, tmp_path / "out", None)
    assert "safetensors" in caught.value.fixes[0] and not (tmp_path / "out").exists()
    export_safetensors(saved, tmp_path / "model.safetensors")
    assert "layer.1.feed_forward_input.weight" in load_file(tmp_path / "model.safetensors")


def their_tokenizer(vocabulary: int, pattern: str = "") -> PreTrainedTokenizerFast:
    """A byte-level tokenizer as published with Llama 3: special tokens last, and a chat
    template."""
    inner = Tokenizer(models.BPE(ignore_merges=bool(pattern)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern:
        inner.normalizer = normalizers.NFC()
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator(["some words, some more words 1234 12 " * 50], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.add_special_tokens({"bos_token": "<|begin|>", "eos_token": "<|end|>"})
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    return tokenizer


def test_the_tokenizer_goes_round_or_is_refused_where_it_does_not_match(tmp_path: Path) -> None:
    tokenizer = their_tokenizer(280)
    make_model("llama", vocab_size=288).save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")
    import_hugging_face(tmp_path / "hf", tmp_path / "in", "", TRAINING)
    export_hugging_face(tmp_path / "in", tmp_path / "out", None)
    spec = import_hugging_face(tmp_path / "hf", tmp_path / "again", "", TRAINING)
    states = imported_states(tmp_path / "again", spec)
    trained = save_layers(tmp_path / "checkpoints", spec, 0, 0, states)
    plain = read_tokenizer_json(tmp_path / "in" / "tokenizer.json")
    export_hugging_face(trained, tmp_path / "trained", plain, origin=tmp_path / "in" / "origin")
    written = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("out", "trained")]
    assert written[0] == written[1]
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "some words <|end|> é"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.eos_token == "<|end|>" and again.chat_template == tokenizer.chat_template
    make_model("llama", vocab_size=len(tokenizer) - 1).save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    with pytest.raises(UserError, match="tokenizer of another model"):
        import_hugging_face(tmp_path / "small", tmp_path / "no", "", TRAINING)
    (tmp_path / "small" / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    with pytest.raises(UserError, match="cannot be used"):
        import_hugging_face(tmp_path / "small", tmp_path / "no", "", TRAINING)
    assert not list(tmp_path.glob("no*"))


@pytest.mark.parametrize("pattern", sorted(KNOWN_PATTERNS), ids=["llama3", "qwen"])
def test_words_may_be_split_as_in_well_known_models(pattern: str, tmp_path: Path) -> None:
    theirs = their_tokenizer(290, pattern)
    theirs.save_pretrained(tmp_path)
    ours = read_tokenizer_json(tmp_path / "tokenizer.json")
    again = BytePairTokenizer.from_bytes(ours.to_bytes())
    for text in ("some more words 1234\n\n  don't", "  e\u0301t\u00e9 12345 words' x\t!?\n", ""):
        expected = theirs(text)["input_ids"]
        assert ours.encode(text).tolist() == again.encode(text).tolist() == expected
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a+)+$"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="splits words in a way"):
        read_tokenizer_json(path)
