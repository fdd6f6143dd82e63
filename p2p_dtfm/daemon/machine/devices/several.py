"""One daemon for each device of this machine, begun, shown and ended as one.

The first lives in the home itself and does what its user has typed. The others live below it, in
`devices/`, and join through the first. All are peers like any others: links between them are probed
and planned with like links to other machines. What the user lets the whole machine use is divided
among them. Nothing here loads torch or libp2p: each daemon loads its own.
"""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any
from urllib.parse import urlencode

import msgspec

from p2p_dtfm.core.protocol.invited.line import read_line
from p2p_dtfm.daemon.machine.devices.shares import environment_of, shares_of
from p2p_dtfm.daemon.machine.home import BESIDE_FILE, Home, place_of_run
from p2p_dtfm.daemon.machine.life import (
    FOR_ITS_OWNER,
    SERVICE_VARIABLE,
    ends_with_its_terminal,
    is_begun_by_systemd,
)
from p2p_dtfm.daemon.machine.local_client import ask_daemon
from p2p_dtfm.daemon.machine.owner.allowed import note_typed
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.ports import disk, now
from p2p_dtfm.ports.granted import granted_memory
from p2p_dtfm.ports.packages import python_command

LOOK_EVERY_S = 0.2
TOLD_EVERY_S = 2.0
INVITED_S = 10 * 365 * 86_400
BEGUN_AGAIN_S = 30.0
FOR_GOOD = (0, *FOR_ITS_OWNER)
"""Exit codes after which systemd does not begin a service again either."""


@dataclass
class _Daemon:
    """One of the daemons, once it was begun."""

    label: str
    settings: Settings
    process: "subprocess.Popen[bytes]"
    readers: list[threading.Thread]
    ended_s: float | None = None
    """When the daemon was seen to have ended, if it is to be begun again."""

    @property
    def root(self) -> Path:
        return Home(self.settings.home).root


