"""What an unplanned view makes of the states here; `core.recovery.recovery_evidence.Restart`."""

import logging

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.recovery_evidence import Restart
from p2p_dtfm.daemon.telemetry.run_history import RunHistory
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.daemon.trainer.cut_transfers import Cuts
from p2p_dtfm.daemon.trainer.trainer_state import Outlet, Tools, TrainerState
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.optimizer import replay_outcome

log = logging.getLogger("p2p_dtfm")


class Restarting:
    """A large state takes many seconds to be read. If another life begins meanwhile, it discards
    all states, and with them the restarts that are due: nothing of them is put back."""

    def __init__(
        self,
        tools: Tools,
        outlet: Outlet,
        state: TrainerState,
        cuts: Cuts,
        audits: Audits,
        history: RunHistory,
    ) -> None:
        self._tools = tools
        self._outlet = outlet
        self._state = state
        self._cuts = cuts
        self._audits = audits
        self._history = history
        self._damaged = set[int]()
        """Layers that could not be loaded, until the last restart that is due is done."""

    def forget(self) -> None:
        """Another life has begun."""
        self._damaged.clear()

    async def do(self, restart: Restart, step: int) -> None:
        """Bring the states to where an unplanned view starts; `restart` is the first that is
        due."""
        state = self._state
        self._audits.forget()  # states may change
        state.memory.forget((*restart.discard, *restart.load))
        for layer in restart.discard:
            state.states.pop(layer, None)
        self._damaged -= set(restart.discard)
        self._say_what_is_read(restart, step)
        for layer in restart.load:
            found = await self._load(layer, step)
            if not self._is_due(restart):
                return
            if found is not None:
                state.states[layer] = found
            else:
                self._damaged.add(layer)
        await self._roll_forward(restart, step)
        if not self._is_due(restart):
            return
        state.restarts.popleft()
        self._outlet.states_changed()
        if self._damaged and not state.restarts:  # the members go on from what there is
            damaged, self._damaged = sorted(self._damaged), set()
            self._outlet.contradiction(f"layers {damaged} of step {step} are damaged here")

    def _say_what_is_read(self, restart: Restart, step: int) -> None:
        """The others have agreed, and may wait for this peer. Where another failure is dealt with,
        or no steps can happen, the status says that."""
        state = self._state
        has_plan = state.view is not None and isinstance(state.view.plan, Plan)
        if restart.load and has_plan and not state.stopped:
            text = f"reads {counted(len(restart.load), 'layer')} as of step {step}"
            self._tools.status.say(State.SYNCING, text)

    async def _roll_forward(self, restart: Restart, step: int) -> None:
        state, outcome = self._state, restart.outcome
        if restart.rolled_view is None or outcome is None:
            return
        kept = state.reduced.get((restart.rolled_view, step - 1), {})
        for layer in restart.roll_forward:
            held, norm = state.states[layer], outcome.gradient_norm
            args = (self._tools.spec, held, kept[layer], step - 1, norm)
            await self._tools.compute.run(replay_outcome, *args)
            if not self._is_due(restart):
                return
        state.memory.commit(step - 1, restart.rolled_view)
        self._history.record(outcome)

    def _is_due(self, restart: Restart) -> bool:
        return bool(self._state.restarts) and self._state.restarts[0][0] is restart

    async def _load(self, layer: int, step: int) -> LayerState | None:
        """A layer from where it is said to be; None if it is not there any more. A power cut may
        damage what is saved, and nobody has looked since."""
        stores, spec = self._tools.stores, self._tools.spec
        if (copy := self._cuts.find(layer, step)) is not None:
            return await self._tools.compute.run(
                lambda: LayerState.from_bytes(spec, layer, copy.to_bytes())
            )
        if step == 0:
            return await stores.initial.state(layer)
        try:
            return await stores.checkpoints.load(layer, step)
        except UserError as error:
            log.warning("%s: nobody is told any more that it is here", error.cause)
            return None
