"""Points near a given one where an operation has no derivative, or a choice is at its threshold."""

from .drive import Reached as Reached, Searched as Searched, search as search
