"""`make audit` says what is known, and never that nothing is where nobody was asked."""

import json
import sys
from datetime import date

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
def test_a_service_that_cannot_be_reached_is_no_clean_answer(audit, program, status, told):
    found, lines = audit.ask([sys.executable, "-c", program])
    assert found == status and told in "\n".join(lines)


def test_every_pin_is_asked_about(audit, root):
    assert audit.COMMAND[-1] == str(root / "constraints.txt") and "--no-deps" in audit.COMMAND


RANGE = """id: PYSEC-1
affected:
- package: {{name: {name}, ecosystem: {ecosystem}}}
  ranges:
  - type: GIT
    events: [{{introduced: "0"}}, {{fixed: abcdef}}]
  - type: ECOSYSTEM
    events: [{{introduced: "0"}}, {{fixed: 1.1.0}}, {{introduced: 2.0rc1}}, {{{end}: 2.2}}]
  versions: [0.7.1.fix1, 1.5.post1, 1.10]
modified: "2026-11-20T03:49:48.383740Z"
"""
TODAY = date(2026, 12, 1)


@pytest.fixture
def checkout(audit, tmp_path, monkeypatch):
    """Exit status and words for one pin and one advisory."""

    def check(version, text=None, *, name="some-package", ecosystem="PyPI", end="fixed", today=TODAY):
        folder = tmp_path / "vulns" / "some-package"
        folder.mkdir(parents=True, exist_ok=True)
        advisory = RANGE.format(name=name, ecosystem=ecosystem, end=end) if text is None else text
        (folder / "PYSEC-1.yaml").write_text(advisory)
        pins = tmp_path / "pins.txt"
        pins.write_text(f"# a comment\nSome_Package=={version}\nother==1.0\n")
        monkeypatch.setattr(audit, "PINS", pins)
        status, lines = audit.offline(tmp_path, today)
        return status, "\n".join(lines)

    return check


@pytest.mark.parametrize(
    ("version", "end", "status"),
    [
        ("1.0.9", "fixed", 1), ("1.1", "fixed", 0), ("1.1.0rc1", "fixed", 1), ("1.5.post1", "fixed", 1),
        ("1.5.post1+cpu", "fixed", 1), ("2.0", "fixed", 1), ("2.2+cpu", "fixed", 0), ("2.2", "last_affected", 1),
        ("2.2.1", "last_affected", 0), ("1.10", "fixed", 1), ("1.11", "fixed", 0),
    ],
)  # fmt: skip
def test_a_checkout_tells_by_the_rules_of_osv(checkout, version, end, status):
    found, told = checkout(version, end=end)
    assert found == status and "2 of 2 pins were asked about" in told
    assert "the newest advisory is of 2026-11-20" in told
    assert (
        ("some-package".replace("-", "_") in told.lower())
        == bool(status)
        == ("PYSEC-1, fixed in 1.1.0" in told)
    )


@pytest.mark.parametrize(
    ("settings", "status", "told"),
    [
        ({"ecosystem": "npm"}, 0, "0 vulnerabilities"),
        ({"name": "another"}, 0, "0 vulnerabilities"),
        ({"text": RANGE.format(name="some-package", ecosystem="PyPI", end="fixed") + "withdrawn: 2026-11-21\n"},
         0, "0 vulnerabilities"),
        ({"text": "id: [\nmodified: 2026-11-20\n"}, 2, "an advisory of Some_Package cannot be read"),
        ({"text": "id: 1\nmodified: 2026-11-20\naffected: 7\n"}, 2, "an advisory of Some_Package cannot be read"),
        ({"text": "no date"}, 2, "is no checkout of PyPA's advisory database"),
        ({"ecosystem": "npm", "today": date(2027, 1, 1)}, 2, "nothing is said of later ones"),
        ({"today": date(2027, 1, 1)}, 1, "PYSEC-1"),
    ],
)  # fmt: skip
def test_what_a_checkout_cannot_tell_is_no_clean_answer(checkout, settings, status, told):
    found, said = checkout("1.0", **settings)
    assert found == status and told in said


def test_a_folder_that_is_no_checkout_is_told(audit, tmp_path, capsys):
    assert audit.main(["--advisories", str(tmp_path / "none")]) == 2
    assert "is no checkout of PyPA's advisory database" in capsys.readouterr().err
