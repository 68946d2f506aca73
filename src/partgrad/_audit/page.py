"""An audit as a page: search, fold, source lines."""

import html
import linecache
from typing import Any

from .audit import Audited
from .report import data, summary
from .settings import Settings

_AROUND = 3
_COLOURS = {"error": "#b3261e", "warning": "#8a5a00", "info": "#35618e"}
_STYLE = """\
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}
h1{font-size:1.4rem}input{font:inherit;width:100%;padding:.4rem .6rem;box-sizing:border-box;margin:.5rem 0 1rem}
details{border:1px solid #ddd;border-radius:6px;margin:.5rem 0;padding:.4rem .8rem}summary{cursor:pointer}
pre{background:#f6f6f6;padding:.5rem;overflow-x:auto;font-size:.85rem}mark{background:#ffe9a8}
.kind{font-weight:600}.where{font-family:ui-monospace,monospace}p{white-space:pre-wrap}
@media(prefers-color-scheme:dark){body{background:#1b1b1b;color:#e6e6e6}pre{background:#262626}details{border-color:#444}
mark{background:#6b5600;color:inherit}}
"""
_SCRIPT = """\
document.querySelector("input").addEventListener("input", event => {
  const words = event.target.value.toLowerCase().split(/\\s+/);
  for (const entry of document.querySelectorAll("details"))
    entry.hidden = !words.every(word => entry.textContent.toLowerCase().includes(word));
});
"""


def page(result: Audited, settings: Settings) -> str:
    """The whole page, which needs no other file."""
    found = data(result, settings)
    entries = "\n".join(_entry(finding) for finding in found["findings"])
    left = "\n".join(
        f"<li><code>{_text(item['function'])}</code> {_text(item['where'])}: {_text(item['reason'])}</li>"
        for item in found["not_checked"]
    )
    functions = "\n".join(
        f"<li><code>{_text(item['name'])}</code> {_text(item['where'])} {item['seconds']:.1f} s</li>"
        for item in found["functions"]
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Gradients of {_text(settings.root.name)}</title><style>
{_STYLE}</style></head><body>
<h1>Gradients of {_text(settings.root.name)}</h1>
<p>{_text(summary(result))}</p>
<input type="search" placeholder="Search: a file, a function, a kind" aria-label="Search">
{entries}
<details><summary>Checked: {len(found["functions"])}</summary><ul>{functions}</ul></details>
<details><summary>Not checked: {len(found["not_checked"])}</summary><ul>{left}</ul></details>
<script>
{_SCRIPT}</script></body></html>
"""


def _entry(finding: dict[str, Any]) -> str:
    colour = _COLOURS[finding["severity"]]
    head = f'<span class="kind" style="color:{colour}">{finding["severity"]} {_text(finding["kind"])}</span>'
    ways = {"differentiated": finding["differentiated_by"], "called": finding["called_by"]}
    by = "; ".join(f"{how} by {', '.join(where)}" for how, where in ways.items() if where)
    leaves = f" with respect to {', '.join(finding['leaves'])}" if finding["leaves"] else ""
    return (
        f"<details{' open' * (finding['severity'] == 'error')}><summary>{head} "
        f'<span class="where">{_text(finding["where"])}</span> {_text(finding["operation"])}</summary>\n'
        f"<p>{_text(finding['message'])}</p>\n{_lines(finding)}"
        f"<p>In {_text(', '.join(finding['functions']))}{_text(leaves)}; {_text(by)}.</p></details>"
    )


def _lines(finding: dict[str, Any]) -> str:
    if not finding["file"]:
        return ""
    at = finding["line"]
    lines = []
    for number in range(max(1, at - _AROUND), at + _AROUND + 1):
        line = linecache.getline(finding["file"], number)
        if line:
            written = f"{number:5}  {_text(line.rstrip())}"
            lines.append(f"<mark>{written}</mark>" if number == at else written)
    return "<pre>" + "\n".join(lines) + "</pre>\n" if lines else ""


def _text(value: Any) -> str:
    return html.escape(str(value))
