"""From when on locks are granted again."""

import time

from chaos.history import Tail


class Resumed:
    """The moment at which the first body with a lock of these names, granted after `gone`, starts (monotonic, s)."""

    def __init__(self, tail: Tail, names: set[str], gone: float) -> None:
        self._tail, self._names = tail, names
        self._from_us = (time.time() - time.monotonic() + gone) * 1e6
        self.at = 0.0

    def look(self) -> float:
        for event in self._tail.new():
            # The token is the server's time of the grant; its body may enter late on a busy machine.
            granted = event["what"] == "in" and event["name"] in self._names and event["token"] > self._from_us
            if granted and not self.at:
                self.at = event["at"] / 1e9
        return self.at
