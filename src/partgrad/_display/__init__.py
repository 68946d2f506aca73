"""Display: pictures, summaries, the status of leaves, tables."""

from .markup import cells as cells, styled as styled, symbol as symbol
from .picture import Picture as Picture, show as show
from .status import status_of as status_of, tie_in_words as tie_in_words, tied_paths as tied_paths
from .summary import Row as Row, Summary as Summary, summary as summary
from .table import (
    COLUMNS as COLUMNS,
    GAP as GAP,
    ROOT as ROOT,
    columns as columns,
    fitted as fitted,
    printable as printable,
    shortened as shortened,
    table as table,
    within as within,
)
