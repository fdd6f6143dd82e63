"""What a file of p2p-dtfm's says. Its kind is told by its bytes, not by its name, which may be
anything.

It reads MessagePack (records, snapshots and so `disagreement-*` files, plans, histories of views,
signed statements), frames as they were captured, safetensors of a layer, and manifests of
checkpoints. Nothing in a file is believed: what is not whole is reported so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from p2p_dtfm.core.membership.bars import bar_ends_step
from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.facts.in_words import bytes_text, counted, layers_text, rate_text
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.records import RECORD_KIND, PackedRecord, PeerRecord, unpacked
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.daemon.machine.view_history import ViewsFile
from p2p_dtfm.net.streams.frames import WHOLE, FrameHeader, FrameLimits, FrameReader

FILE_LIMIT_BYTES = 256 << 20
FRAMES_TOLD = 200
HEADER_LIMIT_BYTES = 1 << 20
"""Most bytes of a safetensors file's header."""


Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]


class _Tensor(msgspec.Struct, frozen=True):
    """What the header of a safetensors file says of one tensor."""

    dtype: str
    shape: list[Size]
    data_offsets: tuple[Size, Size]


class _LayerFile(msgspec.Struct, frozen=True):
    """What a manifest says of one layer's file."""

    bytes: Size = 0


@dataclass(frozen=True, slots=True)
class Inspected:
    """What a file is, the same in words, and as plain values."""

    kind: str
    words: list[str]
    values: Any


def inspected(path: Path) -> Inspected:
    """Raises `UserError` for what cannot be read, or is nothing that this program writes."""
    try:
        with path.open("rb") as file:
            payload = file.read(FILE_LIMIT_BYTES + 1)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}", "name a file that is there"
        ) from error
    if payload.startswith(b"DTFM"):
        return _frames(payload)
    if _is_safetensors(payload):
        return _layer_file(payload)
    if payload[:1] == b"{":
        found = _json(payload)
        if found is not None:
            return found
    if len(payload) <= FILE_LIMIT_BYTES:
        found = _message_pack(payload)
        if found is not None:
            return found
    raise UserError(
        f"{path} is nothing that p2p-dtfm writes, or is not whole",
        "name a record, a snapshot, a plan, a disagreement-* file, a manifest.json or a layer file "
        "of a checkpoint, or captured frames",
    )


def _message_pack(payload: bytes) -> Inspected | None:
    kinds: tuple[tuple[str, type[Any], Any], ...] = (
        ("snapshot", Snapshot, _snapshot_words),
        ("record", PeerRecord, _record_words),
        ("plan", Plan, _plan_words),
        ("no plan", NoPlan, lambda none: [f"no plan: {none.reason}"]),
        ("history of views", ViewsFile, _views_words),
        ("signed statement", Signed, _signed_words),
    )
    for kind, expected, words in kinds:
        try:
            value = decode(payload, expected, FILE_LIMIT_BYTES)
        except PeerFault:
            continue
        return Inspected(kind, words(value), msgspec.to_builtins(value))
    return None


def _record_words(record: PeerRecord) -> list[str]:
    device = record.device
    lines = [
        f"record of {record.peer_id}, life {record.life}, number {record.sequence}, protocol "
        f"version {record.protocol_version}, run {record.run_digest[:16]}",
        f"device: {device.kind} {device.name}, {bytes_text(device.memory_bytes)} of memory; a "
        f"block takes {_time(device.block.forward_ns)} forward and "
        f"{_time(device.block.backward_ns)} "
        "backward",
        f"up {_rate(record.uplink_bytes_per_s)}, down {_rate(record.downlink_bytes_per_s)}; "
        f"{record.reachability.value}; intent: {record.intent.value}",
        f"addresses: {', '.join(record.addresses) or 'none'}",
    ]
    lines += [
        f"link to {peer}: {_time(link.round_trip_ns)} there and back, {_rate(link.bytes_per_s)}"
        for peer, link in sorted(record.links.items())
    ]
    return lines


