"""The dashboard's server: who may ask, what it answers, and how the state streams."""

import http.client
import json
import socket
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from urllib.parse import urlsplit

import msgspec
import pytest
from starlette.testclient import TestClient

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.web.dashboard import Dashboard, changes
from p2p_dtfm.web.guard import TOKEN_HEADER, is_loopback
from p2p_dtfm.web.server import loopback_listener
from p2p_dtfm.web.state import History, RefusedCount, ViewState
from tests.web.examples import Example, sixty_four
from tests.web.serving import TOKEN, served

PAGE = "http://127.0.0.1:31380"


@pytest.fixture(scope="module")
def large() -> Example:
    return sixty_four()


@pytest.fixture
def example(large: Example) -> Example:
    return Example(large.state)


@pytest.fixture
def client(example: Example) -> TestClient:
    return TestClient(Dashboard(example, lambda: example.actions, TOKEN).app, base_url=PAGE)


# who may ask --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["127.0.0.1:31380", "127.0.0.1", "localhost:8080", "localhost", "[::1]:1", "[::1]"]
)
def test_loopback_hosts_are_answered(client: TestClient, host: str) -> None:
    assert is_loopback(host)
    assert client.get("/api/state", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:31380", "127.0.0.1.evil.example", "localhost.evil.example",
     "192.0.2.7:31380", "0.0.0.0", "", "127.0.0.1:x", "[::1", "localhost:", "::1",
     "127.0.0.1@evil.example"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/api/state", "/api/events", "/metrics", "/static/main.js"])
def test_other_hosts_are_refused(client: TestClient, host: str, path: str) -> None:
    """A stranger's name that resolves to 127.0.0.1 must not read what this machine's user may
    read."""
    reply = client.get(path, headers={"host": host})
    assert reply.status_code == 421
    assert "gpt3" not in reply.text


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "https://127.0.0.1:31380"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_pages_of_others_may_neither_read_nor_act(
    client: TestClient, example: Example, headers: dict[str, str]
) -> None:
    assert client.get("/api/state", headers=headers).status_code == 403
    with_token = {TOKEN_HEADER: TOKEN, **headers}
    assert client.post("/api/actions/leave", headers=with_token).status_code == 403
    assert not example.asked


def test_acting_needs_the_token(client: TestClient, example: Example) -> None:
    own = {"origin": PAGE, "sec-fetch-site": "same-origin"}
    for wrong in ({}, {TOKEN_HEADER: ""}, {TOKEN_HEADER: TOKEN[:-1]}, {TOKEN_HEADER: "ü" * 26}):
        encoded = {name: value.encode() for name, value in {**own, **wrong}.items()}
        reply = client.post("/api/actions/leave", headers=encoded)
        assert reply.status_code == 403 and "p2p-dtfm dashboard" in reply.text
    assert client.get(f"/api/actions/leave?token={TOKEN}").status_code == 405
    assert not example.asked
    reply = client.post("/api/actions/leave", headers={TOKEN_HEADER: TOKEN, **own})
    assert reply.json() == {"state": "training"}
    assert example.asked == ["leave"]
    assert client.post("/api/actions/eat", headers={TOKEN_HEADER: TOKEN}).status_code == 404


@pytest.mark.parametrize("path", ["/", "/static/main.js", "/api/state", "/nowhere", "/metrics"])
def test_every_answer_has_the_strict_headers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = {
        part.split()[0]: part.split()[1:] for part in headers["content-security-policy"].split("; ")
    }
    assert policy["default-src"] == ["'none'"]
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == ["'self'"]
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == ["'none'"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers


def test_nothing_outside_the_static_files_is_served(client: TestClient) -> None:
    for path in (
        "/static/../state.py",
        "/static/%2e%2e/state.py",
        "/static/..%2f..%2fcore/plan.py",
    ):
        assert client.get(path).status_code == 404
    assert client.get("/static/vendor/uplot/LICENSE").status_code == 200


def test_the_page_loads_nothing_from_elsewhere(client: TestClient) -> None:
    assert "http" not in client.get("/").text
    for module in ("main", "map", "charts", "panels", "pipelines", "timeline", "dom", "format"):
        reply = client.get(f"/static/{module}.js")
        assert reply.status_code == 200
        assert "javascript" in reply.headers["content-type"]
        code = reply.text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in code and "https://" not in code and "innerHTML" not in code


# what it answers ----------------------------------------------------------------------------------


def test_the_whole_state_is_one_object(client: TestClient, example: Example) -> None:
    state = client.get("/api/state").json()
    assert state == json.loads(msgspec.json.encode(example.state))
    assert len(state["view"]["peers"]) == 64 and len(state["view"]["pipelines"]) == 8
    assert state["live"]["state"] == "training"


def test_a_page_gets_everything_once_and_then_what_is_new(example: Example) -> None:
    first = example.state
    assert [name for name, _ in changes(None, first)] == [
        "run", "view", "timeline", "samples", "contribution", "events", "history", "live",
    ]  # fmt: skip
    assert [name for name, _ in changes(first, first)] == ["live"]

    longer = History(
        step=(*first.history.step, 700), loss=(*first.history.loss, 3.0),
        tokens_per_s=(*first.history.tokens_per_s, None),
        held_out_step=first.history.held_out_step, held_out_loss=first.history.held_out_loss,
        view_step=first.history.view_step,
    )  # fmt: skip
    grown = dict(changes(first, msgspec.structs.replace(first, history=longer)))["history"]
    assert grown["step"] == (700,) and grown["step_from"] == 700
    assert grown["loss"] == (3.0,) and grown["held_out_step"] == ()

    thinned = msgspec.structs.replace(longer, generation=1)
    grown = dict(changes(first, msgspec.structs.replace(first, history=thinned)))["history"]
    assert grown["step_from"] == 0 and len(grown["step"]) == 701


def read_events(address: str, count: int) -> Iterator[tuple[str, dict]]:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=10)
    connection.request("GET", "/api/events")
    response = connection.getresponse()
    assert response.headers["content-type"].startswith("text/event-stream")
    for _ in range(count):
        name = response.readline().removeprefix(b"event: ").strip().decode()
        data = json.loads(response.readline().removeprefix(b"data: "))
        assert response.readline() == b"\n"
        yield name, data
    connection.close()


def test_the_state_streams_and_the_server_ends_though_pages_are_open(example: Example) -> None:
    with served(example, interval_s=0.05) as address:
        events = read_events(address, 12)
        names = [next(events)[0] for _ in range(10)]
        told = ["run", "view", "timeline", "samples", "contribution", "events", "history", "live"]
        assert names == ["hello", *told, "actions"]
        assert next(events)[0] == "live"
        example.change_live(state="waiting", reason="for more peers")
        assert any(
            data["state"] == "waiting" for name, data in read_events(address, 11) if name == "live"
        )
    # `served` asserts that the server's thread has ended


def test_a_port_that_is_taken_is_named_with_a_fix() -> None:
    with loopback_listener(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}") as refused:
            loopback_listener(port)
        assert "--dashboard" in refused.value.render()


def test_without_a_given_port_the_next_free_one_is_taken() -> None:
    with loopback_listener(None) as first, loopback_listener(None) as second:
        assert first.getsockname() != second.getsockname()
        assert {first.getsockname()[0], second.getsockname()[0]} == {"127.0.0.1"}
        assert first.family == socket.AF_INET


# the end ------------------------------------------------------------------------------------------


def test_a_complete_run_has_a_report_and_nothing_to_pause(
    client: TestClient, example: Example
) -> None:
    assert client.get("/report.html").status_code == 404, "not before its end"
    run = example.state.run
    assert run is not None
    command = "p2p-dtfm export --out my-model"
    example.change_live(state="done", step=run.total_steps, next=(command,))
    reply = client.get("/report.html")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    assert run.digest in reply.text and command in reply.text
    policy = reply.headers["content-security-policy"]
    style = reply.text.partition("<style>")[2].partition("</style>")[0]
    digest = b64encode(sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert "unsafe" not in policy and reply.headers["x-content-type-options"] == "nosniff"
    assert client.get("/report.html", headers={"host": "evil.example"}).status_code == 421
    opened = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/report.html", headers=opened).status_code == 403

    acting = {TOKEN_HEADER: TOKEN, "origin": PAGE}
    assert client.post("/api/actions/pause", headers=acting).status_code == 404
    assert client.post("/api/actions/leave", headers=acting).json() == {"state": "done"}
    assert example.asked == ["leave"]


def test_an_open_page_loses_its_pause_when_the_run_is_complete(example: Example) -> None:
    with served(example, interval_s=0.05) as address:
        events = read_events(address, 60)
        assert next(data for name, data in events if name == "actions") == ["pause", "leave"]
        example.change_live(state="done")
        assert next(data for name, data in events if name == "actions") == ["leave"]


# metrics ------------------------------------------------------------------------------------------


def test_metrics_are_what_the_state_says(client: TestClient, example: Example) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }
    live = example.state.live
    assert samples["p2p_dtfm_step",] == 700
    assert samples["p2p_dtfm_loss",] == pytest.approx(live.loss)
    assert samples["p2p_dtfm_members",] == 64
    assert samples["p2p_dtfm_state", "training"] == 1
    assert samples["p2p_dtfm_state", "waiting"] == 0
    heard = [key for key in samples if key[0] == "p2p_dtfm_peer_heard_seconds_ago"]
    assert len(heard) == 63


def test_what_is_not_known_has_no_sample(client: TestClient, example: Example) -> None:
    example.change_live(loss=None, eta_s=None)
    text = client.get("/metrics").text
    assert "\np2p_dtfm_loss " not in text and "\np2p_dtfm_time_left_seconds " not in text
    assert "\np2p_dtfm_members " in text and "\np2p_dtfm_pipelines " in text
    example.state = msgspec.structs.replace(example.state, view=ViewState())
    text = client.get("/metrics").text
    assert "\np2p_dtfm_members " not in text and "\np2p_dtfm_pipelines " not in text


def test_the_page_may_be_opened_from_a_file_and_nothing_else(client: TestClient) -> None:
    opened = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document",
    }
    assert client.get("/", headers=opened).status_code == 200
    assert client.get("/api/state", headers=opened).status_code == 403
    assert client.post("/", headers=opened).status_code == 403
    framed = {**opened, "sec-fetch-dest": "iframe"}
    assert client.get("/", headers=framed).status_code == 403


def test_metrics_count_what_was_turned_away(client: TestClient, example: Example) -> None:
    example.change_live(
        refused=(RefusedCount("stranger", "lane forward", "not its place to say", 7),)
    )
    line = (
        'p2p_dtfm_refused_total{kind="lane forward",reason="not its place to say",'
        'sender="stranger"} 7.0'
    )
    assert line in client.get("/metrics").text
