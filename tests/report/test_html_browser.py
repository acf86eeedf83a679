"""The report in a real browser: it draws, without an error, and without the network; it fits a phone and paper, and
everything in it can be reached with the Tab key."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hqsweep.report.compare.compare import compare
from hqsweep.report.pages.folder import write

CHROMIUM = shutil.which("chromium")
HARNESS = Path(__file__).with_name("harness.html")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")


def browse(page: Path, profile: Path) -> tuple[str, list[str]]:
    """(DOM after scripts have run, console messages), behind a proxy that does not exist."""
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--window-size=1600,4000", f"--user-data-dir={profile}", "--proxy-server=127.0.0.1:9",
            "--allow-file-access-from-files", "--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def observe(harness: Path, profile: Path) -> dict:
    """What the harness saw on a page that says nothing on the console. Hints of scrolling are drawn with a frame, which
    a busy machine may owe when the harness looks: it looks up to three times."""
    for _ in range(3):
        dom, console = browse(harness, profile)
        assert console == []  # drawn without an error, and without asking for the network
        observed = json.loads(html.unescape(re.search(r'<pre id="facts">(.+?)</pre>', dom)[1]))
        if all(tables["hinted"] == len(tables["wide"]) for tables in observed["tables"]):
            break
    return observed


@pytest.fixture
def page(make_sweep, fake, tmp_path):
    nasty = ("</script><script>injected = 1; console.error('in')</script>", '<img src=x onerror="injected = 1">')
    runs = [*fake.three_arms(), *(fake.Run(arm=arm, state="failed", steps=120, fmt="mxfp8") for arm in nasty)]
    null = [fake.Run(arm="null", seed=seed, gap=0.001, init_noise=0.01, fmt="bf16") for seed in range(3)]
    return write(compare(make_sweep([*runs, *null], nasty[1]), "bf16"), tmp_path / "out")


@pytest.mark.slow
def test_report_in_a_browser(page, tmp_path):
    """One start for all, as a start takes seconds."""
    observed = observe(Path(shutil.copy(HARNESS, page.parent)), tmp_path / "profile")
    assert observed["injected"] == 0
    desk, phone, keyboard = observed["desk"], observed["phone"], observed["keyboard"]
    assert desk["plots"] == 2 + 2 + 4 + 3 + 2  # gaps, losses, SQNR, underflow, gradients
    assert desk["lines"] > 20
    assert desk["headings"][:2] == ["Runs without a result", "Loss"]
    assert (desk["inner"], phone["inner"]) == (1400, 390)
    for view in (desk, phone):
        assert view["scroll"] <= view["inner"] and view["widest"] <= view["inner"]
    for plot, width in zip(observed["forests"], (400, 300), strict=True):
        assert plot["arms"][:2] == ["mxfp8", "nvfp4"] and plot["arms"][-1] == "null" and len(plot["arms"]) == 5
        assert plot["marks"] == [3, 3, 0, 0, 3] and plot["ticks"] >= 3 and plot["strip"] > width
        assert (plot["clashes"], plot["outside"]) == (0, 0) and plot["colours"] == 2
    for tables, wide in zip(observed["tables"], (0, 4), strict=True):
        assert tables["beyond"] == 0 and tables["sections"] > 30
        assert tables["unsaid"] == [] and tables["hinted"] == len(tables["wide"]) >= wide
    assert observed["tables"][0]["wide"] == []
    assert observed["forests"][0]["last"] < 900  # the first screen
    assert keyboard["controls"] > 30 and keyboard["outlines"] == ["solid"]
    assert [keyboard[fault] for fault in ("unsaid", "unnamed", "broken")] == [0, 0, 0]
    lines = observed["interaction"]
    assert lines["unticked"] == 3 and lines["without"] == 2 + 2 + 2 and lines["again"] == 0  # curves and gradients
    settled, whole, again = lines["ranges"]
    assert settled == again != whole
    before, during, after = lines["labels"]
    assert before == after != during
    hands = observed["hands"]
    assert hands["told"][0].startswith("bf16\nstep ") and len(set(hands["told"])) == 3
    assert hands["zoomed"] and hands["back"] is True
    given, up, down, filtered = hands["rows"]
    assert up != given and up[:12] == down[:12][::-1] and up[12:] == down[12:], "runs without a loss stay last"
    assert filtered == ["nvfp4"] * 3 and hands["sorted"] == "descending"
    (light, white), (dark, black), (system, _) = hands["pages"]
    assert [light, dark, system] == ["colours: light", "colours: dark", "colours: as the system"]
    assert (white, black) == ("rgb(255, 255, 255)", "rgb(22, 24, 28)")
    assert [ratio >= 4.5 for ratio, _ in observed["contrast"]] == [True, True], observed["contrast"]


@pytest.mark.slow
def test_the_light_page_in_a_browser_fits_both_widths_without_a_script(page, tmp_path):
    harness = page.with_name("light.html")
    harness.write_text(HARNESS.read_text().replace('src="report.html"', 'src="report_light.html"'))
    observed = observe(harness, tmp_path / "profile")
    for name in ("desk", "phone"):
        assert observed[name]["scroll"] <= observed[name]["inner"] and observed[name]["pictures"] == 2 + 2 + 4 + 3 + 2
        assert observed[name]["widest_picture"] <= observed[name]["inner"]
    for plot in observed["forests"]:
        assert (plot["clashes"], plot["outside"]) == (0, 0)
    for tables in observed["tables"]:
        assert tables["beyond"] == 0 and tables["unsaid"] == [] and tables["hinted"] == len(tables["wide"])
    assert observed["keyboard"]["outlines"] == ["solid"] and observed["keyboard"]["broken"] == 0


@pytest.mark.slow
def test_a_long_name_ends_a_line_at_its_joints_alone(make_sweep, fake, tmp_path):
    names = ["nvfp4_fwd_mxfp8_bwd_dequantized_with_a_tail", "nvfp4+row_scaled|mxfp8@rowwise_dequantized", "float8-e5m2"]
    arms = [fake.Run(arm=n, seed=s, gap=0.01, fmt="mxfp8") for n in names for s in range(3)]
    failed = fake.Run(arm=f"{names[0]}_failed", state="failed", steps=120, fmt="mxfp8")
    runs = [*(fake.Run(seed=seed, fmt="bf16") for seed in range(3)), *arms, failed]
    page = write(compare(make_sweep(runs, "a_long_study-of_nvfp4+its_variants"), "bf16"), tmp_path / "out")
    dom, console = browse(Path(shutil.copy(HARNESS.with_name("words.html"), page.parent)), tmp_path / "profile")
    observed = json.loads(html.unescape(re.search(r'<pre id="facts">(.+?)</pre>', dom)[1]))
    assert console == [] and len(observed) == 4
    assert observed == {key: {"split": [], "wide": False} for key in observed}


@pytest.mark.slow
def test_the_page_may_not_fetch_and_the_console_would_tell(page, tmp_path):
    leaky = tmp_path / "leaky.html"
    leaky.write_text(page.read_text().replace("</body>", '<img src="http://127.0.0.1:9/x.png"></body>'))
    _, console = browse(leaky, tmp_path / "profile")
    assert len(console) == 1 and "Content Security Policy" in console[0]
