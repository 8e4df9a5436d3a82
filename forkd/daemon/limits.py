"""How much and how long a client may ask of the daemon.

One frozen value handed down at start, so that tests can shrink it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    connections: int = 1024
    head_secs: float = 10  # first byte of a request (or the connection) to the end of its head
    body_secs: float = 30  # a whole JSON body; between two pieces of an upload
    write_secs: float = 60  # a client that does not read its reply
    idle_secs: int = 120  # a kept-alive connection between requests
    linger_secs: float = 2  # reading on after a refusal, so that the client gets to see it
    drain_secs: int = 30  # requests under way at SIGTERM
    body_bytes: int = 2 * 1024 * 1024
    file_bytes: int = 1024 * 1024 * 1024
    replays: int = 1024
    replay_secs: float = 24 * 3600
