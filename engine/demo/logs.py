"""The log of the server: SGLang's prefix and uvicorn's access lines, on stderr."""

from __future__ import annotations

import logging.config
from typing import Any

_TIME = "%Y-%m-%d %H:%M:%S"


def logging_config() -> dict[str, Any]:
    """For logging.config.dictConfig and for uvicorn."""
    stderr = {"class": "logging.StreamHandler", "stream": "ext://sys.stderr"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "plain": {"format": "[%(asctime)s] %(message)s", "datefmt": _TIME},
            "server": {
                "()": "uvicorn.logging.DefaultFormatter", "fmt": "[%(asctime)s] %(levelprefix)s %(message)s",
                "datefmt": _TIME, "use_colors": False,
            },
            "access": {
                "()": "uvicorn.logging.AccessFormatter", "datefmt": _TIME, "use_colors": False,
                "fmt": '[%(asctime)s] %(levelprefix)s %(client_addr)s - "%(request_line)s" %(status_code)s',
            },
        },
        "handlers": {
            name: {**stderr, "formatter": name} for name in ("plain", "server", "access")
        },
        "loggers": {
            "hsx": {"handlers": ["plain"], "level": "INFO", "propagate": False},
            "uvicorn": {"handlers": ["server"], "level": "INFO", "propagate": False},
            "uvicorn.access": {"handlers": ["access"], "level": "INFO", "propagate": False},
        },
        "root": {"handlers": ["plain"], "level": "WARNING"},
    }  # fmt: skip


def set_up() -> None:
    """Begin to log."""
    logging.config.dictConfig(logging_config())
