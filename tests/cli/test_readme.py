"""The README is run: its Python, its command lines, its table."""

import io
import re
import shlex
from contextlib import redirect_stdout
from dataclasses import replace

import pytest

from cglab import settings
from cglab.cli import _parser
from cglab.lab.claims_table import sentence
from cglab.lab.peer_table import Fastest, Peers
from cglab.lab.recorded import Recorded
from cglab.lab.techniques import TECHNIQUES
from cglab.measure.claims import ClaimResult
from cglab.measure.machine import Device
from cglab.measure.record import Record, make_record, new_run
from cglab.measure.records import append
from scripts import readme_table
from scripts.readme_table import DECODE, PREFILL, TTFT

pytestmark = pytest.mark.end_to_end


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
    commands = re.findall(r"^\| `cglab ([\w-]+)", readme, re.MULTILINE)
    assert list(dict.fromkeys(commands)) == [
        "demo", "techniques", "parity", "bench", "serve-compare", "results", "published", "doctor",
    ]  # fmt: skip
    assert set(re.findall(r"^\| `(CGLAB_\w+)`", readme, re.MULTILINE)) == set(settings.VARIABLES)


def test_the_toggles_are_those_of_this_version(readme):
    found = re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|", readme, re.MULTILINE)
    toggles = {t.name: t.values for t in TECHNIQUES.values()}
    assert {name: tuple(re.findall(r"\w+", values)) for name, values in found if name.islower()} == toggles


def test_files_that_the_readme_names_are_there(readme, root):
    for name in [*re.findall(r"\]\((\w[\w./]+)\)", readme), *re.findall(r"`(\w+/[\w.]+\.\w+)`", readme)]:
        # The picture is drawn from a recorded profile, and the report by the demo.
        assert (root / name).exists() or name in ("notebooks/images/timeline.png", "out/report.html"), name
    assert all(
        (root / "notebooks" / f"{name}.ipynb").exists() for name in re.findall(r"`(\d\d_\w+)`", readme)
    )


def test_what_it_measured_is_on_the_first_screens_and_all_of_it_in_300_lines(readme):
    lines = readme.splitlines()
    assert len(lines) <= 300
    assert lines.index("## Two commands") < 12 and lines.index("## What it measured") < 30


def test_accept_lengths_are_those_of_the_drafts_own_cards(readme, root):
    told = re.findall(
        r"(\d\.\d{3}) tokens per pass of at most (\d).*?n-grams(?: commits)? (\d\.\d{3})", readme, re.DOTALL
    )
    assert len(told) == 2
    for (draft, most, lookup), name in zip(told, ("pico-gqa-assistant", "pico-gqa-dflash"), strict=True):
        card = (root / "data" / "drafts" / name / "README.md").read_text(encoding="utf-8")
        assert f"(maximum {most}) | **{draft}**" in card and f"| **{lookup}**" in card


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
    text = DECODE.block(Recorded("decode", tuple(records)))
    assert text.splitlines()[-1] == "| qwen3-8b | 16 | 30.00 | 6.00 | 10.00 | 5.00 | 1.50 | bitwise |"
    assert "H200" in text and "2026-11-29" in text


def test_a_failed_arm_is_a_dash_and_a_corrupted_one_is_named():
    run = new_run()
    bad = replace(gpu_record("breakable", 1, None, run=run), parity={"verdict": "corrupted"})
    text = DECODE.block(Recorded("decode", (gpu_record("full", 1, 6.0, run=run), bad)))
    assert text.splitlines()[-1] == "| qwen3-8b | 1 | - | 6.00 | - | - | 1.50 | bitwise / corrupted |"


@pytest.mark.parametrize(
    "newer", [{"run": "b"}, {"run": "a", "workload": {"batch": 16, "ops": "compiled"}}], ids=["run", "ops"]
)
def test_arms_of_another_run_or_form_of_the_operations_are_never_in_one_row(newer):
    older = [gpu_record(arm, 16, 30.0, run="a") for arm in ("eager", "full", "breakable")]
    text = DECODE.block(Recorded("decode", (*older, gpu_record("full", 16, 6.0, **newer))))
    assert text.splitlines()[-1] == "| qwen3-8b | 16 | - | 6.00 | - | - | 1.50 | bitwise |"


