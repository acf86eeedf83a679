"""Tables and pages: terminal, Markdown, HTML, CSV, paper."""
