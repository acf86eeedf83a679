"""`python -m docs.generate.site` stages the pages of the site in build/site/pages; `make site` builds it from there.

mkdocs takes pages from one folder only, and docs/ links reports, examples and notes beside it, so all are copied with
their places in the tree: a link that works in the checkout works in the site. README.md, with two
buttons under its title, is the landing page.
"""

import importlib
import shutil
import subprocess
from pathlib import Path

import hqsweep

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "build" / "site" / "pages"
SOURCES = ("docs", ":!docs/generate", "examples", "reports", "benchmarks/NOTES.md", "CHANGELOG.md")
BUTTONS = """
[Install](docs/install.md){ .md-button } [A sample report](reports/quickstart/report_light.html){ .md-button }
"""
WIDE = ".md-grid { max-width: 84rem; }\n"  # 120 characters of code beside the two columns
SHOWN = {".md", ".html", ".ipynb", ".svg", ".png", ".yml", ".yaml", ".py", ".csv", ".jsonl"}


def python_page() -> str:
    """The page of the Python interface: an entry of mkdocstrings for each public name."""
    homes = {f"hqsweep.{name}": f"{home}.{name}" for name, home in sorted(hqsweep._HOME.items())}
    homes["hqsweep.recipe"] = "hqsweep.recipe._Package.__call__"  # packages that are called
    homes["hqsweep.track"] = "hqsweep.track.own_loop.track"
    for package in ("hqsweep.nn", "hqsweep.optim"):
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            home = getattr(getattr(module, name), "__module__", "")
            if home.startswith("hqsweep."):
                homes[f"{package}.{name}"] = f"{home}.{name}"
    entries = [f"::: {home}\n    options: {{heading: {name}}}\n" for name, home in homes.items()]
    return "# Python interface\n\n" + "\n".join(entries)


def stage() -> None:
    """Copy the tracked pages, pictures and linked files to PAGES; raises CalledProcessError outside of git."""
    shutil.rmtree(PAGES, ignore_errors=True)
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *SOURCES]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        if Path(name).suffix in SHOWN:
            (PAGES / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, PAGES / name)
    title, _, rest = (ROOT / "README.md").read_text().partition("\n")
    (PAGES / "index.md").write_text(title + "\n" + BUTTONS + rest)
    (PAGES / "docs/reference/python.md").write_text(python_page())
    (PAGES / "site.css").write_text(WIDE)


if __name__ == "__main__":
    stage()
