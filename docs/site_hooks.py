"""A hook of the docs site: a link to a file of the repository outside `docs` becomes its path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(!?)\[([^\]]+)\]\(((?:\.\./)+)([^)#]+)(#[^)]*)?\)")
DOCS = Path(__file__).parent


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace the links of one page."""
    folder = (DOCS / page.file.src_path).parent

    def replace(match: re.Match[str]) -> str:
        target = (folder / (match[3] + match[4])).resolve()
        if target.is_relative_to(DOCS):
            return match[0]
        path = target.relative_to(DOCS.parent).as_posix()
        return f"`{path}`" if match[2].strip("`/") in path else f"{match[2]} (`{path}`)"

    return _LINK.sub(replace, markdown)
