"""A server that answers as SGLang does, in this process, without a model; and a Python that has a tiny 'sglang'."""

import json
import os
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

from cglab.errors import ServerError
from cglab.serving.diagnosis import Fault


def tokens_for(prompt, count, arm=0):
    """Greedy tokens of a model that looks at its context only; ``arm`` makes another model of it."""
    found = list(prompt)
    for _ in range(count):
        found.append((sum(found[-3:]) * 31 + len(found) + arm) % 997)
    return found[len(prompt) :]


class StandIn:
    """What ``RunningServer`` offers, as far as loads, scrapes and parity need it."""

    def __init__(self, answers=None, *, python="", version="0.5.23", log=None):
        self.answers = dict(answers or {})
        self.posted = []
        self.installed = SimpleNamespace(python=Path(python), version=version)
        self.url, self.log, self.living = "http://127.0.0.1:1", log or Path(os.devnull), True
        self.key = None

    def alive(self):
        return self.living

    def log_tail(self, lines=12):
        return self.log.read_text().splitlines()[-lines:] or ["the last line"]

    def get(self, path):
        return self._answer(path, None)

    def post(self, path, json=None):
        self.posted.append((path, json))
        return self._answer(path, json)

    def _answer(self, path, body):
        if not self.living:
            raise ServerError("the server is dead", fault="it died")
        found = self.answers.get(path)
        if callable(found):
            found = found(body)
        if found is None or isinstance(found, int):
            raise ServerError(f"refused {path} with status {found}", fault=Fault.REFUSED)
        if isinstance(found, ServerError):
            raise found
        return SimpleNamespace(text=found if isinstance(found, str) else json.dumps(found))


def generate(arm=0, logprobs=True):
    """An answer to ``/generate``, for one prompt or several."""

    def one(ids, parameters, asked):
        meta = {"completion_tokens": parameters["max_new_tokens"], "prompt_tokens": len(ids)}
        if asked and logprobs:
            meta["input_token_logprobs"] = [[-(token % 7) / 8 - arm, token, None] for token in ids]
        return {
            "output_ids": tokens_for(ids, parameters["max_new_tokens"], arm),
            "text": "",
            "meta_info": meta,
        }

    def answer(body):
        ids, parameters = body["input_ids"], body["sampling_params"]
        asked = body.get("return_logprob", False)
        if isinstance(ids[0], list):
            return [one(each, parameters, asked) for each in ids]
        return one(ids, parameters, asked)

    return answer


@contextmanager
def http_server(generate=None):
    """A real HTTP server; ``received`` lists what was posted, in order."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            received.append((self.path, json.loads(content or b"{}")))
            if generate is not None and self.path == "/generate":
                generate(received[-1][1])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()
