"""The report in a real browser: it draws, without an error, and without the network."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hqsweep.report.compare import compare, write

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")


def browse(page: Path, profile: Path) -> tuple[str, list[str]]:
    """(DOM after scripts have run, console messages), behind a proxy that does not exist."""
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--window-size=1200,4000", f"--user-data-dir={profile}", "--proxy-server=127.0.0.1:9",
            "--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture
def page(make_sweep, fake, tmp_path):
    runs = [*fake.three_arms(), fake.Run(arm="</script><script>console.error('in')</script>", state="failed", steps=80)]
    return write(compare(make_sweep(runs), "bf16"), tmp_path / "out")


def test_report_draws_without_network_or_console_messages(page, tmp_path):
    dom, console = browse(page, tmp_path / "profile")
    assert console == []
    assert dom.count('class="main-svg"') >= 8  # at least one layer for each of the eight figures
    assert len(re.findall(r'class="trace scatter', dom)) > 20 and "heatmaplayer" in dom and "<image" in dom


def test_the_page_may_not_fetch_and_the_console_would_tell(page, tmp_path):
    leaky = tmp_path / "leaky.html"
    leaky.write_text(page.read_text().replace("</body>", '<img src="http://127.0.0.1:9/x.png"></body>'))
    _, console = browse(leaky, tmp_path / "profile")
    assert len(console) == 1 and "Content Security Policy" in console[0]
