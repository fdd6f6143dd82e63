"""What a daemon has of its own before it meets anybody."""

import logging

from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
from p2p_dtfm.daemon.dashboard.observer import Observer
from p2p_dtfm.daemon.dashboard.seen import Seen
from p2p_dtfm.daemon.dashboard.waits import OwnWaits
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.life import Life
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.machine.world import Machine, World
from p2p_dtfm.daemon.telemetry.event_files import EventFiles
from p2p_dtfm.daemon.telemetry.status import State, Status
from p2p_dtfm.daemon.telemetry.step_recorder import StepRecorder

log = logging.getLogger("p2p_dtfm")


class Local:
    """Settings, home, compute thread and life, and the places where it is told how things stand."""

    def __init__(
        self,
        settings: Settings,
        dashboard: DashboardHost,
        seen: Seen | None = None,
        world: World | None = None,
    ) -> None:
        """`dashboard` is closed by whoever made it. `seen`: what an earlier daemon of this
        home has seen."""
        self.settings = settings
        self.founds = settings.founds
        """The user has brought a run along. The daemon then goes on alone, whichever peers it was
        told of."""
        self.world: World = world or Machine()
        self.dashboard = dashboard
        self.status = Status()
        self.waits = OwnWaits(self.world.tasks)
        self.observer = Observer(self.status, seen, self.waits.overdue)
        self.recorder = StepRecorder()
        self.event_files: EventFiles | None = None
        """TensorBoard's event files, if the user wants them."""
        self.home = Home(settings.home, self.world.lock_folder)
        self.observer.of_this_machine = self.home.of_this_machine
        self.compute = Compute()
        self.life = Life(self._say_leaving)

    def tell(self, text: str, level: int = logging.INFO) -> None:
        """Tell this in the log, and among the events of the dashboard."""
        log.log(level, "%s", text)
        self.observer.note(text)

    def _say_leaving(self) -> None:
        self.status.say(State.LEAVING, "finishes the step and hands its layers to the others")

    @property
    def disk_limit_bytes(self) -> int:
        """0: no limit."""
        return int(self.settings.disk_gib * (1 << 30))
