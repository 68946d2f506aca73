"""What depends on JAX's internals or on the texts of its errors, each with the reason and the versions."""

# JAX has no class of its own for trees that do not match. Read on 0.10.2 and 0.12.
_OF_STRUCTURES = ("structure", "pytree", "PyTree", "tree prefix", "custom node", "treedef")


def speaks_of_structures(error: BaseException) -> bool:
    """Whether an error of JAX says that two trees do not match, so that a note on structures helps."""
    return any(words in str(error) for words in _OF_STRUCTURES)
