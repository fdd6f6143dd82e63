"""The choices of `[model]`: presets fill them, contradictions are refused, GPT-2's is unstated."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.model_spec import ModelSpec
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.core.protocol.workload import workload_of
from tests.core.builders import run_spec

CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = {"layers": 4, "width": 32, "heads": 4, "context": 32, "vocabulary": 256}
NAMES = {
    "tiny": "fff8429975703e0ca05c17bd961cfb2de16a2d5a44401808a448c7cc2d9e1ea2",
    "gpt2-small": "d2960dca316c1f163cb62dee15edff415b8cf322f6982c6619923520ce1ac20e",
    "gpt3-xl": "9e14d773391aaac6d372e8feefb022f4f63a4c2a9694f340027b1881bc9cfb7b",
}


def with_model(**model: object) -> RunSpec:
    values = run_spec().model_dump()
    return parse_run_spec(values | {"model": SIZES | model}, "here.toml")


@pytest.mark.parametrize("name", NAMES)
def test_runs_keep_the_names_that_they_had_before_there_were_choices(name: str) -> None:
    values = tomllib.loads((CONFIGS / f"{name}.toml").read_text(encoding="utf-8"))
    assert parse_run_spec(values, name).digest() == NAMES[name]


def test_what_is_stated_and_the_default_is_the_same_run() -> None:
    plain = with_model()
    assert with_model(norm="layer", rope={}, kv_heads=0, preset="gpt2").digest() == plain.digest()
    stated = decode(plain.canonical_bytes(), dict[str, Any])["model"]
    assert stated.keys() == {*SIZES, "initial"}
    assert with_model(kv_heads=2).digest() != plain.digest()


def test_presets_fill_in_what_is_not_stated() -> None:
    llama = with_model(preset="llama").model
    assert (llama.norm, llama.position, llama.feed_forward) == ("rms", "rope", "swiglu")
    assert not llama.attention_bias and not llama.feed_forward_bias
    assert llama.hidden_width == 88 and llama.rope.theta == 10000.0
    qwen3 = with_model(preset="qwen3", head_width=16, kv_heads=2, rope={"factor": 1.0}).model
    assert qwen3.query_key_norm and qwen3.rope.theta == 1e6 and qwen3.norm_epsilon == 1e-6
    assert (qwen3.query_width, qwen3.key_width) == (64, 32)
    wide = with_model(preset="llama", feed_forward_width=96, norm_epsilon=1e-6, rope={"theta": 5e5})
    assert (wide.model.hidden_width, wide.model.norm_epsilon) == (96, 1e-6)
    assert with_model(preset="gpt2").model == ModelSpec.model_validate(SIZES)


def test_a_run_with_choices_comes_back_from_its_bytes() -> None:
    rope = {"theta": 5e5, "scaling": "llama3", "factor": 8.0, "original_positions": 16}
    spec = with_model(preset="qwen3", rope=rope | {"positions": 128}, attention_bias=True)
    assert RunSpec.from_canonical_bytes(spec.canonical_bytes()) == spec


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        ({"preset": "mamba"}, "preset must be one of 'gpt2', 'llama', 'qwen3'"),
        ({"preset": 3}, "preset must be one of"),
        ({"norm": "batch"}, "model.norm: must be 'layer' or 'rms'"),
        ({"kv_heads": 3}, r"kv_heads \(3\) must divide heads \(4\)"),
        ({"width": 33}, "head_width says how wide"),
        ({"rope": {"theta": 5e5}}, 'position is not "rope"'),
        ({"position": "rope", "head_width": 7}, "one too many"),
        ({"query_key_norm": True}, 'norm is not "rms"'),
        ({"preset": "llama", "rope": {"factor": 2.0}}, "factor belongs to the scaling"),
        ({"preset": "llama", "rope": {"scaling": "linear", "fast_rotations": 3.0}}, "yarn"),
        ({"preset": "llama", "rope": {"scaling": "yarn"}}, "needs original_positions"),
        ({"preset": "llama", "rope": {"positions": 16}}, "longer than the 16 positions"),
        (
            {
                "preset": "llama",
                "rope": {
                    "scaling": "llama3",
                    "original_positions": 8,
                    "low_frequency_factor": 4.0,
                },
            },
            "must be less than high_frequency_factor",
        ),
        ({"preset": "llama", "rope": {"thetta": 1.0}}, "unknown key 'model.rope.thetta'"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(model: dict, cause: str) -> None:
    with pytest.raises(UserError, match=cause) as caught:
        with_model(**model)
    assert caught.value.fixes


def test_a_tied_head_and_inner_steps_are_refused() -> None:
    values = run_spec(sync={"mode": "local", "inner_steps": 2}).model_dump()
    with pytest.raises(UserError, match="the two copies of the matrix would part"):
        parse_run_spec(values | {"model": SIZES | {"tied_head": True}}, "here.toml")


def test_a_tied_head_may_lie_elsewhere_unless_work_is_audited() -> None:
    tied = with_model(tied_head=True)
    assert not workload_of(tied).one_stage
    assert workload_of(tied).head.shared_bytes == 4 * tied.model.vocabulary * tied.model.width
    assert not workload_of(with_model()).head.shared_bytes
    audited = tied.model_copy(update={"audit": tied.audit.model_copy(update={"rate": 0.1})})
    assert workload_of(audited).one_stage


def test_sizes_follow_the_choices() -> None:
    """Llama 3.2 1B and Qwen3 0.6B, as published but for their heads, which are tied there."""
    llama = with_model(
        preset="llama", layers=16, width=2048, heads=32, kv_heads=8, vocabulary=128256,
        feed_forward_width=8192,
    )  # fmt: skip
    qwen3 = with_model(
        preset="qwen3", layers=28, width=1024, heads=16, kv_heads=8, head_width=128,
        vocabulary=151936, feed_forward_width=3072,
    )  # fmt: skip
    for spec, published in ((llama, 1_235_814_400), (qwen3, 596_049_920)):
        work = workload_of(spec)
        total = sum(work.cost(layer).parameter_count for layer in range(work.layer_count))
        assert total - spec.model.vocabulary * spec.model.width == published
