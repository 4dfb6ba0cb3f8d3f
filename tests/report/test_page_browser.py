"""The page in a real browser: figures are drawn, tables sort, a method disappears everywhere,
nothing leaves the machine.
"""

import json
import shutil
import time

import pytest

from dpkfc.app.html.contents import Contents, read_all
from dpkfc.app.html.page import build
from tests.report.page_cases import HOSTILE, run_folder, summary

CHROMIUM, DRIVER = (
    shutil.which("chromium") or shutil.which("chromium-browser"),
    shutil.which("chromedriver"),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs Chromium and its driver"),
]
pytest.importorskip("selenium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    try:
        driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    except (
        WebDriverException
    ) as error:  # for instance under a limit of virtual memory, of which Chromium reserves a lot
        pytest.skip(f"Chromium cannot be started here: {error.msg}")
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of ordinary runs and one of a hostile folder."""
    folder = tmp_path_factory.mktemp("pages")
    run_folder(folder / "a")
    run_folder(folder / "b", "dp-sgd", sigma=2.0, accuracy=0.4)
    runs = list(read_all([folder / "a", folder / "b"]).runs)
    for method, accuracy in (("dp-sgd", 0.7), ("dp-kfc", 0.8)):
        for epsilon in (1.0, 8.0):
            for seed in (0, 1):
                score = accuracy + 0.01 * seed
                runs.append(summary(method, epsilon=epsilon, seed=seed, accuracy=score))
    runs.append(summary(smoke=True, accuracy=1.0, curve=[]))
    runs.append(summary("a-method-with-a-name-that-is-rather-long-for-a-narrow-screen"))
    run_folder(folder / "h", HOSTILE, words=HOSTILE, recipe=HOSTILE)
    hostile = list(read_all([folder / "h"]).runs)
    for epsilon in (1.0, 2.0):
        hostile.append(summary(HOSTILE, warnings=[HOSTILE], epsilon=epsilon))
    many = [summary(f"a-method-of-many-{i}", accuracy=0.5 + i / 100) for i in range(39)]
    found = {}
    for name, shown in (("good", runs), ("hostile", hostile), ("many", many)):
        title = HOSTILE if name == "hostile" else "Report"
        found[name] = folder / f"{name}.html"
        found[name].write_text(build(Contents(runs=shown), title), "utf-8")
    return found


def open_page(browser, path, width=1400, scheme="light"):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(path.as_uri())
    wait_until(browser, "return document.documentElement.dataset.ready === 'true'")
    return browser


def wait_until(browser, script):
    end = time.monotonic() + 300
    while not browser.execute_script(script):
        assert time.monotonic() < end, f"never came true: {script}"
        time.sleep(0.05)


def open_all(browser):
    browser.execute_script(
        "for (const one of document.querySelectorAll('details')) one.open = true"
    )


def list_requests(browser, page):
    """Addresses that the browser asked for, beside the page itself and what it holds."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent"
    ]
    return [
        url
        for url in asked
        if not url.startswith(("data:", "blob:", "chrome")) and url != page.as_uri()
    ]


def test_it_renders_without_a_complaint_and_asks_for_nothing(browser, pages):
    open_page(browser, pages["good"])
    open_all(browser)
    assert browser.execute_script("return document.querySelectorAll('.plot > svg').length") >= 6
    marks = "return document.querySelectorAll('.plot g[data-method] > title').length"
    assert browser.execute_script(marks) > 10
    assert not list_requests(browser, pages["good"])
    entries = browser.execute_script(
        "return performance.getEntriesByType('resource').map((e) => e.name)"
    )
    assert not [name for name in entries if not name.startswith(("data:", "blob:"))]
    assert not browser.get_log("browser")


def _column(browser, index):
    rows = "return [...document.querySelectorAll('#run-table tbody tr')]"
    return browser.execute_script(f"{rows}.map((r) => r.cells[{index}].textContent)")


