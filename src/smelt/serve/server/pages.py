"""The pages for a browser: the chat with live figures at /, the API at /docs.

They are static and tell nothing about the server, so that they need no API key: what they show, they read from other
routes, with the key that they ask for.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

router = APIRouter(include_in_schema=False)
_FOLDER = Path(__file__).parent / "html"


def read_page(name: str) -> str:
    """Return a page with the files that it includes as `{{file}}`: one self-contained document."""
    text = (_FOLDER / name).read_text(encoding="utf-8")
    return re.sub(r"\{\{([a-z.]+)\}\}", lambda match: (_FOLDER / match[1]).read_text(encoding="utf-8"), text)


def security_policy(page: str) -> str:
    """Return the Content-Security-Policy of a page: only its own inline scripts and styles, and only this server."""

    def hashes(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (hashlib.sha256(text.encode()).digest() for text in texts)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _response(page: str) -> HTMLResponse:
    headers = {
        "content-security-policy": security_policy(page), "cache-control": "no-store", "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }  # fmt: skip
    return HTMLResponse(page, headers=headers)


CHAT_PAGE, DOCS_PAGE = read_page("chat.html"), read_page("docs.html")


@router.get("/")
async def chat_page() -> Response:
    return _response(CHAT_PAGE)


@router.get("/docs")
async def docs_page() -> Response:
    return _response(DOCS_PAGE)
