"""Remedies: what someone means whose selector fits nothing, as the code of one that does.

Nothing here selects anything. It is imported when an error is about to be raised, and what it says to write was tried
on the tree.
"""

from .advice import not_found as not_found, unreadable as unreadable
from .code import source_of as source_of
from .habits import may_mean_a_part as may_mean_a_part
from .misreadings import (
    false_everywhere as false_everywhere,
    fits_nowhere as fits_nowhere,
    no_node_of as no_node_of,
    no_path as no_path,
    not_a_selector as not_a_selector,
    path_is_text as path_is_text,
)
