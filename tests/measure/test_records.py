"""Result records: written whole or not at all, whatever happens on the way."""

import errno
import json
import math
import multiprocessing
import os
import resource
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cglab.errors import DeviceError, InputError, ResultsError
from cglab.measure import machine
from cglab.measure.machine import Device
from cglab.measure.record import SCHEMA, Record, make_record, new_run
from cglab.measure.records import append, load, read
from cglab.measure.tree import is_dirty, tree_hash


def record(number=0, **fields):
    facts = {"bench": "decode", "arm": "full", "device": Device("NVIDIA H200", "cuda", "580.1", 132)}
    facts |= {
        "id": f"id{number}",
        "created": f"2026-01-01T00:00:{number:02}+00:00",
        "metrics": {"step_ms": 1.5 + number},
    }
    return Record(**(facts | fields))


def test_what_is_written_is_read(tmp_path):
    full = record(
        1,
        run="r",
        versions={"torch": "2.13.0", "cuda": None},
        tree="abc",
        dirty=False,
        command=["cglab", "bench"],
        model="pico-gqa",
        weights="trained",
        dtype="float32",
        workload={"batch": 4, "context": 128},
        samples={"step_ms": [1.0, 2.0]},
        metrics={"step_ms": 1.5, "bitwise": True, "note": "é\n", "gap_ms": None},
        parity={"verdict": "bitwise"},
        coverage={"captured": 10},
        notes="n",
    )
    append(tmp_path / "new" / "decode.jsonl", [full, record(2)])
    results = load(tmp_path / "new")
    assert results.records == (full, record(2))
    assert results.problems == ()
    assert len((tmp_path / "new" / "decode.jsonl").read_text().splitlines()) == 2


def test_records_of_all_files_come_in_order_of_time(tmp_path):
    append(tmp_path / "b.jsonl", [record(3), record(1)])
    append(tmp_path / "a.jsonl", [record(2)])
    append(tmp_path / "a.jsonl", [record(4)])
    assert [each.id for each in load(tmp_path).records] == ["id1", "id2", "id3", "id4"]
    assert [each.id for each in load(tmp_path / "a.jsonl").records] == ["id2", "id4"]


def test_the_data_folder_of_the_settings_is_the_default(tmp_path, monkeypatch):
    append(tmp_path / "results" / "a.jsonl", [record(1)])
    monkeypatch.setenv("CGLAB_DATA", str(tmp_path))
    assert load().records == (record(1),)


def test_only_cuda_times_are_times_of_graphs():
    assert record().shows_graph_times
    assert not record(device=Device("a CPU", "cpu")).shows_graph_times


def test_make_record_fills_in_machine_versions_and_state():
    run = new_run()
    made = make_record(
        bench="decode",
        arm="full",
        device="cpu",
        run=run,
        metrics={"step_ms": 1},
        samples={"step_ms": (1.0, 2.0)},
        command=["cglab", "bench", "decode"],
        model="pico-gqa",
        workload={"batch": 1},
    )
    assert made.schema == SCHEMA
    assert made.run == run
    assert made.device.kind == "cpu"
    assert made.device.name
    assert made.device.sms is None
    assert (made.tree, made.dirty) == (tree_hash(), is_dirty())
    assert made.versions["torch"]
    assert made.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert made.created.endswith("+00:00")
    assert made.samples == {"step_ms": [1.0, 2.0]}
    assert len(made.id) == 16
    again = make_record(bench="decode", arm="eager", device="cpu", run=run, metrics={})
    assert again.id != made.id
    assert len(again.command) == len(sys.argv) and not any(Path(word).is_absolute() for word in again.command)
    with pytest.raises(InputError, match="batch_size"):
        make_record(bench="decode", arm="full", device="cpu", run=run, metrics={}, batch_size=1)
    with pytest.raises(InputError, match="None for no value"):
        make_record(bench="decode", arm="full", device="cpu", run=run, metrics={"step_ms": math.nan})
    with pytest.raises(DeviceError):
        make_record(bench="decode", arm="full", device="meta", run=run, metrics={})


