"""The report of a run, drawn from a plain dict: a page for the browser and a table for the terminal."""

from smelt.report.page import render, write_report
from smelt.report.terminal import summary_table

__all__ = ["render", "summary_table", "write_report"]
