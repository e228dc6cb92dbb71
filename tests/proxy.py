"""A TCP proxy that breaks connections in the ways a network does."""

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import Self

from tests.processes import HOST, free_port

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
    """

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self._target = target_port
        self._mode: Mode = "pass"
        self._cuts: int | None = None
        self._containing = b""
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        # One loop in one thread instead of two threads per connection: a mode changes between two chunks, and
        # no thread is blocked in recv on a socket that another one closes.
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

    def set_mode(self, mode: Mode, *, times: int | None = None, containing: bytes = b"") -> None:
        """Change the mode; it holds when this returns.

        Args:
            times: with `cut_reply`, pass again after so many cuts; a new connection's handshake has replies too.
            containing: with `cut_reply`, cut only the reply to what carries these bytes, such as b"EVALSHA".
        """
        self._call(self._change(mode, times, containing))

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _change(self, mode: Mode, times: int | None, containing: bytes) -> None:
        was, self._mode, self._cuts, self._containing = self._mode, mode, times, containing
        if mode == "blackhole":
            self._flowing.clear()
        else:
            self._flowing.set()
        if mode == "refuse" and was != "refuse":
            self._refuse()
        elif was == "refuse" and mode != "refuse":
            await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connect, HOST, self.port)

    def _refuse(self) -> None:
        self._server.close()
        for writer in self._writers:
            _reset(writer)

    async def _close(self) -> None:
        self._refuse()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._owned(writer):
            await self._flowing.wait()
            far_reader, far_writer = await asyncio.open_connection(HOST, self._target)
            with self._owned(far_writer):
                link = _Link()
                requests = asyncio.create_task(self._forward_requests(reader, far_writer, link))
                replies = asyncio.create_task(self._forward_replies(far_reader, writer, link))
                done, rest = await asyncio.wait({requests, replies}, return_when=asyncio.FIRST_COMPLETED)
                for task in rest:
                    task.cancel()
                await asyncio.gather(*rest, return_exceptions=True)
                for task in done:
                    task.result()

    async def _forward_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: "_Link"
    ) -> None:
        while chunk := await reader.read(CHUNK):
            await self._flowing.wait()
            link.doomed = link.doomed or (self._mode == "cut_reply" and self._containing in chunk)
            writer.write(chunk)
            await writer.drain()

    async def _forward_replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: "_Link") -> None:
        while chunk := await reader.read(CHUNK):
            await self._flowing.wait()
            if link.doomed:
                self._count_cut()
                raise ConnectionResetError
            writer.write(chunk)
            await writer.drain()

    def _count_cut(self) -> None:
        if self._cuts is not None:
            self._cuts -= 1
            if not self._cuts:
                self._mode = "pass"

    @contextmanager
    def _owned(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._writers.add(writer)
        try:
            yield
        except (OSError, asyncio.CancelledError):
            # The other side is down, has hung up or was cut off: this side sees a reset, as from a network.
            _reset(writer)
        finally:
            self._writers.discard(writer)
            writer.close()


@dataclass
class _Link:
    doomed: bool = False


def _reset(writer: asyncio.StreamWriter) -> None:
    opened: socket.socket | None = writer.get_extra_info("socket")
    if opened is not None and opened.fileno() >= 0:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