def test_the_table_sorts_by_mouse_and_by_keyboard(browser, pages):
    from selenium.webdriver.common.keys import Keys

    open_page(browser, pages["good"])
    buttons = browser.find_elements("css selector", "#run-table thead button")
    browser.execute_script("arguments[0].click()", buttons[3])
    numbers = [float(text.split()[0]) for text in _column(browser, 3)]
    assert numbers == sorted(numbers) and len(set(numbers)) > 3
    buttons[3].send_keys(Keys.ENTER)
    assert [float(text.split()[0]) for text in _column(browser, 3)] == sorted(numbers, reverse=True)
    assert (
        browser.execute_script("return document.querySelectorAll('#run-table th')[3].ariaSort")
        == "descending"
    )
    buttons[0].send_keys(Keys.SPACE)
    names = [text.split(" ", 1)[1] for text in _column(browser, 0)]
    assert names == sorted(names)
    assert "sorted by method" in browser.execute_script(
        "return document.getElementById('status').textContent"
    )


def test_a_method_is_hidden_everywhere_and_comes_back(browser, pages):
    open_page(browser, pages["good"])
    open_all(browser)
    find = (
        "[...document.querySelectorAll('[data-toggle]')].find((b) =>"
        " b.parentElement.textContent.endsWith('dp-sgd'))"
    )
    seen = f"const box = {find};"
    seen += """
        const parts = [...document.querySelectorAll(`[data-method="${box.dataset.toggle}"]`)];
        const shown = parts.filter((e) => getComputedStyle(e).display !== "none");
        const isPart = (e) => e.closest("svg") !== null;
        return [shown.filter(isPart).length, shown.filter((e) => !isPart(e)).length];"""
    click = f"{find}.click()"
    before = browser.execute_script(seen)
    assert min(before) >= 3
    browser.execute_script(click)
    assert browser.execute_script(seen) == [0, 0]
    browser.execute_script(click)
    assert browser.execute_script(seen) == before
    browser.execute_script("document.getElementById('none').click()")
    assert (
        browser.execute_script(
            "return document.querySelectorAll('#run-table tbody tr:not([hidden])').length"
        )
        == 0
    )


def fits(browser):
    assert browser.execute_script(
        "return [document.documentElement.scrollWidth <= innerWidth, innerWidth]"
    ) == [True, 390]
    wide = (
        "return [...document.querySelectorAll('.plot')].filter((p) =>"
        " p.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert browser.execute_script(wide) == 0


@pytest.mark.parametrize("width, share", [(1400, 0.16), (390, 0.5)])
def test_the_legend_of_many_methods_scrolls_and_covers_no_heading(browser, pages, width, share):
    open_page(browser, pages["many"], width=width)
    box = "document.getElementById('methods').getBoundingClientRect()"
    assert browser.execute_script(f"return {box}.height / innerHeight") < share
    assert browser.execute_script(
        "const b = document.querySelector('.boxes'); return b.scrollHeight > b.clientHeight"
    )
    browser.execute_script(
        "document.getElementById('table').scrollIntoView(); location.hash = '#table'"
    )
    browser.execute_script("document.getElementById('h-table').scrollIntoView()")
    under = f"return document.getElementById('h-table').getBoundingClientRect().top - {box}.bottom"
    assert browser.execute_script(under) >= 0
    assert browser.execute_script(
        "const a = document.getElementById('all').getBoundingClientRect(); return a.height > 10"
    )


def test_a_hostile_folder_runs_nothing_and_does_not_break_the_page(browser, pages):
    open_page(browser, pages["hostile"], width=390)
    open_all(browser)
    fits(browser)
    browser.execute_script(
        "for (const b of document.querySelectorAll('[data-toggle]')) { b.click(); b.click(); }"
    )
    assert browser.execute_script("return window.hacked === undefined")
    assert (
        browser.execute_script(
            "return document.querySelectorAll('img, svg a, a[href^=\"javascript\"]').length"
        )
        == 0
    )
    assert not list_requests(browser, pages["hostile"])
    assert not browser.get_log("browser")


def test_the_page_refuses_a_script_that_is_not_its_own(browser, pages, tmp_path):
    page = (
        pages["good"]
        .read_text("utf-8")
        .replace("</footer>", "</footer><script>window.hacked = 1</script>")
    )
    (tmp_path / "planted.html").write_text(page, "utf-8")
    open_page(browser, tmp_path / "planted.html")
    assert browser.execute_script("return window.hacked === undefined")
    assert any(
        "Content Security Policy" in entry["message"] for entry in browser.get_log("browser")
    )
