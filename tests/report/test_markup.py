"""Markup: plain text is always escaped, and finished markup is unchanged."""

from __future__ import annotations

from smelt.report.markup import Markup, join, tag


def test_text_and_attributes_are_escaped() -> None:
    assert tag("p", "<b>&", title='"><i>') == '<p title="&quot;&gt;&lt;i&gt;">&lt;b&gt;&amp;</p>'


def test_finished_markup_is_kept_and_none_is_left_out() -> None:
    assert tag("p", tag("b", "x"), None, 7, class_="y", style=None) == '<p class="y"><b>x</b>7</p>'
    assert join("<", Markup("<br />")) == "&lt;<br />"


def test_attribute_names() -> None:
    assert tag("text", "x", text_anchor="end", class_="y") == '<text text-anchor="end" class="y">x</text>'
    assert tag("rect", x=1) == '<rect x="1" />'
    assert tag("rect", tag("title", "t"), x=1) == '<rect x="1"><title>t</title></rect>'
