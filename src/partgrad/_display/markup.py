"""HTML for notebooks: tables, and the symbols of leaves and verdicts in their colours."""

import html
from collections.abc import Iterable

from .look import LOOKS
from .status import kind_of

# Pages with their own rules for tables (Jupyter, Sphinx themes) do not override these.
_STYLE = """\
.pg{font:13px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;color:inherit;\
max-width:60em;margin:.4em 0 1em;text-align:left}
.pg-head{margin:0 0 .5em;font-size:14px}
.pg-cells{border-collapse:collapse!important;margin:0!important;font-size:13px}
.pg-cells td,.pg-cells th{text-align:left!important;padding:2px 14px 2px 0!important;border:0!important;\
background:none!important;vertical-align:baseline}
.pg-cells thead th,.pg-cells tfoot tr:first-child>*{border-bottom:1px solid rgba(128,128,128,.4)!important}
.pg-cells tfoot tr:first-child>*{border-bottom:0!important;border-top:1px solid rgba(128,128,128,.4)!important}
.pg-scroll{overflow-x:auto}
.pg-message summary{cursor:pointer}.pg-message p{white-space:pre-wrap;margin:.2em 0 .6em 1.2em}
"""


def styled(body: str) -> str:
    """A fragment of HTML with its style sheet."""
    return f'<div class="pg">\n<style>\n{_STYLE}</style>\n{body}\n</div>'


def symbol(status: str) -> str:
    """The symbol of a status, a kind or a verdict, in its colour."""
    kind = status if status in LOOKS else kind_of(status)
    look = LOOKS[kind]
    return f'<span style="color:{look.colour}" title="{kind}">{look.symbol}</span>'


def cells(head: Iterable[str], rows: Iterable[Iterable[str]], foot: str = "") -> str:
    """A table: a header of text, and rows of cells in HTML."""
    row = lambda tag, texts: f"<tr>{''.join(f'<{tag}>{text}</{tag}>' for text in texts)}</tr>"
    body = "\n".join(row("td", texts) for texts in rows)
    below = f"\n<tfoot>\n{foot}\n</tfoot>" if foot else ""
    return (
        f'<div class="pg-scroll"><table class="pg-cells">\n<thead>{row("th", map(html.escape, head))}</thead>\n'
        f"<tbody>\n{body}\n</tbody>{below}\n</table></div>"
    )
