"""Resolve the development environment anew and write it to constraints.txt.

    python scripts/lock.py

The file is a pip constraints file (``pip install -c constraints.txt -e '.[dev]'``): the very versions that CI
runs, for the CPU path. The ``sglang`` extra is left out on purpose: it brings a torch of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"  # the CPU path; the library itself runs on the range in pyproject.toml
CUDA_ONLY = ("cuda-", "nvidia-", "sglang")


def resolve() -> dict[str, str]:
    """Name -> version of all that ``.[dev]`` needs with the pinned torch, as pip resolves it here and now.

    For the first patch release of this Python, so that what is pinned installs on every later one: some releases want
    a later patch, and Debian's is 3.11.2.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    first = f"{sys.version_info.major}.{sys.version_info.minor}.0"
    command += ["--python-version", first, "--only-binary", ":all:", "--target", "nowhere"]
    command += ["--report", "-", f"torch=={TORCH}", f"{ROOT}[dev]"]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    found = (item["metadata"] for item in report["install"])
    # The local part (+cpu) says where a wheel came from; constraints must hold anywhere.
    return {re.sub(r"[-_.]+", "-", item["name"]).lower(): item["version"].split("+")[0] for item in found}


def main() -> int:
    """Exit status 1, and the old file kept, when the resolution would pull CUDA libraries."""
    versions = resolve()
    del versions["cglab"]
    versions.pop("triton", None)  # torch for CUDA asks for one version of it, which no pin may contradict
    if heavy := sorted(name for name in versions if name.startswith(CUDA_ONLY)):
        print(
            f"torch {TORCH} as pip finds it here brings {', '.join(heavy)}: "
            "point pip at a folder or index with the CPU build (PIP_FIND_LINKS) and run this again",
            file=sys.stderr,
        )
        return 1
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    header = [
        f"# The development environment on Python {python}, CPU. Written by scripts/lock.py; do not edit.",
        "# Use: pip install -c constraints.txt -e '.[dev]'",
    ]
    pins = [f"{name}=={version}" for name, version in sorted(versions.items())]
    (ROOT / "constraints.txt").write_text("\n".join([*header, *pins]) + "\n", encoding="utf-8")
    print(f"constraints.txt: {len(pins)} packages, torch {TORCH}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
