"""Runs notebooks in JupyterLab in a headless Chromium, and waits for their pictures.

`make test-browser` runs this file. `make test` does not, because the name of the file does not
begin with `test_`.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# Time limits for a busy machine. On an idle machine, all tests take about 40 seconds.
START_SECONDS = 90
RUN_SECONDS = 240
# Keep all cells in the page, and make no requests to the network.
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
LIVE_CELL = """\
from rsembed import datasets, plot
from rsembed.plot.buffers import partition_entries
batches = datasets.zipf_ids(4 * 64 * 4, 500, exponent=1.0, seed=0).reshape(4, 64, 4)
plot.explore(partition_entries(batches, num_shards=4))
"""


def find(*programs):
    """Path of the first of these programs that is installed. Skips the test if none is."""
    program = next(filter(None, map(shutil.which, programs)), None)
    if program is None:
        pytest.skip(
            f"the browser test needs {' or '.join(programs)}: apt-get install chromium chromium-driver"
        )
    return program


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    browser, driver_program = find("chromium", "google-chrome", "chrome"), find("chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    profile = tmp_path_factory.mktemp("profile")
    flags = "--headless=new --no-sandbox --disable-gpu --disable-background-networking --disable-dev-shm-usage"
    for flag in (*flags.split(), "--window-size=1400,1600", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_program))
    yield started
    started.quit()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Address and token of a local JupyterLab with two notebooks, and with its own settings."""
    folder = tmp_path_factory.mktemp("lab")
    notebooks = folder / "notebooks"
    notebooks.mkdir()
    shutil.copy(ROOT / "notebooks" / "01_shakespeare.ipynb", notebooks)
    live = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(LIVE_CELL)])
    live.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(live, notebooks / "live.ipynb")
    # Notebooks run with this Python, although the machine may have other kernels.
    kernel = folder / "data" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": command, "display_name": "Python 3", "language": "python"}
    kernel.joinpath("kernel.json").write_text(json.dumps(spec))
    for name, values in SETTINGS.items():
        file = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    environment = {}
    for name in ("CONFIG", "RUNTIME", "DATA"):
        environment[f"JUPYTER_{name}_DIR"] = str(folder / name.lower())
    for name in ("SETTINGS", "WORKSPACES"):
        environment[f"JUPYTERLAB_{name}_DIR"] = str(folder / name.lower())
    arguments = f"--no-browser --ip=127.0.0.1 --port={port} --ServerApp.port_retries=0 --allow-root"
    log = (folder / "log.txt").open("w")
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *arguments.split(), f"--ServerApp.root_dir={notebooks}"],
        env=os.environ | environment | {"JUPYTER_TOKEN": token},
        stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for_server(f"{address}/api/status?token={token}", server, folder / "log.txt")
        yield address, token
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=20)
        log.close()


def wait_for_server(address, server, log):
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


def wait_for(driver, what, condition, seconds=START_SECONDS):
    """Calls `condition` until its result is true, and returns the result.

    After `seconds`, keeps a picture of the page and fails.
    """
    from selenium.common.exceptions import WebDriverException

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            # JupyterLab may ask for a kernel. The only kernel is already chosen.
            for button in driver.find_elements("css selector", ".jp-Dialog .jp-mod-accept"):
                button.click()
            if result := condition():
                return result
        except WebDriverException:
            # The page changed during the call.
            pass
        time.sleep(0.5)
    picture = Path(tempfile.gettempdir()) / "rsembed-browser-test.png"
    driver.save_screenshot(str(picture))
    pytest.fail(
        f"{what} did not appear within {seconds:.0f} seconds; the page looked like {picture}"
    )


def open_and_run(driver, address, token, name):
    """Opens a notebook, and runs all of its cells by the menu."""
    driver.get(f"{address}/lab/tree/{name}?token={token}&reset")

    def kernel_is_ready():
        with urllib.request.urlopen(f"{address}/api/sessions?token={token}", timeout=10) as answer:
            kernels = [
                session["kernel"] for session in json.load(answer) if session["path"] == name
            ]
        return any(
            kernel["execution_state"] == "idle" and kernel["connections"] > 0 for kernel in kernels
        )

    wait_for(driver, "a kernel", kernel_is_ready)
    for menu, label in (("MenuBar", "Run"), ("Menu", "Run All Cells")):
        entry = f"//*[contains(@class,'lm-{menu}-itemLabel')][text()='{label}']"
        wait_for(
            driver, label, lambda entry=entry: driver.find_element("xpath", entry).click() or True
        )


def test_the_shakespeare_tutorial_runs_and_shows_its_loss(driver, lab):
    open_and_run(driver, *lab, "01_shakespeare.ipynb")
    notebook = nbformat.read(ROOT / "notebooks" / "01_shakespeare.ipynb", as_version=4)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]

    def cells_with_a_number():
        return [
            prompt.text
            for prompt in driver.find_elements("css selector", ".jp-CodeCell .jp-InputPrompt")
        ]

    def is_done():
        texts = [output.text for output in driver.find_elements("css selector", ".jp-RenderedText")]
        assert not [text for text in texts if "Traceback (most recent call last)" in text], texts
        # The last cell has the asserts.
        return f"[{len(code)}]:" in cells_with_a_number()

    wait_for(driver, "the number of the last cell", is_done, RUN_SECONDS)
    (position,) = [number for number, source in enumerate(code) if "plot.plot_loss(" in source]
    cell = driver.find_elements("css selector", ".jp-CodeCell")[position]
    (picture,) = cell.find_elements("css selector", ".jp-OutputArea-output img")
    assert picture.get_attribute("src").startswith("data:image/png;base64,")
    assert picture.size["width"] > 300 and picture.size["height"] > 200
    assert picture.is_displayed()


def test_the_live_picture_follows_its_slider(driver, lab):
    open_and_run(driver, *lab, "live.ipynb")

    def pictures():
        return driver.find_elements("css selector", ".jp-CodeCell .jp-OutputArea-output img")

    (before,) = [
        picture.get_attribute("src") for picture in wait_for(driver, "the picture", pictures)
    ]
    handles = wait_for(
        driver,
        "sliders",
        lambda: driver.find_elements("css selector", ".widget-slider .noUi-handle"),
    )
    handles[0].send_keys("\ue012")  # the left arrow key
    wait_for(driver, "another picture", lambda: pictures()[0].get_attribute("src") != before)
