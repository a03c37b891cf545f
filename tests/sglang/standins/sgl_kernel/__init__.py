"""Stand-in for sgl_kernel, of which there is no CPU wheel: names resolve, and a call raises with the name.

The models of the tests need none of its functions but those of linear attention (gated_delta.py).
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0+standin"


class _Scalars:
    """``scalar_types.<name>`` serves as a key only."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"scalar_type:{name}"


def _missing(name):
    if name.endswith(".scalar_types"):
        return _Scalars()

    def call(*args, **kwargs):
        raise NotImplementedError(f"the stand-in has no {name}")

    call.__name__ = name.rsplit(".", 1)[-1]
    return call


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(f"sgl_kernel.{name}")


class _Loader(importlib.abc.Loader):
    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []

        def getattribute(name, _of=spec.name):
            if name.startswith("__"):
                raise AttributeError(name)
            return _missing(f"{_of}.{name}")

        module.__getattr__ = getattribute
        return module

    def exec_module(self, module):
        return None


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("sgl_kernel.") and name != "sgl_kernel.gated_delta":
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
        return None


sys.meta_path.append(_Finder())

from . import gated_delta  # noqa: E402,F401
