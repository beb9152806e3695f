"""Draw the README's timeline: an eager decode step above its replay.

    python scripts/readme_picture.py              from the recorded profile in data/results, if there is one
    python scripts/readme_picture.py --live       profile this machine now and draw that

Needs kaleido and a Chromium (`pip install kaleido`); neither is needed by anything else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import cglab
from cglab.errors import CglabError
from cglab.lab.comparison import Profile
from cglab.lab.profiles import recorded_profile

OUT = Path(__file__).resolve().parent.parent / "notebooks" / "images" / "timeline.png"
MOST_BYTES = 200_000


def live(model: str | None) -> Profile:
    """One decode step of each arm, profiled here."""
    with cglab.open(model) as lab:
        return lab.profile("decode", ("eager", "full"), batch=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when the picture is there, 1 when it could not be drawn, 2 for bad input."""
    parser = argparse.ArgumentParser(description="Draw the README's timeline.")
    parser.add_argument("--live", action="store_true", help="profile this machine now")
    parser.add_argument("--model", help="for --live (default: CGLAB_MODEL, or pico-gqa)")
    parser.add_argument("--folder", type=Path, help="where the recorded profile is (default: data/results)")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    try:
        profile = live(options.model) if options.live else recorded_profile("decode", options.folder)
        if not profile.traces:
            parser.error("no profile is recorded; record one with lab.profile(save=...), or use --live")
        figure = profile.timeline()
        picture = figure.to_image(format="png", width=960, height=figure.layout.height, scale=1.5)
    except (CglabError, RuntimeError, ValueError) as error:  # plotly's errors when kaleido is not there
        print(f"no picture: {error}", file=sys.stderr)
        return 1
    if len(picture) > MOST_BYTES:
        print(f"no picture: {len(picture)} bytes, more than {MOST_BYTES}", file=sys.stderr)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    part = options.out.with_suffix(".part")
    part.write_bytes(picture)
    part.replace(options.out)
    print(f"{options.out.name}: {len(picture)} bytes, {profile.title}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