@pytest.mark.parametrize("value", [math.nan, math.inf, object()])
def test_values_that_json_cannot_hold_change_nothing(tmp_path, value):
    path = tmp_path / "a.jsonl"
    append(path, [record(1)])
    before = path.read_bytes()
    with pytest.raises(InputError, match="None for no value"):
        append(path, [record(2), record(3, workload={"x": value})])
    assert path.read_bytes() == before


@pytest.mark.parametrize("call", ["write", "fsync", "replace", "mkstemp"])
def test_a_full_disk_at_any_call_loses_no_earlier_line(tmp_path, monkeypatch, call):
    path = tmp_path / "a.jsonl"
    append(path, [record(1)])
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "write":

        class Full:
            def __init__(self, handle, mode):
                self.handle = handle

            def __enter__(self):
                return self

            def __exit__(self, *_):
                os.close(self.handle)

            def write(self, content):
                os.write(self.handle, content[: len(content) // 2])
                full()

        monkeypatch.setattr(os, "fdopen", Full)
    elif call == "mkstemp":
        monkeypatch.setattr("tempfile.mkstemp", full)
    else:
        monkeypatch.setattr(os, call, full)
    with pytest.raises(ResultsError, match="No space left") as told:
        append(path, [record(2)])
    assert "untouched" in str(told.value)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["a.jsonl"]
    monkeypatch.undo()
    append(path, [record(2)])
    assert len(load(tmp_path).records) == 2


def test_a_really_full_disk(tmp_path):
    """A limit on file size makes the kernel itself refuse the bytes, after some of them."""
    path = tmp_path / "a.jsonl"
    append(path, [record(1)])
    before = path.read_bytes()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    writer = context.Process(target=write_beyond, args=(path, len(before) + 100, theirs))
    writer.start()
    assert "untouched" in ours.recv()
    writer.join()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def write_beyond(path, limit, pipe):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        append(path, [record(2)])
    except ResultsError as error:
        pipe.send(str(error))


def killed_while_it_appends(path, prepare, *arguments):
    """What ended a process that appends after ``prepare``."""

    def write():
        prepare(*arguments)
        append(path, [record(2)])

    writer = multiprocessing.get_context("fork").Process(target=write)
    writer.start()
    writer.join()
    return -writer.exitcode


def die_at_byte(limit):
    """The kernel kills a process that writes beyond a limit, after the bytes up to it."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def die_at_call(name):
    setattr(os, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


def still_whole(path, before):
    """What was there is there, a next writer goes on after it, and no unfinished copy is left."""
    assert path.read_bytes() == before
    append(path, [record(3)])
    assert [each.id for each in load(path.parent).records] == ["id1", "id3"]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("share", [0, 0.3, 0.5, 0.8, 1])
def test_a_kill_at_any_byte_leaves_whole_lines(tmp_path, share):
    path = tmp_path / "a.jsonl"
    append(path, [record(1)])
    before = path.read_bytes()
    last = len(before) + len(record(2).as_line()) - 1
    assert killed_while_it_appends(path, die_at_byte, round(share * last)) == signal.SIGXFSZ
    still_whole(path, before)


@pytest.mark.parametrize("call", ["fdopen", "fchmod", "fsync", "replace"])
def test_a_kill_at_any_call_leaves_whole_lines(tmp_path, call):
    path = tmp_path / "a.jsonl"
    append(path, [record(1)])
    before = path.read_bytes()
    assert killed_while_it_appends(path, die_at_call, call) == signal.SIGKILL
    still_whole(path, before)


def test_concurrent_writers_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=write_twenty, args=(tmp_path / "a.jsonl", first)) for first in (0, 20, 40)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    results = load(tmp_path)
    assert results.problems == ()
    assert {each.id for each in results.records} == {f"id{number}" for number in range(60)}
    assert len(results.records) == 60


def write_twenty(path, first):
    for number in range(first, first + 20):
        append(path, [record(number)])


def test_a_partial_line_from_elsewhere_is_reported_and_kept(tmp_path):
    path = tmp_path / "a.jsonl"
    append(path, [record(1)])
    partial = record(2).as_line()[:-20]
    for cut in (1, len(partial) // 2, len(partial)):
        path.write_bytes(record(1).as_line() + partial[:cut])
        found = read(tmp_path)
        assert [each.id for each in found.records] == ["id1"]
        assert [(problem.line, problem.text) for problem in found.problems] == [(2, partial[:cut].decode())]
        assert "a.jsonl, line 2: no complete JSON" in str(found.problems[0])
        append(path, [record(3)])
        after = read(tmp_path)
        assert [each.id for each in after.records] == ["id1", "id3"]
        assert [problem.line for problem in after.problems] == [2]
        assert path.read_bytes().splitlines()[1] == partial[:cut]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": SCHEMA + 1}, "this version reads"),
        ({"surprise": 1}, "surprise"),
        ({"device": {"name": "x"}}, "device"),
        ({"device": None}, "wrong kind: device"),
    ],
)
def test_lines_of_another_layout_are_reported(tmp_path, change, reason):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(record(1).as_dict() | change), "[1]", record(2).as_line().decode()]
    path.write_text("\n".join(lines))
    results = read(path)
    assert [each.id for each in results.records] == ["id2"]
    assert reason in results.problems[0].reason
    assert "no JSON object" in results.problems[1].reason


def test_a_folder_that_is_missing_or_cannot_be_made(tmp_path):
    with pytest.raises(ResultsError, match="no results at"):
        read(tmp_path / "missing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResultsError, match="another folder"):
        append(tmp_path / "file" / "a.jsonl", [record(1)])
    (tmp_path / "b.jsonl").mkdir()
    with pytest.raises(ResultsError, match=r"b\.jsonl"):
        read(tmp_path)


def test_an_append_through_a_link_keeps_link_and_mode(tmp_path):
    real = tmp_path / "real.jsonl"
    append(real, [record(1)])
    real.chmod(0o640)
    (tmp_path / "link.jsonl").symlink_to(real)
    append(tmp_path / "link.jsonl", [replace(record(2), notes="through the link")])
    assert (tmp_path / "link.jsonl").is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert len(read(real).records) == 2


@pytest.mark.parametrize(
    "odd", [{"created": 5}, {"created": None}, {"workload": [1]}, {"parity": "x"}, {"samples": None}]
)
def test_a_line_with_a_field_of_the_wrong_kind_is_a_problem_beside_the_good_ones(tmp_path, odd):
    lines = [json.dumps(record(0).as_dict() | odd), json.dumps(record(1).as_dict())]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = read(tmp_path)
    assert [each.id for each in found.records] == ["id1"]
    assert f"wrong kind: {next(iter(odd))}" in found.problems[0].reason


@pytest.mark.parametrize("odd", ["NaN", "Infinity", "1e999", "-1e999"])
def test_a_line_with_a_number_that_is_none_is_no_record(tmp_path, odd):
    good = json.dumps(record(0).as_dict())
    (tmp_path / "a.jsonl").write_text(good.replace("1.5", odd))
    found = read(tmp_path)
    assert odd in found.problems[0].reason and not found.records


def test_a_record_tells_what_else_its_host_did(tmp_path):
    made = make_record(bench="decode", arm="full", device="cpu", run="r", metrics={"step_ms": 1.0})
    assert made.device.cores == os.cpu_count()
    assert made.device.load is not None and made.device.load >= 0 and made.device.gpus == 0
    assert made.device == replace(made.device, load=99.0), "a machine is the same one, whatever else it does"
    append(tmp_path / "new.jsonl", [made])
    old = made.as_dict() | {"device": {"name": "NVIDIA H200", "kind": "cuda", "driver": "580.1", "sms": 132}}
    (tmp_path / "old.jsonl").write_text(json.dumps(old) + "\n")
    assert {each.device.load for each in load(tmp_path).records} == {made.device.load, None}


@pytest.mark.parametrize(
    ("said", "found"), [("580.1\n580.1\n", ("580.1", 2)), ("580.1\n", ("580.1", 1)), ("", (None, None))]
)
def test_the_host_says_its_driver_and_how_many_gpus_it_has(monkeypatch, said, found):
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=said))
    assert machine._host() == found
