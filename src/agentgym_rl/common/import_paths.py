"""Names of the user's own code in a recipe: `my_module:MyEnv`, `my_package.module:function`."""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

from agentgym_rl.errors import ConfigError, describe_error, did_you_mean

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def import_named(path: str, where: str, what: str, example: str, suggested: Any = object) -> Any:
    """Return what `my_module:name` names. The current folder is searched after the installed packages.

    `where` begins every error; a misspelt name is compared with the module's members of type `suggested`.
    """
    if not _IMPORT_PATH.fullmatch(path):
        raise ConfigError(f"{where}: {what} is named by its import path, such as {example}")
    module_name, _, attributes = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that a file here never replaces an installed package
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{where}: there is no module {error.name!r}, neither installed nor in {os.getcwd()}: "
                "start the command in the folder of the module, or set PYTHONPATH"
            ) from error
        raise ConfigError(f"{where}: {module_name} imports {error.name!r}, which is not installed") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: importing {module_name} raised {describe_error(error)}") from error
    module = value
    for attribute in attributes.split("."):
        if not hasattr(value, attribute):
            names = [name for name, member in vars(module).items() if isinstance(member, suggested)]
            file = getattr(module, "__file__", None) or "built in"
            raise ConfigError(
                f"{where}: the module {module_name} ({file}) has no {attribute!r}{did_you_mean(attribute, names)}"
            )
        value = getattr(value, attribute)
    return value
