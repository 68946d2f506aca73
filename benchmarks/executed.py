"""What a compiled program executes: operations and bytes, with the body of a loop counted as often as it runs.

XLA's own analysis counts the body of a loop once. This one reads the optimised program: a product has two operations
for each number that it adds up, an elementwise operation one for each number of its result, a reduction one for each
number that it reads. An instruction reads its operands and writes its result; a slice reads what it takes, and an
update in place writes what it changes, in a fusion too. Loops whose number of turns XLA does not know are refused.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

_BITS = {"pred": 8, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s64": 64, "u64": 64, "f64": 64}
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*)")
# What names values, or moves none.
_FREE = frozenset(
    [
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "iota",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "domain",
    ]
)
_MOVES = frozenset(
    [
        "copy",
        "broadcast",
        "reshape",
        "transpose",
        "slice",
        "dynamic-slice",
        "dynamic-update-slice",
        "concatenate",
        "pad",
        "reverse",
        "gather",
        "convert",
        "bitcast-convert",
    ]
)


class Executed(NamedTuple):
    """What a compiled program needs."""

    flops: float
    bytes: float
    temporaries: float = 0.0

    def __add__(self, other: Any) -> "Executed":
        return Executed(*(one + another for one, another in zip(self, other, strict=True)))

    def __mul__(self, times: Any) -> "Executed":
        return Executed(self.flops * times, self.bytes * times)


class _Instruction(NamedTuple):
    name: str
    shape: str
    kind: str
    operands: list[str]
    rest: str


def executed(function: Callable[..., Any], *args: Any) -> Executed:
    """What a function of these arguments needs when it is compiled."""
    compiled = jax.jit(function).lower(*args).compile()
    program = _Program(compiled.as_text())
    return program.of(program.entry)._replace(temporaries=compiled.memory_analysis().temp_size_in_bytes)


class _Program:
    """The computations of an optimised program, by name."""

    def __init__(self, text: str):
        self.computations: dict[str, list[_Instruction]] = {}
        self.shapes: dict[str, dict[str, str]] = {}
        self.entry = ""
        for line in text.splitlines():
            if line[:1] in ("%", "E") and line.endswith("{"):
                name = line.removeprefix("ENTRY ").lstrip("%").split()[0].split("(")[0]
                self.entry = name if line.startswith("ENTRY") else self.entry
                self.computations[name] = []
            elif found := _INSTRUCTION.match(line):
                own, shape, kind, rest = found.groups()
                operands = re.findall(r"%([\w.-]+)", _closed(rest))
                self.computations[name].append(_Instruction(own, shape, kind, operands, rest))
        for name, instructions in self.computations.items():
            self.shapes[name] = {own.name: own.shape for own in instructions}

    def of(self, name: str) -> Executed:
        """What a computation needs."""
        total = Executed(0, 0)
        for own in self.computations[name]:
            total += self._instruction(own, self.shapes[name])
        return total

    def _instruction(self, own: _Instruction, shapes: dict[str, str]) -> Executed:
        if own.kind == "while":
            turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', own.rest)
            if turns is None:
                raise ValueError(f"The number of turns of the loop {own.name} is not known.")
            return (self.of(_called(own, "body")) + self.of(_called(own, "condition"))) * int(turns[1])
        if own.kind == "call":
            return self.of(_called(own, "to_apply"))
        if own.kind == "conditional":
            raise ValueError("Which branch of a conditional runs is not known.")
        if own.kind in _FREE:
            return Executed(0, 0)
        if own.kind == "fusion":
            inner = _called(own, "calls")
            return Executed(self._flops(inner), self._fused_bytes(own, inner, shapes))
        return Executed(_flops(own, shapes), self._bytes(own, shapes))

    def _flops(self, name: str) -> float:
        total = 0.0
        for own in self.computations[name]:
            inner = re.search(r"calls=%([\w.-]+)", own.rest)
            total += self._flops(inner[1]) if inner else _flops(own, self.shapes[name])
        return total

    def _bytes(self, own: _Instruction, shapes: dict[str, str]) -> float:
        if own.kind in ("slice", "dynamic-slice", "gather"):
            return 2 * _size(own.shape)
        if own.kind == "dynamic-update-slice":
            return 2 * _size(shapes[own.operands[1]])
        return _size(own.shape) + sum(_size(shapes[operand]) for operand in own.operands)

    def _fused_bytes(self, own: _Instruction, name: str, shapes: dict[str, str]) -> float:
        """What a fusion reads and writes: of an operand that is only sliced or updated in it, that part."""
        instructions, inner, total = self.computations[name], self.shapes[name], 0.0
        updates = [one for one in instructions if one.kind == "dynamic-update-slice"]
        numbers = {one.name: int(one.rest.split(")")[0]) for one in instructions if one.kind == "parameter"}
        for parameter, number in numbers.items():
            readers = [one for one in instructions if parameter in one.operands]
            if readers and all(one.kind in ("slice", "dynamic-slice") for one in readers):
                total += sum(_size(one.shape) for one in readers)
            elif not (readers and all(one in updates and one.operands[0] == parameter for one in readers)):
                total += _size(shapes[own.operands[number]])
        written = {one.shape.split("{")[0]: _size(inner[one.operands[1]]) for one in updates}
        for kind, sizes in _SHAPE.findall(own.shape):
            total += written.get(f"{kind}[{sizes}]", _size(f"{kind}[{sizes}]"))
        return total


def _closed(text: str) -> str:
    """The operands: what is before the bracket that closes."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return text[:position]
    return text


def _called(own: _Instruction, what: str) -> str:
    return re.search(rf"{what}=%([\w.-]+)", own.rest)[1]  # type: ignore[index]


def _size(shape: str) -> float:
    """The bytes of an array or a tuple."""
    return sum(_BITS.get(kind, 32) / 8 * _count(sizes) for kind, sizes in _SHAPE.findall(shape))


def _count(sizes: str) -> int:
    return math.prod(int(own) for own in sizes.split(",") if own)


def _flops(own: _Instruction, shapes: dict[str, str]) -> float:
    if own.kind in _FREE or own.kind in _MOVES:
        return 0.0
    count = sum(_count(sizes) for _, sizes in _SHAPE.findall(own.shape))
    if own.kind == "dot":
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", own.rest)[1]  # type: ignore[index]
        sizes = _SHAPE.search(shapes[own.operands[0]])[2].split(",")  # type: ignore[index]
        return 2.0 * count * math.prod(int(sizes[int(axis)]) for axis in axes.split(",") if axis)
    if own.kind == "reduce":
        return float(_count(_SHAPE.search(shapes[own.operands[0]])[2]))  # type: ignore[index]
    if own.kind in ("custom-call", "convolution"):
        raise ValueError(f"What a {own.kind} computes is not known.")
    return float(count)
