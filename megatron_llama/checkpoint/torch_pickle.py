"""Reads the pickle in a file of ``torch.save``: tensors, settings, and containers of them.

Torch's own restricted reader calls the functions that torch allows with any arguments of the file:
``torch.FloatTensor(10**12)``, ``bytearray(10**12)``, a tensor larger than its storage. Here a name
of the pickle stands for a function of this module, which checks its arguments, or is refused.
"""

from __future__ import annotations

import argparse
import codecs
import pickle
import pickletools
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_llama.checkpoint.pickles import ForbiddenNames, require_bounded
from megatron_llama.config.limits import (
    LARGEST_DEPTH,
    LARGEST_DIMENSIONS,
    LARGEST_INTEGER,
    LARGEST_PICKLE,
    LARGEST_VALUES,
)

FOREIGN = (
    "megatron.",
    "apex.",
    "transformer_engine.",
    "numpy.",
    "signal.Signals",
    "pathlib.",
    "_io.BytesIO",
    "datetime.",
)
"""Beginnings of names that stand for settings and random states in checkpoints: they are read as
inert objects."""
RENAMED: Mapping[str, str] = MappingProxyType(
    {"__builtin__": "builtins", "copy_reg": "copyreg", "UserDict": "collections"}
)
"""Modules of Python 2 that pickles of protocol 2 name, and today's names."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
"""Types of values that contain no others."""


class Inert:
    """Stands for an object of a class that is not wanted here. It takes any state from a pickle and
    does nothing."""


@dataclass(frozen=True)
class StoredValues:
    """Values of the file that tensors are views of: their bytes, and the dtype that the pickle
    names. With None they are bytes."""

    storage: torch.UntypedStorage
    dtype: torch.dtype | None


@dataclass(frozen=True)
class StorageKind:
    """A class of storages. The pickle names it to give the dtype."""

    dtype: torch.dtype | None


@dataclass(frozen=True)
class Constructor:
    """A name of a pickle that may be called, and the function that is called in its place."""

    call: Callable[..., Any]


def read_pickle(content: bytes, load_storage: Callable[[str, int], torch.UntypedStorage]) -> Any:
    """Return the value of a pickle of ``torch.save``. ``load_storage`` returns the storage of a key
    with a number of bytes, on the meta device if only shapes are wanted.

    Raises ForbiddenNames for unknown names, before anything is made, and pickle.UnpicklingError for
    any other problem."""
    if len(content) > LARGEST_PICKLE:
        raise pickle.UnpicklingError(
            f"a pickle of {len(content):,} bytes, where {LARGEST_PICKLE:,} are allowed"
        )
    if require_bounded(content) != len(content):
        raise pickle.UnpicklingError("bytes behind the end of the pickle")
    names = _names(content)
    constructors = {name: _constructor(name) for name in names}
    forbidden = sorted(name for name, value in constructors.items() if value is None)
    if forbidden:
        raise ForbiddenNames(forbidden)
    try:
        value = _Machine(constructors, load_storage).run(content)
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # wrong kinds and numbers of arguments, an empty stack
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error
    _require_tree(value)
    return value


def _names(content: bytes) -> set[str]:
    """Return the names in a pickle: modules with their classes or functions."""
    names = set()
    for code, argument, _ in pickletools.genops(content):
        if code.name == "GLOBAL":
            names.add(_full_name(str(argument)))
    return names


def _full_name(argument: str) -> str:
    module, _, name = argument.partition(" ")
    return f"{RENAMED.get(module, module)}.{name}"


class _Machine:
    """The stack machine of pickles, with the opcodes that ``torch.save`` writes."""

    def __init__(
        self,
        constructors: Mapping[str, Any],
        load_storage: Callable[[str, int], torch.UntypedStorage],
    ) -> None:
        self._constructors = constructors
        self._load_storage = load_storage
        self._storages: dict[str, StoredValues] = {}
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        """Return the value that a pickle leaves on the stack."""
        for code, argument, _ in pickletools.genops(content):
            name = code.name
            if name in ("BINPUT", "LONG_BINPUT"):
                self._memo[int(str(argument))] = self._stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                self._stack.append(self._memo[int(str(argument))])
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name]())
            elif name in _ARGUMENTS:
                self._stack.append(argument)
            elif name == "SHORT_BINSTRING":
                self._stack.append(str(argument).encode("latin-1"))
            elif name == "GLOBAL":
                self._stack.append(self._constructors[_full_name(str(argument))])
            elif name in _ACTIONS:
                _ACTIONS[name](self)
            elif name not in ("PROTO", "STOP"):
                raise pickle.UnpicklingError(f"opcode {name}, which torch.save does not write")
        if len(self._stack) != 1 or self._outer:
            raise pickle.UnpicklingError("values are left over")
        return self._stack[0]

    def _pop_to_mark(self) -> list[Any]:
        values = self._stack
        self._stack = self._outer.pop()
        return values

    def _mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _make_tuple(self) -> None:
        values = tuple(self._pop_to_mark())
        self._stack.append(values)

    def _make_short_tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise pickle.UnpicklingError("too few values for a tuple")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _append(self) -> None:
        value = self._stack.pop()
        self._extend([value])

    def _appends(self) -> None:
        self._extend(self._pop_to_mark())

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise pickle.UnpicklingError("values are added to another object than a list")
        target.extend(values)

    def _set_item(self) -> None:
        value = self._stack.pop()
        key = self._stack.pop()
        self._update([key, value])

    def _set_items(self) -> None:
        self._update(self._pop_to_mark())

    def _update(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (dict, OrderedDict):
            raise pickle.UnpicklingError("keys are set in another object than a dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            _require_key(key)
            target[key] = value

    def _call(self) -> None:
        arguments = self._stack.pop()
        function = self._stack.pop()
        if not isinstance(function, Constructor) or type(arguments) is not tuple:
            raise pickle.UnpicklingError("a call of what is no function")
        self._stack.append(function.call(*arguments))

    def _build(self) -> None:
        """Give an object its state. Only objects that this pickle has made may have one."""
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, argparse.Namespace | types.SimpleNamespace):
            if type(state) is not dict or not all(type(name) is str for name in state):
                raise pickle.UnpicklingError("settings without names")
            vars(target).update(state)
        elif type(target) not in (Inert, OrderedDict):
            raise pickle.UnpicklingError(f"a state for a {type(target).__name__}")

    def _load_persistent(self) -> None:
        """Replace a tuple ("storage", kind, key, device, values) by the storage."""
        word, kind, key, _, count = self._stack.pop()
        right = word == "storage" and isinstance(kind, StorageKind) and type(key) is str
        if not right or type(count) is not int or not 0 <= count <= LARGEST_INTEGER:
            raise pickle.UnpicklingError("a storage without kind, key and size")
        nbytes = count * (kind.dtype.itemsize if kind.dtype is not None else 1)
        if key not in self._storages:
            self._storages[key] = StoredValues(self._load_storage(key, nbytes), kind.dtype)
        stored = self._storages[key]
        if stored.storage.nbytes() != nbytes:
            raise pickle.UnpicklingError(f"storage {key} has two sizes")
        self._stack.append(StoredValues(stored.storage, kind.dtype))


_CONSTANTS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "NONE": lambda: None,
        "NEWTRUE": lambda: True,
        "NEWFALSE": lambda: False,
        "EMPTY_TUPLE": tuple,
        "EMPTY_LIST": list,
        "EMPTY_DICT": dict,
    }
)
"""Opcodes without an argument that push a value, and the functions that make it."""
_ARGUMENTS = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"})
"""Opcodes that push their argument."""
_ACTIONS: Mapping[str, Callable[[_Machine], None]] = MappingProxyType(
    {
        "MARK": _Machine._mark,
        "TUPLE": _Machine._make_tuple,
        "TUPLE1": lambda machine: machine._make_short_tuple(1),
        "TUPLE2": lambda machine: machine._make_short_tuple(2),
        "TUPLE3": lambda machine: machine._make_short_tuple(3),
        "APPEND": _Machine._append,
        "APPENDS": _Machine._appends,
        "SETITEM": _Machine._set_item,
        "SETITEMS": _Machine._set_items,
        "REDUCE": _Machine._call,
        "NEWOBJ": _Machine._call,
        "BUILD": _Machine._build,
        "BINPERSID": _Machine._load_persistent,
    }
)
"""Opcodes that change the values on the stack."""


def _require_key(key: Any) -> None:
    """Raise UnpicklingError for a key of a dict whose hash could take long: that of a tuple of
    tuples of tuples overflows the stack of the process."""
    flat = key if type(key) is tuple else (key,)
    if not all(isinstance(value, PLAIN) for value in flat):
        raise pickle.UnpicklingError(f"a key of kind {type(key).__name__}")


def _require_tree(value: Any) -> None:
    """Raise UnpicklingError for values that are nested deeply, hold themselves, or hold others so
    often that a walk through them would not end."""
    level = [value]
    total = 1
    for _ in range(LARGEST_DEPTH):
        level = [inner for outer in level for inner in _held_values(outer)]
        total += len(level)
        if total > LARGEST_VALUES:
            raise pickle.UnpicklingError(f"more than {LARGEST_VALUES:,} values")
        if not level:
            return
    raise pickle.UnpicklingError(f"values nested more than {LARGEST_DEPTH} times")


def _held_values(value: Any) -> Sequence[Any]:
    """Return those values in a container that may hold others."""
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        value = vars(value)
    inner = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple | set):
        return ()
    return [held for held in inner if not isinstance(held, (*PLAIN, Tensor))]


def _constructor(name: str) -> Any:
    """Return the stand-in for a name of a pickle; None if the name is not allowed."""
    if name in _CONSTRUCTORS:
        return _CONSTRUCTORS[name]
    if name.startswith(FOREIGN):
        return Constructor(lambda *_: Inert())
    module, _, leaf = name.rpartition(".")
    if f"{module}.".startswith("torch.") and leaf in _STORAGES:
        return StorageKind(_STORAGES[leaf])
    value = getattr(torch, leaf, None) if module == "torch" else None
    return value if isinstance(value, torch.dtype) else None


_STORAGES: Mapping[str, torch.dtype | None] = MappingProxyType(
    {
        "DoubleStorage": torch.float64,
        "FloatStorage": torch.float32,
        "HalfStorage": torch.float16,
        "BFloat16Storage": torch.bfloat16,
        "LongStorage": torch.int64,
        "IntStorage": torch.int32,
        "ShortStorage": torch.int16,
        "CharStorage": torch.int8,
        "ByteStorage": torch.uint8,
        "BoolStorage": torch.bool,
        "ComplexDoubleStorage": torch.complex128,
        "ComplexFloatStorage": torch.complex64,
        "UntypedStorage": None,
    }
)
"""Classes of storages, and the dtype of their values. Quantized values are not read."""


def _rebuild_tensor(
    stored: StoredValues,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    *_: Any,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return a view of a storage. Gradients and hooks that the file has for it are left out."""
    dtype = dtype or stored.dtype
    if dtype is None:
        raise pickle.UnpicklingError("a tensor without a dtype")
    numbers = (offset, *size, *stride)
    right = all(type(number) is int and 0 <= number <= LARGEST_INTEGER for number in numbers)
    if not right or len(size) != len(stride) or len(size) > LARGEST_DIMENSIONS:
        raise pickle.UnpicklingError(f"a tensor of shape {size} and strides {stride}"[:200])
    values = stored.storage.nbytes() // dtype.itemsize
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    numel = 1
    for count in size:
        numel *= count
    # Where strides are 0 a tensor has more values than its storage: a small file would pose as a
    # large one.
    if numel and (last >= values or numel > values):
        raise pickle.UnpicklingError(
            f"a tensor of {numel:,} values up to place {last:,}, where its storage has {values:,}"
        )
    view = torch.empty(0, dtype=dtype, device=stored.storage.device)
    return view.set_(stored.storage, offset, tuple(size), tuple(stride))


