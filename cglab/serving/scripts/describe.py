"""Tells, as one line of JSON, what the SGLang of the Python that runs this can be asked for.

Arguments are those of its own parser, each with its choices and default; variables are those that its source names;
modules are its files. Runs alone, in the server's environment, on any Python from 3.10 on; without SGLang its exit
status is 3.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

NO_SGLANG = 3
VARIABLE = re.compile(r"\bSGLANG_[A-Z0-9_]+\b")


def arguments() -> dict[str, dict[str, Any]]:
    """Every spelling of every argument of a server, with its choices (None: any), default and number of values."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    return {
        spelling: {
            "choices": None if action.choices is None else sorted(map(str, action.choices)),
            "default": action.default if isinstance(action.default, (bool, int, float, str)) else None,
            "takes_value": action.nargs != 0,
        }
        for action in parser._actions  # noqa: SLF001 - argparse has no other list of them
        for spelling in action.option_strings
    }


def main() -> int:
    """Exit status 0 after one line on standard output, the last one that is printed."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return NO_SGLANG
    package = Path(next(iter(found.submodule_search_locations)))
    sources = sorted(package.rglob("*.py"))
    variables: set[str] = set()
    for source in sources:
        variables.update(VARIABLE.findall(source.read_text(encoding="utf-8", errors="replace")))
    names = [path.relative_to(package.parent).with_suffix("").parts for path in sources]
    answer = {
        "version": importlib.metadata.version("sglang"),
        "arguments": arguments(),
        "variables": sorted(variables),
        "modules": sorted(
            {
                ".".join(parts).removesuffix(".__init__")
                for parts in names
                if all(map(str.isidentifier, parts))
            }
        ),
    }
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
