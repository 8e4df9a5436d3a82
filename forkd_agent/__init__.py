"""The agent inside a sandbox, and what code in a sandbox may import from it."""

from __future__ import annotations

from forkd_agent.hooks import after_fork

__all__ = ["after_fork"]
