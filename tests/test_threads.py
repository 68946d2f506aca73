"""Threads: no lock is held while a user's code runs, and several threads may meet at a structure that is new to all."""

import sys
import threading
import time

import jax
import pytest

import partgrad as pg

THREADS = 8


def together(function, count=THREADS):
    """Run a function in several threads at once, given its number, and return what each returned."""
    results, errors, start = [None] * count, [], threading.Barrier(count)

    def run(number):
        start.wait()
        try:
            results[number] = function(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), name=str(number), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    return results


@pytest.fixture(autouse=True)
def _switching_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def slow_class(wait, lock=None):
    """A class of nodes that takes its time, and perhaps a lock, to be flattened."""

    @jax.tree_util.register_pytree_with_keys_class
    class Slow:
        def __init__(self, x):
            self.x = x

        def tree_flatten_with_keys(self):
            with lock or threading.Lock():
                # Every other thread is slow, and still at it when the rest are done.
                time.sleep(wait * (int(threading.current_thread().name) % 2))
                return ((jax.tree_util.GetAttrKey("x"), self.x),), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    return Slow


def refused(model):
    with pytest.raises(pg.errors.NoMatchError) as caught:
        pg.select(model, "s.y")
    return str(caught.value)


QUESTIONS = {
    "items": lambda m: [path for path, _ in pg.items(m)],
    "grad": lambda m: pg.grad(lambda t: t["s"].x ** 2 * t["b"], wrt="s.x")(m),
    "described": lambda m: pg.grad(lambda t: t["s"].x ** 2 * t["b"])(m)["b"],
    "callable": lambda m: pg.partition(m, lambda t: t["s"])[0]["s"].x,
    "replace": lambda m: pg.replace(m, "s.x", 3.0)["s"].x,
    "summary": lambda m: str(pg.summary(m)),
    "freeze": lambda m: [path for path, _ in pg.items(pg.freeze(m, "s"))],
    "ravel": lambda m: pg.ravel(m)[0].tolist(),
    "error": refused,
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_threads_meet_at_a_new_structure(name):
    question = QUESTIONS[name]
    for _ in range(3):
        cls = slow_class(0.001)
        found = together(lambda _, cls=cls: question({"s": cls(2.0), "b": 1.0}))
        assert all(str(own) == str(found[0]) for own in found)
        assert "leaf 0" not in str(found)


def test_paths_are_right_while_another_thread_lays_out_the_structure():
    class Node:
        def __init__(self, x):
            self.x = x

    def flatten_with_keys(node):
        if threading.current_thread().name == "0":
            time.sleep(0.1)
        return ((jax.tree_util.GetAttrKey("x"), node.x),), None

    flatten = lambda node: ((node.x,), None)
    jax.tree_util.register_pytree_with_keys(Node, flatten_with_keys, lambda _, children: Node(*children), flatten)

    def paths(number):
        time.sleep(0.02 * min(number, 1))
        return [path for path, _ in pg.items({"s": Node(1.0), "b": 1.0})]

    assert together(paths) == [["['b']", "['s'].x"]] * THREADS


def test_no_lock_is_held_while_a_node_is_flattened():
    lock = threading.Lock()
    cls = slow_class(0.0, lock)

    def run(number):
        for i in range(100):
            if number % 2:
                pg.items({"s": cls(1.0), f"k{number},{i}": 1.0})
            else:
                # Another structure, under the lock that the node takes.
                with lock:
                    time.sleep(1e-4)
                    pg.items({f"z{number},{i}": 1.0})

    together(run, 4)


@pytest.mark.slow
def test_no_lock_is_held_while_a_property_computes():
    lock = threading.Lock()

    @pg.dataclass
    class Model:
        w: float

        @property
        def twice(self):
            with lock:
                return 2 * self.w

    def run(number):
        for i in range(50):
            if number % 2:
                pg.grad(lambda m: m["m"].w ** 2, wrt=lambda m: (m["m"].w,))({"m": Model(1.0), f"k{number},{i}": 1})
            else:
                with lock:
                    pg.check(lambda x: x**2)(1.0) if i == 0 else pg.grad(lambda x: x["x"] ** 2)({"x": 1.0})

    together(run, 4)
