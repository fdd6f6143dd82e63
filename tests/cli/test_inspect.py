"""`p2p-dtfm inspect`, and the bytes of each kind as the reference implementation of MessagePack
reads them."""

import json
from pathlib import Path

import msgpack
import msgspec
import pytest
from typer.testing import CliRunner

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands.offline import inspect  # noqa: F401  (registers the command)
from p2p_dtfm.core.messages.agreement_messages import KnownView
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.canonical import encode, encode_for_wire
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.plan import NoPlan
from p2p_dtfm.core.protocol.records import packed
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Bar
from p2p_dtfm.daemon.machine.view_history import ViewHistory, ViewsFile
from p2p_dtfm.net.streams.frames import (
    PART_BYTES,
    FrameHeader,
    FrameKind,
    encode_frame,
    encode_part,
)
from p2p_dtfm.train.model.checkpoint import checkpoint_directory, layer_path
from p2p_dtfm.train.model.layer_state import LayerState
from tests.core.builders import record, run_spec
from tests.core.planning import Peer, snapshot
from tests.train.saved_layers import save_layers

RECORD = record("12D3KooWalice")
SNAPSHOT = snapshot([Peer(), Peer(), Peer()])
PLAN = compute_plan(SNAPSHOT)
VIEWS = ViewsFile("run", (KnownView(SNAPSHOT.view_id, SNAPSHOT.members, PLAN.digest()),))
SIGNED = Signed(RECORD.peer_id, "record", encode(packed(RECORD)), b"\x01" * 64)
HEADER = FrameHeader(3, "ab" * 32, 7, FrameKind.ACTIVATION, 5, 2, "fp32", "float32", (2, 4))
KINDS = {
    "record": (RECORD, ("record of 12D3KooWalice, life 1", "intent: train")),
    "snapshot": (SNAPSHOT, ("planned view 1", "3 members", "record of peer-0002")),
    "plan": (PLAN, ("pipeline 1, ", "peer-0000 layers")),
    "no plan": (NoPlan("nobody has memory"), ("no plan: nobody has memory",)),
    "history of views": (VIEWS, ("history of 1 view of", "peer-0001")),
    "signed statement": (SIGNED, ("record signed by 12D3KooWalice", "record of 12D3KooWalice")),
}


def in_lists(value):
    """MessagePack knows one kind of array."""
    if isinstance(value, dict):
        return {key: in_lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [in_lists(item) for item in value]
    return value


def typed(path: Path, *options: str):
    return CliRunner().invoke(app, ["inspect", str(path), *options])


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_told_and_is_what_the_reference_reads(kind: str, tmp_path: Path) -> None:
    value, words = KINDS[kind]
    for number, payload in enumerate((encode(value), encode_for_wire(value))):
        read = msgpack.unpackb(payload, strict_map_key=False)
        assert read == in_lists(msgspec.to_builtins(value, builtin_types=(bytes,)))
        path = tmp_path / f"disagreement-{number}.msgpack"
        path.write_bytes(payload)
        told = typed(path).stdout
        assert all(word in told for word in words), told
        assert json.loads(typed(path, "--json").stdout)["kind"] == kind


def test_frames_and_parts_are_told_and_a_torn_one_is_told_so(tmp_path: Path) -> None:
    payload = bytes(range(32))
    header, before = encode_frame(HEADER, payload)
    assert before[:4] == b"DTFM"
    read = msgspec.to_builtins(header, builtin_types=(bytes,))
    assert msgpack.unpackb(before[8:]) == in_lists(read)
    large = memoryview(bytes(PART_BYTES + 8))
    shaped = msgspec.structs.replace(HEADER, shape=(len(large) // 4,))
    parts = [
        encode_part(shaped, 9, at, large) + large[at * PART_BYTES :][:PART_BYTES] for at in (0, 1)
    ]
    path = tmp_path / "captured"
    path.write_bytes(before + payload + b"".join(parts))
    told = typed(path).stdout.splitlines()
    assert told[0] == "3 frames"
    assert "activation of view 3:abababababab, step 7, number 5, layer 2: 2 x 4 float32" in told[1]
    assert told[3].endswith("part 1 of frame 9")
    values = json.loads(typed(path, "--json").stdout)["values"]
    assert [each["step"] for each in values["frames"]] == [7, 7, 7] and values["end"] == ""
    path.write_bytes(before + payload + before[:9])
    assert typed(path).stdout.splitlines()[-1] == "then a frame that is not whole"
    path.write_bytes(before + payload[::-1])
    assert "checksum" in typed(path).stdout


def test_a_checkpoint_is_told_by_its_manifest_and_by_a_layer(tmp_path: Path) -> None:
    spec = run_spec()
    state = LayerState.genesis(spec, 1)
    save_layers(tmp_path, spec, 0, 0, [state])
    directory = checkpoint_directory(tmp_path, 0)
    told = typed(directory / "manifest.json").stdout
    assert "manifest of a checkpoint of format 1, step 0" in told
    assert f"run {spec.name}: {spec.model.layers} layers" in told
    layer = layer_path(directory, 1)
    told = typed(layer).stdout
    assert told.startswith("safetensors, ") and "lack" not in told and "version 0" in told
    layer.write_bytes(layer.read_bytes()[:-5])
    assert "5 bytes lack" in typed(layer).stdout


def test_a_plan_as_the_plan_command_prints_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"view": 1, "plan": msgspec.to_builtins(PLAN)}))
    assert typed(path).stdout.startswith(f"plan {PLAN.digest()[:16]}")


