"""Reports from plain dicts: HTML pages and terminal tables. Imports no other package."""

from smelt.report.page import render, write_report
from smelt.report.terminal import summary_table

__all__ = ["render", "summary_table", "write_report"]
