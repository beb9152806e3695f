"""The README is run: its Python, its command lines, its table."""

import io
import re
import shlex
from contextlib import redirect_stdout
from dataclasses import replace

import pytest

from cglab import settings
from cglab.cli import _parser
from cglab.lab.recorded import Recorded
from cglab.lab.techniques import TECHNIQUES
from cglab.measure.machine import Device
from cglab.measure.record import make_record, new_run
from scripts import readme_table


@pytest.fixture(scope="module")
def readme(root):
    return (root / "README.md").read_text(encoding="utf-8")


def test_python_of_the_readme_runs_and_prints_what_it_says(readme):
    space = {}
    snippets = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(snippets) >= 3
    for snippet in snippets:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(snippet, "README.md", "exec"), space)
        wanted = re.findall(r"print\(.*\)  # (.+)", snippet)
        assert printed.getvalue().splitlines() == wanted


def test_the_exit_status_the_variables_and_the_commands_are_the_real_ones(readme):
    for words in re.findall(r"^\| `cglab (.+?)` \|", readme, re.MULTILINE):
        line = re.sub(r"[\[\]]", "", words).replace("--out DIR", "--out out")
        assert _parser().parse_args(shlex.split(line)).run
    commands = re.findall(r"^\| `cglab (\w+)", readme, re.MULTILINE)
    assert commands == ["demo", "techniques", "parity", "bench", "results", "published", "doctor"]
    assert set(re.findall(r"^\| `(CGLAB_\w+)`", readme, re.MULTILINE)) == set(settings.VARIABLES)


def test_the_toggles_are_those_of_this_version(readme):
    found = re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|", readme, re.MULTILINE)
    available = {t.name: t.values for t in TECHNIQUES.values() if t.available}
    assert {name: tuple(re.findall(r"\w+", values)) for name, values in found if name.islower()} == available


def test_files_that_the_readme_names_are_there(readme, root):
    for name in [*re.findall(r"\]\((\w[\w./]+)\)", readme), *re.findall(r"`(\w+/[\w.]+\.\w+)`", readme)]:
        # The picture is drawn from a recorded profile, and the report by the demo.
        assert (root / name).exists() or name in ("notebooks/images/timeline.png", "out/report.html"), name
    assert all(
        (root / "notebooks" / f"{name}.ipynb").exists() for name in re.findall(r"`(\d\d_\w+)`", readme)
    )


def test_the_table_is_what_the_records_say():
    assert readme_table.main(["--check"]) == 0


def gpu_record(arm, batch, step_ms, **fields):
    made = make_record(
        bench="decode", arm=arm, device="cpu", run=fields.pop("run"), model="qwen3-8b", workload={"batch": batch},
        metrics={"step_ms": step_ms, "floor_ms": 4.0}, parity=None if arm == "eager" else {"verdict": "bitwise"},
    )  # fmt: skip
    return replace(made, device=Device("H200", "cuda"), created="2026-11-29T12:00:00+00:00", **fields)


def test_a_row_holds_the_arms_of_one_run_and_their_ratio():
    run = new_run()
    records = [
        gpu_record(arm, 16, ms, run=run) for arm, ms in (("eager", 30.0), ("full", 6.0), ("breakable", 10.0))
    ]
    text = readme_table.block(Recorded("decode", tuple(records)))
    assert text.splitlines()[-1] == "| qwen3-8b | 16 | 30.00 | 6.00 | 10.00 | 5.00 | 1.50 | bitwise |"
    assert "H200" in text and "2026-11-29" in text


def test_a_failed_arm_is_a_dash_and_a_corrupted_one_is_named():
    run = new_run()
    bad = replace(gpu_record("breakable", 1, None, run=run), parity={"verdict": "corrupted"})
    text = readme_table.block(Recorded("decode", (gpu_record("full", 1, 6.0, run=run), bad)))
    assert text.splitlines()[-1] == "| qwen3-8b | 1 | - | 6.00 | - | - | 1.50 | bitwise / corrupted |"


def test_without_records_the_table_says_so_and_how_to_get_them(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{readme_table.BEGIN}\nold\n{readme_table.END}\nafter\n")
    arguments = ["--readme", str(readme), "--folder", str(tmp_path / "none")]
    assert readme_table.main([*arguments, "--check"]) == 1
    assert "old" in readme.read_text()
    assert readme_table.main(arguments) == 0
    assert (
        readme.read_text()
        == f"before\n{readme_table.BEGIN}\n{readme_table.NOT_YET}\n{readme_table.END}\nafter\n"
    )
    assert readme_table.main([*arguments, "--check"]) == 0


@pytest.mark.parametrize(
    "text", ["no markers", readme_table.BEGIN, f"{readme_table.END}\n{readme_table.BEGIN}"]
)
def test_a_readme_without_markers_is_left_alone(tmp_path, capsys, text):
    readme = tmp_path / "README.md"
    readme.write_text(text)
    assert readme_table.main(["--readme", str(readme), "--folder", str(tmp_path)]) == 1
    assert readme.read_text() == text
    assert "once each" in capsys.readouterr().err
