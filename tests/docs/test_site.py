"""The documentation's site builds without a dead link, and has its landing page, search and reference."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not in a git checkout")
    for words in (["docs.generate.site"], ["mkdocs", "build", "--strict", "-d", str(tmp_path)]):
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    landing = (tmp_path / "index.html").read_text()
    assert "Which low-precision training recipe can I trust?" in landing
    assert "reports/smollm2/figures/forest.svg" in landing and "reports/quickstart/report_light.html" in landing
    assert "arms against bf16" in (tmp_path / "reports/quickstart/report_light.html").read_text()
    reference = (tmp_path / "docs/reference/python.html").read_text()
    assert all(f"hqsweep.{name}" in reference for name in ("convert", "Sweep", "nn.Linear", "optim.FusedAdam"))
    searched = json.loads((tmp_path / "search/search_index.json").read_text())["docs"]
    assert any(page["location"].startswith("docs/glossary.html") for page in searched)
