"""Display: summaries, the status of leaves, tables."""

from .status import status_of as status_of
from .summary import summary as summary
from .table import (
    ROOT as ROOT,
    columns as columns,
    fitted as fitted,
    html_row as html_row,
    padded as padded,
    printable as printable,
)
