"""Run specs: an error about an unknown key or a wrong value says how to mend it; the digest names
the run."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.core.commit.step_terms import terms_of
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.layers.listed import LayerSizes
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.core.protocol.sections.audit_spec import UNDO_COPIES
from tests.core.builders import run_spec


def values() -> dict:
    return json.loads(run_spec().model_dump_json())


def error_of(changed: dict) -> UserError:
    with pytest.raises(UserError) as caught:
        parse_run_spec(changed, "here.toml")
    assert caught.value.cause.startswith("here.toml: ")
    assert caught.value.exit_code == 2
    return caught.value


def test_a_fix_names_what_is_to_change_and_not_all_that_stands_there() -> None:
    changed = values()
    changed["model"]["heads"] = 3
    assert error_of(changed).fixes == ("change model",)
    changed = values()
    changed["model"]["context"] = 4_800_000
    assert "model.context: must be 1048576 or less" in error_of(changed).cause


SECTIONS = [name for name, value in values().items() if isinstance(value, dict)]


@pytest.mark.parametrize(
    "section, wrong, meant",
    [
        ("", "total_step", "total_steps"),
        ("", "optimiser", "optimizer"),
        ("model", "layer", "layers"),
        ("batch", "micro_batch", "microbatch"),
        ("optimizer", "learning_rate", "peak_learning_rate"),
        ("data", "sources", "source"),
        ("evaluation", "every_step", "every_steps"),
        ("codecs", "activation", "activations"),
        ("sync", "modes", "mode"),
        ("limits", "min_member", "min_members"),
        ("checkpoint", "keeps", "keep"),
    ],
)
def test_an_unknown_key_anywhere_is_refused_with_a_suggestion(
    section: str, wrong: str, meant: str
) -> None:
    changed = values()
    (changed[section] if section else changed)[wrong] = 1
    error = error_of(changed)
    where = f"{section}.{wrong}" if section else wrong
    assert f"unknown key {where!r}" in error.cause
    assert f"did you mean {meant!r}" in error.fixes[0]


@pytest.mark.parametrize("section", ["", *SECTIONS])
def test_a_key_that_resembles_nothing_lists_what_there_is(section: str) -> None:
    changed = values()
    (changed[section] if section else changed)["zzzzqqqq"] = 1
    known, otherwise = error_of(changed).fixes[0].split(". ")
    assert known.startswith("known keys: ") and otherwise.startswith("Otherwise remove ")


@pytest.mark.parametrize(
    "path, value",
    [
        ("total_steps", 0),
        ("total_steps", "many"),
        ("total_steps", 1.5),
        ("name", "No Spaces"),
        ("seed", -1),
        ("model", 5),
        ("model.layers", 0),
        ("model.heads", 5),
        ("batch.microbatch", 3),
        ("optimizer.peak_learning_rate", float("nan")),
        ("optimizer.peak_learning_rate", float("inf")),
        ("optimizer.beta1", 1.0),
        ("optimizer.clip_norm", 0),
        ("evaluation.sequences", 3),
        ("codecs.activations", ["zip"]),
        ("sync.mode", "sometimes"),
        ("data.manifest", "../etc/passwd"),
        ("checkpoint.keep", 1),
    ],
)
def test_a_wrong_value_is_named_with_its_place(path: str, value: object) -> None:
    changed = values()
    *sections, key = path.split(".")
    target = changed
    for section in sections:
        target = target[section]
    target[key] = value
    error = error_of(changed)
    assert sections[0] in error.cause if sections else key in error.cause
    assert error.fixes


def test_every_mistake_is_named_at_once() -> None:
    changed = values()
    changed["blocks"] = 3
    del changed["total_steps"]
    changed["model"]["width"] = "wide"
    cause = error_of(changed).cause
    assert all(word in cause for word in ("'blocks'", "'total_steps' is missing", "model.width"))


def test_the_digest_is_the_same_in_every_process() -> None:
    program = (
        "import sys, json; from p2p_dtfm.core.protocol.run_spec import RunSpec;"
        "print(RunSpec.model_validate(json.load(sys.stdin)).digest())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            input=run_spec().model_dump_json(),
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "4242")
    }
    assert seen == {run_spec().digest()}


def test_the_order_of_keys_does_not_change_the_run() -> None:
    backwards = dict(reversed(values().items()))
    assert parse_run_spec(backwards, "x").digest() == run_spec().digest()


def test_any_change_is_another_run() -> None:
    specs = [run_spec(), run_spec(seed=8), run_spec(name="other"), run_spec(total_steps=21)]
    assert len({spec.digest() for spec in specs}) == len(specs)


@given(
    st.floats(min_value=1e-300, max_value=1e300),
    st.floats(min_value=0, max_value=1, exclude_max=True),
)
def test_floats_come_back_exactly_from_canonical_bytes(rate: float, beta: float) -> None:
    spec = run_spec(optimizer={"peak_learning_rate": rate, "beta1": beta})
    again = RunSpec.from_canonical_bytes(spec.canonical_bytes())
    assert again == spec
    assert again.optimizer.peak_learning_rate == rate
    assert again.canonical_bytes() == spec.canonical_bytes()


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", encode([1]), encode({}), encode({"name": "x"}), b"\x00" * (1 << 17)],
    ids=["empty", "rubbish", "list", "nothing", "partial", "oversize"],
)
def test_a_run_spec_from_a_stranger_is_whole_or_a_fault(payload: bytes) -> None:
    with pytest.raises(PeerFault):
        RunSpec.from_canonical_bytes(payload)


@pytest.mark.parametrize(
    "path",
    [
        ("checkpoint", "every_steps"),
        ("checkpoint", "keep"),
        ("evaluation", "every_steps"),
        ("evaluation", "sequences"),
        ("optimizer", "warmup_steps"),
        ("optimizer", "decay_steps"),
    ],
)
def test_a_number_that_has_no_canonical_bytes_is_a_fault(path: tuple[str, str]) -> None:
    """Such a run spec was taken, as numbers may stand as text. Whoever asked for its digest ended
    with `OverflowError`: the directory's nodes that it was brought to, and the founder's command.
    """
    section, key = path
    changed = values()
    changed["optimizer"]["schedule"] = "wsd"
    changed[section][key] = "4" * 40
    with pytest.raises(PeerFault, match=key):
        RunSpec.from_canonical_bytes(encode(changed))
    changed[section][key] = 1 << 80
    assert f"{section}.{key}: must be" in error_of(changed).cause


def test_a_run_spec_with_more_than_we_know_is_a_fault() -> None:
    with pytest.raises(PeerFault, match="does not validate"):
        RunSpec.from_canonical_bytes(encode(values() | {"new_feature": 1}))


def test_of_thousands_of_faults_the_first_ones_are_told() -> None:
    """Of 65 KB of a stranger 1.2 MB were told to be wrong, on the screen of who joins."""
    changed = values()
    changed["model"] |= {f"k{n}": n for n in range(6000)}
    with pytest.raises(PeerFault, match="does not validate") as caught:
        RunSpec.from_canonical_bytes(encode(changed))
    assert len(caught.value.cause) < 2000


def test_choices_that_do_nothing_or_harm_are_refused() -> None:
    changed = values()
    changed["optimizer"] |= {"kind": "adamw", "muon": {"peak_learning_rate": 0.05}}
    assert 'only with optimizer.kind = "muon"' in error_of(changed).cause
    changed = values()
    changed["codecs"]["reduction"] = "sign"
    assert 'needs sync.mode = "local"' in error_of(changed).cause
    changed["sync"]["mode"] = "local"
    changed["sync"]["inner_steps"] = 2
    assert parse_run_spec(changed, "here.toml").codecs.reduction == "sign"


def test_a_run_with_adamw_keeps_the_name_it_had_before_there_was_muon() -> None:
    spec = run_spec()
    assert b"muon" not in spec.canonical_bytes() and b"kind" not in spec.canonical_bytes()
    muon = spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"kind": "muon"})})
    assert RunSpec.from_canonical_bytes(muon.canonical_bytes()) == muon
    assert muon.digest() != spec.digest()


A_PEER = "12D3KooWP8cRVSzGdzoFj7gW587Fi9LV6TqxXSAc6LEGxD9S3P1n"


@pytest.mark.parametrize("name", ["brave-otter", "", "12D3KooW", A_PEER + "/x"])
def test_whom_ends_are_left_to_is_named_by_id(name: str) -> None:
    error = error_of({**values(), "privacy": {"ends": [name]}})
    assert "privacy.ends.0: must be the id of a peer" in error.cause
    assert f"(now {name!r})" in error.fixes[0]


@pytest.mark.parametrize(
    "section, key, value",
    [("audit", "rate", 0.5), ("admission", "mode", "open"), ("data", "packing", "documents")],
)
def test_what_shows_texts_to_others_does_not_go_with_it(
    section: str, key: str, value: object
) -> None:
    changed = {**values(), "privacy": {"ends": ["founder"]}}
    changed[section] = {**changed[section], key: value}
    error = error_of(changed)
    assert f"{section}.{key}" in error.cause and "with privacy.ends" in error.cause


def test_a_run_names_its_founder_and_one_that_names_nobody_keeps_its_digest() -> None:
    asked = run_spec(privacy={"ends": ["founder", A_PEER]})
    founder = "12D3KooWA1b2c3d4e5f6g7h8i9jAkBmCnDpEqFrGsHtJuKvLwMxN"
    stated = asked.model_copy(update={"privacy": asked.privacy.with_founder(founder)})
    assert stated.privacy.ends == tuple(sorted([founder, A_PEER]))
    assert RunSpec.from_canonical_bytes(stated.canonical_bytes()) == stated
    assert stated.privacy.withheld(A_PEER, 6) == frozenset()
    assert stated.privacy.withheld("12D3KooWother", 6) == {0, 5}
    assert b"privacy" not in run_spec().canonical_bytes()
    assert b"privacy" in stated.canonical_bytes()


def test_what_liars_did_is_taken_back_only_where_the_run_says_so_and_audits() -> None:
    audit = {**values()["audit"], "undo_steps": 30}
    assert "audit.undo_steps needs audit.rate" in error_of({**values(), "audit": audit}).cause
    plain, undoing = run_spec(audit={"rate": 0.1}), run_spec(audit={"rate": 0.1, "undo_steps": 30})
    assert b"undo_steps" not in plain.canonical_bytes() and plain.digest() != undoing.digest()
    assert RunSpec.from_canonical_bytes(undoing.canonical_bytes()) == undoing
    assert plain.audit.undo_every == 0 and not plain.saves_at(15)


@pytest.mark.parametrize(
    "undo_steps, checkpoints, every", [(30, 100, 15), (31, 100, 16), (30, 10, 15), (1, 100, 1)]
)
def test_states_to_go_back_to_reach_back_over_what_is_undone(
    undo_steps: int, checkpoints: int, every: int
) -> None:
    """With the newest of four still under way, the others must lie far enough back: at most
    `undo_steps`, and as much as lies between two of them, before now."""
    spec = run_spec(
        audit={"rate": 0.1, "undo_steps": undo_steps},
        checkpoint={"every_steps": checkpoints},
        total_steps=1000,
    )
    assert spec.audit.undo_every == every
    saved = [step for step in range(1, 1001) if spec.saves_at(step)]
    assert set(range(every, 1001, every)) | set(range(checkpoints, 1001, checkpoints)) == set(saved)
    assert (UNDO_COPIES - 2) * every >= undo_steps
    assert all(terms_of(spec).tells_states(step) for step in saved), "their digests are stated"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"total_steps": True}, "total_steps is true, and must be a number"),
        ({"optimizer": {"peak_learning_rate": False}}, "peak_learning_rate is false"),
        ({"codecs": {"sparse": {"bits": True}}}, "bits is true, and must be a number"),
        ({"data": {"source": ""}}, "source is empty"),
    ],
    ids=str,
)
def test_true_is_no_number_and_nothing_no_source(changes: dict[str, object], cause: str) -> None:
    """Python takes `True` for 1. A founder heard of an empty source only when it was too late."""
    spec = values()
    for name, value in changes.items():
        spec[name] = {**spec[name], **value} if isinstance(value, dict) else value
    assert cause in error_of(spec).cause


def test_true_is_no_number_in_a_list() -> None:
    sizes = {"parameters": 1, "saved_values": 1, "forward_flops": 1}
    with pytest.raises(ValueError, match="boundary has true or false where a number is due"):
        LayerSizes.model_validate({"boundary": [True, 4], **sizes})
    assert LayerSizes.model_validate({"boundary": [1, 4], **sizes}).boundary_values == 4
