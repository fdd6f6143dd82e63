"""Figures for TensorBoard are written as TensorBoard reads them, and a failure there never stops
training."""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.telemetry.event_files import EventFiles
from p2p_dtfm.ports.packages import how_to_install


def events_of(directory: Path) -> Iterator[Event]:
    """The events, as TensorBoard reads them: u64 length · its checksum · event · its checksum."""
    for path in sorted(directory.glob("events.out.tfevents.*")):
        rest = path.read_bytes()
        while rest:
            length, length_sum = struct.unpack_from("<QI", rest)
            body = rest[12 : 12 + length]
            (body_sum,) = struct.unpack_from("<I", rest, 12 + length)
            assert length_sum == masked_crc32c(rest[:8]) and body_sum == masked_crc32c(body)
            yield Event.FromString(body)
            rest = rest[16 + length :]


def figures(directory: Path) -> list[tuple[int, str, float]]:
    return [
        (event.step, value.tag, pytest.approx(value.simple_value))
        for event in events_of(directory)
        for value in event.summary.value
    ]


def test_figures_are_read_back(tmp_path: Path) -> None:
    files = EventFiles(tmp_path / "board")
    files.step_committed(StepOutcome(0, 1.5, 5.5, 100, 5.25, None), None)
    files.step_committed(StepOutcome(1, 1.25, 4.5, 100, None, None), 2000.0)
    files.close()
    assert figures(tmp_path / "board") == [
        (0, "loss", 5.5),
        (0, "held_out_loss", 5.25),
        (0, "gradient_norm", 1.5),
        (1, "loss", 4.5),
        (1, "gradient_norm", 1.25),
        (1, "tokens_per_s", 2000.0),
    ]
    first, second, *_ = events_of(tmp_path / "board")
    assert first.file_version == "brain.Event:2"
    assert second.session_log.status == second.session_log.START and second.step == 0


def test_steps_that_are_repeated_replace_those_before(tmp_path: Path) -> None:
    """A failure cost five steps of a run. TensorBoard drew them twice, and a line back between."""
    files = EventFiles(tmp_path / "board")
    for step in (0, 1, 2, 1, 2, 3):
        files.step_committed(StepOutcome(step, 1.0, 5.0, 100, None, None), None)
    files.close()
    begun = [it.step for it in events_of(tmp_path / "board") if it.HasField("session_log")]
    assert begun == [0, 1], "of what is from that step on TensorBoard keeps the newest"


def test_without_the_package_the_fix_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    with pytest.raises(UserError, match="needs tensorboardX") as refused:
        EventFiles(tmp_path / "board")
    assert how_to_install("tensorboardX") in refused.value.fixes


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write TensorBoard's files"):
        EventFiles(tmp_path / "file" / "board")


def test_a_disk_that_fails_costs_the_figures_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = EventFiles(tmp_path / "board")
    (tmp_path / "board").rmdir()
    for step in range(3):
        files.step_committed(StepOutcome(step, 1.0, 5.0, 100, None, None), 1.0)
    files.close()
    assert [message[:30] for message in caplog.messages] == ["no more figures for TensorBoard"[:30]]
