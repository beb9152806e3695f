"""Speaks /health, /generate, /server_info and /metrics; SGLANG_FAKE says how it misbehaves.

As the real one it has a key if it is given one, asks for it everywhere but at /health and /metrics, and tells it to
its log and in /server_info.

It has two children, as a real server has its scheduler and its detokenizer: one in its group, one that left it and
ignores SIGTERM.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from sglang.srt.server_args import ServerArgs

MODE = os.environ.get("SGLANG_FAKE", "")
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
METRICS = """# TYPE sglang:cuda_graph_passes_total counter
sglang:cuda_graph_passes_total{mode="decode_none"} 7.0
"""


class Handler(BaseHTTPRequestHandler):
    options = None

    def refuses(self):
        allowed = self.path.startswith(("/health", "/metrics")) or self.options.api_key is None
        if allowed or self.headers["Authorization"] == f"Bearer {self.options.api_key}":
            return False
        self.answer('{"error":"Unauthorized"}', status=401)
        return True

    def do_GET(self):
        if self.refuses():
            return None
        if self.path == "/health" and MODE == "never healthy":
            return self.answer("", status=503)
        if self.path == "/health" and MODE == "hang":
            time.sleep(600)
        if self.path == "/server_info":
            facts = {
                "version": "0.5.23",
                "env": dict(os.environ),
                "argv": sys.argv[: sys.argv.index("--api-key")] if self.options.api_key else sys.argv,
                "path": sys.path,
            }
            facts |= {**vars(self.options), "nested": [vars(self.options)]}
            return self.answer(json.dumps(facts))
        if self.path == "/metrics":
            return self.answer(METRICS)
        return self.answer("", status=200 if self.path == "/health" else 404)

    def do_POST(self):
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refuses():
            return None
        if sent.get("text") == "die":
            print("Traceback: told to die", flush=True)
            os._exit(3)
        if sent.get("text") == "hang":
            time.sleep(600)
        ids = sent.get("input_ids") or [1]
        return self.answer(json.dumps({"output_ids": [ids[-1] + 1], "meta_info": {"completion_tokens": 1}}))

    def answer(self, text, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def main():
    parser = argparse.ArgumentParser(prog="launch_server.py")
    ServerArgs.add_cli_args(parser)
    options = Handler.options = parser.parse_args()
    print("Load weight begin.", flush=True)
    if MODE == "out of memory":
        raise RuntimeError("Not enough memory. Please try to increase --mem-fraction-static.")
    if MODE == "wrong model":
        raise OSError(f"{options.model_path} does not appear to have a file named config.json")
    if MODE == "killed":
        os.kill(os.getpid(), 9)
    if MODE == "died":
        sys.exit(7)
    log = logging.getLogger("sglang")
    log.warning(f"server_args={options}")  # noqa: G004 - as SGLang does
    log.warning("server_args=%s", options)
    if MODE == "tells the key":  # as a process that it starts may, whose log is not blanked
        print(f"Disable graph of {options}", flush=True)
    deaf = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=True)
    deaf.stdout.readline()
    plain = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pids = Path(os.environ["FAKE_PIDS"])
    pids.with_suffix(".new").write_text(f"{os.getpid()} {deaf.pid} {plain.pid}")
    pids.with_suffix(".new").rename(pids)  # there with all that is in it
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    print("The server is fired up and ready to roll!", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
