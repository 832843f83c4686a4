"""The page as one file, with its modules joined into one script, its styles and its data.

The bundler supports a small subset of module syntax: named imports from the same folder, and `export` before a
function, a class or a const. Each module becomes a function, so that names never clash.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Mapping
from typing import Any

from agentgym_rl.viewer.encode import replace_surrogates, to_json

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)
_UNSUPPORTED = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)


def join_modules(modules: Mapping[str, str], entry: str) -> str:
    """Return one script equivalent to importing `entry`."""
    ordered: list[str] = []

    def visit(name: str, importers: tuple[str, ...]) -> None:
        if name in importers:
            raise ValueError(f"modules import each other in a cycle: {' -> '.join([*importers, name])}")
        if name in ordered:
            return
        for match in _IMPORT.finditer(modules[name]):
            visit(match[2], (*importers, name))
        ordered.append(name)

    visit(entry, ())
    return "\n".join(['"use strict";', "const modules = {};", *(_as_function(name, modules[name]) for name in ordered)])


def _as_function(name: str, source: str) -> str:
    body = _IMPORT.sub(lambda match: f'const {{{match[1]}}} = modules["{match[2]}"];\n', source)
    exported = [match[2] for match in _EXPORT.finditer(body)]
    body = _EXPORT.sub(lambda match: f"{match[1]} {match[2]}", body)
    if unsupported := _UNSUPPORTED.search(body):
        raise ValueError(f"{name}: this import or export is not supported: {unsupported[0]}")
    return f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {", ".join(exported)} }};\n}})();'


def page(files: Mapping[str, bytes], data: Any, title: str) -> bytes:
    """Return a self-contained HTML file. Its policy allows only the script with the given hash to run."""
    modules = {name: text.decode() for name, text in files.items() if name.endswith(".js")}
    script = join_modules(modules, "app.js").replace("</", "<\\/")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Inline styles are allowed: an environment's HTML picture has its own, and its frame inherits this policy.
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; "
        "frame-src blob:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    styles = (files["base.css"] + files["pages.css"]).decode()
    icon = base64.b64encode(files["icon.svg"]).decode()
    packed = base64.b64encode(gzip.compress(to_json(data), 6, mtime=0)).decode()
    safe_title = replace_surrogates(title).replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    text = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{safe_title}</title>
<link rel="icon" href="data:image/svg+xml;base64,{icon}">
<style>{styles}</style>
<script type="application/octet-stream" id="embedded">{packed}</script>
<script type="module">{script}</script>
</head>
<body><p class="starting" role="status">Loading</p><noscript>This page needs JavaScript.</noscript></body>
</html>
"""
    return text.encode()