def _rebuild_tensor_of_dtype(
    stored: StoredValues,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool,
    hooks: Any,
    dtype: torch.dtype,
    *_: Any,
) -> Tensor:
    if not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError("a tensor without a dtype")
    return _rebuild_tensor(stored, offset, size, stride, dtype=dtype)


def _rebuild_parameter(tensor: Tensor, *_: Any) -> Tensor:
    """Return a parameter's values; attributes that the file has for it are left out."""
    if not isinstance(tensor, Tensor):
        raise pickle.UnpicklingError("a parameter without a tensor")
    return tensor


def _rebuild_with_attributes(function: Constructor, _: Any, arguments: Any, *__: Any) -> Tensor:
    """Return a tensor that had attributes in Python, without them."""
    if function not in _TENSORS or type(arguments) is not tuple:
        raise pickle.UnpicklingError("attributes of what is no tensor")
    tensor: Tensor = function.call(*arguments)
    return tensor


def _encode(text: str, encoding: str = "utf-8") -> bytes:
    if encoding not in ("latin1", "utf-8"):
        raise pickle.UnpicklingError(f"bytes in {encoding}"[:80])
    return codecs.encode(text, encoding)


def _make_bytearray(*arguments: Any) -> bytearray:
    """Return a bytearray of bytes. One of a number could take any amount of memory."""
    if not arguments:
        return bytearray()
    if isinstance(arguments[0], str) and arguments[1:] in (("latin-1",), ("latin1",)):
        return bytearray(arguments[0], "latin-1")
    if type(arguments[0]) is not bytes or arguments[1:]:
        raise pickle.UnpicklingError("a bytearray of other things than bytes")
    return bytearray(arguments[0])


