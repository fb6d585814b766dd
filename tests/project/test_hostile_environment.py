"""What lies around a program does not get into it, and what it shows does not act."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stdout

import pytest
import torch
from rich.console import Console

from shardgrad.errors import DeviceError
from shardgrad.ops import library
from shardgrad.programs.train.display import Display

EVIL = "runs/\x1b]0;boo\x07[red]\u202ex[/red]"


def test_a_gpu_without_kernels_is_told_once_with_what_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(library, "has_kernels", lambda device_type: False)
    library.check_kernels.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"CUDA kernels were not built.* PATH: pip install"):
        library.check_kernels("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device_type in ("cpu", "cuda"):
            library.check_kernels(device_type)
    library.check_kernels.cache_clear()


def test_a_gpu_that_is_older_than_the_kernels_is_refused_before_one_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("is_available", True), ("get_device_name", "Tesla T4")):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(library, "has_kernels", lambda device_type: True)
    for built in (True, False):
        library.check_kernels.cache_clear()
        monkeypatch.setattr(library, "_is_launched", lambda built=built: built)
        if built:  # with TORCH_CUDA_ARCH_LIST
            library.check_kernels("cuda")
    with pytest.raises(DeviceError, match="not built for Tesla T4") as caught:
        library.check_kernels("cuda")
    assert "TORCH_CUDA_ARCH_LIST=7.5 pip install" in str(caught.value)
    library.check_kernels.cache_clear()


def test_kernels_are_found_where_the_library_has_brought_them() -> None:
    assert library.has_kernels("cpu") == (library.backend() == "compiled")
    assert not library.has_kernels("xpu")


def test_what_a_run_shows_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    Display(1, EVIL).note(EVIL)
    stream = io.StringIO()
    console = Console(file=stream, width=100, force_terminal=True, color_system=None)
    with redirect_stdout(stream), Display(1, EVIL, console=console) as display:
        display.note(EVIL)
        display.stepped(1)
    for shown in (capsys.readouterr().out, stream.getvalue()):
        assert not {"\x07", "\u202e"} & set(shown)
        assert "\x1b]" not in shown
        assert "runs/\\x1b]0;boo\\x07[red]\\u202ex[/red]" in shown
