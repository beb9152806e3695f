"""The README's picture: whole or not at all, and small."""

import plotly.graph_objects as go
import pytest

from scripts import readme_picture


@pytest.fixture
def drawn(make, monkeypatch):
    """A recorded profile, and a renderer that gives the bytes asked for."""

    def draw(size):
        profile = make.profiled(eager=make.eager_trace(), full=make.full_trace())
        monkeypatch.setattr(readme_picture, "recorded_profile", lambda technique, folder: profile)
        monkeypatch.setattr(go.Figure, "to_image", lambda figure, **_: b"x" * size)

    return draw


def test_a_picture_is_written_whole(drawn, tmp_path, capsys):
    drawn(100)
    assert readme_picture.main(["--out", str(tmp_path / "images" / "t.png")]) == 0
    assert [(path.name, path.stat().st_size) for path in (tmp_path / "images").iterdir()] == [("t.png", 100)]
    assert "One decode step of pico-gqa" in capsys.readouterr().out


def test_a_picture_that_is_too_large_keeps_the_old_one(drawn, tmp_path, capsys):
    out = tmp_path / "t.png"
    out.write_bytes(b"old")
    drawn(readme_picture.MOST_BYTES + 1)
    assert readme_picture.main(["--out", str(out)]) == 1
    assert out.read_bytes() == b"old" and "more than 200000" in capsys.readouterr().err


def test_no_renderer_is_said(drawn, monkeypatch, capsys):
    drawn(1)

    def missing(figure, **_):
        message = "Image export requires the Kaleido package"
        raise ValueError(message)

    monkeypatch.setattr(go.Figure, "to_image", missing)
    assert readme_picture.main([]) == 1
    assert "Kaleido" in capsys.readouterr().err


def test_nothing_recorded_is_bad_input(tmp_path):
    with pytest.raises(SystemExit) as stopped:
        readme_picture.main(["--folder", str(tmp_path)])
    assert stopped.value.code == 2
