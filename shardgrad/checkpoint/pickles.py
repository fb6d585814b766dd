"""What a pickle would make, found out before it is unpickled: how deep, how large, and of which
globals.

A pickle can refer to an object again for two bytes, so 60 references make a tuple with 2**60
leaves. It fits in memory, but hashing, comparing, printing or walking it does not end, and no
signal interrupts C code that does. The check reads opcodes only, in time linear in the size of the
pickle.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["check_pickle"]

_MOST_DEPTH = 100  # of containers inside each other
_SHARED_NBYTES = 4 * 2**20  # repeated objects may add this much,
_SHARED_RATIO = 16  # or so many times the pickle's size, whichever is more

_LEAVES = {
    *(
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
    ),
    *("FLOAT", "BINFLOAT", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("STRING", "SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    *("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "GLOBAL"),
}
# How many objects on the stack become one. None is all above the mark.
_TAKES: dict[str, int | None] = {
    **{"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None, "LIST": None, "DICT": None},
    **{"STACK_GLOBAL": 2, "REDUCE": 2, "NEWOBJ": 2, "NEWOBJ_EX": 3, "BINPERSID": 1},
}
_CALLS = ("REDUCE", "NEWOBJ", "NEWOBJ_EX")
# How many objects on the stack go into the one below them.
_CHANGES: dict[str, int | None] = {
    "APPEND": 1,
    "SETITEM": 2,
    "BUILD": 1,
    "APPENDS": None,
    "SETITEMS": None,
}


@dataclass
class _Object:
    """An object of which only the size is known.

    Attributes:
        nbytes: of it and what is inside, each repetition counted.
        depth: of the containers inside it.
        text: of a string; module and name of a global, with a space between them.
        is_shared: whether it has been referred to again.
    """

    nbytes: int
    depth: int = 0
    text: str | None = None
    is_shared: bool = False


def check_pickle(content: bytes, *, names: Collection[str], calls: Collection[str]) -> None:
    """Refuses a pickle that would make more than its own size justifies.

    Args:
        content: the pickle.
        names: globals that it may name, as "module name".
        calls: those of them that it may call.

    Raises:
        pickle.UnpicklingError: it nests too deeply, repeats too much, changes an object that it has
            referred to, or has an opcode or a global that plain data does not need.
        ValueError, IndexError, KeyError: it is not a pickle.
    """
    most = max(_SHARED_NBYTES, _SHARED_RATIO * len(content))
    shared_nbytes = 0
    stack: list[_Object] = []
    marks: list[int] = []
    memo: dict[int, _Object] = {}

    def taken(count: int | None) -> list[_Object]:
        begin = marks.pop() if count is None else len(stack) - count
        if begin < (marks[-1] if marks else 0):
            raise _refused("takes more than there is")
        objects = stack[begin:]
        del stack[begin:]
        return objects

    def put_into(target: _Object, parts: list[_Object]) -> None:
        target.nbytes += sum(part.nbytes for part in parts)
        target.depth = max([target.depth, *(part.depth + 1 for part in parts)])
        if target.depth > _MOST_DEPTH:
            raise _refused(f"nests deeper than {_MOST_DEPTH}")

    for code, argument, position in pickletools.genops(content):
        name = code.name
        if name in _LEAVES:
            if name == "GLOBAL" and argument not in names:
                raise _refused(f"names {str(argument)[:100]}, which has no place in it")
            text = argument if isinstance(argument, str) else None
            nbytes = len(argument) if isinstance(argument, str | bytes) else _nbytes(argument)
            stack.append(_Object(1 + nbytes, text=text))
        elif name in _TAKES:
            parts = taken(_TAKES[name])
            if name in _CALLS and parts[0].text not in calls:
                raise _refused(f"calls {str(parts[0].text)[:100]}, which has no place in it")
            made = _Object(1)
            if name == "STACK_GLOBAL":
                made.text = f"{parts[0].text} {parts[1].text}"
                if made.text not in names:
                    raise _refused(f"names {made.text[:100]}, which has no place in it")
            put_into(made, parts)
            stack.append(made)
        elif name in _CHANGES:
            parts = taken(_CHANGES[name])
            if stack[-1].is_shared:
                # What holds it already would become larger too, unnoticed.
                raise _refused("changes an object that it has referred to")
            put_into(stack[-1], parts)
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            found = memo[int(str(argument))]
            found.is_shared = True
            shared_nbytes += found.nbytes
            if shared_nbytes > most:
                raise _refused(f"repeats more than {most} bytes")
            stack.append(found)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            number = len(memo) if name == "MEMOIZE" else int(str(argument))
            # The unpickler's table of references is as long as the largest number in it.
            if number > len(content):
                raise _refused(f"numbers an object {number} in {len(content)} bytes")
            memo[number] = stack[-1]
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise _refused(f"has the opcode {name} at {position}")


def _nbytes(number: object) -> int:
    return number.bit_length() // 8 if isinstance(number, int) else 8


def _refused(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"the pickle {what}")
