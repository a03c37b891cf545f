"""The engine: what runs on the GPU host. `python -m engine VERB`."""

__version__ = "0.1.0"
