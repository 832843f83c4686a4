"""Pack AgentGym-RL and the packages that it needs into one archive, for a Linux machine without a network.

    python scripts/pack_offline.py --extras textcraft searchqa --without torch transformers --python 3.12 \\
        --machine x86_64 --out site.tar.xz
    mkdir site && tar xJf site.tar.xz -C site                                                # there
    PYTHONPATH=site python3.12 -m agentgym_rl train textcraft/grpo

Run it in an environment that has the project with these extras: its versions are packed. --without names packages that
the machine has: they and what only they need are left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Collection, Sequence
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "agentgym-rl"
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux_2_12")
"""Wheels for the C library of 2018 (glibc 2.28) and older ones."""


def needed(extras: Collection[str], without: Collection[str], python: str, machine: str) -> list[str]:
    """Return the names of the project, with some extras, and of all packages that it needs on that machine."""
    markers = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
    markers |= {"platform_system": "Linux", "sys_platform": "linux", "os_name": "posix"}
    left_out = {canonicalize_name(name) for name in without}
    found: dict[str, set[str]] = {}
    queue = [(PROJECT, set(extras))]
    while queue:
        name, wanted = queue.pop()
        if name in left_out or (name in found and wanted <= found[name]):
            continue
        found.setdefault(name, set()).update(wanted)
        for requirement in map(Requirement, requires(name) or []):
            cases = [markers | {"extra": extra} for extra in ("", *found[name])]
            if requirement.marker is None or any(map(requirement.marker.evaluate, cases)):
                queue.append((canonicalize_name(requirement.name), requirement.extras))
    return sorted(found)


def install(names: Sequence[str], python: str, machine: str, folder: Path) -> None:
    """Install packages into a folder, in the versions of this environment and as for that machine."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    platforms = [f"--platform={each}_{machine}" for each in PLATFORMS]
    target = ["--target", str(folder), "--python-version", python, "--implementation", "cp", *platforms]
    packages = [f"{name}=={version(name)}" for name in names if name != PROJECT]
    own = [str(Path(__file__).parents[1])] if PROJECT in names else []
    subprocess.run([*pip, *target, "--prefer-binary", *packages, *own], check=True)


def built_here(folder: Path, machine: str) -> list[str]:
    """Return packages without a wheel for that machine whose binaries were built here."""
    wrong = []
    for path in folder.glob("*.dist-info/WHEEL"):
        tags = [line.removeprefix("Tag: ") for line in path.read_text().splitlines() if line.startswith("Tag: ")]
        if not any(tag.endswith(("-any", machine)) for tag in tags):
            wrong.append(path.parent.name.removesuffix(".dist-info"))
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", nargs="*", default=[])
    parser.add_argument("--without", nargs="*", default=[], metavar="PACKAGE")
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    parser.add_argument("--machine", default="x86_64", help="x86_64 or aarch64")
    parser.add_argument(
        "--packages-only", action="store_true", help="leave out AgentGym-RL, for a machine with a checkout"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    names = needed(options.extras, options.without, options.python, options.machine)
    if options.packages_only:
        names.remove(PROJECT)
    with tempfile.TemporaryDirectory() as folder:
        install(names, options.python, options.machine, Path(folder))
        if wrong := built_here(Path(folder), options.machine):
            raise SystemExit(f"no wheel for {options.machine} and Python {options.python}: {', '.join(wrong)}")
        with tarfile.open(options.out, "w:xz", preset=2) as archive:
            for path in sorted(Path(folder).iterdir()):
                archive.add(path, path.name)
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.0f} MiB, {len(names)} packages: {', '.join(names)}")


if __name__ == "__main__":
    main()
