"""Result records whose file was damaged: what is whole is read, what is not is told, and nothing is lost."""

import errno
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cglab.errors import ResultsError
from cglab.measure import records
from cglab.measure.machine import Device
from cglab.measure.record import Record
from cglab.measure.records import ResultsWarning, append, load, read

FIRST = Record(
    bench="decode", arm="full", device=Device("a CPU", "cpu"), id="one", created="2026-01-01", notes="é\n\u2028 日",
    metrics={"step_ms": 1.5}, samples={"step_ms": [1.0, 2.0]},
)  # fmt: skip
SECOND = replace(FIRST, id="two", created="2026-01-02")
NEXT = replace(FIRST, id="next", created="2026-01-03")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The bytes of a file of two records."""
    path = tmp_path_factory.mktemp("written") / "a.jsonl"
    append(path, [FIRST, SECOND])
    return path.read_bytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged") / "a.jsonl"


@given(data=st.data())
def test_a_file_cut_at_any_byte_is_read_up_to_there_and_keeps_its_bytes_at_the_next_append(
    written, path, data
):
    cut = data.draw(st.integers(0, len(written)))
    path.write_bytes(written[:cut])
    ends = [written.index(b"\n"), len(written) - 1]
    whole = [each for each, end in zip((FIRST, SECOND), ends, strict=True) if cut >= end]
    found = read(path)
    assert list(found.records) == whole
    partial = cut not in (0, ends[0], ends[0] + 1, ends[1], len(written))
    assert [problem.line for problem in found.problems] == ([len(whole) + 1] if partial else [])
    append(path, [NEXT])
    assert path.read_bytes().startswith(written[:cut])
    assert list(read(path).records) == [*whole, NEXT]


@given(data=st.data())
def test_a_bit_that_flipped_anywhere_is_never_read_as_another_result(written, path, data):
    at, bit = data.draw(st.integers(0, len(written) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(written)
    damaged[at] ^= 1 << bit
    path.write_bytes(damaged)
    found = read(path)
    assert set(map(id_of, found.records)) <= {id_of(FIRST), id_of(SECOND)}
    assert len(found.records) == 2 or found.problems


def id_of(record):
    """All of a record, to be compared."""
    return record.as_line()


def test_a_figure_that_was_changed_by_hand_is_told(written, path):
    path.write_bytes(written.replace(b"1.5", b"0.5", 1))
    found = read(path)
    assert found.records == (SECOND,) and "checksum" in found.problems[0].reason


def test_lines_without_a_checksum_of_earlier_versions_and_of_windows_are_read(written, path):
    path.write_bytes(FIRST.as_line() + written.splitlines(keepends=True)[1].replace(b"\n", b"\r\n"))
    assert read(path) == records.Results((FIRST, SECOND), ())


def test_what_is_passed_over_is_warned_of_with_the_first_line(written, path):
    path.write_bytes(written + b"half a li\n\0\0\0\n")
    with pytest.warns(
        ResultsWarning, match=r"passed over 2 lines .* the first is .*a\.jsonl, line 3: no complete JSON"
    ):
        assert load(path).records == (FIRST, SECOND)


class NearlyFull:
    """A file on a disk with room for so many bytes more."""

    def __init__(self, handle, room):
        self.handle, self.room = handle, room

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.handle)

    def write(self, content):
        os.write(self.handle, content[: self.room])
        if len(content) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self):
        pass


@settings(max_examples=40)
@given(data=st.data())
def test_a_disk_that_is_full_at_any_byte_loses_nothing_and_takes_it_all_once_there_is_room(
    written, path, data
):
    path.write_bytes(written)
    room = data.draw(st.integers(0, len(written) + len(NEXT.as_line()) - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdopen", lambda handle, mode: NearlyFull(handle, room))
        with pytest.raises(ResultsError, match="No space left.*untouched"):
            append(path, [NEXT])
    assert path.read_bytes() == written and list(path.parent.iterdir()) == [path]
    append(path, [NEXT])
    assert read(path).records == (FIRST, SECOND, NEXT)


def test_a_disk_that_does_not_confirm_the_new_name_is_told_as_that(written, path, monkeypatch):
    path.write_bytes(written)
    real, calls = os.fsync, []

    def second_fails(handle):
        calls.append(handle)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(handle)

    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(ResultsError, match="has the new records.*not confirmed"):
        append(path, [NEXT])
    assert read(path).records == (FIRST, SECOND, NEXT)
