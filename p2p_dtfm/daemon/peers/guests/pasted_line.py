"""What a pasted line tells the daemon: where to go, and to which run."""

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.invited.line import InvitationLine, read_line
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.net.contacts.addresses import is_address


def addresses_of(settings: Settings) -> tuple[str, ...]:
    """Members' addresses that were typed, and those of the line. One that is malformed spoils no
    others, since the line's maker may have taken it from another's word. Raises `UserError`."""
    pasted = read_line(settings.invite).addresses if settings.invite else ()
    pasted = tuple(filter(is_address, pasted)) or pasted
    return tuple(dict.fromkeys((*settings.initial_peers, *pasted)))


def run_digest_of(settings: Settings) -> str:
    """The digest of the run that was named, or that the line names; else empty. Raises
    `UserError`."""
    return read_line(settings.invite).run_digest if settings.invite else settings.run_digest


def invitation_of(settings: Settings) -> InvitationLine | None:
    """The line, if it is of a run that asks for one. Raises `UserError`."""
    line = read_line(settings.invite) if settings.invite else None
    return line if line is not None and line.chain else None


def with_invitation(settings: Settings) -> Settings:
    """The settings as if the line's addresses and run had been typed. Raises `UserError`."""
    if not settings.invite:
        return settings
    line = read_line(settings.invite)
    if settings.run:
        raise UserError(
            "--invite joins a run that is there, --run founds one", "leave out one of them"
        )
    if settings.run_digest and not line.run_digest.startswith(settings.run_digest):
        raise UserError(
            f"the invitation is to run {line.run_digest[:16]}, not {settings.run_digest[:16]}",
            "leave out --run-digest: the invitation names the run",
        )
    return settings.model_copy(
        update={"initial_peers": addresses_of(settings), "run_digest": line.run_digest}
    )
