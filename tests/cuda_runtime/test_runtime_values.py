"""The CPU's bits on CUDA, eagerly and in replays, in every order that streams allow; and not in any
other.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.cuda_runtime import inspection

ORDERS = ["host", "late", "1", "2", "3"]


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> Iterator[str]:
    with inspection.order(request.param):
        yield request.param


def losses(device: str, *, graphed: bool) -> list[float]:
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8)
    model = nn.Sequential(*layers).to(device)
    lr = torch.tensor(1e-2, device=device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, fused=True, capturable=device == "cuda"
    )
    x = torch.zeros(4, 8, device=device)

    def step() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    graph = None
    seen = []
    for number in range(8):
        x.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(number)))
        if not graphed or number < 3:
            seen.append(step().item())
            continue
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                loss = step()
        graph.replay()
        seen.append(loss.item())
    return seen


def test_training_has_the_same_bits_on_cpu_and_cuda_and_in_replays(order: str) -> None:
    right = losses("cpu", graphed=False)
    assert losses("cuda", graphed=False) == right
    with torch.cuda.stream(torch.cuda.Stream()):
        assert losses("cuda", graphed=True) == right
