"""The capture as it is loaded inside a server: one package with relative imports, and a name that hides no
other.

``register`` is the entry point ``sglang.srt.plugins`` (the dist-info folder beside this package names it).
"""
