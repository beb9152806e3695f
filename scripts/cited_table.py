"""Write the table of tests/README.md: every known pitfall and public report, and the tests that hold it.

    python scripts/cited_table.py            write the table between the markers anew
    python scripts/cited_table.py --check    write nothing; exit 1 if the table is old

The tests are read and not run. A test cites what it holds in its name (``test_b05_...``, ``test_p53_p54_...``); what
these ids are is in tests/cited.toml. It is an error to cite an id that is not there, to have neither a test nor a
reason, or both.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cglab.lab import markdown

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- cited: begin (scripts/cited_table.py) -->"
END = "<!-- cited: end -->"
ID = re.compile(r"(?<=_)([bnp]\d+)(?=_)")
MARKS = {"gpu": "GPU", "soak": "soak", "sglang": "SGLang"}
"""Marks of tests that a plain run leaves out, as the table tells them."""


@dataclass(frozen=True, slots=True)
class Test:
    """A test function, as it stands in its file.

    Attributes:
        file: its file, from the folder of tests.
        name: of the function.
        marks: of ``MARKS``, its own and its file's.
    """

    __test__ = False

    file: str
    name: str
    marks: frozenset[str] = frozenset()

    @property
    def ids(self) -> tuple[str, ...]:
        """What it cites, in the order of its name."""
        return tuple(found.upper() for found in ID.findall(self.name + "_"))

    @property
    def says(self) -> str:
        """Its name as a sentence, without ids, of the table and other ones."""
        return " ".join(word for word in self.name.split("_")[1:] if not re.fullmatch(r"[a-z]\d+", word))


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that goes wrong out there.

    Attributes:
        id: as tests cite it.
        title: what goes wrong.
        source: where it was reported, or is guarded against.
        why_not: why no test holds it; None where there is one.
    """

    id: str
    title: str
    source: str
    why_not: str | None = None
    tests: list[Test] = field(default_factory=list)


def marks_of(nodes: Iterable[ast.expr]) -> frozenset[str]:
    """Those of ``MARKS`` that decorators, or what ``pytestmark`` is set to, name."""
    names = {part.attr for node in nodes for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    return frozenset(names & MARKS.keys())


def tests_of(source: str, file: str) -> Iterator[Test]:
    """The test functions of a file, in order."""
    tree = ast.parse(source, file)
    whole = [
        node.value for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets)
    ]  # fmt: skip
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            # A mark inside of a parametrisation is one case's and not the test's.
            own = [each for each in node.decorator_list if "parametrize" not in ast.unparse(each)]
            yield Test(file, node.name, marks_of([*own, *whole]))


def all_tests(folder: Path) -> list[Test]:
    """The test functions of a folder, by file and place."""
    return [
        test
        for path in sorted(folder.rglob("test_*.py"))
        for test in tests_of(path.read_text(encoding="utf-8"), path.relative_to(folder).as_posix())
    ]


def joined(known: Mapping[str, Mapping[str, str]], tests: Iterable[Test]) -> list[Entry]:
    """The entries in their order, each with the tests that cite it.

    Args:
        known: what tests/cited.toml holds.
        tests: to be joined.

    Raises:
        ValueError: naming every id that is unknown, lacks a field, has neither a test nor a reason, or has both.
    """
    citing: dict[str, list[Test]] = defaultdict(list)
    for test in tests:
        for each in test.ids:
            citing[each].append(test)
    wrong = [
        f"{each} is no id of tests/cited.toml; {citing[each][0].file} cites it in {citing[each][0].name}"
        for each in sorted(citing.keys() - known.keys())
    ]
    entries = []
    for name, facts in known.items():
        if not isinstance(facts, Mapping) or not {"title", "source"} <= facts.keys():
            wrong.append(f"{name} of tests/cited.toml lacks a title or a source")
            continue
        entry = Entry(name, facts["title"], facts["source"], facts.get("why_not"), citing.get(name, []))
        if entry.tests and entry.why_not:
            wrong.append(f"{name} has a why_not, and {entry.tests[0].name} holds it: drop one of the two")
        if not entry.tests and not entry.why_not:
            wrong.append(
                f"{name} has no test: cite it in the name of one, or say why_not in tests/cited.toml"
            )
        entries.append(entry)
    if wrong:
        raise ValueError("\n".join(wrong))
    return entries


def table(entries: Sequence[Entry]) -> str:
    """The entries as Markdown, under a line that counts them."""
    held = [entry for entry in entries if entry.tests]
    tests = {(test.file, test.name) for entry in held for test in entry.tests}
    count = (
        f"{len(entries)} ids: {len(held)} held by {len(tests)} tests, {len(entries) - len(held)} without one."
    )
    return f"{count}\n\n{markdown.table(('id', 'what goes wrong', 'source', 'held by'), map(_row, entries))}"


def _row(entry: Entry) -> tuple[str, ...]:
    held_by = "; ".join(map(_link, entry.tests)) or f"**none**: {entry.why_not}"
    source = f"SGLang: `{entry.source}`" if entry.id.startswith("P") else entry.source
    return entry.id, entry.title, source, held_by


def _link(test: Test) -> str:
    where = f" ({', '.join(MARKS[mark] for mark in sorted(test.marks))})" if test.marks else ""
    return f"[{test.says}]({test.file}){where}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when the table says what the tests say, 1 otherwise."""
    parser = argparse.ArgumentParser(description="Write the table of what tests cite.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="the folder of tests")
    options = parser.parse_args(arguments)
    page = options.tests / "README.md"
    try:
        known = tomllib.loads((options.tests / "cited.toml").read_text(encoding="utf-8"))
        text = page.read_text(encoding="utf-8")
        block = table(joined(known, all_tests(options.tests)))
        wanted = markdown.between(text, BEGIN, END, f"\n{block}\n")
    except (OSError, SyntaxError, ValueError) as error:
        print(f"no table: {error}", file=sys.stderr)
        return 1
    if wanted == text:
        return 0
    if options.check:
        print("tests/README.md is not what the tests say: run scripts/cited_table.py", file=sys.stderr)
        return 1
    page.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
