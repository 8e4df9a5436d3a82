"""The `forkd` command: one small file per family of verbs, each a few lines over the client."""
