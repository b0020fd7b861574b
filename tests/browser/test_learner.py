"""What a learner sees: JupyterLab in a real browser, the notebook filled in, full marks."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

playwright = pytest.importorskip("playwright.sync_api")
ROOT = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # so that every output is in the page
}

IN_EVERY_RUN = "03_tensor"  # the other lessons are for `make browser`
LESSONS = [
    pytest.param(path.stem, marks=() if path.stem == IN_EVERY_RUN else pytest.mark.every_lesson)
    for path in sorted((ROOT / "solutions").glob("*.ipynb"))
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]


def filled_in(name: str) -> dict:
    """The learner's notebook with the reference answers typed into its exercise cells."""
    notebook = json.loads((ROOT / "notebooks" / name).read_text())
    answers = {_grade_id(c): c["source"] for c in json.loads((ROOT / "solutions" / name).read_text())["cells"]}
    for cell in notebook["cells"]:
        graded = cell["metadata"].get("nbgrader", {}).get("grade")
        if cell["cell_type"] == "code" and _grade_id(cell) and not graded:
            cell["source"] = answers[_grade_id(cell)]
    return notebook


def _grade_id(cell: dict) -> str | None:
    return cell["metadata"].get("nbgrader", {}).get("grade_id")


@pytest.fixture
def lab(tmp_path):
    """JupyterLab on a folder of its own; nothing of it is left afterwards."""
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--port=0", "--IdentityProvider.token=word"]
    command += ["--allow-root", "--expose-app-in-browser", f"--ServerApp.root_dir={tmp_path}"]
    for name, values in SETTINGS.items():
        file = tmp_path / ".settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    folders = {f"JUPYTER_{what}_DIR": str(tmp_path / f".{what.lower()}") for what in ("CONFIG", "RUNTIME")}
    environment = os.environ | folders | {"JUPYTERLAB_SETTINGS_DIR": str(tmp_path / ".settings")}
    log = open(tmp_path / "lab.log", "w")
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield _address(tmp_path / "lab.log")
    finally:
        processes = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        server.wait(20)
        for process in processes:
            if process.is_running():
                process.kill()
        log.close()


def _address(log: Path) -> str:
    """Where JupyterLab answers, once it does."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        found = re.search(r"(http://(?:localhost|127\.0\.0\.1):[1-9]\d*)/lab", log.read_text())
        with contextlib.suppress(OSError):
            if found:
                urllib.request.urlopen(f"{found[1]}/api", timeout=10).close()
                return found[1]
        time.sleep(0.2)
    raise AssertionError(log.read_text())


@pytest.fixture
def page():
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser.new_page(viewport={"width": 1300, "height": 1000})
        browser.close()


def run_all(page, address: str, name: str, path: Path, limit: float) -> dict:
    """Open the notebook, run all its cells, save it, and read what was saved."""
    page.goto(f"{address}/lab/tree/{name}?token=word")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=120_000)
    page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
    end = time.monotonic() + limit
    saved: dict = {}
    while time.monotonic() < end:
        page.wait_for_timeout(1000)
        for button in page.locator(".jp-Dialog .jp-mod-accept").all():
            button.click()  # which kernel: the one that is proposed
        page.evaluate("void window.jupyterapp.commands.execute('docmanager:save')")
        try:
            saved = json.loads(path.read_text())
        except json.JSONDecodeError:
            continue  # it is being written
        code = [cell for cell in saved["cells"] if cell["cell_type"] == "code" and "".join(cell["source"]).strip()]
        if all(cell["execution_count"] for cell in code):
            return saved
    page.screenshot(path=path.with_suffix(".png"))
    raise AssertionError(f"not all cells ran within {limit} s; see {path.with_suffix('.png')}")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lesson", LESSONS)
def test_a_learner_who_fills_in_the_answers_gets_full_marks(lab, page, tmp_path, lesson):
    """A lesson in JupyterLab: every check shows all its points, figures have alt text, the widget has its controls."""
    name = f"{lesson}.ipynb"
    (tmp_path / name).write_text(json.dumps(filled_in(name)))
    saved = run_all(page, lab, name, tmp_path / name, limit=1000)
    errors = [o for cell in saved["cells"] for o in cell.get("outputs", ()) if o["output_type"] == "error"]
    assert errors == []
    graded = [cell for cell in saved["cells"] if cell["metadata"].get("nbgrader", {}).get("grade")]
    for cell in graded:
        numbers = [o["data"]["text/plain"] for o in cell["outputs"] if o["output_type"] == "execute_result"]
        assert [float("".join(n)) for n in numbers] == [cell["metadata"]["nbgrader"]["points"]], _grade_id(cell)
    assert sum(cell["metadata"]["nbgrader"]["points"] for cell in graded) >= 20
    images = page.locator(".jp-OutputArea-output img, .jp-RenderedMarkdown img")
    assert images.count() > 3
    assert all(images.nth(i).get_attribute("alt") for i in range(images.count()))
    controls = page.locator(".jupyter-widgets .noUi-handle, .jupyter-widgets select, .jupyter-widgets button")
    assert controls.count() > 0
