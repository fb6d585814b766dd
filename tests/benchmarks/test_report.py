"""The report of records: its page in a browser where there is one, and as text everywhere."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.comparison import Measured, Outcome
from benchmarks.engines.summary import record_of
from benchmarks.engines.task import Length, Task
from benchmarks.engines.trace import LANES, Observation, Span, Traffic
from benchmarks.measure import Cost
from benchmarks.pictures import draw
from benchmarks.records import RESULTS, Record, read
from benchmarks.report import render
from benchmarks.tables import table_of, words
from tests.support.processes import run

NAMES = ("fsdp2", "shardgrad", "shardgrad-graphed", "fsdp2-keep", "fsdp1", "ddp", "compute", "collectives")
BROWSERS = (
    "chromium",
    "chromium-browser",
    "chromium-headless-shell",
    "chrome-headless-shell",
    "google-chrome",
)
BROWSER = os.environ.get("SHARDGRAD_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
TIMEOUT_S = 100
LEAST_FONT_PX = 12

needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser: install {BROWSERS[0]}, or name one in SHARDGRAD_BROWSER"
)


def make_record(spans: int = 40, *, evil: str = "", task: Task | None = None) -> dict[str, Any]:
    """A record of many engines, with `evil` wherever text comes from outside."""
    outcome = Outcome(left_out={"deepspeed-1": f"not installed {evil}"})
    outcome.hardware = {
        "ops_backend": f"compiled{evil}",
        "matmul_flops_per_s": 1e9,
        "model": {"numel": 10, "active_numel": 10, "units": 2, "attention_numel": 0, "vocab_size": 256},
    }
    for number, name in enumerate(NAMES, start=1):
        timeline = [Span(LANES[i % len(LANES)], f"aten::op{i}{evil}", 10.0 * i, 8.0) for i in range(spans)]
        observation = Observation(100, 2**26, traffic={"all-gather": Traffic(3, 1000)}, timeline=timeline)
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


def browse(page: str, folder: Path, script: str, *, width: int = 1200) -> Any:
    """Opens a page and returns what `script`, the body of a function, returned when all was loaded."""
    probe = (
        "<script>window.addEventListener('load', () => setTimeout(() => {"
        f"const answer = (() => {{ {script} }})();"
        "const out = document.createElement('pre'); out.id = 'probe';"
        "out.textContent = JSON.stringify(answer); document.body.append(out); }, 50));</script>"
    )
    done = open_in_browser(
        page.replace("</body>", probe + "</body>"),
        folder,
        "--dump-dom",
        "--virtual-time-budget=3000",
        f"--window-size={width},800",
    )
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:] + done.stdout[-2000:]
    return json.loads(html.unescape(found[1]))


def picture_s(page: str, folder: Path) -> float:
    """Seconds from the start of a browser until it has drawn a page, and left."""
    picture = folder / "page.png"
    picture.unlink(missing_ok=True)
    began_s = time.perf_counter()
    open_in_browser(page, folder, f"--screenshot={picture}", "--window-size=390,844")
    assert picture.read_bytes().startswith(b"\x89PNG")
    return time.perf_counter() - began_s


def open_in_browser(page: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    always = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    return run(
        [str(BROWSER), *always, *options, path.as_uri()],
        timeout_s=TIMEOUT_S,
    )


@needs_browser
@pytest.mark.parametrize("width", [360, 390, 1200])
def test_a_phone_shows_it_without_scrolling_sideways_and_in_letters_that_can_be_read(
    tmp_path: Path, width: int
) -> None:
    # In a frame, since a browser's window has a least width.
    page = page_of(make_record(), make_record(task=Task(precision="bf16")))
    text = json.dumps(page).replace("<", "\\u003c")
    frame = f'<!doctype html><body><iframe width="{width}" height="844"></iframe></body>'
    script = f"""
        const frame = document.querySelector('iframe');
        frame.contentDocument.open(); frame.contentDocument.write({text});
        frame.contentDocument.close();
        const inner = frame.contentDocument.documentElement, sizes = [];
        for (const one of inner.querySelectorAll('body *'))
            if ([...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())
                && one.getClientRects().length)
                sizes.push(parseFloat(frame.contentWindow.getComputedStyle(one).fontSize));
        const images = [...inner.querySelectorAll('img')].map((one) => one.getBoundingClientRect());
        return {{view: frame.contentWindow.innerWidth, page: inner.scrollWidth, font: Math.min(...sizes),
                 images: images.map((one) => [one.width, one.height])}};
    """
    seen = browse(frame, tmp_path, script)
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
    seen = browse(
        page_of(record),
        tmp_path,
        """
        return {hacked: window.hacked ?? null, images: document.images.length, title:
                document.querySelector('h2').textContent};
        """,
    )
    assert seen == {
        "hacked": None,
        "images": 2,
        "title": f"tiny{evil}, fp32, 2 ranks, 8 x 128 tokens each",
    }


@needs_browser
def test_a_large_report_opens_in_less_than_two_seconds(tmp_path: Path) -> None:
    """Until there is a picture of it, beyond what a browser takes to start and to show an empty page."""
    page = page_of(*(make_record(2000) for _ in range(3)))
    took_s = min(picture_s(page, tmp_path) for _ in range(3)) - min(
        picture_s("<!doctype html>", tmp_path) for _ in range(3)
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
        Task(), Length(), ["fsdp2"], Outcome(left_out={"fsdp2": "no & never"}), make_record()["environment"]
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
def test_every_record_that_is_kept_can_be_shown(path: Path) -> None:
    if path.name == "drills.jsonl":
        with pytest.raises(ValueError, match="is not a record of a benchmark: leave the file out"):
            list(read(path))
        return
    records = list(read(path))
    assert all(table_of(record).rows for record in records)
    assert "</html>" in page_of(*records)


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
    assert all('tabindex="0"' in tag for tag in re.findall(r'<(?:pre|div class="scroll")[^>]*>', page))
    assert "color-scheme: light dark" in page
