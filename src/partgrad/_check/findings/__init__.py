"""One file for each kind of finding that a user sees."""
