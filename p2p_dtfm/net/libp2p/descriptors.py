"""How many files and streams this process may have open at once."""

import contextlib
import resource

WANTED = 16_384


def descriptors_at_most() -> int:
    """What `allow_many_descriptors` comes to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return WANTED
    return max(soft, WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED))


def allow_many_descriptors() -> None:
    """A stream is one here and a direct line three, to each neighbour and from it: in a swarm of a
    hundred the 1,024 that systems give by themselves are not enough. They are meant for programs
    that use `select`; whoever may have more asks for it, and needs no leave."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = descriptors_at_most()
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a system that has another bound
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
