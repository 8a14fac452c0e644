"""Finds architectures by module name: `models/<model_type>.py` with an `ARCHITECTURE`. No registry."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

from branchline.engine import models
from branchline.engine.errors import UnsupportedModelError
from branchline.engine.models.base import Architecture

_NOT_ARCHITECTURES = frozenset({"base", "find"})


def architecture_names() -> list[str]:
    """Names of the architectures whose files are there, sorted. Imports none of them."""
    modules = (module.name for module in pkgutil.iter_modules(models.__path__))
    return sorted(name for name in modules if name not in _NOT_ARCHITECTURES and not name.startswith("_"))


def find_architecture(name: str) -> Architecture:
    """The architecture of module `models/<name>.py`.

    Raises:
        UnsupportedModelError: no such file; the text lists what is there.
        ImportError: the file is there but something that it imports isn't (its own error, unchanged).
    """
    known = architecture_names()
    package = models.__name__
    if name not in known or importlib.util.find_spec(f"{package}.{name}") is None:
        raise UnsupportedModelError(f"architecture {name!r} isn't supported. There are: {', '.join(known)}")
    found = getattr(importlib.import_module(f"{package}.{name}"), "ARCHITECTURE", None)
    if not isinstance(found, Architecture):
        raise UnsupportedModelError(f"{package}.{name} has no ARCHITECTURE of type {Architecture.__name__}")
    return found
