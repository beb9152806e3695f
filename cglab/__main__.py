"""``python -m cglab`` is the command ``cglab``."""

from cglab.cli import main

raise SystemExit(main())
