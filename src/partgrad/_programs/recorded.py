"""A call kept as a program, which can be run again later on other values of the leaves that are differentiated."""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.tree_util import GetAttrKey

from .equations import (
    Chain,
    Operands,
    jaxpr_and_consts,
    size_of,
)
from .interpreter import as_array, run
from .references import read
from .same import keyed_jaxpr


class Leaves:
    """The differentiated leaves of a call, each by its path; a pytree whose key paths are these."""

    def __init__(self, paths: tuple[str, ...], values: Sequence[Any]):
        self.paths, self.values = paths, list(values)


jax.tree_util.register_pytree_with_keys(
    Leaves,
    lambda node: ([(GetAttrKey(path), value) for path, value in zip(node.paths, node.values, strict=True)], node.paths),
    lambda paths, values: Leaves(paths, list(values)),
)


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Recorded:
    """The program of a call.

    Python numbers that are not differentiated stay what they are, as the function may branch on them.

    Args:
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        chosen: For each leaf of the arguments whether it is differentiated.
        paths: The paths of the differentiated leaves.
        has_aux: Whether the function returns a pair, of which the first is differentiated.
        stands_for: The results of an equation that whoever records has put into what JAX keeps of a function's program,
            and None for any other.

    Attributes:
        operands: The values of what the program reads, those of references too, and tracers where the call was traced:
            they are not kept apart from this object, so that one program serves many calls.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        chosen: Sequence[bool],
        paths: Sequence[str],
        has_aux: bool = False,
        stands_for: Callable[[JaxprEqn, Operands], Operands | None] = lambda equation, operands: None,
    ):
        leaves, treedef = jax.tree.flatten((tuple(args), kwargs))
        given = [
            is_chosen or isinstance(leaf, jax.Array | np.ndarray | np.generic)
            for is_chosen, leaf in zip(chosen, leaves, strict=True)
        ]
        # A weak type is part of the program.
        operands = [
            leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
            for leaf, is_one in zip(leaves, given, strict=True)
            if is_one
        ]
        constants = [None if is_one else leaf for leaf, is_one in zip(leaves, given, strict=True)]

        def flat(*values: Any) -> Any:
            rest = iter(values)
            filled = [next(rest) if is_one else leaf for leaf, is_one in zip(constants, given, strict=True)]
            positional, named = treedef.unflatten(filled)
            output = function(*positional, **named)
            return output[0] if has_aux else output

        # What it prints, it has printed already, and so it is with its warnings.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), _unwarned():
            closed, shape = jax.make_jaxpr(flat, return_shape=True)(*operands)
        self._jaxpr, consts = jaxpr_and_consts(closed)
        self._count, self._output = len(consts), jax.tree.structure(shape)
        numbers = np.cumsum(given) - 1 + self._count
        self._places = [int(n) for n, is_chosen in zip(numbers, chosen, strict=True) if is_chosen]
        self._paths = tuple(paths)
        self._name = getattr(function, "__name__", type(function).__name__)
        self._given, self._stands_for = given, stands_for
        found: Operands = [*consts, *operands]
        self._are_references = [isinstance(operand, jax.Ref) for operand in found]
        self.operands = [read(operand) for operand in found]

    @property
    def operations(self) -> int:
        """How many operations the program has."""
        return size_of(self._jaxpr)[0]

    @property
    def has_outputs(self) -> bool:
        """Whether it returns anything."""
        return bool(self._jaxpr.outvars)

    @property
    def keyed(self) -> Any:
        """What programs have in common that differ in their numbers only; None if that cannot be said."""
        return keyed_jaxpr(self._jaxpr, exact=False)

    def taken(self) -> Operands:
        """The operands, which are not kept here any longer."""
        operands, self.operands = self.operands, []
        return operands

    def at(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Operands:
        """The operands for other arguments, which differ from those of the call in their arrays only."""
        leaves = jax.tree.leaves((tuple(args), kwargs))
        return [
            *self.operands[: self._count],
            *(read(x) for x, is_one in zip(leaves, self._given, strict=True) if is_one),
        ]

    def point(self, operands: Operands) -> Leaves:
        """The differentiated leaves among the operands."""
        return Leaves(self._paths, [operands[place] for place in self._places])

    def function(self, operands: Operands) -> Callable[[Leaves], Any]:
        """The call as a function of the differentiated leaves."""

        def replayed(leaves: Leaves) -> Any:
            # The function may write to a reference, so it gets another one on every call.
            pairs = zip(operands, self._are_references, strict=True)
            given = [jax.new_ref(jnp.asarray(operand)) if is_one else operand for operand, is_one in pairs]
            for place, value in zip(self._places, leaves.values, strict=True):
                given[place] = value
            consts, inputs = given[: self._count], given[self._count :]
            outputs = run(self._jaxpr, consts, inputs, self._alone, wanted=self._is_left_out)
            arrays = [as_array(output, atom.aval) for output, atom in zip(outputs, self._jaxpr.outvars, strict=True)]
            return self._output.unflatten(arrays)

        replayed.__name__ = replayed.__qualname__ = self._name
        return replayed

    def _is_left_out(self, equation: JaxprEqn) -> bool:
        return _is_pvary(equation) or self._stands_for(equation, list(equation.invars)) is not None

    def _alone(self, chain: Chain, operands: Operands) -> Operands | None:
        """Outside of the `shard_map` that a call was recorded in, its mesh axes do not exist."""
        return operands if _is_pvary(chain[-1]) else self._stands_for(chain[-1], operands)


def _is_pvary(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "pvary"


def host_copies(operands: Sequence[Any]) -> Operands:
    """Copies that stay as they are: a buffer may be donated to the next step."""
    return [_copy(operand) for operand in operands]


def _copy(operand: Any) -> Any:
    if jax.dtypes.issubdtype(getattr(operand, "dtype", None), jax.dtypes.prng_key):
        return jax.random.wrap_key_data(np.array(jax.random.key_data(operand)), impl=jax.random.key_impl(operand))
    return np.array(operand) if isinstance(operand, jax.Array | np.ndarray) else operand
