"""The workspace as a user has it: JupyterLab in a real Chromium, by mouse and by keyboard.

Screenshots are kept in ``artifacts/``. Without a Chromium the test is skipped, in CI it fails then.
"""

import gzip
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from urllib.request import urlopen

import pytest

pytestmark = pytest.mark.end_to_end

NOTEBOOK = "09_dashboard.ipynb"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 120_000  # milliseconds: other tests may have the machine

BREAK = """
import cglab.models.decoder as decoder
whole = decoder.Decoder.logits
decoder.Decoder.logits = lambda self, hidden: whole(self, hidden) * hidden.max().item()
lab.phases._made.pop("decode", None)
"""
MEND = """
decoder.Decoder.logits = whole
lab.phases._made.pop("decode", None)
"""


def missing(reason):
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, and CI must have it")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        missing(f"no Chromium: none of {', '.join(BROWSERS)} is on the PATH")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("no playwright: it is in the dev extra")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def server(root, tmp_path, environment):
    """JupyterLab on a copy of the notebook, with a token and settings of its own: its address and token."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    shutil.copy(root / "notebooks" / NOTEBOOK, folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token, base = secrets.token_hex(16), f"http://127.0.0.1:{port}"
    own = {
        "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "share", "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "IPYTHONDIR": "ipython",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
        "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.expose_app_in_browser=True",
    ]  # fmt: skip
    variables = environment | {name: str(tmp_path / where) for name, where in own.items()}
    news = tmp_path / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false"}')
    with (tmp_path / "server.log").open("wb") as log:
        running = subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 120
            while not answers(f"{base}/api?token={token}"):
                assert running.poll() is None, (tmp_path / "server.log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "server.log").read_text()
                time.sleep(0.2)
            yield base, token
        finally:
            running.terminate()
            running.wait(60)


def answers(address):
    try:
        with urlopen(address, timeout=5) as reply:
            return "version" in json.load(reply)
    except OSError:
        return False


class Page:
    """The notebook in a tab; what the page complains of, and whom it asks, is kept."""

    def __init__(self, browser, base, token, artifacts):
        self.tab = browser.new_page(viewport={"width": 1500, "height": 1250})
        self.tab.set_default_timeout(PATIENCE)
        self.base, self.token, self.artifacts = base, token, artifacts
        self.errors, self.outside = [], []
        self.tab.on("console", lambda said: said.type == "error" and self.errors.append(said.text))
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("request", lambda asked: self._asked(asked.url))

    def _asked(self, url):
        own = (self.base, self.base.replace("http", "ws"), "data:", "blob:")
        if not url.startswith(own):
            self.outside.append(url)

    def open(self):
        self.tab.goto(f"{self.base}/lab/tree/{NOTEBOOK}?reset&token={self.token}")
        # Before a kernel is idle and connected, "run all" is lost in silence.
        self.tab.evaluate(
            """async () => {
                const ready = async () => {
                    if (!window.jupyterapp?.commands.hasCommand('notebook:run-all-cells')) return false;
                    const session = window.jupyterapp.shell.currentWidget?.sessionContext;
                    if (!session?.session?.kernel) return false;
                    await session.ready;
                    const kernels = await (await fetch('/api/kernels')).json();
                    return kernels.some(k => k.execution_state === 'idle' && k.connections > 0);
                };
                while (!(await ready())) await new Promise(after => setTimeout(after, 300));
            }"""
        )

    def run_all(self):
        self.tab.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")

    def execute(self, code):
        """Runs code in the notebook's kernel, as a cell would."""
        self.tab.evaluate(
            """async code => {
                const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
                const reply = await kernel.requestExecute({code}).done;
                if (reply.content.status !== 'ok') throw new Error(JSON.stringify(reply.content));
            }""",
            code,
        )

    def group(self, label):
        return self.tab.locator(".widget-radio", has_text=label)

    def radio(self, label, mode):
        return self.group(label).get_by_role("radio", name=mode, exact=True)

    def row(self, label):
        return self.tab.locator(".widget-hbox", has=self.group(label)).last

    def button(self, name):
        return self.tab.get_by_role("button", name=name, exact=True)

    def picture(self, name):
        self.artifacts.mkdir(exist_ok=True)
        self.tab.screenshot(path=self.artifacts / f"{name}.png")

    def board(self, name, height):
        """A picture of the workspace alone, its upper part: the one of the README is such a one."""
        self.tab.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
        self.tab.set_viewport_size({"width": 1400, "height": height + 400})
        board = self.tab.locator(".jp-OutputArea-output > .widget-vbox", has=self.group("T1 decode")).first
        board.scroll_into_view_if_needed()
        self.tab.wait_for_timeout(1000)  # figures follow the new width
        box = board.bounding_box()
        clip = {"x": box["x"], "y": box["y"], "width": box["width"], "height": min(box["height"], height)}
        self.tab.screenshot(path=self.artifacts / f"{name}.png", clip=clip)


