"""The kinds of sabotage (sabotage.py), by themselves: the command line is read before torch is imported."""

KINDS = ("swap", "shift", "neighbour", "stale")
