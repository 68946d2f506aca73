"""Whose line it is. Moved to `_programs/lines.py`; this file goes when `_check` imports that."""

from .._programs import as_where as as_where, is_users as is_users, raised_at as raised_at
