"""`make audit` says what is known, and never that nothing is where nobody was asked."""

import json
import sys

import pytest

PIN = {"name": "one", "version": "1.0", "vulns": []}
BAD = {"name": "two", "version": "2.0", "vulns": [{"id": "CVE-1", "fix_versions": ["2.1"]}]}
UNKNOWN = {
    "name": "three",
    "skip_reason": "Dependency not found on PyPI and could not be audited: three (3.0)",
}


@pytest.fixture
def audit(root, monkeypatch):
    monkeypatch.syspath_prepend(root / "scripts")
    import audit

    return audit


@pytest.mark.parametrize(
    ("pins", "status", "told"),
    [
        ([PIN], 0, "1 of 1 pins were asked about; 0 vulnerabilities"),
        ([PIN, BAD], 1, "two 2.0: CVE-1, fixed in 2.1"),
        (
            [PIN, UNKNOWN],
            2,
            "not asked about: Dependency not found on PyPI and could not be audited: three (3.0)",
        ),
        ([BAD, UNKNOWN], 1, "1 of 2 pins were asked about; 1 vulnerabilities"),
        ([UNKNOWN, UNKNOWN], 2, "three (3.0) and 1 more"),
        ([], 2, "0 of 0 pins"),
    ],
)
def test_the_status_tells_what_is_known_from_what_was_not_asked(audit, pins, status, told):
    found, lines = audit.verdict({"dependencies": pins})
    assert found == status and told in "\n".join(lines)


@pytest.mark.parametrize(
    ("program", "status", "told"),
    [
        (f"print({json.dumps(json.dumps({'dependencies': [PIN]}))})", 0, "1 of 1 pins"),
        (
            "import sys; sys.exit('Failed to resolve the service')",
            2,
            "ended with 1: Failed to resolve the service",
        ),
        ("print('[]')", 2, "ended with 0: it said nothing"),
    ],
)
def test_a_service_that_cannot_be_reached_is_no_clean_answer(audit, capsys, program, status, told):
    assert audit.main([sys.executable, "-c", program]) == status
    said = capsys.readouterr()
    assert told in said.out + said.err


def test_every_pin_is_asked_about(audit, root):
    assert audit.COMMAND[-1] == str(root / "constraints.txt") and "--no-deps" in audit.COMMAND
