"""Who may talk to the dashboard: pages that it served itself, on loopback, to this machine's user.

A browser sends requests of any web page to loopback. So the host must be a loopback name. Otherwise
a stranger's domain that resolves to 127.0.0.1 could read everything. The origin, where there is
one, must be the dashboard itself. Whatever changes something needs a token that only the daemon's
user can read.
"""

import hmac
import ipaddress
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_HEADER = "x-p2p-dtfm-token"
OPENED = ("navigate", "document")
READING_METHODS = ("GET", "HEAD")
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class RequestGuard:
    """Refuses requests that do not come from the dashboard's own page, and adds the security
    headers."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        assert len(token) >= 16, "a token that can be guessed is none"
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = refused(scope["method"], Headers(scope=scope), self._token, scope["path"])
        if refusal is not None:
            status, reason = refusal
            await PlainTextResponse(reason + "\n", status, SECURITY_HEADERS)(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)  # a page may have a policy of its own
            await send(message)

        await self._app(scope, receive, send_with_headers)


def refused(
    method: str, headers: Mapping[str, str], token: str, path: str = ""
) -> tuple[int, str] | None:
    """(status, reason) for a request that must not be answered, None for one that may."""
    host = headers.get("host", "")
    if not is_loopback(host):
        return 421, "ask for 127.0.0.1 or localhost: other names are refused"
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return 403, "a page of another origin may not ask"
    # The page may be opened from elsewhere, such as the file that `p2p-dtfm dashboard` opens: a
    # page that links to it cannot read it.
    is_opened = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == OPENED
    is_page = is_opened and path == "/" and method == "GET"
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not is_page:
        return 403, "a page of another site may not ask"
    if method not in READING_METHODS and not hmac.compare_digest(
        headers.get(TOKEN_HEADER, "").encode(), token.encode()
    ):
        return 403, "this needs the token: open the address that p2p-dtfm dashboard prints"
    return None


def is_loopback(host: str) -> bool:
    """Whether a Host header names this machine by a name that no resolver can redirect."""
    name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "0")
    if not name:
        name, port = port, "0"
    if not (port.isascii() and port.isdigit()):
        return False
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