def test_views_as_a_daemon_writes_them(tmp_path: Path) -> None:
    history = ViewHistory(tmp_path, "run")
    history.keep(VIEWS.views, (Bar(SNAPSHOT.view_id, 7, "peer-0009", 1, 90, "sums"),))
    history.write()
    told = typed(tmp_path / "runs" / "run" / "views.msgpack").stdout
    assert told.startswith("history of 1 view of run run") and "peer-0001" in told
    assert "peer-0009 is barred until step 90" in told


@pytest.mark.parametrize("payload", [b"", b"{", b"DTF", b"\xff" * 40, b"hello", b"{}", b"[1]"])
def test_anything_else_is_refused_with_what_could_be_named(payload: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(payload)
    failed = typed(path)
    assert isinstance(failed.exception, UserError) and "disagreement" in failed.exception.fixes[0]
    assert isinstance(typed(tmp_path / "none").exception, UserError)


def test_what_a_stranger_wrote_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_bytes(encode(record("evil\x1b[2J")))
    assert "\x1b" not in typed(path).stdout


def with_header(said: object) -> bytes:
    head = json.dumps(said).encode()
    return len(head).to_bytes(8, "little") + head + bytes(8)


def tensor(**said: object) -> dict[str, object]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **said}}


def manifest(layers: object) -> bytes:
    spec = run_spec().canonical_bytes().hex()
    return json.dumps({"format": 1, "run_spec": spec, "step": 0, "layers": layers}).encode()


def plan_json(**said: object) -> bytes:
    return json.dumps({**msgspec.to_builtins(PLAN), **said}).encode()


FALSE = {
    "an offset that is text": with_header(tensor(data_offsets=[0, "x"])),
    "an offset that is endless": with_header(tensor(data_offsets=[0, float("inf")])),
    "an offset without measure": with_header(tensor(data_offsets=[0, 10**400])),
    "an offset below nothing": with_header(tensor(data_offsets=[0, -1])),
    "a shape that is text": with_header(tensor(shape="F32")),
    "a head without a bottom": with_header(tensor()).replace(b"[2]", b"[" * 5000 + b"]" * 5000),
    "a layer's size that is text": manifest({"0": {"bytes": "x"}}),
    "a layer's size without measure": manifest({"0": {"bytes": 10**400}}),
    "a plan's time without measure": plan_json(predicted_step_ns=10**400),
    "a spare with half a letter": plan_json(spares=["\ud800"]),
}


@pytest.mark.parametrize("name", FALSE)
def test_what_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "false"
    path.write_bytes(FALSE[name])
    for options in ((), ("--json",)):
        assert isinstance(typed(path, *options).exception, UserError), name