def _snapshot_words(snapshot: Snapshot) -> list[str]:
    kind = "planned" if snapshot.planned else "unplanned"
    absent = ", ".join(member.peer_id for member in snapshot.absent) or "nobody"
    lines = [
        f"snapshot {snapshot.digest()[:16]} of {kind} view {snapshot.number} after view "
        f"{snapshot.previous}, run {snapshot.run_digest[:16]}, at step {snapshot.step}",
        f"{counted(len(snapshot.records), 'member')}, {len(snapshot.contributors)} contributed; "
        f"absent: {absent}; {len(snapshot.held)} layer states are held",
        f"workload: {counted(snapshot.workload.block_count, 'block')}, "
        f"{counted(snapshot.workload.microbatch_count, 'microbatch')} a step",
    ]
    if snapshot.lost_layers:
        lines.append(f"lost layers: {', '.join(map(str, snapshot.lost_layers))}")
    for record in snapshot.records:
        lines += ["", *_record_words(record)]
    if snapshot.present is not None:
        lines += ["", "in force before:", *_plan_words(snapshot.present)]
    return lines


def _plan_words(plan: Plan) -> list[str]:
    hurried = "provisional " if plan.provisional else ""
    lines = [
        f"{hurried}plan {plan.digest()[:16]}: {counted(len(plan.pipelines), 'pipeline')}, "
        f"{_time(plan.predicted_step_ns)} a step predicted"
    ]
    for number, pipeline in enumerate(plan.pipelines, 1):
        stages = ", ".join(
            f"{stage.peer_id} {layers_text(stage.first_layer, stage.end_layer)}"
            + (" (stands in)" if stage.stands_in else "")
            for stage in pipeline.stages
        )
        lines.append(
            f"pipeline {number}, {counted(pipeline.microbatch_count, 'microbatch')}: {stages}"
        )
    if plan.spares:
        lines.append(f"spares: {', '.join(plan.spares)}")
    return lines


def _views_words(history: ViewsFile) -> list[str]:
    return [
        f"history of {counted(len(history.views), 'view')} of run {history.run_digest[:16]}",
        *(
            f"view {known.view}: {', '.join(member.peer_id for member in known.members)}"
            for known in history.views
        ),
        *(
            f"{bar.peer_id} is barred until step {bar_ends_step(bar)}, "
            f"for its work in step {bar.step}"
            for bar in history.bars
            if bar.count
        ),
    ]


def _signed_words(signed: Signed) -> list[str]:
    inner = _signed_record(signed) or _message_pack(signed.payload)
    return [
        f"{signed.kind} signed by {signed.peer_id} ({len(signed.signature)} bytes of signature, "
        f"not checked here), {len(signed.payload)} bytes",
        *(inner.words if inner is not None else ["of a kind that is not told in words"]),
    ]


def _signed_record(signed: Signed) -> Inspected | None:
    """The record in a signed payload, if it is one. It leaves out what the signature says."""
    if signed.kind != RECORD_KIND:
        return None
    try:
        record = unpacked(signed.peer_id, decode(signed.payload, PackedRecord, FILE_LIMIT_BYTES))
    except PeerFault:
        return None
    return Inspected("record", _record_words(record), msgspec.to_builtins(record))


def _frames(payload: bytes) -> Inspected:
    """Reads one frame after the other, until they end or one is not sound."""
    told: list[str] = []
    values: list[dict[str, Any]] = []
    end = ""
    reader = FrameReader(FrameLimits(payload_bytes=FILE_LIMIT_BYTES))
    try:
        for header in _headers(reader, payload):
            values.append(
                dict(zip(header.__struct_fields__, msgspec.to_builtins(header), strict=True))
            )
            if len(told) < FRAMES_TOLD:
                told.append(_frame_words(header))
    except PeerFault as fault:
        end = f"then {fault.cause}"
    else:
        if reader.inside_frame:
            end = "then a frame that is not whole"
    count = counted(len(values), "frame")
    words = [count, *told]
    if len(values) > len(told):
        words.append(f"and {len(values) - len(told)} more")
    return Inspected("frames", [*words, *([end] if end else [])], {"frames": values, "end": end})


