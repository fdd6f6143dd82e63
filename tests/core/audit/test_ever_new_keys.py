"""Keys cost nothing. Neither new keys nor convicted peers that come back keep a run from getting
on, or keep honest newcomers out for good."""

import msgspec
import pytest

from p2p_dtfm.core.audit.roles import (
    KNOWN,
    LATE_FACTOR,
    held_off,
    on_probation,
    probation_ends_step,
    quiet_from,
    with_roles,
)
from p2p_dtfm.core.membership.bars import bar_ends_step, barred_at, united, with_convicted
from p2p_dtfm.core.membership.undo import undo_due
from p2p_dtfm.core.protocol.lineage import Epochs
from p2p_dtfm.core.protocol.snapshot import GENESIS, Bar, ViewId
from tests.core.audit.parts import VIEW
from tests.core.audit.test_undo import RARE


def test_waits_for_verdicts_follow_each_other_and_end() -> None:
    verdict = Bar(VIEW, 3000, "y", 1, 3400, "lies")
    many = [msgspec.structs.replace(verdict, peer_id=str(n)) for n in range(40)]
    waits = [quiet_from(many[:count], 3001, 50, 228) - 3000 for count in (1, 2, 3, 5, 9, 40)]
    assert waits == [200, 1000, 3736, 9208, 20_152, 22_800]
    apart = [msgspec.structs.replace(it, step=3000 + 2000 * n) for n, it in enumerate(many[:5])]
    assert quiet_from(apart, 11_001, 50, 228) == 3000 + 200 + 1800 + 800 + 3 * 2736 + 1200
    again = msgspec.structs.replace(verdict, count=3)
    assert quiet_from((again,), 3001, 50, 228) == 3000 + 2736, "the third verdict of one key"
    long_ago = 3000 + LATE_FACTOR * 228
    assert quiet_from(many, long_ago, 50, 228) == 0 == quiet_from(many, 3001, 50, 0)


def test_the_verdicts_of_others_bar_nobody_for_longer() -> None:
    """Verdicts on others moved the end of the bar itself. Of five that were convicted one after the
    other the fifth was out for 9,000 steps. A peer that had served its bar was out again."""
    bars: tuple[Bar, ...] = (Bar(VIEW, 1, "y", 1, 401, "erred once"),)
    for number in range(5):
        step = 1000 + 60 * number
        bars = with_convicted(bars, {f"k{number}": (ViewId(number + 9, "ef" * 32), step)}, {})
        bars = held_off(bars, (), step, quiet_from(bars, step, 50, 228))
    found = {it.peer_id: it for it in bars}
    assert [bar_ends_step(it) for it in bars if it.peer_id != "y"] == list(range(1400, 1641, 60))
    assert "y" not in barred_at(bars, 1000) and found["k4"].until_step > 10_000
    assert barred_at(bars, 1639).keys() == {"k4"} and not barred_at(bars, 1640)
    assert on_probation(bars, 1640).keys() == found.keys(), "though they wait for a stage"
    assert probation_ends_step(found["y"]) == found["k4"].until_step + 50


class Swarm:
    """Six honest members with audits as advised, and keys that get a stage as soon as they may."""

    def __init__(self) -> None:
        self.bars: tuple[Bar, ...] = tuple(Bar(GENESIS, 0, it, 0, 0, KNOWN) for it in "abcdef")
        self.computed = self.step = self.verdicts = 0
        self.epochs, self.stages = Epochs(), dict[str, int]()

    def come(self, *keys: str) -> None:
        quiet_from_step = quiet_from(self.bars, self.step, RARE.follow_steps, RARE.undo_steps)
        waits = RARE.follow_steps, quiet_from_step
        bars = with_roles(self.bars, "abcdef", keys, self.step, *waits)
        self.bars = united(bars, {*"abcdef", *self.stages, *keys})

    def go_on(self, waiting: list[str], places: int = 2) -> None:
        """One step, and a view in which some keys get a stage."""
        barred = barred_at(self.bars, self.step).keys() | on_probation(self.bars, self.step).keys()
        may = [it for it in waiting if it not in barred | self.stages.keys()]
        may = may[: max(0, places - len(self.stages))]
        self.stages |= dict.fromkeys(may, self.step)
        self.computed, self.step = self.computed + 1, self.step + 1

    def _after(self, key: str) -> tuple[Bar, ...]:
        lies = {key: (ViewId(self.verdicts + 1, "ef" * 32), self.step)}
        return with_convicted(self.bars, lies, {})

    def goes_back_to(self, key: str) -> int:
        """The step to which all go back where a key is convicted now."""
        undo = undo_due(self.bars, self._after(key), RARE, self.epochs)
        assert undo is not None
        return undo.newest // RARE.undo_every * RARE.undo_every

    def convict(self, key: str) -> None:
        after, begun = self._after(key), self.goes_back_to(key)
        quiet_from_step = quiet_from(after, self.step, RARE.follow_steps, RARE.undo_steps)
        self.stages.pop(key)
        self.bars = held_off(after, self.stages, self.step, quiet_from_step)
        self.step, self.verdicts = begun, self.verdicts + 1
        self.epochs = self.epochs.next_one(self.step)


@pytest.mark.parametrize("held_steps", [1, 10, 100, 400])
def test_ever_new_keys_do_not_hold_a_run_in_place(held_steps: int) -> None:
    """Ten keys waited, and more came. Each 51 steps one of them had all go back by more than
    that."""
    swarm, number = Swarm(), 0
    while max(2 * swarm.step, swarm.computed) < 40_000:
        waiting = [it.peer_id for it in swarm.bars if it.count == 0 and it.peer_id not in "abcdef"]
        news = [f"key-{number + more:05}" for more in range(10 - len(waiting))]
        number += len(news)
        if news:
            swarm.come(*news)
        swarm.go_on(sorted({*waiting, *news}))
        for key in [it for it, at in swarm.stages.items() if swarm.step - at >= held_steps][:1]:
            swarm.convict(key)
    assert swarm.step >= 0.9 * swarm.computed, (swarm.computed, swarm.step)


@pytest.mark.parametrize(("count", "most_steps"), [(1, 250), (5, 10_000), (9, 21_000)])
def test_a_few_keys_that_convict_themselves_do_not_keep_others_out_for_good(
    count: int, most_steps: int
) -> None:
    """Nine keys were back after 450 steps each. With each verdict all others waited anew, for
    51,000 steps. Waiting with the verdict does not help the keys either."""
    for pause_steps in (0, 1000, 2700):
        swarm, keys = Swarm(), [f"liar-{n}" for n in range(count)]
        swarm.step = swarm.computed = 1000
        swarm.come(*keys)
        swarm.go_on([])
        swarm.come("honest")
        for _ in range(60):
            swarm.go_on(keys, places=count)
        begun, last = swarm.computed, 0
        while "honest" not in swarm.stages:
            if swarm.stages and swarm.computed >= last + pause_steps:
                last = swarm.computed
                swarm.convict(min(swarm.stages))
            swarm.go_on(["honest", *keys], places=count + 1)
            assert swarm.computed - begun < most_steps, (pause_steps, swarm.verdicts)
