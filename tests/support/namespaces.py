"""Hosts apart: network namespaces joined by cables (veth), one of which is the test's own. Needs root and iproute2."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET; os.setns is Python 3.12's
_CHAINS = (("INPUT", "-i"), ("OUTPUT", "-o"))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def at_home() -> bool:
    """Return whether this thread is in the network of the process that started this one. True without namespaces."""
    try:
        return Path("/proc/thread-self/ns/net").readlink() == Path(f"/proc/{os.getppid()}/ns/net").readlink()
    except OSError:
        return True


@contextmanager
def inside(namespace: str | Path) -> Iterator[None]:
    """This thread, and every process that it starts, is in that namespace (a name, or a file of /proc)."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(descriptor: int) -> None:
        if libc.setns(descriptor, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"setns({namespace})")

    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(Path("/run/netns", namespace), os.O_RDONLY)
    try:
        enter(there)
        yield
        enter(before)
    except BaseException:
        enter(before)
        raise
    finally:
        os.close(there)
        os.close(before)


class Host:
    """A namespace with one cable, to the test's.

    Attributes:
        name: of the namespace.
        home: the address of the test's host, as this one sees it.
    """

    def __init__(self, name: str, cable: str, home: str) -> None:
        self.name, self.home, self._cable = name, home, cable

    def cut_off(self) -> None:
        """Drop every packet that comes or goes."""
        self._filter("-A")

    def mend(self) -> None:
        self._filter("-F")

    def _filter(self, verb: str) -> None:
        for chain, flag in _CHAINS:
            rule = [flag, self._cable, "-j", "DROP"] if verb == "-A" else []
            _run("ip", "netns", "exec", self.name, "iptables", "-w", verb, chain, *rule)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts; meanwhile the calling thread is on a host of its own. Nothing is left of them, whatever happens.

    Processes on them have to be ended before: the kernel keeps a namespace for as long as there is one.
    """
    prefix = f"dlk{os.getpid()}"
    with ExitStack() as stack:

        def made(name: str) -> str:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            return name

        home = made(f"{prefix}home")
        joined = []
        for number in range(count):
            host = made(f"{prefix}h{number}")
            near, far = f"near{number}", f"far{number}"
            _run("ip", "-n", home, "link", "add", near, "type", "veth", "peer", "name", far, "netns", host)
            for namespace, cable, last in ((home, near, 1), (host, far, 2)):
                _run("ip", "-n", namespace, "address", "add", f"10.213.{number}.{last}/30", "dev", cable)
                _run("ip", "-n", namespace, "link", "set", cable, "up")
            joined.append(Host(host, far, f"10.213.{number}.1"))
        stack.enter_context(inside(home))
        yield joined
