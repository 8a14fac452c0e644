"""Policies by name or import path."""

from __future__ import annotations

import importlib
import pkgutil

from branchline.engine.config import SchedulingConfig
from branchline.engine.errors import ConfigError
from branchline.engine.scheduler import policies
from branchline.engine.scheduler.policies.base import Policy

_NOT_POLICIES = {"base", "find"}


def policy_names() -> list[str]:
    """The built-in ones."""
    return sorted(
        module.name.replace("_", "-") for module in pkgutil.iter_modules(policies.__path__) if module.name not in _NOT_POLICIES
    )


def find_policy(config: SchedulingConfig) -> Policy:
    """The policy that the settings name. Raises ConfigError."""
    name = config.policy
    if ":" in name:
        module_name, _, class_name = name.partition(":")
    elif name in policy_names():
        module_name, class_name = f"{policies.__name__}.{name.replace('-', '_')}", "Policy"
    else:
        raise ConfigError(
            f"scheduling.policy = {name!r}: expected one of {', '.join(policy_names())}, or 'package.module:Class'",
            param="scheduling.policy",
        )
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as err:
        raise ConfigError(f"scheduling.policy = {name!r}: {err}", param="scheduling.policy") from err
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise ConfigError(
            f"scheduling.policy = {name!r} is no subclass of {Policy.__module__}:Policy", param="scheduling.policy"
        )
    return cls(config)
