"""The pages of docs/reference: file name -> Markdown, all of it taken from the code that it describes."""

from docs.generate import cli, config, formats, statistics

NOTE = "<!-- Written by `make docs` from the code; edit that. -->\n\n"


def pages() -> dict[str, str]:
    made = {
        "cli.md": cli.page(),
        "config.md": config.page(),
        "formats.md": formats.page(),
        "statistics.md": statistics.page(),
    }
    return {name: NOTE + text.strip() + "\n" for name, text in made.items()}