class SeveralDevices:
    """All daemons of this machine, until the last one ends."""

    def __init__(
        self, settings: Settings, devices: Sequence[str], out: IO[str], log: IO[str]
    ) -> None:
        is_human = settings.log == "human" or (settings.log == "auto" and log.isatty())
        settings = settings.model_copy(update={"log": "human" if is_human else "json"})
        self._settings, self._out, self._log = settings, out, log
        self._shares = shares_of(settings, devices, granted_memory().free_bytes)
        self._labels = [f"{number} {device}" for number, device in enumerate(devices, 1)]
        self._daemons: list[_Daemon] = []
        self._signals: list[int] = []
        self._is_told_to_end = False
        self._of_a_service = {SERVICE_VARIABLE: str(os.getpid())} if is_begun_by_systemd() else {}
        self._told = b""
        self._is_refused = False
        """Whether a failure to write `BESIDE_FILE` was told."""

    def run(self) -> int:
        """Returns 0, or the exit code of a daemon that failed. One whose fault may pass goes first.
        Raises `UserError` if a daemon has the home already: it would answer in place of the one
        begun here."""
        home = Home(self._settings.home)
        home.acquire()
        note_typed(home.root, self._settings)  # the daemons themselves have shares of it
        home.release()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if ends_with_its_terminal():
            signal.signal(signal.SIGHUP, self._on_signal)
        if self._settings.until_stdin_closes:
            threading.Thread(target=self._leave_when_stdin_closes, daemon=True).start()
        first = self._begin(0, self._shares[0])
        self._daemons.append(first)
        next_told_s = 0.0
        try:
            while any(daemon.process.poll() is None for daemon in self._daemons):
                self._pass_signals_on()
                self._begin_again()
                if len(self._daemons) < len(self._shares):
                    self._begin_others(first)
                if now.monotonic_s() >= next_told_s:
                    self._tell_them_of_each_other()
                    next_told_s = now.monotonic_s() + TOLD_EVERY_S
                threading.Event().wait(LOOK_EVERY_S)
        finally:
            self._end()
        codes = [code for each in self._daemons if (code := each.process.returncode)]
        return next((code for code in codes if code not in FOR_GOOD), codes[0] if codes else 0)

    def _begin(self, number: int, settings: Settings) -> _Daemon:
        command = python_command("-m", "p2p_dtfm", "--home", str(settings.home))
        process = subprocess.Popen(
            command,
            env=environment_of(settings) | self._of_a_service,
            stdin=subprocess.PIPE,  # closes when this process dies, in any way
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is passed on, once
        )
        label = self._labels[number]
        assert process.stdout is not None and process.stderr is not None
        readers = [
            threading.Thread(target=self._pass_lines, args=arguments, daemon=True)
            for arguments in (
                (process.stdout, *((self._out, "") if number == 0 else (self._log, label))),
                (process.stderr, self._log, label),
            )
        ]
        for reader in readers:
            reader.start()
        return _Daemon(label, settings, process, readers)

    def _begin_again(self) -> None:
        """Begin daemons of a service again that have failed while others take part, as systemd
        would. If all have failed, systemd begins all of them again. One that cannot be begun, as
        where memory is short, is tried again after the same pause."""
        if not self._of_a_service or self._is_told_to_end:
            return
        for number, daemon in enumerate(self._daemons):
            code, now_s = daemon.process.poll(), now.monotonic_s()
            if code is None or code in FOR_GOOD:
                continue
            if daemon.ended_s is None:
                daemon.ended_s = now_s
            elif now_s - daemon.ended_s >= BEGUN_AGAIN_S:
                if daemon.process.stdin is not None:
                    daemon.process.stdin.close()
                try:
                    self._daemons[number] = self._begin(number, daemon.settings)
                except OSError as error:
                    daemon.ended_s = now_s
                    self._say(f"the daemon of {daemon.label} cannot be begun again: {error}")

    def _begin_others(self, first: _Daemon) -> None:
        """Begin the other daemons, once the first knows its run and where it can be called."""
        facts = ask_daemon(first.root, "status")
        if not facts or not facts.get("run_digest"):
            return
        digest, addresses = facts["run_digest"], tuple(facts["addresses"])
        others = self._shares[1:]
        is_closed = facts["admission"] == "invited"
        needs_line = [is_closed and not _is_let_in(share, digest) for share in others]
        line = _line_of(first.root) if any(needs_line) or not addresses else ""
        if not line and (any(needs_line) or not addresses):
            return
        addresses = addresses or read_line(line).addresses
        for number, (share, needs) in enumerate(zip(others, needs_line, strict=True), 1):
            where = tuple(dict.fromkeys((*addresses, *share.initial_peers)))
            changes: dict[str, Any] = {"initial_peers": where, "run_digest": digest}
            if needs:
                changes["invite"] = line
            self._daemons.append(self._begin(number, share.model_copy(update=changes)))

    def _tell_them_of_each_other(self) -> None:
        """Write into each home which peers are of this machine."""
        if len(self._daemons) < len(self._shares):
            return
        found = [ask_daemon(daemon.root, "status") or {} for daemon in self._daemons]
        known = {facts["peer_id"] for facts in found if facts.get("peer_id")}
        told = msgspec.json.encode(sorted(known))
        if told == self._told or len(known) < 2:
            return
        try:
            for daemon in self._daemons:
                if daemon.root.exists():
                    disk.write_whole(daemon.root / BESIDE_FILE, told)
            self._told = told
        except OSError as error:  # a full disk; they train on, and it is tried again
            if not self._is_refused:
                self._say(f"the devices of this machine are not shown as one: {error}")
            self._is_refused = True

    def _say(self, text: str) -> None:
        self._pass_lines(io.BytesIO(f"{text}\n".encode()), self._log, "")

    def _pass_lines(self, lines: IO[bytes], to: IO[str], label: str) -> None:
        """Pass a daemon's lines on, also if nobody reads `to`: a daemon whose lines are not taken
        stands still. `label` goes before each line that people read."""
        before = f"[{label}] " if label and self._settings.log == "human" else ""
        for line in lines:
            with contextlib.suppress(OSError):
                to.write(before + line.decode(errors="replace"))
                to.flush()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _pass_signals_on(self) -> None:
        while self._signals:
            number, self._is_told_to_end = self._signals.pop(0), True
            for daemon in self._daemons:
                if daemon.process.poll() is None:
                    daemon.process.send_signal(number)
            self._shares = self._shares[: len(self._daemons)]  # no other is begun any more

    def _leave_when_stdin_closes(self) -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        self._signals.append(signal.SIGTERM)

    def _end(self) -> None:
        for daemon in self._daemons:
            if daemon.process.stdin is not None:
                daemon.process.stdin.close()
            daemon.process.wait()
            for reader in daemon.readers:
                reader.join()
            if self._told:
                (daemon.root / BESIDE_FILE).unlink(missing_ok=True)


def _is_let_in(settings: Settings, run_digest: str) -> bool:
    """Whether a daemon may join a run by invitation: its user gave a line, or its home was there
    before."""
    remembers = place_of_run(Home(settings.home).root, run_digest).exists()
    return bool(settings.invite) or remembers


def _line_of(root: Path) -> str:
    """The line that a daemon's `p2p-dtfm invite` would print; empty while it can tell none."""
    asked = urlencode({"seconds": INVITED_S, "may_invite": 0})
    made = ask_daemon(root, f"invite?{asked}", "POST")
    return str(made["line"]) if made and made.get("line") else ""
