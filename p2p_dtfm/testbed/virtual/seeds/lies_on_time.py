"""When a lie of a schedule begins, and when it is over."""

from p2p_dtfm.testbed.virtual.lies.lying import SELDOM_TOLD, Lying
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault


class LiesOnTime:
    """Keeps each liar lying until its lie was told."""

    def __init__(self, lying: Lying | None) -> None:
        self._lying = lying
        self._ending: list[Fault] = []
        """Lies that end once they were told."""

    def begin(self, fault: Fault) -> bool:
        assert self._lying is not None, "only who is drawn to lies"
        self._lying.kinds |= dict.fromkeys(fault.whom, fault.what)
        return True

    def end(self, fault: Fault) -> None:
        """Ends the lie once it was told, unless the liar tells another one by then."""
        self._ending.append(fault)
        self.end_those_that_were_told()

    def end_those_that_were_told(self) -> None:
        """Ends those of `_ending` that were told by now, or are seldom told. While a swarm stands
        still nobody lies."""
        lying, waiting = self._lying, list[Fault]()
        for fault in self._ending if lying is not None else ():
            assert lying is not None
            those = [name for name in fault.whom if lying.kinds.get(name) == fault.what]
            seldom = fault.what in SELDOM_TOLD
            for name in those:
                if seldom or (name, fault.what) in lying.has_told:
                    del lying.kinds[name]
            if any(lying.kinds.get(name) == fault.what for name in those):
                waiting.append(fault)
        self._ending = waiting
