"""Draws the timelines of `docs/explanation/`: `python docs/pictures.py`.

Each picture is data: lanes, boxes in them, arrows between boxes. A solid arrow is a wait that the
program has; the red, dashed one is the wait it lacks. A frame encloses what a graph holds. The
ground is white on dark pages too.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).with_name("explanation") / "pictures"

LANE_HEIGHT, BOX_HEIGHT, LABEL_WIDTH, UNIT, TOP, MARGIN = 64, 34, 150, 56, 66, 16
COLOURS = {
    "plain": "#cfd8e3",
    "write": "#ffe0a3",
    "read": "#bfe3c4",
    "late": "#e3e3e3",
    "free": "#e2cdf2",
}
INK, WAIT, MISSING = "#1b1f24", "#4d6480", "#d1242f"


@dataclass(frozen=True)
class Box:
    """Work on a stream: it begins at `begin` and lasts `length`, in units of the picture."""

    lane: int
    begin: float
    length: float
    text: str
    kind: str = "plain"


@dataclass(frozen=True)
class Arrow:
    """The second box waits for the first, or should."""

    first: str
    then: str
    missing: bool = False


@dataclass(frozen=True)
class Frame:
    """A stretch of time on neighboring lanes."""

    first_lane: int
    last_lane: int
    begin: float
    end: float
    text: str


@dataclass(frozen=True)
class Picture:
    """One timeline; boxes are named by keys. `wrong` says what the missing wait leads to."""

    name: str
    title: str
    lanes: tuple[str, ...]
    boxes: dict[str, Box]
    arrows: tuple[Arrow, ...]
    wrong: str = ""
    frame: Frame | None = None


PICTURES = [
    Picture(
        "hook_on_a_side_stream",
        "The reduction waits for the default stream; the hook runs on the stream its node was "
        "created on",
        ("default stream", "reduce stream", "side stream"),
        {
            "backward": Box(0, 0, 2, "backward", "plain"),
            "rest": Box(0, 2.1, 2.4, "more of backward", "plain"),
            "late": Box(2, 2.4, 2.2, "(busy)", "late"),
            "hook": Box(2, 4.7, 2.6, "hook: bucket = grad", "write"),
            "reduce": Box(1, 4.9, 2.6, "reduce bucket", "read"),
        },
        (Arrow("backward", "late"), Arrow("rest", "reduce"), Arrow("hook", "reduce", missing=True)),
        "the bucket of the previous step is sent",
    ),
    Picture(
        "only_the_current_stream",
        "Two streams fill one bucket; the reduction waits for the one that filled it up",
        ("producer 0", "reduce stream", "producer 1"),
        {
            "second": Box(0, 3.0, 2.2, "second half", "write"),
            "late": Box(2, 0, 3.6, "(busy)", "late"),
            "first": Box(2, 3.7, 3.4, "first half, launched earlier", "write"),
            "reduce": Box(1, 5.5, 2.6, "reduce both halves", "read"),
        },
        (Arrow("second", "reduce"), Arrow("first", "reduce", missing=True)),
        "half of the message is old",
    ),
    Picture(
        "refill_after_the_flush",
        "The reader waits for both producers; before the refill only the producer that flushed "
        "waits",
        ("flusher", "other producer", "reduce stream"),
        {
            "fill a": Box(0, 0, 1.7, "fill bucket 0", "write"),
            "fill b": Box(1, 0, 1.7, "fill bucket 0", "write"),
            "late": Box(2, 2.0, 2.2, "(busy)", "late"),
            "reduce": Box(2, 4.3, 2.0, "reduce bucket 0", "read"),
            "again b": Box(1, 3.5, 2.0, "refill bucket 0", "write"),
            "again a": Box(0, 6.7, 1.9, "refill bucket 0", "write"),
        },
        (
            Arrow("fill a", "late"),
            Arrow("fill b", "late"),
            Arrow("reduce", "again a"),
            Arrow("reduce", "again b", missing=True),
        ),
        "half of the message is of a later round",
    ),
    Picture(
        "freed_early",
        "A buffer is freed while the reduction still reads it, and the next tensor gets its memory",
        ("default stream", "reduce stream"),
        {
            "fill": Box(0, 0, 1.9, "fill buffer", "write"),
            "free": Box(0, 2.2, 1.1, "free", "free"),
            "next": Box(0, 3.5, 3.0, "next tensor, same bytes", "write"),
            "late": Box(1, 2.2, 2.3, "(busy)", "late"),
            "reduce": Box(1, 4.6, 2.3, "reduce buffer", "read"),
        },
        (Arrow("fill", "late"), Arrow("reduce", "next", missing=True)),
        "another tensor's values are sent",
    ),
    Picture(
        "one_captured_step",
        "One replay: forks and joins are inside the graph, and only one stream leaves it",
        ("caller", "compute", "all-gather", "reduce"),
        {
            "before": Box(0, 0, 1.1, "(before)", "late"),
            "copy": Box(1, 1.0, 1.1, "copy in"),
            "begin": Box(1, 2.5, 0.8, "begin"),
            "gather a": Box(2, 3.3, 1.3, "gather a", "read"),
            "forward a": Box(1, 4.6, 1.4, "forward a"),
            "gather b": Box(2, 4.8, 1.3, "gather b", "read"),
            "forward b": Box(1, 6.1, 1.4, "forward b"),
            "backward b": Box(1, 7.6, 1.9, "backward b", "write"),
            "gather again": Box(2, 6.9, 1.3, "gather a", "read"),
            "backward a": Box(1, 9.6, 1.9, "backward a", "write"),
            "reduce b": Box(3, 9.6, 1.6, "reduce b", "read"),
            "reduce a": Box(3, 11.6, 1.6, "reduce a", "read"),
            "update": Box(1, 13.2, 2.3, "clip, update, zero", "write"),
            "after": Box(0, 15.9, 1.5, "read loss", "late"),
        },
        (
            Arrow("before", "copy"),
            Arrow("begin", "gather a"),
            Arrow("gather a", "forward a"),
            Arrow("gather b", "forward b"),
            Arrow("forward a", "gather again"),
            Arrow("gather again", "backward a"),
            Arrow("backward b", "reduce b"),
            Arrow("backward a", "reduce a"),
            Arrow("reduce a", "update"),
            Arrow("update", "after"),
        ),
        frame=Frame(1, 3, 2.3, 15.7, "the graph"),
    ),
]


def text(x: float, y: float, words: str, **style: str) -> str:
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(words)}</text>'


def left_of(box: Box) -> float:
    return LABEL_WIDTH + UNIT * box.begin


def middle_of(lane: int) -> float:
    return TOP + LANE_HEIGHT * (lane + 0.5)


def draw_lane(number: int, name: str, width: float) -> list[str]:
    y = middle_of(number)
    return [
        text(MARGIN, y + 5, name, font_weight="bold"),
        f'<line x1="{LABEL_WIDTH - 8}" y1="{y}" x2="{width - MARGIN}" y2="{y}" stroke="#9aa7b5"/>',
    ]


def draw_frame(frame: Frame) -> list[str]:
    x, y = LABEL_WIDTH + UNIT * frame.begin, TOP + LANE_HEIGHT * frame.first_lane + 2
    width, height = (
        UNIT * (frame.end - frame.begin),
        LANE_HEIGHT * (frame.last_lane - frame.first_lane + 1),
    )
    return [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="10" '
        f'fill="#f5f7fa" '
        f'stroke="{WAIT}" stroke-dasharray="3 4"/>'
    ]


def draw_box(box: Box) -> list[str]:
    x, y, width = left_of(box), middle_of(box.lane) - BOX_HEIGHT / 2, UNIT * box.length
    return [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BOX_HEIGHT}" rx="4" '
        f'fill="{COLOURS[box.kind]}" stroke="{INK}"/>',
        text(x + width / 2, y + BOX_HEIGHT / 2 + 5, box.text, text_anchor="middle"),
    ]


def draw_arrow(first: Box, then: Box, *, missing: bool) -> list[str]:
    down = then.lane > first.lane
    x1 = left_of(first) + UNIT * first.length - 6
    x2 = left_of(then) + 8
    y1 = middle_of(first.lane) + (BOX_HEIGHT / 2 if down else -BOX_HEIGHT / 2)
    y2 = middle_of(then.lane) + (-BOX_HEIGHT / 2 if down else BOX_HEIGHT / 2)
    color, dashes = (MISSING, ' stroke-dasharray="7 5"') if missing else (WAIT, "")
    head = "missing" if missing else "wait"
    return [
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
        f'stroke-width="2.5"{dashes} marker-end="url(#{head})"/>'
    ]


def marker(name: str, color: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{color}"/></marker>'
    )


def legend(y: float, picture: Picture) -> list[str]:
    x = LABEL_WIDTH
    lines = [
        f'<line x1="{x}" y1="{y}" x2="{x + 40}" y2="{y}" stroke="{WAIT}" stroke-width="2.5" '
        f'marker-end="url(#wait)"/>',
        text(x + 50, y + 5, "waits"),
    ]
    if picture.wrong:
        lines += [
            f'<line x1="{x + 120}" y1="{y}" x2="{x + 160}" y2="{y}" stroke="{MISSING}" '
            f'stroke-width="2.5" '
            f'stroke-dasharray="7 5" marker-end="url(#missing)"/>',
            text(x + 170, y + 5, f"should wait; without it, {picture.wrong}", fill=MISSING),
        ]
    if picture.frame is not None:
        lines += [
            f'<rect x="{x + 120}" y="{y - 8}" width="40" height="16" rx="5" fill="#f5f7fa" '
            f'stroke="{WAIT}" '
            f'stroke-dasharray="3 4"/>',
            text(x + 170, y + 5, picture.frame.text),
        ]
    return lines


def draw(picture: Picture) -> str:
    """Returns a picture as SVG."""
    boxes = picture.boxes.values()
    end = max(left_of(box) + UNIT * box.length for box in boxes) + MARGIN
    width, height = max(end, 720.0), TOP + LANE_HEIGHT * len(picture.lanes) + 42
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" '
        f'height="{height}" font-family="sans-serif" font-size="14" fill="{INK}">',
        f"<title>{escape(picture.title)}</title>",
        f"<defs>{marker('wait', WAIT)}{marker('missing', MISSING)}</defs>",
        f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#ffffff"/>',
        text(MARGIN, 28, picture.title, font_size="15"),
        text(width - MARGIN, 52, "time →", text_anchor="end", fill=WAIT),
    ]
    if picture.frame is not None:
        lines += draw_frame(picture.frame)
    for number, name in enumerate(picture.lanes):
        lines += draw_lane(number, name, width)
    for box in boxes:
        lines += draw_box(box)
    for arrow in picture.arrows:
        lines += draw_arrow(
            picture.boxes[arrow.first], picture.boxes[arrow.then], missing=arrow.missing
        )
    lines += legend(height - 24, picture)
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for picture in PICTURES:
        (FOLDER / f"{picture.name}.svg").write_text(draw(picture), encoding="utf-8")
