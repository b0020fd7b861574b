"""A forked rank as its supervisor sees it."""

from __future__ import annotations

import os
import socket
from typing import Any


class RankProcess:
    """A forked rank and the three channels to it: announcements, output, result."""

    def __init__(self, rank: int):
        self.rank = rank
        self.pid = 0
        self.channel, self.far_channel = socket.socketpair()
        self.output, self.far_output = os.pipe()
        self.result, self.far_result = os.pipe()
        self.lines = self.text = b""
        self.printed = 0
        self.received = bytearray()
        self.state = "running"  # running, finished, failed
        self.report: dict[str, Any] = {}
        self.data = b""

    def close_far(self) -> None:
        self.far_channel.close()
        os.close(self.far_output)
        os.close(self.far_result)
        for fd in (self.channel.fileno(), self.output, self.result):
            os.set_blocking(fd, False)
