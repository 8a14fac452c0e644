"""Finds attention backends by module name: `attention/<name>.py` with a class `Backend`. No registry."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil

import torch

from branchline.engine import attention
from branchline.engine.attention.base import AttentionBackend
from branchline.engine.errors import ConfigError

AUTO = "auto"
_NOT_BACKENDS = frozenset({"base", "find"})
_BEST = {"cpu": "cpu", "cuda": "flashinfer"}


def backend_names() -> list[str]:
    """Names of the backends whose files are there, sorted. Imports none of them."""
    modules = (module.name for module in pkgutil.iter_modules(attention.__path__))
    return sorted(name for name in modules if name not in _NOT_BACKENDS and not name.startswith("_"))


def find_backend(name: str, device: torch.device | str) -> type[AttentionBackend]:
    """The backend class of module `attention/<name>.py`.

    Args:
        name: a module name, or "auto": the device's best.
        device: where the engine computes; only "auto" looks at it.

    Raises:
        ConfigError: no such backend; the text lists what is there.
        ImportError: the backend's file is there but something that it imports isn't (its own error, unchanged).
    """
    device = torch.device(device)
    wanted = _BEST.get(device.type, name) if name == AUTO else name
    known = backend_names()
    package = attention.__name__
    if wanted not in known or importlib.util.find_spec(f"{package}.{wanted}") is None:
        near = difflib.get_close_matches(wanted, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        asked = f"attention = {name!r}" + (f" ({wanted!r} on {device.type})" if wanted != name else "")
        raise ConfigError(f"{asked}: no such backend. There are: {', '.join(known)}{hint}", param="attention")
    backend = getattr(importlib.import_module(f"{package}.{wanted}"), "Backend", None)
    if not (isinstance(backend, type) and issubclass(backend, AttentionBackend)):
        raise ConfigError(f"{package}.{wanted} has no class Backend(AttentionBackend)", param="attention")
    return backend
