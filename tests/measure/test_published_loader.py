"""The loader of published tables; their content is checked beside the data."""

import json

import pytest

from cglab.errors import ResultsError
from cglab.measure.published import load_published, published_frame

TABLE = {
    "id": "s2-stage",
    "source": "S2",
    "title": "Stage wall",
    "machine": "GB300",
    "columns": [{"name": "rank", "unit": None}, {"name": "wall", "unit": "ms"}],
    "rows": [{"rank": 0, "wall": 73.06, "source": "S2"}, {"rank": 1, "wall": None, "source": "S2"}],
    "notes": "",
}


def write(folder, name="a.json", **changes):
    (folder / name).write_text(json.dumps(TABLE | changes))
    return folder


def test_tables_by_id(tmp_path):
    write(tmp_path, "z.json", id="a-first")
    tables = load_published(write(tmp_path))
    assert list(tables) == ["a-first", "s2-stage"]
    assert tables["s2-stage"] == TABLE


def test_the_tables_of_this_repository_load():
    tables = load_published()
    assert {table["source"] for table in tables.values()} == {"S0", "S1", "S2", "S3", "S4"}
    assert all(len(published_frame(table)) == len(table["rows"]) > 0 for table in tables.values())


def test_frame_keeps_units_and_sources(tmp_path):
    frame = published_frame(load_published(write(tmp_path))["s2-stage"])
    assert list(frame.columns) == ["rank", "wall", "source"]
    assert frame["wall"][0] == 73.06
    assert frame.attrs["units"] == {"rank": None, "wall": "ms"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"source": "S9"}, "S9"),
        ({"machine": None}, "'machine' must be a str"),
        ({"columns": [{"name": "rank"}, {"name": "rank"}]}, "name of its own"),
        ({"rows": [{"rank": 0, "source": "S2"}]}, "row 0 needs every column"),
        ({"rows": [{"rank": 0, "wall": 1.0}]}, "row 0 needs .* source"),
        ({"rows": [TABLE["rows"][0], [0, 73.06]]}, "row 1"),
    ],
)
def test_faulty_tables_are_named(tmp_path, changes, reason):
    with pytest.raises(ResultsError, match=rf"a\.json.*{reason}"):
        load_published(write(tmp_path, **changes))


def test_two_tables_of_one_id_broken_json_and_no_tables(tmp_path):
    with pytest.raises(ResultsError, match="no published tables"):
        load_published(tmp_path)
    with pytest.raises(ResultsError, match="second table"):
        load_published(write(write(tmp_path), "b.json"))
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(ResultsError, match=r"cannot read .*b\.json"):
        load_published(tmp_path)