def _headers(reader: FrameReader, payload: bytes) -> Iterator[FrameHeader]:
    view = memoryview(payload)
    while len(view):
        wanted = reader.wanted_bytes() or 1
        for header, _ in reader.feed(view[:wanted]):
            yield header
        view = view[wanted:]


def _frame_words(header: FrameHeader) -> str:
    shape = " x ".join(map(str, header.shape)) or "one number"
    part = "" if header.part == WHOLE else f", part {header.part} of frame {header.frame}"
    return (
        f"{header.kind.value} of view {header.view_number}:{header.view_digest[:12]}, step "
        f"{header.step}, number {header.index}, layer {header.layer}: {shape} {header.dtype} as "
        f"{header.codec}, {bytes_text(header.payload_bytes)}{part}"
    )


def _is_safetensors(payload: bytes) -> bool:
    length = int.from_bytes(payload[:8], "little")
    return len(payload) > 9 and 2 <= length <= HEADER_LIMIT_BYTES and payload[8:9] == b"{"


def _layer_file(payload: bytes) -> Inspected:
    length = int.from_bytes(payload[:8], "little")
    try:
        header = msgspec.json.decode(payload[8 : 8 + length], type=dict[str, Any])
        metadata = msgspec.convert(header.get("__metadata__", {}), dict[str, str])
        others = {name: value for name, value in header.items() if name != "__metadata__"}
        tensors = msgspec.convert(others, dict[str, _Tensor])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UserError(
            f"a safetensors file whose header is not sound: {error}", "fetch or save it again"
        ) from error
    due = max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    shapes = [
        f"{name}: {' x '.join(map(str, tensor.shape)) or 'one number'} {tensor.dtype}"
        for name, tensor in sorted(tensors.items())
    ]
    there = len(payload) - 8 - length
    whole = "" if there >= due or len(payload) > FILE_LIMIT_BYTES else f"; {due - there} bytes lack"
    said = ", ".join(f"{name} {value}" for name, value in sorted(metadata.items()))
    words = [f"safetensors, {len(tensors)} tensors, {bytes_text(due)}{whole}", f"of itself: {said}"]
    return Inspected("layer file", [*words, *shapes], header)


def _json(payload: bytes) -> Inspected | None:
    """A checkpoint's manifest, or a plan as `plan --json` prints it."""
    try:
        values = msgspec.json.decode(payload, type=dict[str, Any])
        if isinstance(values.get("layers"), dict) and isinstance(values.get("run_spec"), str):
            return Inspected("manifest of a checkpoint", _manifest_words(values), values)
        plan = msgspec.convert(values.get("plan", values), Plan)
        encode(plan)  # raises for numbers that JSON has and no plan can hold
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return None
    return Inspected("plan", _plan_words(plan), msgspec.to_builtins(plan))


def _manifest_words(values: dict[str, Any]) -> list[str]:
    try:
        spec = RunSpec.from_canonical_bytes(bytes.fromhex(values["run_spec"]))
        model = spec.model
        run = (
            f"run {spec.name}: {counted(model.layers, 'layer')} of width {model.width}, vocabulary "
            f"{model.vocabulary}, seed {spec.seed}"
        )
    except (PeerFault, UserError, ValueError):
        run = "its run spec cannot be read by this version"
    layers = msgspec.convert(values["layers"], dict[str, _LayerFile])
    size = sum(each.bytes for each in layers.values())
    return [
        f"manifest of a checkpoint of format {values.get('format')}, step {values.get('step')}, "
        f"committed tokens: {values.get('committed_tokens')}, "
        f"run {str(values.get('run_digest'))[:16]}",
        run,
        f"{counted(len(layers), 'layer file')}, {bytes_text(size)}: "
        f"{', '.join(sorted(layers, key=lambda name: (len(name), name)))}",
    ]


def _rate(bytes_per_s: int) -> str:
    return rate_text(bytes_per_s) if bytes_per_s else "not limited"


def _time(duration_ns: int) -> str:
    return f"{duration_ns / 1e9:.3f} s" if duration_ns >= 10**9 else f"{duration_ns / 1e6:.3f} ms"
