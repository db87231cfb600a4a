"""The style sheet of all pages: light and dark by the system's preference, no external fonts.

Blue and orange are distinguishable with every kind of color vision, and never carry meaning alone.
"""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f7f8; --card: #ffffff; --ink: #1b2127; --soft: #5b6670; --line: #dfe3e7;
  --blue: #0b6fb0; --grey: #9aa5af; --hollow: #f3f5f7; --edge: #c6ced5;
  --warn: #9a4a00; --warn-page: #fff3e4; --warn-line: #e8a54b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181c; --card: #1c2228; --ink: #e7ebee; --soft: #9eaab4; --line: #323b43;
    --blue: #56b4e9; --grey: #707c87; --hollow: #222a30; --edge: #48545e;
    --warn: #ffc078; --warn-page: #33261a; --warn-line: #a8691f;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; padding: 40px 24px 64px; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%;
}
main { max-width: 1080px; margin: 0 auto; }
header { margin-bottom: 24px; }
h1 { font-size: 28px; line-height: 1.25; margin: 0 0 4px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 4px; }
h3 { font-size: 14px; margin: 20px 0 4px; }
p { margin: 0 0 12px; }
.soft { color: var(--soft); }
.verdict { font-size: 18px; margin: 12px 0 0; text-wrap: balance; }
section {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 24px; margin: 0 0 24px;
}
section > :last-child { margin-bottom: 0; }
.figures {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 16px; margin: 0 0 24px;
}
.figure { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; }
.figure .label { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.figure .value { font-size: 28px; line-height: 1.3; font-weight: 600; letter-spacing: -0.01em; white-space: nowrap; }
.figure .unit { font-size: 17px; font-weight: 500; }
.figure .note { color: var(--soft); font-size: 13px; line-height: 1.45; }
.warning {
  background: var(--warn-page); border: 1px solid var(--warn-line); border-left-width: 4px; border-radius: 8px;
  color: var(--warn); padding: 12px 16px; margin: 0 0 16px; overflow-wrap: anywhere;
}
.warning b { color: inherit; }
table { border-collapse: collapse; width: 100%; margin: 12px 0 0; }
th, td { padding: 8px 0 8px 20px; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; font-size: 13px; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tbody tr:last-child td { border-bottom: 0; }
tfoot td { border-top: 1px solid var(--line); border-bottom: 0; font-weight: 600; }
td { white-space: nowrap; }
td:first-child { white-space: normal; min-width: 130px; overflow-wrap: anywhere; }
.facts {
  text-align: left; white-space: normal; color: var(--soft); font-size: 13px; min-width: 200px; overflow-wrap: anywhere;
}
td:has(.bars) { width: 26%; } .bars { min-width: 90px; }
.item { white-space: pre-wrap; }
details { margin: 12px 0 0; }
summary { color: var(--blue); cursor: pointer; }
.pair { display: grid; grid-template-columns: minmax(0, 5fr) minmax(0, 4fr); gap: 8px 48px; align-items: start; }
svg { display: block; overflow: visible; }
svg text { fill: var(--soft); font-size: 12px; }
.before { fill: var(--grey); } .after { fill: var(--blue); }
.axis-title { fill: var(--soft); color: var(--soft); font-size: 12px; font-style: italic; }
.y-title { grid-column: 1 / -1; margin-bottom: 4px; }
.whisker { stroke: var(--ink); stroke-width: 1.5; }
.axis { stroke: var(--line); } .reference { stroke: var(--soft); stroke-dasharray: 3 3; }
.interval { stroke: var(--blue); stroke-width: 2.5; }
.estimate { fill: var(--blue); stroke: var(--card); stroke-width: 2; }
.estimate.hollow { fill: var(--card); stroke: var(--grey); stroke-width: 2.5; }
svg .point-name { fill: var(--ink); font-size: 13px; }
.plot { margin: 8px 0 20px; }
.graphs { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px 40px; }
.graph { display: grid; grid-template-columns: 52px minmax(0, 1fr); }
.graph h3 { grid-column: 1 / -1; }
.curve { fill: none; stroke: var(--blue); stroke-width: 2; vector-effect: non-scaling-stroke; }
.spot { fill: var(--blue); fill-opacity: 0.55; }
.run1 { stroke: #d55e00; stroke-dasharray: 7 3; } .run2 { stroke: #009e73; stroke-dasharray: 2 3; }
.run3 { stroke: #cc79a7; stroke-dasharray: 9 3 2 3; } .run4 { stroke: #b08900; stroke-dasharray: 4 4; }
.run5 { stroke: var(--grey); }
.spot.run1 { fill: #d55e00; stroke: none; }
.part0 { fill: var(--grey); background: var(--grey); } .part1 { fill: #56b4e9; background: #56b4e9; }
.part2 { fill: #0b6fb0; background: #0b6fb0; } .part3 { fill: #d55e00; background: #d55e00; }
.part4 { fill: #009e73; background: #009e73; }
.entry { display: inline-block; margin-right: 20px; } .entry svg { display: inline-block; margin: 0 6px -1px 0; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin: 0 6px -1px 0; }
.kept { fill: var(--blue); }
.removed { fill: var(--hollow); stroke: var(--edge); }
.timing {
  display: grid; grid-template-columns: 64px minmax(0, 1fr) minmax(110px, max-content); gap: 2px 14px;
  align-items: center; margin: 6px 0;
}
.timing.named { grid-template-columns: minmax(64px, max-content) minmax(0, 1fr) minmax(80px, max-content); }
.samples.many { grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); }
.runs-table td { white-space: normal; }
.kept-map { margin: 16px 0 0; font-size: 13px; }
.kept-row { display: grid; gap: 0 28px; padding: 2px 0; align-items: center; }
.kept-row { grid-template-columns: 44px minmax(0, min(50%, var(--heads))) minmax(0, 1fr); }
.single .kept-row { grid-template-columns: 44px minmax(0, 1fr); }
.kept-head { color: var(--soft); padding-bottom: 6px; }
.block-name { text-align: right; color: var(--soft); }
.part { display: grid; grid-template-columns: minmax(0, 1fr) 92px; gap: 2px 10px; align-items: center; }
.part.heads { grid-template-columns: minmax(0, 1fr) 52px; }
.count { text-align: right; white-space: nowrap; }
.scrolled { overflow-x: auto; }
.precision td:not(:first-child) {
  background: color-mix(in srgb, var(--blue) var(--share, 0%), transparent); padding: 4px 8px; font-size: 13px;
  border: 1px solid var(--card); border-radius: 4px;
}
.precision th { padding: 4px 8px; }
.precision td { vertical-align: middle; } .precision td:first-child { padding: 4px 0; border-bottom: 0; }
.key {
  display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin: 0 6px -1px 0; background: var(--blue);
}
.key.grey { background: var(--grey); } .key.second { margin-left: 16px; }
.key.hollow { background: var(--hollow); border: 1px solid var(--edge); margin-left: 16px; }
pre {
  margin: 12px 0 0; padding: 16px; background: var(--page); border: 1px solid var(--line); border-radius: 8px;
  overflow-x: auto;
  font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
}
.samples { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; margin: 12px 0 0; }
blockquote { margin: 0; padding: 14px 16px; background: var(--page); border-radius: 8px; overflow-wrap: anywhere; }
blockquote .who { display: block; font-size: 13px; color: var(--soft); margin-bottom: 4px; }
blockquote p { margin: 0; white-space: pre-wrap; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 4px 24px; margin: 12px 0 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
ul { margin: 12px 0 0; padding-left: 20px; overflow-wrap: anywhere; }
a { color: var(--blue); }
footer { color: var(--soft); font-size: 13px; }
@media (max-width: 640px) {
  body { padding: 24px 12px 40px; }
  h1 { font-size: 23px; }
  .verdict { font-size: 16px; }
  section { padding: 18px 16px; margin-bottom: 16px; }
  .figures { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 10px; margin-bottom: 16px; }
  .figure { padding: 12px; }
  .figure .value { font-size: 22px; }
  .figure:last-child:nth-child(odd) { grid-column: 1 / -1; }
  .pair, .samples, .graphs { grid-template-columns: minmax(0, 1fr); }
  thead { display: none; }
  tr { display: grid; grid-template-columns: 7fr 7fr 6fr; gap: 2px 8px; padding: 8px 0; }
  tr:has(td:nth-child(5)) { grid-template-columns: 1fr 1fr; }
  tr:has(td .bars):has(td:nth-child(5)) { grid-template-columns: 7fr 7fr 6fr; }
  tr + tr { border-top: 1px solid var(--line); }
  td, tfoot td { padding: 0; border: 0; font-size: 13px; text-align: left; white-space: normal; }
  td:first-child { grid-column: 1 / -1; font-size: 14px; }
  td:not(:first-child)::before { content: attr(data-label); display: block; font-size: 12px; color: var(--soft); }
  td:empty { display: none; }
  td:has(.facts), td:has(.bars) { grid-column: 1 / -1; width: auto; }
  td:has(.bars)::before { display: none !important; }
  .pair tr { grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); }
  .pair td:first-child { grid-column: auto; font-size: 13px; }
  .pair td:not(:first-child) { text-align: right; }
  .pair td:not(:first-child)::before { display: none; }
  .precision tr { grid-template-columns: repeat(3, minmax(0, 1fr)); }
  .precision td:first-child::before { content: "block "; }
  .timing { grid-template-columns: 48px minmax(0, 1fr); gap: 2px 10px; font-size: 13px; }
  .timing.named { grid-template-columns: minmax(48px, max-content) minmax(0, 1fr); }
  .timing > :empty { display: none; } .timing .bar-axis { grid-column: 2; }
  .timing .count { grid-column: 2; text-align: left; margin-bottom: 6px; }
  .kept-map .kept-row { grid-template-columns: 24px minmax(0, 1fr); gap: 2px 12px; padding: 5px 0; }
  .kept-map .kept-row > :nth-child(n + 3) { grid-column: 2; }
  .kept-head { display: none !important; }
  .part.heads { grid-template-columns: minmax(0, 1fr) 92px; }
}
@media print { body { background: none; padding: 0; } section, .figure { break-inside: avoid; } }
"""
