"""A class of the user's own, named by its import path `my_module:MyEnv`: import it, check it, bind its arguments."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

from agentgym_rl.common.import_paths import import_named
from agentgym_rl.environment.base import TextEnv
from agentgym_rl.errors import ConfigError, describe_error

ATTRIBUTES = {
    "name": (str, 'name = "my_env"'),
    "instruction": (str, 'instruction = "The rules, and how to write an action."'),
    "splits": (Mapping, 'splits = {"train": range(80), "test": range(80, 100)}'),
    "subsets": (tuple, "subsets = ()"),
    "cheap": (bool, "cheap = False"),
}
"""Attributes of an environment: type, and a line that sets it."""
METHODS = {
    "reset": ((0,), "def reset(self, item: int) -> str"),
    "step": (("",), "def step(self, text: str) -> Step"),
    "close": ((), "def close(self) -> None"),
    "subsets_of": ((0,), "def subsets_of(cls, item: int) -> tuple[str, ...]"),
}
"""Methods of an environment: arguments they are called with, and their definition."""

_bound: dict[tuple[type, str], type[TextEnv]] = {}
"""Classes made by `bind`: the same class and arguments give the same class."""


def is_import_path(name: str) -> bool:
    return ":" in name


def import_class(path: str) -> type[TextEnv]:
    """Return the class that `my_module:MyEnv` names. The current folder is searched after the installed packages."""
    value = import_named(path, f"environment {path!r}", "a class of your own", "my_module:MyEnv", type)
    if not isinstance(value, type):
        raise ConfigError(f"environment {path!r}: it must name a class, got {type(value).__name__} {value!r:.60}")
    return value


def bind(env_class: type[TextEnv], kwargs: Mapping[str, Any], where: str) -> type[TextEnv]:
    """Return a class of the shape of TextEnv whose constructor takes no argument. ConfigError if there is none.

    Attributes that the constructor sets, such as splits that depend on `kwargs`, are read from one instance.
    """
    key = env_class, json.dumps(kwargs, sort_keys=True, default=repr)
    if key not in _bound:
        _bound[key] = _bind(env_class, kwargs, where)
    return _bound[key]


def _bind(env_class: type[TextEnv], kwargs: Mapping[str, Any], where: str) -> type[TextEnv]:
    problems = class_problems(env_class, kwargs)
    if problems:
        raise ConfigError(_one_line(where, problems))
    instance: Any = _create(env_class, kwargs, where)  # a class that cannot be made is refused before it is needed
    try:
        problems = attribute_problems(instance)
        if problems:
            raise ConfigError(_one_line(where, problems))
        members = {name: getattr(instance, name) for name in ATTRIBUTES}
        members["subsets_of"] = staticmethod(instance.subsets_of)
    finally:
        _close(instance, where)
    if not kwargs and not _needs_instance(env_class):
        return env_class

    def create(self: Any) -> None:
        env_class.__init__(self, **kwargs)

    members |= {"__init__": create, "__module__": env_class.__module__, "__qualname__": env_class.__qualname__}
    return type(env_class.__name__, (env_class,), members)


def _create(env_class: type, kwargs: Mapping[str, Any], where: str) -> Any:
    return _call(where, _call_text(env_class, kwargs), env_class, **kwargs)


def _close(instance: Any, where: str) -> None:
    _call(where, f"{type(instance).__name__}.close()", instance.close)


def _call(where: str, text: str, function: Callable[..., Any], **kwargs: Any) -> Any:
    try:
        return function(**kwargs)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"environment {where}: {text} raised {describe_error(error)}") from error


def class_problems(env_class: type, kwargs: Mapping[str, Any]) -> list[str]:
    """Return a line per mistake that the class itself shows, before there is an instance."""
    problems = [*method_problems(env_class), *signature_problems(env_class, kwargs)]
    if not problems and not kwargs and not _needs_instance(env_class):
        problems = attribute_problems(env_class)
    return problems


def all_problems(env_class: type, kwargs: Mapping[str, Any], where: str) -> list[str]:
    """Return a line per mistake in the shape of the class and of an instance, if one can be made."""
    problems = [*method_problems(env_class), *signature_problems(env_class, kwargs)]
    if signature_problems(env_class, kwargs):
        return problems + attribute_problems(env_class)
    try:
        instance = _create(env_class, kwargs, where)
        problems += attribute_problems(instance)
        if not method_problems(env_class):
            _close(instance, where)
    except ConfigError as error:
        problems.append(str(error))
    return problems


def _needs_instance(env_class: type) -> bool:
    """Return whether attributes or subsets are known only once an instance exists."""
    missing = (not hasattr(env_class, name) for name in ATTRIBUTES)
    properties = (isinstance(getattr(env_class, name, None), property) for name in ATTRIBUTES)
    subsets_of = inspect.getattr_static(env_class, "subsets_of")
    return any(missing) or any(properties) or not isinstance(subsets_of, classmethod | staticmethod)


def method_problems(env_class: type) -> list[str]:
    """Return a line per method that is missing or cannot be called as the framework calls it."""
    problems = []
    for name, (arguments, definition) in METHODS.items():
        method = getattr(env_class, name, None)
        if not callable(method):
            decorator = "@classmethod " if name == "subsets_of" else ""
            problems.append(f"it has no method {name}: add `{decorator}{definition}`")
            continue
        is_bound = isinstance(inspect.getattr_static(env_class, name), classmethod | staticmethod)
        try:
            signature = inspect.signature(method)
            signature.bind(*(() if is_bound else (None,)), *arguments)
        except TypeError:
            problems.append(f"{name}{signature} has the wrong signature: it should be `{definition}`")
        if inspect.iscoroutinefunction(method):
            problems.append(f"{name} is async: make it a plain function, each session that is not cheap has a thread")
    return problems


def signature_problems(env_class: type, kwargs: Mapping[str, Any]) -> list[str]:
    """Return a line if the constructor does not take `kwargs`."""
    signature = inspect.signature(env_class)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        return [f"{_call_text(env_class, kwargs)} does not fit {env_class.__name__}{signature}: {error}; set kwargs"]
    return []


def attribute_problems(env: Any) -> list[str]:
    """Return a line per attribute of a class or an instance that is missing or wrong."""
    problems = []
    for name, (kind, line) in ATTRIBUTES.items():
        if not hasattr(env, name):
            problems.append(f"it has no attribute {name}: add `{line}`")
        elif not isinstance(getattr(env, name), kind):
            value = getattr(env, name)
            problems.append(f"{name} is {value!r:.60}, of type {type(value).__name__}: write for example `{line}`")
    return problems or [*split_problems(env.splits)]


def split_problems(splits: Mapping[str, Any]) -> list[str]:
    """Return a line per split that is missing, empty, no range, or that shares items with another."""
    problems = [f"splits has no {name!r}: it needs train and test" for name in ("train", "test") if name not in splits]
    ranges = {name: items for name, items in splits.items() if isinstance(items, range) and items.step == 1}
    for name, items in splits.items():
        if name not in ranges:
            problems.append(f"splits[{name!r}] is {items!r:.60}: it must be a range with step 1, such as range(80)")
        elif not items or items.start < 0:
            problems.append(f"splits[{name!r}] is {items!r}: it must have items, numbered from 0 or above")
    names = sorted(ranges, key=lambda name: ranges[name].start)
    for name, other in itertools.pairwise(names):
        if ranges[name].stop > ranges[other].start:
            problems.append(f"splits {name!r} and {other!r} share item {ranges[other].start}: they must be disjoint")
    return problems


def _call_text(env_class: type, kwargs: Mapping[str, Any]) -> str:
    arguments = ", ".join(f"{name}={value!r:.40}" for name, value in kwargs.items())
    return f"{env_class.__name__}({arguments})"


def _one_line(where: str, problems: list[str]) -> str:
    more = f" (and {len(problems) - 1} more: agentgym-rl check-env {where})" if len(problems) > 1 else ""
    return f"environment {where}: {problems[0]}{more}"
