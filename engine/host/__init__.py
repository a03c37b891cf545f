"""Runs on the host: supervisor, run directory, verbs, tail, probe. Standard library only, Python >= 3.10."""
