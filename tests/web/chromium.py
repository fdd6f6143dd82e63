"""A real headless Chromium, driven over its debugging pipe (`--remote-debugging-pipe`).

The DevTools protocol as JSON texts that end with a zero byte: read from file descriptor 3 by the
browser, written to 4. Needs no other package.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEADLINE_S = 30.0
PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")


# Chromium reads from descriptor 3 and writes to 4; either number may be taken by the other's pipe
_MOVE_PIPES = """
import fcntl, os, sys
high = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(high[0], 3)
os.dup2(high[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """One tab. `problems` holds uncaught and console errors, and what the page's policy stopped."""

    def __init__(self, write_to: int, read_from: int) -> None:
        self.problems: list[str] = []
        self._write_to = write_to
        self._read_from = read_from
        self._buffer = b""
        self._number = 0
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def set_view(self, width: int, height: int, *, dark: bool = False, calm: bool = False) -> None:
        """The window's size in pixels of style sheets, and the colours that its user prefers.
        `calm`: nothing moves, for a user who asked for that."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce" if calm else "no-preference"}
        self._call("Emulation.setEmulatedMedia", features=[scheme, motion])

    def open(self, address: str) -> None:
        self._call("Page.navigate", url=address)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        reply = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait_for(self, expression: str, deadline_s: float = DEADLINE_S) -> None:
        """Poll until the expression is truthy."""
        end_s = time.monotonic() + deadline_s
        while not self.evaluate(f"!!({expression})"):
            assert time.monotonic() < end_s, (
                f"not true in {deadline_s} s: {expression}; {self.problems}"
            )
            time.sleep(0.05)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the whole page, or of what the window shows."""
        reply = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(reply["data"]))

    def press(self, key: str) -> None:
        """One key, as from a keyboard: "Tab", "ArrowRight"."""
        code = {"Tab": 9, "ArrowRight": 39}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def unnamed(self, roles: tuple[str, ...]) -> list[str]:
        """Nodes of these roles without a name for a user who hears the page."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        return [
            node["role"]["value"]
            for node in nodes
            if not node.get("ignored")
            and node.get("role", {}).get("value") in roles
            and not str(node.get("name", {}).get("value", "")).strip()
        ]

    def accept_dialogs(self) -> None:
        """Answer yes to each question of the page."""
        self.evaluate("window.confirm = () => true")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        request: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._write_to, json.dumps(request).encode() + b"\0")
        while (message := self._receive(method)).get("id") != self._number:
            self._note(message)
        assert "error" not in message, (method, message["error"])
        return message["result"]

    def _receive(self, what: str) -> dict[str, Any]:
        end_s = time.monotonic() + DEADLINE_S
        while b"\0" not in self._buffer:
            left_s = end_s - time.monotonic()
            assert left_s > 0 and select.select([self._read_from], [], [], left_s)[0], what
            chunk = os.read(self._read_from, 1 << 20)
            assert chunk, "Chromium has ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            text = details.get("exception", {}).get("description", details["text"])
            self.problems.append(text)
        elif message.get("method") == "Runtime.consoleAPICalled":
            if parameters["type"] in ("error", "assert"):
                self.problems.append(str(parameters["args"]))
        elif message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A browser with a fresh profile and one tab. It is gone at the end."""
    assert PROGRAM is not None
    to_browser, write_to = os.pipe()
    read_from, from_browser = os.pipe()
    command = [
        PROGRAM, "--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", "--hide-scrollbars", "--mute-audio", f"--user-data-dir={profile}",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", _MOVE_PIPES, str(to_browser), str(from_browser), *command],
        pass_fds=(to_browser, from_browser),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(write_to, read_from)
    finally:
        os.close(write_to)  # Chromium ends when its pipe closes
        os.close(read_from)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
