"""How many files and streams this process may have open at once."""

import contextlib
import resource

WANTED = 16_384


def descriptors_at_most() -> int:
    """The limit after `allow_many_descriptors`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return WANTED
    return max(soft, WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED))


def allow_many_descriptors() -> None:
    """Raise this process's soft limit to its hard limit, which needs no permission. To each
    neighbour and from it, a stream takes one descriptor and a direct line three. In a swarm of a
    hundred the usual limit of 1,024, which protects programs that use `select`, is not enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = descriptors_at_most()
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems have another bound
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
