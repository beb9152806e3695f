"""The transcribed tables of S0 to S4: their form, their figures against each other, and the headlines."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "data" / "published"
SOURCES = {"S0", "S1", "S2", "S3", "S4"}
TECHNIQUES = {f"T{number}" for number in range(1, 11)}
ROW_UNIT = "row unit"
RATE_UNITS = {"tok/s", "tok/s/GPU", "tok/s/user", "tokens/step"}
COUNT_UNITS = {"count", "rank", "lines", "tokens", "GPUs"}
NUMBER_UNITS = RATE_UNITS | COUNT_UNITS | {"%", "pp", "fraction", "x", "ms", "s", "GB"}
UNITS = NUMBER_UNITS | {"text", ROW_UNIT}
BOUNDS = {"exact", "about", "up to", "at least", "low end", "high end"}
KEYS = ["id", "source", "technique", "title", "machine", "model", "conditions", "columns", "rows", "notes"]

# Rows of each table and the sum of its numbers, read twice against the source: no digit can change unseen.
CONTROL_TOTALS: dict[str, tuple[int, str]] = {
    "s0-prompt-parity": (1, "40.95"),
    "s0-seed-step-throughput": (8, "168216.844"),
    "s0-stated-figures": (8, "132.2"),
    "s1-stated-figures": (5, "31"),
    "s2-agentx-end-to-end": (3, "92791.748"),
    "s2-agentx-requests": (3, "1851"),
    "s2-gsm8k-accuracy": (3, "795.970"),
    "s2-prefill-peak-by-cap": (5, "1386980.09"),
    "s2-prefill-throughput-by-cap": (25, "6473227"),
    "s2-stage-profile": (4, "490.12"),
    "s2-stated-figures": (23, "264896.488"),
    "s3-end-to-end-change": (10, "10755.8"),
    "s3-graph-memory": (2, "15.31"),
    "s3-gsm8k-accuracy": (4, "393.412"),
    "s3-recheck-gsm8k": (2, "196.679"),
    "s3-recheck-ttft": (6, "12658.5"),
    "s3-stated-figures": (27, "10168.19"),
    "s3-steady-decode-tpot": (4, "37.30"),
    "s3-ttft": (40, "138867.0"),
    "s4-stated-figures": (3, "8"),
}


def read(table_id: str) -> dict[str, Any]:
    """One table, its numbers as Decimal so that the printed precision survives."""
    text = (FOLDER / f"{table_id}.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text, parse_float=Decimal, parse_int=Decimal)
    return table


TABLES = {path.stem: read(path.stem) for path in sorted(FOLDER.glob("*.json"))}


def find(table_id: str, **wanted: Any) -> dict[str, Any]:
    """The only row of a table with these cells."""
    matches: list[dict[str, Any]] = [row for row in TABLES[table_id]["rows"] if wanted.items() <= row.items()]
    assert len(matches) == 1, f"{table_id}: {len(matches)} rows with {wanted}"
    return matches[0]


def stated(source: str, name: str) -> Decimal:
    value: Decimal = find(f"{source.lower()}-stated-figures", name=name)["value"]
    return value


def half_step(number: Decimal) -> Decimal:
    """Half a unit of the last printed place."""
    return Decimal(5).scaleb(int(number.as_tuple().exponent) - 1)


def percent(baseline: Decimal, captured: Decimal) -> Decimal:
    return (captured / baseline - 1) * 100


def agrees(baseline: Decimal, captured: Decimal, change: Decimal) -> bool:
    """Whether a printed change can come from two printed values, each rounded to its last place."""
    lowest = percent(baseline + half_step(baseline), captured - half_step(captured))
    highest = percent(baseline - half_step(baseline), captured + half_step(captured))
    return lowest <= change + half_step(change) and change - half_step(change) <= highest


@pytest.mark.parametrize("table_id", TABLES)
def test_table_has_the_schema(table_id: str) -> None:
    table = TABLES[table_id]
    assert list(table) == KEYS
    assert table["id"] == table_id
    assert table["source"] in SOURCES and table_id.startswith(table["source"].lower() + "-")
    assert table["technique"] and set(table["technique"]) <= TECHNIQUES
    for key in ("title", "machine", "model", "notes"):
        assert isinstance(table[key], str) and table[key].strip(), key
    assert isinstance(table["conditions"], dict) and table["conditions"]
    names = [column["name"] for column in table["columns"]]
    assert len(set(names)) == len(names) and "source" not in names
    for column in table["columns"]:
        assert set(column) == {"name", "unit"}
        assert column["unit"] in UNITS, column
    assert table["rows"]


@pytest.mark.parametrize("table_id", TABLES)
def test_rows_fit_the_columns(table_id: str) -> None:
    table = TABLES[table_id]
    for row in table["rows"]:
        assert list(row) == [column["name"] for column in table["columns"]] + ["source"]
        assert row["source"] == table["source"]
        for column in table["columns"]:
            cell = row[column["name"]]
            if column["unit"] == "text":
                assert isinstance(cell, str) and cell.strip(), row
            else:
                # Only a change may be missing: where the source prints both values and no percentage.
                assert isinstance(cell, Decimal) or (cell is None and column["name"] == "change"), row
            if column["unit"] == ROW_UNIT:
                assert row["unit"] in NUMBER_UNITS, row
        if table_id.endswith("-stated-figures"):
            assert row["bound"] in BOUNDS


def test_no_row_is_there_twice() -> None:
    beside = {"where", "bound", "unit", "source"}
    for table_id, table in TABLES.items():
        units = {
            column["name"]: column["unit"] for column in table["columns"] if column["name"] not in beside
        }
        labels = [name for name, unit in units.items() if unit == "text" or unit in COUNT_UNITS]
        keys = [tuple(row[name] for name in labels) for row in table["rows"]]
        assert len(set(keys)) == len(keys), table_id


def test_every_source_is_there_and_every_technique_with_a_figure() -> None:
    assert {table["source"] for table in TABLES.values()} == SOURCES
    with_figures = {technique for table in TABLES.values() for technique in table["technique"]}
    assert with_figures == TECHNIQUES - {"T2"}  # S0 and S1 name the verify step and give no figure for it


def test_the_readme_lists_exactly_these_files() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    lines = [line.split("|") for line in readme.splitlines() if line.startswith("| `s")]
    listed = {name.strip(" `"): int(count) for _, name, count, *_ in lines}
    assert len(listed) == len(lines)
    assert listed == {f"{table_id}.json": len(table["rows"]) for table_id, table in TABLES.items()}


def test_control_totals() -> None:
    found = {}
    for table_id, table in TABLES.items():
        numbers = [cell for row in table["rows"] for cell in row.values() if isinstance(cell, Decimal)]
        found[table_id] = (len(table["rows"]), str(sum(numbers)))
    assert found == CONTROL_TOTALS


def test_printed_changes_follow_from_their_two_values() -> None:
    rows = [row for table in TABLES.values() for row in table["rows"]]
    compared = [row for row in rows if {"baseline", "captured"} <= set(row) and row.get("change") is not None]
    assert len(compared) == 6 + 3 + 40 + 6
    for row in compared:
        assert agrees(row["baseline"], row["captured"], row["change"]), row


def test_s2_peaks_follow_from_the_sweep() -> None:
    sweep = TABLES["s2-prefill-throughput-by-cap"]["rows"]
    for peak in TABLES["s2-prefill-peak-by-cap"]["rows"]:
        points = [row for row in sweep if row["cap_tokens"] == peak["cap_tokens"]]
        assert [row["concurrency"] for row in points] == [16, 32, 64, 128, 256]
        for arm in ("baseline", "captured"):
            best = max(points, key=lambda row: row[arm])
            assert (best[arm], best["concurrency"]) == (peak[f"{arm}_peak"], peak[f"{arm}_peak_concurrency"])
        assert round(peak["captured_peak"] / peak["baseline_peak"], 2) == peak["ratio"]
        assert round(percent(peak["baseline_peak"], peak["captured_peak"]), 2) == peak["change"]


# The headlines of the techniques as the lab's claims quote them, each derived from the rows.
def seed_step(workload: str, metric: str) -> dict[str, Any]:
    return find("s0-seed-step-throughput", workload=workload, metric=metric)


def test_t4_headline() -> None:
    chat = seed_step("chat 1k/1k", "throughput")
    assert (chat["baseline"], chat["captured"]) == (1466, 1566)
    assert round(percent(chat["baseline"], chat["captured"]), 1) == Decimal("6.8")
    assert stated("S0", "throughput change, chat") == chat["change"] == Decimal("6.8")
    summarisation = seed_step("summ 8k/1k", "throughput")
    assert round(percent(summarisation["baseline"], summarisation["captured"]), 1) == Decimal("4.4")
    latency = seed_step("chat 1k/1k", "median TPOT")
    assert latency["change"] == Decimal("-5.7")
    assert agrees(latency["baseline"], latency["captured"], Decimal("-5.7"))
    for workload in ("chat 1k/1k", "summ 8k/1k"):
        accept = seed_step(workload, "accept length")
        assert abs(percent(accept["baseline"], accept["captured"])) < Decimal("0.25")
    assert stated("S0", "captured batch sizes") == 29


def test_t4_parity_headline() -> None:
    parity = find("s0-prompt-parity")
    assert (parity["matched"], parity["total"]) == (19, 20)
    assert parity["matched"] + parity["mismatched"] == parity["total"]
    assert parity["match_rate"] == parity["matched"] / parity["total"]


def test_t5_headline() -> None:
    assert stated("S4", "forward occupancy change") == 5


def test_t7_throughput_headline() -> None:
    sweep = "s2-prefill-throughput-by-cap"
    eager = find(sweep, cap="2K", concurrency=16)["baseline"]
    replayed = find(sweep, cap="2K", concurrency=32)["captured"]
    assert (eager, replayed) == (34857, 86561)
    assert round(replayed / eager, 2) == Decimal("2.48")
    matched = find(sweep, cap="2K", concurrency=64)
    ratio = round(matched["captured"] / matched["baseline"], 2)
    assert ratio == stated("S2", "2K cap at concurrency 64, ratio") == Decimal("2.60")
    assert stated("S2", "default capture limit (8K)") == 8192


def test_t7_shares_of_the_32k_peak() -> None:
    small, large = find("s2-prefill-peak-by-cap", cap="2K"), find("s2-prefill-peak-by-cap", cap="32K")
    eager = small["baseline_peak"] / large["baseline_peak"]
    replayed = small["captured_peak"] / large["captured_peak"]
    name = "2K peak as a share of the 32K peak"
    assert round(eager * 100, 2) == stated("S2", f"{name}, eager") == Decimal("18.66")
    assert round(replayed * 100, 2) == stated("S2", f"{name}, replayed") == Decimal("47.75")
    assert round(replayed / eager, 2) == stated("S2", "growth of that share") == Decimal("2.56")


def test_t7_stage_headline() -> None:
    rows = TABLES["s2-stage-profile"]["rows"]
    walls = [percent(row["baseline_wall"], row["captured_wall"]) for row in rows]
    assert (round(max(walls)), round(min(walls))) == (-71, -73)
    busy = [abs(percent(row["baseline_kernel_busy"], row["captured_kernel_busy"])) for row in rows]
    assert round(max(busy), 1) == stated("S2", "kernel-busy difference between arms") == Decimal("1.2")
    over_busy = [row["captured_wall"] / row["captured_kernel_busy"] for row in rows]
    assert (round(min(over_busy), 2), round(max(over_busy), 2)) == (Decimal("1.08"), Decimal("1.34"))


def test_t8_t9_t10_latency_headlines() -> None:
    for parallelism, change in (("TP8", -44), ("TP4", -30)):
        row = find("s3-ttft", parallelism=parallelism, cached_prefix="none", new_tokens=512, concurrency=1)
        assert row["change"] == change and agrees(row["baseline"], row["captured"], row["change"])
    rows = TABLES["s3-ttft"]["rows"]
    fresh = [row["change"] for row in rows if row["cached_prefix"] == "none"]
    cached_under_load = [
        row["change"] for row in rows if row["cached_prefix"] != "none" and row["concurrency"] > 1
    ]
    assert min(fresh) == stated("S3", "TTFT change, short fresh prompts") == -44
    assert min(cached_under_load) == stated("S3", "TTFT change, cached prefixes under concurrency") == -37
    point = {"parallelism": "TP4", "new_tokens": 512, "concurrency": 4}
    changes = [
        find("s3-end-to-end-change", lane_offset=kind, **point)["change"]
        for kind in ("fixed", "client default")
    ]
    assert changes == [-4, 9]


def test_t8_t9_t10_memory_headline() -> None:
    memory = find("s3-graph-memory", parallelism="TP4")
    assert (memory["baseline_target"], memory["captured_target"]) == (Decimal("4.04"), Decimal("3.61"))
    assert memory["captured_draft"] == stated("S3", "draft prefill graph memory") == Decimal("0.25")
    for row in TABLES["s3-graph-memory"]["rows"]:
        assert row["captured_target"] + row["captured_draft"] < row["baseline_target"]


def test_s2_accuracy_and_agent_figures() -> None:
    accuracy = {row["metric"]: row for row in TABLES["s2-gsm8k-accuracy"]["rows"]}
    for arm in ("baseline", "captured"):
        assert accuracy["correct answers"][arm] / accuracy["questions"][arm] == accuracy["score"][arm]
    points = (accuracy["score"]["baseline"] - accuracy["score"]["captured"]) * 100
    assert points == stated("S2", "GSM8K score difference")
    changes = {
        "total rate per GPU": "13.74",
        "P90 output rate per user": "19.27",
        "P50 output rate per user": "10.18",
    }
    for metric, change in changes.items():
        row = find("s2-agentx-end-to-end", metric=metric)
        assert round(percent(row["baseline"], row["captured"]), 2) == Decimal(change)
