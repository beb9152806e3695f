"""The base is where the machinery is: what runs a phase of speculation is small, and knows no bucket, key or padding."""

import ast
import tokenize
from collections import Counter
from pathlib import Path

import pytest

import cglab

PACKAGE = Path(cglab.__file__).parent
SPECULATION = ("runners/verify.py", "runners/draft_loop.py", "runners/seed_step.py")
BASE = ("runners/base.py", "runners/requests.py")
RUNNERS = (*SPECULATION, *BASE, "runners/decode.py", "runners/prefill.py")
LAYOUT = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
)  # fmt: skip
MACHINERY = ("bucket", "pad", "key", "trim", "tail", "captured", "recording", "replay", "backend")
"""Parts of a name that would tell of machinery."""


def parsed(name):
    return ast.parse((PACKAGE / name).read_text())  # a path that is whole stands for itself


def code_lines(name):
    """Lines of a module that hold code: neither blank, nor only a comment or a docstring."""
    docs = {
        line
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    with (PACKAGE / name).open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in LAYOUT][1:]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docs)


def test_lines_of_code_are_counted_as_a_reader_would(tmp_path):
    (tmp_path / "one.py").write_text(
        '"""Doc."""\n\n# why\nx = [\n    1,\n]\n\n\ndef f():\n    """Doc."""\n    return x\n'
    )
    assert code_lines(tmp_path / "one.py") == 5


def test_the_three_runners_together_add_less_code_than_the_base_has():
    added = sum(map(code_lines, SPECULATION))
    assert added < sum(map(code_lines, BASE)), "what the runners themselves share"
    assert added < sum(map(code_lines, ("runners/base.py", "graphs/captured.py"))), (
        "what every runner stands on"
    )


def names_in(tree):
    """Every name, attribute, argument, keyword and import of a module, but not what is in texts."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield name


@pytest.mark.parametrize("name", SPECULATION)
def test_no_bucket_padding_or_key_logic_is_outside_the_base(name):
    """Bucket sizes are handed on to the base, as an argument, and that is all."""
    found = Counter(n for n in names_in(parsed(name)) if any(part in n.lower() for part in MACHINERY))
    constructors = sum(
        isinstance(n, ast.FunctionDef) and n.name == "__init__" for n in ast.walk(parsed(name))
    )
    assert found == ({"buckets": 2 * constructors} if constructors else {})


def test_none_of_it_is_there_twice():
    """No two runners have a function of the same body, docstrings aside."""
    seen = {}
    for name in RUNNERS:
        for node in ast.walk(parsed(name)):
            if isinstance(node, ast.FunctionDef):
                body = [
                    ast.dump(part)
                    for part in node.body
                    if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
                ]
                seen.setdefault("\n".join(body), []).append(f"{name}:{node.name}")
    assert {body: where for body, where in seen.items() if body and len(where) > 1} == {}
