"""Carries notices out of this machine, or to its desktop; training never waits for it."""

import asyncio
import http.client
import json
import logging
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections import deque
from html import escape
from typing import Any
from urllib.parse import urlsplit

from p2p_dtfm.daemon.machine.settings import LOOPBACK, Settings
from p2p_dtfm.daemon.telemetry.attention.watch import Notice
from p2p_dtfm.net.errors import one_line

WAITING_LIMIT = 16
"""How many notices wait. Older ones go: what is wrong now matters more."""
SEND_LIMIT_S = 10.0
AGAIN_AFTER_S = (0.0, 5.0, 30.0)
LAST_WORDS_LIMIT_S = 15.0
CONTENT_LIMIT = 2000
"""The longest text, in letters: Discord refuses more."""
SESSION = ("DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "WAYLAND_DISPLAY")

_MOVED = frozenset({301, 302, 303, 307, 308})


class _NotElsewhere(urllib.request.HTTPRedirectHandler):
    """Behind a redirection `urllib` asks by GET, and leaves out what was to be told."""

    def redirect_request(self, *_: Any) -> None:
        return None


_STRAIGHT = urllib.request.build_opener(_NotElsewhere)
_UNSEEN = "\N{ZERO WIDTH SPACE}"

log = logging.getLogger("p2p_dtfm")


class Outbox:
    """Sends to one address, and to the desktop; to neither, if the user has asked for none."""

    def __init__(self, webhook: str, to_desktop: bool) -> None:
        self._webhook = webhook
        self._to_desktop = to_desktop
        self._waiting: deque[Notice] = deque(maxlen=WAITING_LIMIT)
        self._task: asyncio.Task[None] | None = None
        self._has_warned = False

    def send(self, notice: Notice) -> None:
        """Send a notice in its own time, in order."""
        self._waiting.append(notice)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._carry())

    async def close(self) -> None:
        """What waits is still carried, for a bounded time."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=LAST_WORDS_LIMIT_S)
            self._task.cancel()

    async def _carry(self) -> None:
        while self._waiting:
            notice = self._waiting.popleft()
            if self._to_desktop:
                await asyncio.to_thread(show_on_desktop, notice)
            if self._webhook:
                await self._post(notice)

    async def _post(self, notice: Notice) -> None:
        """The log names the host alone: the rest of such an address is often a secret."""
        why = ""
        for pause_s in AGAIN_AFTER_S:
            await asyncio.sleep(pause_s)
            why = await asyncio.to_thread(post, self._webhook, notice)
            if not why:
                self._has_warned = False
                return
        if not self._has_warned:
            self._has_warned = True
            host = urlsplit(self._webhook).hostname
            log.warning("the webhook at %s was not told %r: %s", host, notice.title, why)


def post(address: str, notice: Notice) -> str:
    """Send a notice. Returns why it was not taken; empty if it was. Slack and Mattermost show
    `text`, Discord shows `content`; the other fields are for programs, and as they are."""
    line = _waking_nobody(f"{notice.title}: {notice.text}")
    body = {
        "kind": notice.kind,
        "title": notice.title,
        "message": notice.text,
        "text": escape(line, quote=False),
        "content": shortened(line, CONTENT_LIMIT),
        "allowed_mentions": {"parse": []},
    }
    headers = {"Content-Type": "application/json", "User-Agent": "p2p-dtfm"}
    try:
        data = json.dumps(body).encode()
        request = urllib.request.Request(address, data, headers, method="POST")
        with _STRAIGHT.open(request, timeout=SEND_LIMIT_S):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        moved = ", and names another address" if error.code in _MOVED else ""
        return f"it answers {error.code}{moved}"
    except http.client.HTTPException as error:  # whose text may hold the address
        return f"no sound address, or no answer of HTTP ({type(error).__name__})"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def _waking_nobody(line: str) -> str:
    """A line that wakes nobody. Peers' names are in it, which strangers choose. A chat program
    would call all who are in a channel by `@everyone`, and hide where a link leads behind words."""
    return line.replace("@", f"@{_UNSEEN}").replace("](", f"]{_UNSEEN}(")


def shortened(text: str, limit: int) -> str:
    """A text's beginning, where it is longer than `limit`."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def show_on_desktop(notice: Notice) -> None:
    """Show a notice, if there is a desktop. Desktops read the text as markup, and no program can be
    given a zero byte."""
    urgency = "critical" if notice.kind == "problem" else "normal"
    command = ["notify-send", "--app-name=p2p-dtfm", f"--urgency={urgency}", "--"]
    if shutil.which(command[0]) is None or not any(os.environ.get(name) for name in SESSION):
        return
    try:
        subprocess.run(
            [*command, one_line(notice.title), escape(one_line(notice.text), quote=False)],
            capture_output=True,
            timeout=SEND_LIMIT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("the desktop was not told: %s", error)


def outbox_of(settings: Settings) -> Outbox | None:
    """None where nobody wants to hear. A daemon that listens on loopback alone is somebody's
    experiment: they look at it, or have a webhook of their own."""
    is_experiment = all(address.startswith(LOOPBACK) for address in settings.listen)
    to_desktop = settings.notify and not is_experiment
    return Outbox(settings.webhook, to_desktop) if settings.webhook or to_desktop else None
