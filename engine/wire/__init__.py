"""The wire: what the engine and the console both know. Standard library only, Python >= 3.10.

errors  the tree of errors and the exit codes        ids     run ids and request ids
causes  why a dump was refused (a closed list)       events  the lines of events.jsonl
spec    what a run is asked to do (spec.json)
"""
