"""The built-in text: prose of the language reference that ships with Python, so nothing has to be downloaded.

Topics repeat passages of each other, so each paragraph is kept only in the longest topic that contains it. A hash of
its name assigns a topic to calibration or evaluation: the splits share neither topics nor paragraphs.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pydoc_data.topics import topics

SPLITS = ("calibration", "evaluation")

_CALIBRATION_RATIO = 0.7
_MIN_WORDS = 8
_MIN_LETTER_RATIO = 0.8
_BLANK_LINE = re.compile(r"\n\s*\n")
_FOOTNOTE_MARK = re.compile(r"\s*\[\d+\]")
# Grammar rules, interactive sessions, table borders and heading underlines.
_MARKUP = re.compile(r"::=|>>>|\||[-=*^~]{4}")


def default_documents(split: str) -> dict[str, str]:
    """Return the documents of a split by topic, sorted by name."""
    return {topic: text for topic, text in _documents().items() if _assign_split(topic) == split}


def _assign_split(topic: str) -> str:
    position = int.from_bytes(hashlib.sha256(topic.encode()).digest()[:4], "big") / 2**32
    return SPLITS[0] if position < _CALIBRATION_RATIO else SPLITS[1]


@cache
def _documents() -> dict[str, str]:
    seen: set[str] = set()
    documents = {}
    for topic in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        paragraphs = [paragraph for paragraph in _prose(topics[topic]) if paragraph not in seen]
        seen.update(paragraphs)
        if paragraphs:
            documents[topic] = "\n\n".join(dict.fromkeys(paragraphs))
    return dict(sorted(documents.items()))


def _prose(text: str) -> list[str]:
    """Return the paragraphs of prose, each on one line, without code, tables, headings and signatures."""
    paragraphs = (_FOOTNOTE_MARK.sub("", " ".join(block.split())) for block in _BLANK_LINE.split(text))
    return [paragraph for paragraph in paragraphs if _is_prose(paragraph)]


def _is_prose(paragraph: str) -> bool:
    if len(paragraph.split()) < _MIN_WORDS or _MARKUP.search(paragraph):
        return False
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return letters >= _MIN_LETTER_RATIO * len(paragraph)