def ttft_record(arm, ttft_ms, *, captured, concurrency=1, **metrics):
    made = make_record(
        bench="ttft", arm=arm, device="cpu", run="a", model="qwen3-8b", metrics={"ttft_ms": ttft_ms, **metrics},
        workload={"tokens": 512, "cached": 0, "concurrency": concurrency},
        parity=None if arm == "eager" else {"verdict": "bitwise"}, coverage={"captured": captured, "steps": 12},
    )  # fmt: skip
    return replace(made, device=Device("H200", "cuda"), created="2026-11-29T12:00:00+00:00")


def test_ttft_has_a_row_for_each_size_and_concurrency_with_what_full_could_not_serve():
    records = [
        ttft_record("eager", 20.0, captured=0, gap_share=0.5),
        ttft_record("breakable", 10.0, captured=12, ratio_to_eager=0.5, verdict="faster"),
        ttft_record("full", 20.0, captured=3),
    ]
    head, rule, row = TTFT.block(Recorded("ttft", tuple(records))).splitlines()[2:]
    assert (
        row == "| qwen3-8b | 512 | 0 | 1 | 20.00 | 20.00 | 10.00 | 0.50 | faster | 0.50 | 3 of 12 | bitwise |"
    )
    assert head.count("|") == rule.count("|") == row.count("|")


def test_records_of_no_step_such_as_the_cost_of_all_buckets_are_no_row():
    everything = replace(ttft_record("breakable", 1.0, captured=0), workload={"captured": "all buckets"})
    assert PREFILL.block(Recorded("prefill", (everything,))) == PREFILL.not_yet
    step = replace(
        everything, workload={"tokens": 512, "cached": 8192}, metrics={"step_ms": 2.0, "breaks": 36.0}
    )
    table = PREFILL.block(Recorded("prefill", (step, everything)))
    assert table.splitlines()[-1] == "| qwen3-8b | 512 | 8192 | - | - | 2.00 | - | 36.00 | - | - | bitwise |"


def written(root, content):
    """Files with every block between its markers."""
    for name, blocks in readme_table.BLOCKS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        text = "".join(f"before\n{each.begin}\n{content(each)}\n{each.end}\nafter\n" for each in blocks)
        (root / name).write_text(text)


def texts(root):
    return {name: (root / name).read_text() for name in readme_table.BLOCKS}


def test_without_records_the_tables_say_so_and_how_to_get_them(tmp_path):
    written(tmp_path / "wanted", lambda block: block.not_yet)
    written(tmp_path, lambda block: f"old {block.name}")
    old = texts(tmp_path)
    arguments = ["--root", str(tmp_path), "--folder", str(tmp_path / "none")]
    assert readme_table.main([*arguments, "--check"]) == 1
    assert texts(tmp_path) == old
    assert readme_table.main(arguments) == 0
    assert texts(tmp_path) == texts(tmp_path / "wanted")
    assert readme_table.main([*arguments, "--check"]) == 0


def test_what_was_checked_is_told_with_what_failed(tmp_path):
    run = new_run()
    for seed, good in ((0, True), (1, False)):
        made = make_record(
            bench="parity", arm="decode", device="cpu", run=run, model="pico-gqa", dtype="float32",
            workload={"seed": seed}, metrics={"ok": good, "cases": 500.0, "steps": 1500.0, "captured": 900.0},
        )  # fmt: skip
        append(tmp_path / "parity.jsonl", [replace(made, device=Device("H200", "cuda"))])
    *_, line = readme_table.Checks().text(tmp_path).splitlines()
    assert line == (
        "| random batches against three oracles | decode, float32, portable | 1,000 sequences, 3,000 steps, 1,800 replayed | "
        "**no**: 1 of 2 runs |"
    )


@pytest.mark.parametrize(
    "text", ["no markers", DECODE.begin, f"{DECODE.end}\n{DECODE.begin}", f"{DECODE.begin}\n{DECODE.end}"]
)
def test_a_file_without_markers_leaves_all_alone(tmp_path, capsys, text):
    written(tmp_path, lambda block: "old")
    (tmp_path / "README.md").write_text(text)
    old = texts(tmp_path)
    assert readme_table.main(["--root", str(tmp_path), "--folder", str(tmp_path)]) == 1
    assert texts(tmp_path) == old
    assert "README.md: the lines" in capsys.readouterr().err


