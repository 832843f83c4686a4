"""The page as one file: its modules joined into one script, its styles and its data inside.

The modules keep to a small part of the language of modules, which is all this understands: named imports from beside
them, and `export` before a function, a class or a const. Each becomes a function of its own, so names never clash.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Mapping
from typing import Any

from agentgym_rl.viewer.encode import to_json, whole_characters

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)
_OTHER = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)


def join_modules(modules: Mapping[str, str], entry: str) -> str:
    """One script that does what importing `entry` does."""
    ordered: list[str] = []

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"modules import each other in a ring: {' -> '.join([*above, name])}")
        if name in ordered:
            return
        for match in _IMPORT.finditer(modules[name]):
            visit(match[2], (*above, name))
        ordered.append(name)

    visit(entry, ())
    return "\n".join(['"use strict";', "const modules = {};", *(_as_function(name, modules[name]) for name in ordered)])


def _as_function(name: str, source: str) -> str:
    body = _IMPORT.sub(lambda match: f'const {{{match[1]}}} = modules["{match[2]}"];\n', source)
    exported = [match[2] for match in _EXPORT.finditer(body)]
    body = _EXPORT.sub(lambda match: f"{match[1]} {match[2]}", body)
    if left := _OTHER.search(body):
        raise ValueError(f"{name}: this import or export is not understood: {left[0]}")
    return f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {", ".join(exported)} }};\n}})();'


def page(files: Mapping[str, bytes], data: Any, title: str) -> bytes:
    """A self-contained HTML file. Only the script whose hash its policy names can run in it."""
    modules = {name: text.decode() for name, text in files.items() if name.endswith(".js")}
    script = join_modules(modules, "app.js").replace("</", "<\\/")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Styles stay inline: an environment's HTML picture has its own, and a frame made here inherits this policy.
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; "
        "frame-src blob:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    styles = (files["base.css"] + files["pages.css"]).decode()
    icon = base64.b64encode(files["icon.svg"]).decode()
    packed = base64.b64encode(gzip.compress(to_json(data), 6, mtime=0)).decode()
    safe_title = whole_characters(title).replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
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
