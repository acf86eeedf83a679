"""`python -m docs.generate` writes docs/reference/*.md from the code; `make docs` calls it."""

from pathlib import Path

from docs.generate.pages import pages

REFERENCE = Path(__file__).parents[1] / "reference"

for name, text in pages().items():
    (REFERENCE / name).write_text(text)
    print(f"docs/reference/{name}: {len(text.splitlines())} lines")
