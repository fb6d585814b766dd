"""Programs of packages end in the bits of FSDP2; `python -m tests.clients` runs more of them."""

from __future__ import annotations

import pytest

from tests.clients.catalogue import CLIENTS, Client
from tests.clients.programs import same_bits
from tests.support.ranks import Ranks
from tests.support.under_patch import STARTUP_S, close_under_both, skip_without

# Whichever test is first, imports the framework on both ranks.
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    "client", [each for each in CLIENTS if each.is_tested], ids=lambda c: c.name
)
def test_a_program_written_for_fsdp2_equals_it(client_ranks: Ranks, client: Client) -> None:
    for package in client.packages:
        skip_without(package)
    client_ranks.run(same_bits, client.program, client.options, timeout_s=STARTUP_S)


def test_accelerates_plugin_with_tied_weights_is_close_to_fsdp2(client_ranks: Ranks) -> None:
    """Embedding and head are one unit of two modules, which FSDP2 reduces twice and this engine
    once: another order of the same sum. Twelve digits of float64 are left after some thousand
    roundings.
    """
    skip_without("accelerate")
    from tests.clients.trainers import with_the_plugin_in_float64

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
    from tests.clients.trainers import in_mixed_precision

    client_ranks.run(
        close_under_both, in_mixed_precision, None, tolerance=2e-4, timeout_s=STARTUP_S
    )
