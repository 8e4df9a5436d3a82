"""The Python SDK: everything that talks to the daemon, and nothing that runs inside it."""