@pytest.fixture
def page(browser, server, root):
    made = Page(browser, *server, root / "artifacts")
    yield made
    made.picture("last")
    made.tab.close()


def toggles(page, expect):
    """Three of them: one by mouse, two by keyboard."""
    expect(page.radio("T1 decode", "full")).to_be_enabled()
    expect(page.radio("T5 draft_sampler", "graph")).to_be_disabled()
    page.radio("T1 decode", "breakable").click()
    expect(page.row("T1 decode")).to_contain_text("runs breakable")
    page.radio("T6 prefill", "breakable").focus()
    page.tab.keyboard.press("Tab")
    page.tab.keyboard.press("Space")
    expect(page.row("T6 prefill")).to_contain_text("runs eager")
    page.radio("T4 seed_step", "fused").focus()
    page.tab.keyboard.press("Space")
    expect(page.row("T4 seed_step")).to_contain_text("runs fused")
    page.picture("toggles")


def compares(page, expect):
    """A run, begun by keyboard, changes the timeline, which can be saved."""
    tab = page.tab
    tab.get_by_label("Compare", exact=True).select_option(label="T2 verify")
    page.button("Run").focus()
    tab.keyboard.press("Enter")
    expect(tab.get_by_text("breakable: parity bitwise")).to_be_attached()
    expect(page.button("Run")).to_be_enabled()
    timeline = tab.locator(".js-plotly-plot", has_text="time from the start of the step").first
    expect(timeline).to_contain_text("One verify step of pico-gqa")
    timeline.scroll_into_view_if_needed()
    page.picture("timeline")
    with tab.expect_download() as saved:
        tab.get_by_role("link", name="Save for Perfetto").click()
    with gzip.open(saved.value.path()) as file:
        assert len(json.load(file)["traceEvents"]) > 100
    page.group("T1 decode").scroll_into_view_if_needed()
    page.board("workspace", 2080)


def fails(page, expect):
    """A capture that fails flips the toggle back and says why, until it succeeds."""
    page.execute(BREAK)
    page.radio("T1 decode", "full").click()
    alert = page.row("T1 decode").get_by_role("alert")
    expect(alert).to_contain_text("CaptureError: full cannot be captured")
    expect(page.radio("T1 decode", "breakable")).to_be_checked()
    page.picture("failed-capture")
    page.execute(MEND)
    page.radio("T1 decode", "full").click()
    expect(page.row("T1 decode")).to_contain_text("runs full")
    expect(alert).to_have_count(0)


def stops(page, expect):
    """In mid-run."""
    page.button("Run").click()
    expect(page.tab.get_by_role("status").filter(has_text="timing")).to_be_attached()
    page.button("Stop").click()
    expect(page.tab.get_by_role("alert").filter(has_text="stopped")).to_be_attached()
    expect(page.button("Run")).to_be_enabled()


def replays(page, expect):
    """Recorded results through the same panels: a prediction, its error, and a recorded timeline of a GPU."""
    tab = page.tab
    tab.get_by_label("Source", exact=True).select_option(label="recorded: qwen3-0.6b")
    expect(page.row("T1 decode")).to_contain_text("runs full")
    page.button("Run").click()
    expect(tab.get_by_text("Such predictions were off by", exact=False)).to_be_attached()
    timeline = tab.locator(".js-plotly-plot", has_text="time from the start of the step").first
    expect(timeline).to_contain_text("device: stream")
    timeline.scroll_into_view_if_needed()
    page.picture("recorded")


@pytest.mark.slow
def test_a_user_toggles_runs_fails_stops_and_replays_in_jupyterlab(page):
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE)
    page.open()
    page.run_all()
    expect(page.tab.get_by_text("recorded at this size: 0")).to_be_attached()
    page.group("T1 decode").scroll_into_view_if_needed()
    for path in (toggles, compares, fails, stops, replays):
        path(page, expect)
    assert page.errors == []
    assert page.outside == []