def _make_set(values: Any = ()) -> set[Any]:
    for value in values:
        _require_key(value)
    return set(values)


def _make_ordered_dict(pairs: Any = ()) -> OrderedDict[Any, Any]:
    for key, _ in pairs:
        _require_key(key)
    return OrderedDict(pairs)


def _make_counter(counts: Any = MappingProxyType({})) -> Counter[Any]:
    if not isinstance(counts, Mapping):
        raise pickle.UnpicklingError("a Counter of other things than counts")
    return Counter(counts)


def _make_size(numbers: Any = ()) -> torch.Size:
    if len(numbers) > LARGEST_DIMENSIONS:
        raise pickle.UnpicklingError("a size of too many dimensions")
    return torch.Size(numbers)


_TENSORS = (
    Constructor(_rebuild_tensor),
    Constructor(_rebuild_tensor_of_dtype),
    Constructor(_rebuild_parameter),
)
_CONSTRUCTORS: Mapping[str, Constructor] = MappingProxyType(
    {
        "torch._utils._rebuild_tensor": _TENSORS[0],
        "torch._utils._rebuild_tensor_v2": _TENSORS[0],
        "torch._utils._rebuild_tensor_v3": _TENSORS[1],
        "torch._utils._rebuild_parameter": _TENSORS[2],
        "torch._utils._rebuild_parameter_with_state": _TENSORS[2],
        "torch.nn.parameter.Parameter": _TENSORS[2],
        "torch._tensor._rebuild_from_type_v2": Constructor(_rebuild_with_attributes),
        "torch.Tensor": Constructor(_rebuild_parameter),
        "torch.Size": Constructor(_make_size),
        "torch.device": Constructor(lambda *_: Inert()),
        "collections.OrderedDict": Constructor(_make_ordered_dict),
        "collections.Counter": Constructor(_make_counter),
        "argparse.Namespace": Constructor(argparse.Namespace),
        "types.SimpleNamespace": Constructor(types.SimpleNamespace),
        "_codecs.encode": Constructor(_encode),
        "builtins.bytearray": Constructor(_make_bytearray),
        "builtins.set": Constructor(_make_set),
        "builtins.complex": Constructor(complex),
    }
)
"""Names that ``torch.save`` writes for the objects in checkpoints."""
