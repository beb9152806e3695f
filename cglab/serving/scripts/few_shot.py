"""SGLang's own few-shot harness over local files of questions; one line of scores a run, after what it prints itself.

    python few_shot.py MODULE URL NEW_TOKENS SHOTS RUN...

A run is ``FILE:QUESTIONS:PARALLEL``. Importing the harness takes long, hence one process for several runs. The server's
key is in ``OPENAI_API_KEY``, if it has one; the harness has no argument for it.
"""

import json
import os
import sys
from argparse import Namespace
from functools import partial
from importlib import import_module

module, url, new_tokens, shots, *runs = sys.argv[1:]
harness = import_module(module)
if key := os.environ.get("OPENAI_API_KEY"):
    harness.RuntimeEndpoint = partial(harness.RuntimeEndpoint, api_key=key)  # type: ignore[attr-defined]
host, _, port = url.removeprefix("http://").rpartition(":")
scores = []
for run in runs:
    data, questions, parallel = run.rsplit(":", 2)
    found = harness.run_eval(
        Namespace(
            host=host, port=int(port), data_path=data, num_questions=int(questions), num_shots=int(shots),
            max_new_tokens=int(new_tokens), parallel=int(parallel), temperature=0.0,
        )
    )  # fmt: skip
    scores.append({name: float(value) for name, value in found.items()})
sys.stdout.write(f"\n{json.dumps(scores)}\n")
