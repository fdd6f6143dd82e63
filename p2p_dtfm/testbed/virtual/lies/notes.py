"""Notes each liar's view, what honest peers commit and deny, and whom they leave out."""

from typing import Any

from p2p_dtfm.daemon.node.membership import Membership
from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.daemon.trainer.step_loop import StepLoop
from p2p_dtfm.testbed.virtual.lies.lying import Deed, Lying
from p2p_dtfm.testbed.virtual.patches import Patches

LEFT_OUT = "leaves out "


def _commits_are_noted(patches: Patches, lying: Lying) -> None:
    async def outcome(self: Any, view: Any, step: int, reduced: Any) -> Any:
        found = await honest(self, view, step, reduced)
        book, deed = self.audits._book, Deed(view.id, step)
        seen = lying.commit(deed, found.digest)
        if seen is not None and book is not None and deed in lying.told:
            honest_ones = lying.victims(view.plan.stage_holders())
            draws = (*book.drawn_instead(), *book.rounds())
            seen.drawn |= book.drawn()
            further = (it for drawn in draws for it in drawn.items())
            seen.drawn |= {peer: by for peer, by in further if by in honest_ones}
            for liar in lying.told[deed]:
                seen.judges[liar] = sum(book.may_judge(it, liar) for it in honest_ones)
        return found

    honest = patches.put(StepLoop, "_outcome", outcome)


def _denials_are_noted(patches: Patches, lying: Lying) -> None:
    async def account(self: Any, view: Any, plan: Any, step: int, *rest: Any) -> Any:
        said = await honest(self, view, plan, step, *rest)
        denied = (it for it, is_denied in (said.disputed if said else {}).items() if is_denied)
        lying.deny(Deed(view.id, step), len(plan.stage_holders()), denied)
        return said

    honest = patches.put(Audits, "account", account)


def _reports_are_noted(patches: Patches, lying: Lying) -> None:
    def report(self: Any, action: Any) -> None:
        if lying.here() not in lying.ids and action.text.startswith(LEFT_OUT):
            lying.reports.append(action.text)
        honest(self, action)

    honest = patches.put(Membership, "_report", report)


def _steps_are_noted(patches: Patches, lying: Lying) -> None:
    async def one_step(self: Any, view: Any, *rest: Any) -> None:
        lying.views[lying.here()] = view.id
        await honest(self, view, *rest)

    honest = patches.put(StepLoop, "_one_step", one_step)


NOTES = (
    _steps_are_noted,
    _commits_are_noted,
    _denials_are_noted,
    _reports_are_noted,
)
