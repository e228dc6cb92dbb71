"""A TCP proxy that breaks connections in the ways a network does."""

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import Self

from tests.support.processes import HOST, free_port

Mode = Literal["pass", "refuse", "blackhole", "cut_reply"]
CHUNK = 65_536
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close at once, with RST instead of FIN


class Proxy:
    """Stands on `port` in front of a local server; use as a context manager.

    - `pass`: forward.
    - `refuse`: reset every connection and refuse new ones.
    - `blackhole`: accept, but hold every byte back until the mode changes, as a network that drops packets.
    - `cut_reply`: forward the request and reset the connection instead of its reply: the server did it, the
      client cannot know.

    Beside the mode: answers may be delayed (`set_delay`), and the connections of now forgotten (`half_open`).
    """

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self._target = target_port
        self._mode: Mode = "pass"
        self._cuts: int | None = None
        self._every, self._met = 1, 0
        self._containing: tuple[bytes, ...] = (b"",)
        self._passed_before_cut = 0
        self._delay = 0.0, 0.0
        self._chance = random.Random(1)
        self._links: set[_Link] = set()
        self._flowing = asyncio.Event()
        # One loop in one thread instead of two threads per connection. So a mode changes between two chunks, and no
        # thread is blocked in recv on a socket that another one closes.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._flowing.set()
        self._call(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def mode(self) -> Mode:
        return self._mode

    def url(self, db: int = 0) -> str:
        return f"redis://{HOST}:{self.port}/{db}"

    def set_mode(
        self, mode: Mode, *, times: int | None = None, every: int = 1, containing: bytes | Collection[str] = b""
    ) -> None:
        """Change the mode; it holds when this returns.

        Args:
            times: with `cut_reply`, pass again after so many cuts; a new connection's handshake has replies too.
            every: with `cut_reply`, cut one reply of so many.
            containing: with `cut_reply`, cut only (and count only) the reply to what carries these bytes, such as
                b"EVALSHA", or one of these texts.
        """
        parts = (containing,) if isinstance(containing, bytes) else tuple(text.encode() for text in containing)
        self._call(self._change(mode, times, every, parts))

    def cut_after(self, request: bytes, size: int) -> None:
        """Cut the next reply to a request with these bytes after so many bytes of it."""
        self.set_mode("cut_reply", times=1, containing=request)
        self._passed_before_cut = size

    def set_delay(self, least: float, most: float) -> None:
        """Hand each answer on so many seconds late, a random number of them from `least` to `most`."""
        self._call(self._slow(least, most))

    def lead_to(self, target_port: int) -> None:
        """Cut the connections of now; new ones lead to another server, as after a change of a name or a balancer."""
        self._call(self._lead_to(target_port))

    def half_open(self) -> None:
        """Forget the connections of now, as a restarted router does: clients see them open, and hear nothing any more.

        New ones are another matter.
        """
        self._call(self._forget())

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _slow(self, least: float, most: float) -> None:
        self._delay = least, most

    async def _lead_to(self, target_port: int) -> None:
        self._target = target_port
        await self._refuse()
        await self._listen()

    async def _forget(self) -> None:
        for link in self._links:
            link.deaf = True

    async def _change(self, mode: Mode, times: int | None, every: int, containing: tuple[bytes, ...]) -> None:
        was, self._mode, self._cuts, self._containing = self._mode, mode, times, containing
        self._every, self._met, self._passed_before_cut = every, 0, 0
        if mode == "blackhole":
            self._flowing.clear()
        else:
            self._flowing.set()
        if mode == "refuse" and was != "refuse":
            await self._refuse()
        elif was == "refuse" and mode != "refuse":
            await self._listen()

    # Bare sockets, no streams of asyncio. Those make a transport some steps before the caller has it. A task that is
    # cancelled in between leaves it open. A socket is in `_links` from the step that makes it.

    async def _listen(self) -> None:
        self._listener = socket.create_server((HOST, self.port), backlog=100)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return  # the client hung up before its connection was accepted
        link = _Link(near, socket.socket())
        self._links.add(link)
        link.task = self._loop.create_task(self._serve(link))

    async def _refuse(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        links = list(self._links)
        for link in links:
            link.task.cancel()
        await asyncio.gather(*(link.task for link in links), return_exceptions=True)
        for link in links:
            self._end(link, reset=True)  # one that was cancelled before its first step has not ended itself

    async def _close(self) -> None:
        if self._mode != "refuse":
            await self._refuse()

    async def _serve(self, link: "_Link") -> None:
        try:
            await self._flowing.wait()
            await self._loop.sock_connect(link.far, (HOST, self._target))
            await self._forward(link)
        except (OSError, asyncio.CancelledError):
            # The other side is down, has hung up or was cut off: this side sees a reset, as from a network.
            self._end(link, reset=link.reset)
        finally:
            self._end(link)

    async def _forward(self, link: "_Link") -> None:
        ways = [asyncio.create_task(way) for way in (self._forward_requests(link), self._forward_replies(link))]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            # Not before they have let go of the sockets may those be closed.
            await asyncio.gather(*ways, return_exceptions=True)
        for way in done:
            way.result()

    def _end(self, link: "_Link", *, reset: bool = False) -> None:
        self._links.discard(link)
        for end in (link.near, link.far):
            if reset and end.fileno() >= 0:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            end.close()

    async def _forward_requests(self, link: "_Link") -> None:
        while chunk := await self._loop.sock_recv(link.near, CHUNK):
            await self._flowing.wait()
            if not link.deaf:
                link.doomed = link.doomed or self._strikes(chunk)
                await self._loop.sock_sendall(link.far, chunk)

    async def _forward_replies(self, link: "_Link") -> None:
        while chunk := await self._loop.sock_recv(link.far, CHUNK):
            await self._flowing.wait()
            if link.doomed:
                if self._passed_before_cut:
                    await self._loop.sock_sendall(link.near, chunk[: self._passed_before_cut])
                    link.reset = False  # a reset would discard what was just sent
                self._count_cut()
                raise ConnectionResetError
            await asyncio.sleep(self._chance.uniform(*self._delay))
            if not link.deaf:
                await self._loop.sock_sendall(link.near, chunk)
        if link.deaf:
            await asyncio.Event().wait()  # nor does the client hear that the server has gone

    def _strikes(self, chunk: bytes) -> bool:
        if self._mode != "cut_reply" or not any(part in chunk for part in self._containing):
            return False
        self._met += 1
        return (self._met - 1) % self._every == 0

    def _count_cut(self) -> None:
        if self._cuts is not None:
            self._cuts -= 1
            if not self._cuts:
                self._mode = "pass"


@dataclass(eq=False)
class _Link:
    """One client's connection, and the one that was made for it."""

    near: socket.socket
    far: socket.socket
    task: "asyncio.Task[None]" = field(init=False)
    doomed: bool = False
    deaf: bool = False
    reset: bool = True

    def __post_init__(self) -> None:
        for end in (self.near, self.far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
