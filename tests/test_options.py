"""Options that are on or off: what is not a bool is refused, not taken as True."""

import inspect

import jax.numpy as jnp
import pytest

import partgrad as pg

# Python's `dataclasses.dataclass` has the first one's options, and takes what has a truth value. The last one's are trees
# of bools.
OTHERS = {pg.dataclass, pg.Finding, pg.stop_gradient}


def switches():
    """Every public function with each of its options whose default is a bool."""
    for module in (pg, pg.safe, pg.testing):
        for name in dir(module):
            function = getattr(module, name)
            if name.startswith("_") or not callable(function) or function in OTHERS:
                continue
            try:
                parameters = inspect.signature(function).parameters.values()
            except (TypeError, ValueError):
                continue
            yield from ((function, p.name) for p in parameters if isinstance(p.default, bool))


def arguments_of(function):
    """Arguments that the function takes, beside the option."""
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    x = jnp.eye(2)
    if function is pg.jvp:
        return jnp.sum, (x,), (x,)
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in required)
    values = [jnp.sum, x] if required and required[0].name in ("f", "fun") else [x]
    return tuple(values[: count + any(p.kind is p.VAR_POSITIONAL for p in required)])


SWITCHES = list(switches())


@pytest.mark.parametrize("given", ["no", 0, None, [False]], ids=repr)
@pytest.mark.parametrize(("function", "option"), SWITCHES, ids=[f"{f.__name__}-{option}" for f, option in SWITCHES])
def test_a_switch_takes_a_bool_alone(function, option, given):
    if (option, given) == ("search", 0):
        pytest.skip("it takes seconds")
    with pytest.raises(pg.errors.ArgumentError, match=f"`{option}`"):
        function(*arguments_of(function), **{option: given})


def test_a_report_takes_a_bool_alone():
    report = pg.check(jnp.sum, progress=False)(jnp.ones(2))
    with pytest.raises(pg.errors.ArgumentError, match="allow_inconclusive=True"):
        report.raise_if_failed(allow_inconclusive="no")


@pytest.mark.parametrize("option", ["nondiff", "static"])
def test_a_mark_of_a_field_takes_a_bool_alone(option):
    with pytest.raises(pg.errors.ArgumentError, match=f"write {option}=True"):
        pg.field(**{option: "no"})


def test_the_table_holds_what_it_is_for():
    names = {(function.__name__, option) for function, option in SWITCHES}
    assert names >= {("norm", "keepdims"), ("svd", "hermitian"), ("check", "has_aux"), ("vjp", "double_where")}
