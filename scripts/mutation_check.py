"""Take the most dangerous guards away, one at a time, and see that the tests that name them notice.

    python scripts/mutation_check.py               every guard of tests/mutations.toml
    python scripts/mutation_check.py pool-busy     this one

Each edit is made in a copy of the tree, never in the tree itself, and only the tests that name the guard are run
on it: those that cite one of its ids, or are called what it says. All of them must pass before the edit, and one
must fail after it. Exit status 1 if an edit survives, no longer applies, or breaks more than a guard.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from cited_table import Test, all_tests

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("cglab", "tests", "scripts", "data", "notebooks", "conftest.py", "pyproject.toml")
"""What tests read; the rest of a checkout can be large and is none of theirs."""
SECONDS = 600
PASSED, FAILED = 0, 1
"""What pytest exits with; anything else is no answer of tests."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A guard, and the edit that takes it away.

    Attributes:
        name: of the guard.
        guard: what it sees to.
        file: where it is, from the root.
        old: the text of it, which must be there once.
        new: what stands there without the guard.
        named: ids that its tests cite, or names of tests.
        under: folder of ``tests`` in which they are; all of them if empty.
    """

    name: str
    guard: str
    file: str
    old: str
    new: str
    named: tuple[str, ...]
    under: str = ""

    def applied(self, source: str) -> str:
        """The source without the guard.

        Raises:
            ValueError: if the guard's text is not there once, or what is left is no Python.
        """
        count = source.count(self.old)
        if count != 1:
            message = f"its text is {count} times in {self.file}, not once: adapt tests/mutations.toml"
            raise ValueError(message)
        mutated = source.replace(self.old, self.new)
        try:
            compile(mutated, self.file, "exec")
        except SyntaxError as error:
            message = f"{self.file} is no Python without it: {error}"
            raise ValueError(message) from error
        return mutated

    def tests(self, known: Sequence[Test]) -> list[str]:
        """Those that name the guard, as pytest takes them.

        Raises:
            ValueError: if a name or id has no test, or none that runs everywhere.
        """
        near = [test for test in known if test.file.startswith(self.under) and not test.marks]
        found: dict[str, None] = {}
        for name in self.named:
            mine = [test for test in near if name in (*test.ids, test.name)]
            if not mine:
                message = f"no test in tests/{self.under} that runs everywhere is named {name}"
                raise ValueError(message)
            found |= {f"tests/{test.file}::{test.name}": None for test in mine}
        return list(found)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one mutation.

    Attributes:
        mutation: the edit.
        caught: whether a test failed because of it.
        said: the test that did, or what is wrong.
    """

    mutation: Mutation
    caught: bool
    said: str


def read_mutations(root: Path) -> list[Mutation]:
    """The guards of ``tests/mutations.toml``, in its order.

    Raises:
        ValueError: naming the entry that lacks a field, or has one that a guard does not.
    """
    entries = tomllib.loads((root / "tests" / "mutations.toml").read_text(encoding="utf-8"))
    mutations = []
    for name, facts in entries.items():
        try:
            mutations.append(Mutation(name, **{**facts, "named": tuple(facts["named"])}))
        except (KeyError, TypeError) as error:
            message = f"{name} of tests/mutations.toml: a field is missing or odd ({error!r})"
            raise ValueError(message) from error
    return mutations


@contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """A copy of what tests need of a tree, for the extent of the context."""
    with tempfile.TemporaryDirectory(prefix="cglab-mutation-") as folder:
        copy = Path(folder)
        for name in NEEDED:
            if (root / name).is_dir():
                shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (root / name).exists():
                shutil.copy2(root / name, copy / name)
        yield copy


@contextmanager
def mutated(copy: Path, mutation: Mutation) -> Iterator[None]:
    """Makes the edit in a copy, and takes it back.

    Raises:
        ValueError: if it does not apply.
    """
    path = copy / mutation.file
    if not path.is_file():
        message = f"there is no {mutation.file}: adapt tests/mutations.toml"
        raise ValueError(message)
    source = path.read_text(encoding="utf-8")
    path.write_text(mutation.applied(source), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(source, encoding="utf-8")


def run_tests(copy: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Runs tests in a copy up to the first that fails.

    Returns:
        pytest's exit status, and the test that failed or the last line.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",  # an edit of equal length within a second would be taken for no edit
        "CI": "true",  # what is drawn is drawn again
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--no-header",
        "--durations=0",
        "--durations-min=60",
    ]
    command += ["-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end within {SECONDS} s"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    lines = (done.stdout + done.stderr).strip().splitlines() or ["pytest said nothing"]
    return done.returncode, failed[1] if failed else lines[-1]


def check(copy: Path, mutation: Mutation, tests: Sequence[str]) -> Verdict:
    """Runs the tests of a guard without it."""
    try:
        with mutated(copy, mutation):
            status, said = run_tests(copy, tests)
    except ValueError as error:
        return Verdict(mutation, caught=False, said=str(error))
    if status == PASSED:
        said = f"survived {len(tests)} tests"
    elif status != FAILED:
        said = f"pytest exited with {status}: {said}"
    return Verdict(mutation, caught=status == FAILED, said=said)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when every guard that is taken away is missed, 1 otherwise."""
    parser = argparse.ArgumentParser(description="Take guards away and see that tests notice.")
    parser.add_argument("names", nargs="*", help="guards of tests/mutations.toml; all of them if left out")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree")
    options = parser.parse_args(arguments)
    try:
        chosen = {mutation.name: mutation for mutation in read_mutations(options.root)}
        if options.names:
            chosen = {name: chosen[name] for name in options.names}
        known = all_tests(options.root / "tests")
        tests = {name: mutation.tests(known) for name, mutation in chosen.items()}
    except KeyError as error:
        print(f"{error} is no guard; there are: {', '.join(chosen)}", file=sys.stderr)
        return 1
    except (OSError, SyntaxError, ValueError) as error:
        print(f"no check: {error}", file=sys.stderr)
        return 1
    survived = 0
    with copy_of(options.root) as copy:
        status, said = run_tests(copy, list(dict.fromkeys(chain.from_iterable(tests.values()))))
        if status != PASSED:
            print(f"the tests do not pass as it is: {said}", file=sys.stderr)
            return 1
        width = max(map(len, chosen))
        for name, mutation in chosen.items():
            verdict = check(copy, mutation, tests[name])
            survived += not verdict.caught
            print(
                f"{name:<{width}}  {'caught' if verdict.caught else 'NOT CAUGHT':<10}  {verdict.said}",
                flush=True,
            )
    print(f"{len(chosen) - survived} of {len(chosen)} guards are missed when they are gone")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
