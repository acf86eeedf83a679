"""`python -m docs.generate` writes docs/reference/*.md from the code, and the tests of features in tests/FEATURES.md;
`make docs` calls it."""

from pathlib import Path

from docs.generate.features import PAGE, features
from docs.generate.pages import pages

REFERENCE = Path(__file__).parents[1] / "reference"

for name, text in pages().items():
    (REFERENCE / name).write_text(text)
    print(f"docs/reference/{name}: {len(text.splitlines())} lines")
PAGE.write_text(features())
