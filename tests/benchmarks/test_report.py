"""The report of records: its page in a browser where there is one, and as text everywhere."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks.engines.comparison import Measured, Outcome
from benchmarks.engines.summary import record_of
from benchmarks.engines.task import Length, Task
from benchmarks.engines.trace import LANES, Observation, Span, Traffic
from benchmarks.measure import Cost
from benchmarks.pictures import draw
from benchmarks.records import RESULTS, Record, read
from benchmarks.report import render, show
from benchmarks.tables import table_of, words

NAMES = (
    "fsdp2",
    "shardgrad",
    "shardgrad-graphed",
    "fsdp2-keep",
    "fsdp1",
    "ddp",
    "compute",
    "collectives",
)
BROWSERS = (
    "chromium",
    "chromium-browser",
    "chromium-headless-shell",
    "chrome-headless-shell",
    "google-chrome",
)
BROWSER = os.environ.get("SHARDGRAD_BROWSER") or next(
    filter(None, map(shutil.which, BROWSERS)), None
)
TIMEOUT_S = 100
LEAST_FONT_PX = 12

try:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import sync_playwright
except ImportError:
    BROWSER = None

needs_browser = pytest.mark.skipif(
    BROWSER is None,
    reason=f"needs the extra 'browser', and {BROWSERS[0]} or one that SHARDGRAD_BROWSER names",
)


def make_record(spans: int = 40, *, evil: str = "", task: Task | None = None) -> dict[str, Any]:
    """A record of many engines, with `evil` wherever text comes from outside."""
    outcome = Outcome(left_out={"deepspeed-1": f"not installed {evil}"})
    outcome.hardware = {
        "ops_backend": f"compiled{evil}",
        "matmul_flops_per_s": 1e9,
        "model": {
            "numel": 10,
            "active_numel": 10,
            "units": 2,
            "attention_numel": 0,
            "vocab_size": 256,
        },
    }
    for number, name in enumerate(NAMES, start=1):
        timeline = [
            Span(LANES[i % len(LANES)], f"aten::op{i}{evil}", 10.0 * i, 8.0) for i in range(spans)
        ]
        observation = Observation(
            100, 2**26, traffic={"all-gather": Traffic(3, 1000)}, timeline=timeline
        )
        costs = [Cost(number / 100 * (1 + i / 100), 0.01, 1.0, 1e6) for i in range(40)]
        outcome.measured[name] = Measured(costs, rounds=[*range(40)], observations=[observation])
    started = {
        "git": "0123456789abcdef",
        "git_is_clean": True,
        "torch": f"2.13.0{evil}",
        "cpu": f"a processor{evil}",
        "cores": 2,
        "load_average_1min": 0.1,
        "time": "now",
    }
    names = [*NAMES, "deepspeed-1"]
    return record_of(task or Task(), Length(), names, outcome, started)


def page_of(*records: Record) -> str:
    return render(records, [draw(record) for record in records])


@contextmanager
def browsed(page: str, folder: Path, **options: Any) -> Iterator[Any]:
    """Opens a page, and gives what drives it.

    Args:
        page: HTML.
        folder: to put it into.
        **options: of the browser's context, such as `viewport` and `color_scheme`.
    """
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        try:
            opened = browser.new_page(**options)
            opened.set_default_timeout(TIMEOUT_S * 1e3)
            opened.goto(path.as_uri())
            yield opened
        finally:
            browser.close()


@needs_browser
@pytest.mark.parametrize("width", [360, 390, 1200])
def test_a_phone_shows_it_without_scrolling_sideways_and_in_letters_that_can_be_read(
    tmp_path: Path, width: int
) -> None:
    script = """() => {
        const inner = document.documentElement, sizes = [];
        for (const one of inner.querySelectorAll('body *'))
            if ([...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())
                && one.getClientRects().length)
                sizes.push(parseFloat(getComputedStyle(one).fontSize));
        const images = [...inner.querySelectorAll('img')].map((one) => one.getBoundingClientRect());
        return {view: window.innerWidth, page: inner.scrollWidth, font: Math.min(...sizes),
                images: images.map((one) => [one.width, one.height])};
    }"""
    page = page_of(make_record(), make_record(task=Task(precision="bf16")))
    with browsed(page, tmp_path, viewport={"width": width, "height": 844}) as opened:
        seen = opened.evaluate(script)
    assert seen["view"] == width
    assert seen["page"] <= width
    assert seen["font"] >= LEAST_FONT_PX
    assert len(seen["images"]) == 4  # of each record the charts, and a timeline
    assert all(wide > 0.8 * min(width, 1000) and high > 50 for wide, high in seen["images"])


def test_what_records_say_is_escaped_and_drawn_as_it_is() -> None:
    evil = "</script><script>x</script><img src=x onerror=x>$\\frac{$"
    page = page_of(make_record(evil=evil, task=Task(preset=f"tiny{evil}")))
    assert evil not in page
    assert "&lt;script&gt;x&lt;/script&gt;" in page


@needs_browser
def test_whatever_records_say_stays_text(tmp_path: Path) -> None:
    evil = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\"'&lt;"
    record = make_record(evil=evil, task=Task(preset=f"tiny{evil}"))
    with browsed(page_of(record), tmp_path) as opened:
        seen = opened.evaluate(
            "() => ({hacked: window.hacked ?? null, images: document.images.length,"
            "        title: document.querySelector('h2').textContent})"
        )
    assert seen == {
        "hacked": None,
        "images": 2,
        "title": f"tiny{evil}, fp32, 2 ranks, 8 x 128 tokens each",
    }


@needs_browser
def test_a_large_report_opens_in_less_than_two_seconds(tmp_path: Path) -> None:
    """Until there is a picture of it, beyond what a browser takes for an empty page."""
    page = page_of(*(make_record(2000) for _ in range(3)))
    (tmp_path / "large.html").write_text(page, encoding="utf-8")
    (tmp_path / "empty.html").write_text("<!doctype html>", encoding="utf-8")
    with browsed(page, tmp_path, viewport={"width": 390, "height": 844}) as opened:

        def picture_s(name: str) -> float:
            began_s = time.perf_counter()
            opened.goto((tmp_path / name).as_uri())
            assert opened.screenshot().startswith(b"\x89PNG")
            return time.perf_counter() - began_s

        took_s = min(picture_s("large.html") for _ in range(3)) - min(
            picture_s("empty.html") for _ in range(3)
        )
    if took_s >= 2 and os.getloadavg()[0] > (os.cpu_count() or 1):
        pytest.skip(f"the machine is busy, so {took_s:.1f} s say nothing about the page")
    assert took_s < 2


def test_the_report_asks_for_nothing_from_elsewhere() -> None:
    page = page_of(make_record())
    outside = r"""(?:src|href)\s*=\s*(?!["']?(?:\#|data:image/png;base64,))"""
    assert not re.search(outside, page)
    assert "<script" not in page
    assert not re.search(r"url\(|@import|https?:", page)
    assert "default-src 'none'" in page


def test_a_record_without_any_number_is_still_a_report() -> None:
    record = record_of(
        Task(),
        Length(),
        ["fsdp2"],
        Outcome(left_out={"fsdp2": "no & never"}),
        make_record()["environment"],
    )
    page = page_of(record)
    assert "no &amp; never" in page
    assert "<img" not in page


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("wall_s", 0.01234, "12.34 ms"),
        ("wall_s", {"median": 2.5, "quartiles": [2.25, 2.75]}, "2.5 (2.25 .. 2.75) s"),
        ("host_s_per_unit", 12e-6, "12 µs"),
        ("peak_nbytes", 3 * 2**19, "1.5 MiB"),
        ("bytes_per_s", 2.5e9, "2.5 GB/s"),
        ("ratio_to_base", {"median": 0.5, "quartiles": [0.4, 0.6]}, "0.5 (0.4 .. 0.6)"),
        ("tokens_per_s", 12345.6, "12,346"),
        ("mfu", 0.1234, "12.3%"),
        ("calls", 370, "370"),
        ("collectives", {"all-gather": {"count": 3, "nbytes": 2**20}}, "3, 1.00"),
    ],
)
def test_the_end_of_a_fields_name_tells_its_unit(field: str, value: Any, expected: str) -> None:
    assert words(field, value) == expected


