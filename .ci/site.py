"""A hook of mkdocs: documents link to the files that GitHub shows; the site has pages of its own for two of them."""

from typing import Any

PAGES = {"](../SECURITY.md": "](security.md", "](../README.md": "](index.md"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    for file, page in PAGES.items():
        markdown = markdown.replace(file, page)
    return markdown
