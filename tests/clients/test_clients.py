"""Programs of packages end in the bits of FSDP2; `python -m tests.clients` runs more of them."""

from __future__ import annotations

import pytest

from benchmarks.records import read
from tests.clients.__main__ import PAGE, RECORDS, written
from tests.clients.catalogue import CLIENTS
from tests.clients.trainers import in_mixed_precision, with_the_plugin_in_float64
from tests.support.ranks import Ranks
from tests.support.under_patch import (
    STARTUP_S,
    close_under_both,
    same_bits_under_both,
    skip_without,
)

# Whichever test is first, imports the framework on both ranks.
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", [name for name, each in CLIENTS.items() if each.is_tested])
def test_a_program_written_for_fsdp2_equals_it(client_ranks: Ranks, name: str) -> None:
    client = CLIENTS[name]
    for package in client.packages:
        skip_without(package)
    client_ranks.run(same_bits_under_both, client.program, timeout_s=STARTUP_S, **client.options)


def test_accelerates_plugin_with_tied_weights_is_close_to_fsdp2(client_ranks: Ranks) -> None:
    """Embedding and head are one unit of two modules, which FSDP2 reduces twice and this engine
    once: another order of the same sum. Twelve digits of float64 are left after some thousand
    roundings.
    """
    skip_without("accelerate")
    client_ranks.run(
        close_under_both,
        with_the_plugin_in_float64,
        tied=True,
        tolerance=1e-12,
        timeout_s=STARTUP_S,
    )


def test_accelerates_mixed_precision_differs_by_the_rounding_of_sums(client_ranks: Ranks) -> None:
    """Its own policy reduces in bfloat16, where FSDP2 rounds a sum once more: 2^-9 of each
    gradient.

    Two steps move a weight by 2e-2, and 2^-9 of that is 4e-5; the tolerance is five times as much.
    """
    skip_without("accelerate")
    client_ranks.run(
        close_under_both, in_mixed_precision, None, tolerance=2e-4, timeout_s=STARTUP_S
    )


def test_the_page_is_made_of_a_record_in_which_nearly_all_end_in_the_same_bits() -> None:
    *_, record = read(RECORDS)
    assert PAGE.read_text(encoding="utf-8") == written(record)
    verdicts = {name: each["verdict"] for name, each in record["summary"].items()}
    assert len(verdicts.keys() & CLIENTS.keys()) >= 40
    others = {name for name, verdict in verdicts.items() if verdict != "same bits"}
    assert others == {"Accelerate: bf16"}, "which rounds sums to bfloat16 with FSDP2"
