"""A public network and homes behind routers that translate addresses, in network namespaces.

Each namespace is held by a process whose standard input is a pipe of this one: when this process
ends, in whatever way, the holders end and the namespaces, with all that is in them, are gone. The
routers are Linux's own: nftables masquerades what leaves a home, and drops what was not asked for.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Self

PUBLIC = "5.9.0.{}"
"""Public in form (libp2p treats test networks as private), and nowhere to be reached from here."""
HOME = "192.168.1.2"
"""The same in every home, as it is."""
ROUTER_WITHIN = "192.168.1.1"
COMMANDS = ("ip", "nft", "unshare", "nsenter", "tc", "sysctl", "setpriv")

_RULES = """
table ip translation {{
  chain outward {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname "wan" masquerade{how}
  }}
  chain inward {{
    type nat hook prerouting priority dstnat; policy accept;
    {forwarded}
  }}
}}
table ip firewall {{
  chain input {{
    type filter hook input priority filter; policy drop;
    iifname "home" accept
    ct state established,related accept
  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
    iifname "home" accept
    ct state established,related accept
    ct status dnat accept
  }}
}}
"""
_FIREWALL = """
table ip firewall {
  chain input {
    type filter hook input priority filter; policy drop;
    iifname "lo" accept
    ct state established,related accept
  }
}
"""


def missing() -> str:
    """Why namespaces cannot be made here, or nothing."""
    absent = [command for command in COMMANDS if shutil.which(command, path=_PATH) is None]
    if absent:
        return f"needs the commands {', '.join(absent)}"
    tried = subprocess.run(
        [
            "unshare",
            "--net",
            "nft",
            "add table ip probe; add chain ip probe nat "
            "{ type nat hook postrouting priority srcnat; }",
        ],
        capture_output=True,
        text=True,
        env=_environment(),
    )
    if tried.returncode:
        return f"network namespaces with address translation cannot be made: {tried.stderr[:200]}"
    return ""


class Namespace:
    """A network of its own. Commands with the prefix `enter` run in it."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=_environment(),
        )
        self.pid = self._holder.pid
        while os.readlink(f"/proc/{self.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            assert self._holder.poll() is None, "unshare --net failed"
        self.run("ip", "link", "set", "lo", "up")

    @property
    def enter(self) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net"]

    def run(self, *command: str, given: str | None = None) -> str:
        done = subprocess.run(
            [*self.enter, *command],
            input=given,
            capture_output=True,
            text=True,
            env=_environment(),
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdin is not None
        self._holder.stdin.close()


class Network:
    """One public network; as a context manager it is gone at the end."""

    def __init__(self) -> None:
        self._namespaces: list[Namespace] = []
        self._count = 0

    def __enter__(self) -> Self:
        self.exchange = self._namespace()
        self.exchange.run("ip", "link", "add", "exchange", "type", "bridge")
        self.exchange.run("ip", "link", "set", "exchange", "up")
        return self

    def __exit__(self, *problem: object) -> None:
        for namespace in reversed(self._namespaces):
            namespace.close()

    def _namespace(self) -> Namespace:
        namespace = Namespace()
        self._namespaces.append(namespace)
        return namespace

    def public(self, *, firewall: bool = False) -> tuple[Namespace, str]:
        """A machine with a public address, and that address.

        `firewall`: it drops what it has not asked for.
        """
        namespace = self._namespace()
        if firewall:
            namespace.run("nft", "-f", "-", given=_FIREWALL)
        return namespace, self._plug(namespace)

    def limit(self, namespace: Namespace, mbps: int) -> None:
        """How fast a machine with a public address may send."""
        limits = f"rate {mbps}mbit burst 64kb latency 100ms"
        namespace.run("tc", "qdisc", "add", "dev", "wan", "root", "tbf", *limits.split())

    def move(self, namespace: Namespace, *, firewall: bool = False) -> str:
        """Give a machine with a public address another one in its place, as to a laptop that is
        opened elsewhere; there, behind a firewall."""
        self._count += 1
        address = PUBLIC.format(self._count)
        namespace.run("ip", "address", "flush", "dev", "wan")
        namespace.run("ip", "address", "add", f"{address}/24", "dev", "wan")
        if firewall:
            namespace.run("nft", "-f", "-", given=_FIREWALL)
        return address

    def _plug(self, namespace: Namespace) -> str:
        self._count += 1
        address, port = PUBLIC.format(self._count), f"port{self._count}"
        self.exchange.run(
            "ip", "link", "add", port, "type", "veth",
            "peer", "name", "wan", "netns", str(namespace.pid),
        )  # fmt: skip
        self.exchange.run("ip", "link", "set", port, "master", "exchange", "up")
        namespace.run("ip", "address", "add", f"{address}/24", "dev", "wan")
        namespace.run("ip", "link", "set", "wan", "up")
        return address

    def home(
        self, *, symmetric: bool = False, forwarded_ports: Sequence[int] = ()
    ) -> tuple[Namespace, str]:
        """A machine behind a router of its own, and the router's public address.

        `symmetric`: the router takes a new random port for each connection, so that nobody can
        tell others how to reach it. `forwarded_ports` lead to the machine.
        """
        router, machine = self._namespace(), self._namespace()
        address = self._plug(router)
        router.run(
            "ip", "link", "add", "home", "type", "veth",
            "peer", "name", "eth0", "netns", str(machine.pid),
        )  # fmt: skip
        router.run("ip", "address", "add", f"{ROUTER_WITHIN}/24", "dev", "home")
        router.run("ip", "link", "set", "home", "up")
        machine.run("ip", "address", "add", f"{HOME}/24", "dev", "eth0")
        machine.run("ip", "link", "set", "eth0", "up")
        machine.run("ip", "route", "add", "default", "via", ROUTER_WITHIN)
        router.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
        forwarded = "\n    ".join(
            f'iifname "wan" tcp dport {port} dnat to {HOME}' for port in forwarded_ports
        )
        how = " fully-random" if symmetric else ""
        router.run("nft", "-f", "-", given=_RULES.format(how=how, forwarded=forwarded))
        return machine, address


_PATH = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin" + os.pathsep + "/sbin"


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _PATH}
