"""The commands of ``cglab``: each takes parsed options and returns what to say and whether it held."""

import os

# Before torch is loaded, here and in the kernels that a command starts: a thread that waits for another sleeps.
# Spinning is a little faster on an idle machine and many times slower on one that has other work to do.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
