"""Preflight, canary and the one extraction loop."""
