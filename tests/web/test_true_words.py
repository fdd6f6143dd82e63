"""What the page says where something that it usually has is missing."""

from collections.abc import Iterator

import msgspec
import pytest

from p2p_dtfm.web.state import ContributionBoard, DashboardState, History, ViewState
from tests.programs import skip_without
from tests.web import chromium as browser
from tests.web.chromium import Page
from tests.web.examples import two
from tests.web.serving import TOKEN, served

pytestmark = skip_without(
    "browser", "" if browser.PROGRAM else "no Chromium here: apt-get install chromium"
)
DRAWN = "document.querySelector('#map .peer') && document.querySelector('#answers dd')"
ANSWER = "(document.querySelector('#answers dd')?.textContent ?? '')"


@pytest.fixture(autouse=True)
def no_errors(page: Page) -> Iterator[None]:
    page.problems.clear()
    yield
    assert not page.problems


def without_a_plan(state: DashboardState) -> DashboardState:
    view = state.view
    nobody = {"pipeline": None, "position": None, "first_layer": 0, "end_layer": 0, "in_flight": 0}
    peers = tuple(msgspec.structs.replace(peer, **nobody) for peer in view.peers)
    left = ViewState(view.number, me=view.me, peers=peers, no_plan="the peers have too little room")
    return msgspec.structs.replace(state, view=left)


def test_without_a_plan_nobody_is_a_spare(page: Page) -> None:
    """Of two that had too little memory, each read that it helps as a spare, and that it stands in
    when the other goes."""
    example = two()
    example.state = without_a_plan(example.state)
    example.change_live(state="waiting", reason="the peers have too little room", problems=())
    page.set_view(1440, 900)
    with served(example) as address:
        page.open(address)
        page.wait_for(DRAWN)
        page.wait_for(f"{ANSWER} === 'Not now'")
        assert "spare" not in page.evaluate("document.body.innerText").lower()
        titles = "[...document.querySelectorAll('#map .peer title')].map((it) => it.textContent)"
        assert all("there is no plan" in it for it in page.evaluate(titles))
        example.state = msgspec.structs.replace(example.state, contribution=ContributionBoard())
        example.change_live(committed_here=0)
        page.wait_for(f"{ANSWER} === 'Not yet'")
        example.change_live(state="done")
        page.wait_for("document.querySelector('#pipelines').textContent.includes('complete')")
        assert "spare" not in page.evaluate("document.body.innerText").lower()
        page.open("about:blank")


def test_who_was_never_heard_was_not_heard_ago(page: Page) -> None:
    example = two()
    example.change_live(heard_s_ago=(None, None))
    page.set_view(1440, 900)
    with served(example) as address:
        page.open(address)
        page.wait_for("document.querySelector('.neighbours tbody tr')")
        assert (
            page.evaluate("document.querySelector('.neighbours tbody td:last-child').innerText")
            == "–"
        )
        page.open("about:blank")


def test_an_end_in_another_year_has_its_year(page: Page) -> None:
    """A large model takes longer than a year. Its end was said to be in a few weeks."""
    example = two()
    days = 400
    example.change_live(eta_s=days * 86_400.0)
    note = "(document.querySelectorAll('#answers .note')[2]?.textContent ?? '')"
    year = f"new Date(Date.now() + {days} * 86400000).getFullYear()"
    with served(example) as address:
        page.open(address)
        page.wait_for(DRAWN)
        page.wait_for(f"{note}.includes(` ${{{year}}} at `)")
        page.open("about:blank")


def test_who_is_in_no_view_hears_nothing_false_of_those_that_train(page: Page) -> None:
    """Whoever came to a run at its step 100 read that no step is committed yet, and that there is
    no plan and no view yet; so did who was out again after days."""
    example = two()
    example.state = msgspec.structs.replace(
        example.state, view=ViewState(), history=History(), contribution=ContributionBoard()
    )
    example.change_live(state="joining", loss=None, held_out_loss=None, eta_s=None, problems=())
    page.set_view(1440, 900)
    with served(example) as address:
        page.open(address)
        page.wait_for("document.querySelector('#map p') && document.querySelector('#answers dd')")
        said = page.evaluate("document.body.innerText")
        assert "step 120 of" in said
        for untrue in ("no step is committed", "no view yet", "no plan yet", "in a view yet"):
            assert untrue not in said.lower(), untrue
        assert "are committed" not in said, "before two steps are"
        page.open("about:blank")


def test_a_link_is_as_busy_as_the_way_that_is_used(page: Page) -> None:
    """A home line is mostly much slower upwards. What came down it to be guarded was counted at
    the rate upwards: a link that transmits for 8% of a step was busy for 80% of it."""
    example = two()
    view, step_ns = example.state.view, 1_000_000_000
    flow = msgspec.structs.replace(
        view.flows[0], kind="guard", there_bytes=800_000, here_bytes=0, bytes_per_s=10**6, use=0.08
    )
    view = msgspec.structs.replace(view, flows=(flow,), predicted_step_ns=step_ns)
    example.state = msgspec.structs.replace(example.state, view=view)
    example.change_live(step_ns=step_ns)
    busy = "(document.querySelector('.neighbours tbody tr')?.children[3].textContent ?? '')"
    with served(example) as address:
        page.open(address)
        page.wait_for("document.querySelector('.neighbours tbody tr')")
        page.wait_for(f"{busy} !== ''")
        assert page.evaluate(busy) == "8.0%"
        example.change_live(step_ns=2 * step_ns)
        page.wait_for(f"{busy} === '4.0%'")
        page.open("about:blank")


def test_a_paused_daemon_has_no_layers_to_hand_over(page: Page) -> None:
    """Its user was asked whether it is to finish its step, and hand its layers over."""
    example = two()
    buttons = "[...document.querySelectorAll('#actions button')]"
    with served(example) as address:
        page.open(f"{address}#token={TOKEN}")
        example.change_live(state="paused")
        page.wait_for(f"{buttons}.some((it) => it.textContent === 'Resume')")
        page.evaluate("window.confirm = (text) => { window.asked = text; return false; }")
        page.evaluate(f"{buttons}.find((it) => it.textContent === 'Leave').click()")
        told = page.evaluate(f"window.asked + {buttons}.map((it) => it.title).join()")
        assert "Leave?" in told and "layers" not in told
        page.open("about:blank")
