"""The look of everything shown in a notebook or on a page: one style sheet, symbols, tables."""

import html
from collections.abc import Iterable, Mapping

from .._trees import LOOKS
from .status import kind_of

_SHAPES = """\
.pg-look{display:inline-block;width:9px;height:9px;margin:0 4px 0 0;box-sizing:border-box;color:var(--pg);\
font-style:normal;vertical-align:baseline;overflow:hidden;text-indent:20px;white-space:nowrap}
.pg-disc{background:var(--pg);border-radius:50%}
.pg-ring{border:2px solid var(--pg);border-radius:50%}
.pg-square{background:var(--pg)}
.pg-half{border:1.5px solid var(--pg);background:linear-gradient(90deg,var(--pg) 50%,transparent 50%)}
.pg-diamond{background:var(--pg);transform:rotate(45deg) scale(.86)}
.pg-dot{background:var(--pg);border-radius:50%;transform:scale(.45)}
.pg-sign{overflow:visible;text-indent:0;line-height:9px;font-weight:bold;text-align:center}
"""
# Pages with their own rules for tables and lists (Jupyter, Sphinx themes) do not override these.
_STYLE = """\
.pg{font:13px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;color:inherit;\
max-width:60em;margin:.4em 0 1em;container-type:inline-size;text-align:left}
.pg *{box-sizing:border-box}
.pg-head{margin:0 0 .5em;font-size:14px}
.pg-tree,.pg-tree ul{list-style:none!important;margin:0!important;padding:0}
.pg-tree{border:1px solid rgba(128,128,128,.3);border-radius:8px;padding:.4em .5em}
.pg-tree ul{margin-left:6px!important;padding-left:13px;border-left:1px solid rgba(128,128,128,.3)}
.pg-tree li{margin:0!important;padding:0;list-style:none!important}
.pg-tree details{margin:0;padding:0;border:0;background:none;box-shadow:none}
.pg-row{display:flex;align-items:baseline;gap:0 1.2em;padding:1px 6px 1px 0;margin:0;border-radius:4px;\
background:none;font-weight:normal;line-height:1.55}
.pg-row:hover{background:rgba(128,128,128,.12)}
.pg-row>*{overflow:hidden;text-overflow:ellipsis;white-space:nowrap;flex:none}
.pg-type,.pg-value,.pg-name,.pg-cells code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",\
monospace;font-size:12px}
.pg-row>.pg-name{flex:1 1 0;min-width:6em;padding-left:13px;position:relative;padding-bottom:1px}
.pg-type{width:10em;opacity:.75}.pg-status{width:9.5em}.pg-value{width:11em}
.pg-row>.pg-counts{width:calc(9.5em + 1.2em + 11em*12/13)}
summary>.pg-name{font-weight:600}
.pg-quiet{opacity:.65}
.pg summary{display:flex;cursor:pointer;list-style:none}
.pg summary::-webkit-details-marker{display:none}
.pg summary::before,.pg summary::after{content:none}
.pg summary>.pg-name::before{content:"";position:absolute;left:2px;top:.5em;border:4px solid transparent;\
border-left:6px solid currentColor;border-right:0;opacity:.6}
.pg details[open]>summary>.pg-name::before{transform:rotate(90deg)}
.pg summary:focus-visible{outline:2px solid #0d7fd1;outline-offset:-1px}
.pg-counts>span{margin-right:.8em;white-space:nowrap}
.pg-legend{margin:.5em 0 0;display:flex;flex-wrap:wrap;gap:.1em 1.3em}
.pg-cells{border-collapse:collapse!important;margin:0!important;font-size:13px}
.pg-cells td,.pg-cells th{text-align:left!important;padding:2px 14px 2px 0!important;border:0!important;\
background:none!important;vertical-align:baseline}
.pg-cells thead th,.pg-cells tfoot tr:first-child>*{border-bottom:1px solid rgba(128,128,128,.4)!important}
.pg-cells tfoot tr:first-child>*{border-bottom:0!important;border-top:1px solid rgba(128,128,128,.4)!important}
.pg-scroll{overflow-x:auto}
.pg-message summary{display:block;padding:2px 0}.pg-message p{white-space:pre-wrap;margin:.2em 0 .6em 1.2em}
@container (max-width:46em){.pg-type{width:8em}.pg-row>.pg-counts{width:auto;min-width:calc(9.5em + 1.2em)}}
@container (max-width:40em){.pg-row{gap:0 .8em}.pg-row>.pg-status{display:none}.pg-value{width:9em}\
.pg-row>.pg-counts{min-width:calc(9em*12/13)}.pg-counts>span{margin-right:.4em}}
@container (max-width:26em){.pg-type{width:6em}.pg-value{width:7em}.pg-row>.pg-counts{min-width:calc(7em*12/13)}}
"""


def styled(body: str) -> str:
    """A fragment of HTML with the style sheet, which needs nothing from the page around it."""
    colours = "".join(f".pg-{_css(kind)}{{--pg:{look.colour}}}" for kind, look in LOOKS.items())
    return f'<div class="pg">\n<style>\n{_SHAPES}{_STYLE}{colours}\n</style>\n{body}\n</div>'


def page(title: str, fragment: str) -> str:
    """A complete document, which is dark if the reader's system is."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<style>body{margin:1.2em;background:Canvas;color:CanvasText}</style>\n"
        f"</head>\n<body>\n{fragment}\n</body>\n</html>\n"
    )


def symbol(status: str) -> str:
    """The symbol of a status or a kind: a character, drawn by the style sheet where there is one."""
    kind = status if status in LOOKS else kind_of(status)
    look = LOOKS[kind]
    return f'<i class="pg-look pg-{look.style} pg-{_css(kind)}" title="{kind}">{look.symbol}</i>'


def counted(counts: Mapping[str, int], words: bool = False) -> str:
    """How many leaves there are of each kind."""
    said = ((kind, f"{kind} " if words else "") for kind in LOOKS if counts.get(kind))
    return " ".join(f"<span>{symbol(kind)} {word}{counts[kind]:,}</span>" for kind, word in said)


def cells(head: Iterable[str], rows: Iterable[Iterable[str]], foot: str = "") -> str:
    """A table: a header of text, and rows of cells in HTML."""
    row = lambda tag, texts: f"<tr>{''.join(f'<{tag}>{text}</{tag}>' for text in texts)}</tr>"
    body = "\n".join(row("td", texts) for texts in rows)
    below = f"\n<tfoot>\n{foot}\n</tfoot>" if foot else ""
    return (
        f'<div class="pg-scroll"><table class="pg-cells">\n<thead>{row("th", map(html.escape, head))}</thead>\n'
        f"<tbody>\n{body}\n</tbody>{below}\n</table></div>"
    )


def _css(kind: str) -> str:
    return "is-" + kind.replace(" ", "-")
