"""Every error has one shape, and is also what FSDP2 raises."""

from __future__ import annotations

import shardgrad.errors as errors
from shardgrad.errors import OptionError, ShardgradError


def test_a_message_has_its_rows_in_order_without_those_that_say_nothing() -> None:
    error = OptionError("it broke", expected="a", got="b", where="rank 0", fix="c")
    assert str(error).splitlines() == [
        "it broke",
        "  expected: a",
        "  got:      b",
        "  where:    rank 0",
        "  try:      c",
    ]
    assert str(OptionError("it broke", fix="c")) == "it broke\n  try:      c"


def test_every_exported_error_is_one_of_ours_and_a_builtin() -> None:
    classes = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]
    assert len(classes) > 15
    for cls in classes:
        assert issubclass(cls, ShardgradError)
        if cls is not ShardgradError:
            builtins = {base for base in cls.__mro__ if base.__module__ == "builtins"}
            assert builtins & {
                ValueError,
                TypeError,
                RuntimeError,
                NotImplementedError,
                AssertionError,
                ImportError,
            }, cls


def test_all_errors_are_exported() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    defined = {each.__name__ for each in classes if each.__module__ == errors.__name__}
    assert defined == {name for name in errors.__all__ if name.endswith(("Error", "Warning"))}