def token_records(run, **arms):
    """One step of batch 1 by peer: its metrics."""
    return [
        replace(
            make_record(
                bench="token", arm=arm.replace("_", "-"), device="cpu", run=run, metrics={"floor_ms": 3.6, **metrics},
                model="qwen3-8b", weights="random", workload={"batch": 1, "context": 512},
                parity={"verdict": "bitwise"} if "replay_ms" in metrics else None,
            ),
            device=Device("NVIDIA H200", "cuda"),
        )
        for arm, metrics in arms.items()
    ]  # fmt: skip


def test_peers_stand_fastest_first_with_the_reason_of_whoever_could_not_run(tmp_path):
    failed = "NotInstalledError: it | is not here\nand more"
    records = token_records(
        "one", sglang={"token_ms": 6.25, "ratio_to_ours": 1.25, "verdict": "slower", "over_floor": 1.7361},
        full={"token_ms": 5.0, "replay_ms": 4.75, "over_floor": 1.3889}, torch_compile={"error": failed},
    )  # fmt: skip
    append(tmp_path / "peers.jsonl", records)
    block = Peers().text(tmp_path)
    assert "on one NVIDIA H200 on " in block
    assert block.splitlines()[-3:] == [
        "| qwen3-8b | 1 | full | 5.00 | - | - | 4.75 | 1.39 | equal |",
        "| qwen3-8b | 1 | sglang | 6.25 | 1.25 | slower | - | 1.74 | - |",
        "| qwen3-8b | 1 | torch-compile | - | - | NotInstalledError: it \\| is not here | - | - | - |",
    ]


def test_the_short_table_has_the_fastest_of_the_others_and_no_arm_of_the_lab_among_them(tmp_path):
    records = token_records(
        "one", full={"token_ms": 5.0}, eager={"token_ms": 14.0}, piecewise={"token_ms": 5.5}, floor={"token_ms": 3.6},
        sglang={"token_ms": 6.25, "ratio_to_ours": 1.25}, transformers={"token_ms": 20.0, "ratio_to_ours": 4.0},
        torch_compile={"error": "failed"},
    )  # fmt: skip
    append(tmp_path / "peers.jsonl", records)
    text = Fastest().text(tmp_path)
    assert text.splitlines()[-1] == "| qwen3-8b | 1 | 3.60 | 5.00 | 14.00 | sglang | 6.25 | 1.25 |"
    assert "Others that ran: sglang, transformers." in text
    alone = Fastest().block(Recorded("token", tuple(records[:1])))
    assert alone.splitlines()[-1] == "| qwen3-8b | 1 | - | 5.00 | - | - | - | - |"


def test_the_sentence_on_the_targets_counts_them_all():
    claims = [
        ClaimResult(f"G{index}", "", 1.0, None, status, (), False, ())
        for index, status in enumerate(["met", "unmet", "met", "unmeasured"])
    ]
    assert sentence(claims) == (
        "Of the lab's 4 targets 2 are met (G0, G2), 1 is not met (G1), 1 is not measured (G3)."
    )


def test_without_peers_the_block_says_how_to_record_them(tmp_path):
    assert Peers().text(tmp_path) == Peers().not_yet
    argument = re.search(r"cglab (bench peers --save)", Peers().not_yet)
    assert _parser().parse_args(argument[1].split()).run


def test_the_peers_table_says_what_its_host_did_beside():
    device = Device("NVIDIA H200", "cuda", gpus=2, cores=32, load=1.69)
    record = Record(
        bench="token", arm="full", device=device, created="2026-01-01", model="qwen3-8b", workload={"batch": 1},
        metrics={"token_ms": 4.0},
    )  # fmt: skip
    assert Recorded("token", (record,)).beside == "a host of 32 cores and 2 GPUs, its load up to 1.7"
    older = replace(record, device=Device("NVIDIA H200", "cuda"))
    assert Recorded("token", (older,)).beside == ""
    assert Recorded("token", (older, record)).beside.endswith("up to 1.7")