def test_rows_are_the_innermost_dictionaries_of_a_summary() -> None:
    record = make_record(spans=0) | {"benchmark": "kernels", "config": {"rounds": 2}}
    record["summary"] = {"pack": {"copy": {"wall_s": 1.0}, "compiled": {"wall_s": 2.0, "calls": 3}}}
    table = table_of(record)
    assert table.title == "kernels: rounds 2"
    assert table.headings == ["wall time", "calls"]
    assert table.rows == {"pack, copy": ["1 s", ""], "pack, compiled": ["2 s", "3"]}


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.jsonl")), ids=lambda path: path.stem)
def test_every_record_that_is_kept_can_be_shown(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if path.name == "drills.jsonl":
        with pytest.raises(ValueError, match="is not a record of a benchmark: leave the file out"):
            list(read(path))
        return
    records = list(read(path))
    assert all(shown(record, capsys) and table_of(record).rows for record in records)
    assert "</html>" in page_of(*records)


def shown(record: Record, capsys: pytest.CaptureFixture[str]) -> str:
    """What the terminal shows of a record; nothing of it is cut off."""
    show(record)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    return text


def test_a_table_on_a_terminal_has_all_its_columns_in_a_hundred_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, table = shown(make_record(), capsys), table_of(make_record())
    assert all(cell in text for cells in table.rows.values() for cell in (*cells, *table.headings))


def test_a_report_says_first_what_words_mean_and_then_how_the_engine_compares() -> None:
    page = page_of(make_record())
    ratio = make_record()["summary"]["shardgrad"]["ratio_to_base"]
    sentence = f"shardgrad takes {ratio['median']:.2f} of FSDP2&#39;s step; quartiles"
    assert page.index("What the words mean") < page.index("<h2>") < page.index(sentence)


def test_the_markup_has_what_a_screen_reader_needs() -> None:
    page = page_of(make_record(), make_record(task=Task(precision="bf16")))
    assert "<html lang=" in page
    assert page.count("<main>") == page.count("</main>") == 1
    assert not re.search(r"<th(?![a-z])(?! scope=)", page), "a header says what it is the header of"
    assert '<th scope="col"></th>' not in page
    assert all("alt=" in tag for tag in re.findall(r"<img[^>]*>", page))
    assert all(
        'tabindex="0"' in tag for tag in re.findall(r'<(?:pre|div class="scroll")[^>]*>', page)
    )
    assert "color-scheme: light dark" in page


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", [{"width": 1280, "height": 900}, {"width": 390, "height": 844}])
def test_axe_finds_nothing_that_keeps_people_out(
    tmp_path: Path, scheme: Literal["light", "dark"], screen: Any
) -> None:
    page = page_of(make_record(), make_record(task=Task(precision="bf16")))
    # The page's own policy would keep axe out, too.
    with browsed(page, tmp_path, viewport=screen, color_scheme=scheme, bypass_csp=True) as opened:
        found = Axe().run(opened)
    assert found.violations_count == 0, found.generate_report()
    assert len(found.response["passes"]) > 20
