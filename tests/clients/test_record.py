"""The page *Clients* is made of its record, which has at least forty programs."""

from __future__ import annotations

from benchmarks.records import read
from tests.clients.__main__ import PAGE, RECORDS, written
from tests.clients.catalogue import CLIENTS


def test_the_page_is_made_of_the_record() -> None:
    assert PAGE.read_text(encoding="utf-8") == written([*read(RECORDS)][-1])


def test_the_record_has_forty_programs_and_nearly_all_end_in_the_same_bits() -> None:
    found = [*read(RECORDS)][-1]["summary"]
    assert list(found) == [each.name for each in CLIENTS if each.name in found]
    assert len(found) >= 40
    others = {name for name, each in found.items() if each["verdict"] != "same bits"}
    assert others == {"Accelerate: bf16"}, "which rounds sums to bfloat16 with FSDP2"
