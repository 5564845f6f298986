"""Adapters of one batch: whatever the mix, each row gets its own and nothing else."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.engines.adapters import AdapterBank
from infra.engines.fitting import LowRank

WIDTH, OUT = 5, 7
SHAPES = {"up": (WIDTH, OUT), "gate": (WIDTH, OUT), "down": (OUT, WIDTH)}
TENANTS = ("ada", "bob", "cyd", "dan")


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = torch.nn.Linear(WIDTH, OUT), torch.nn.Linear(WIDTH, OUT)
        self.down = torch.nn.Linear(OUT, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.gate(x))


def low_rank(rank: int, wide: int, out: int, seed: int) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    return LowRank(torch.randn(wide, rank, generator=generator), torch.randn(rank, out, generator=generator))


@settings(deadline=None, max_examples=60)
@given(
    batches=st.lists(st.lists(st.sampled_from(("", *TENANTS)), min_size=1, max_size=24), min_size=1, max_size=4),
    ranks=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    only_up=st.sets(st.sampled_from(TENANTS)),
    leaves=st.lists(st.sets(st.sampled_from(TENANTS)), min_size=4, max_size=4),
    queries=st.integers(1, 3),
)
@torch.inference_mode()
def test_each_row_gets_its_own_adapter_in_any_mix(batches, ranks, only_up, leaves, queries):
    module, plain = Layers(), Layers()
    plain.load_state_dict(module.state_dict())
    bank = AdapterBank(module)
    served = {"": {}}
    for tenants, leaving in zip(batches, leaves, strict=False):
        for tenant in leaving & served.keys():  # with an adapter that would spoil whoever gets its place
            bank.put(tenant, {"up": LowRank(torch.full((WIDTH, 4), torch.nan), torch.full((4, OUT), torch.nan))})
            bank.remove(tenant)
            del served[tenant]
        for seed, (tenant, rank) in enumerate(zip(TENANTS, ranks, strict=True)):
            if tenant in tenants:  # a new version before each batch that needs it
                paths = {"up"} if tenant in only_up else SHAPES.keys()
                place = 100 * len(served) + seed
                served[tenant] = {path: low_rank(rank, *SHAPES[path], seed=place) for path in paths}
                bank.put(tenant, served[tenant])
        x = torch.randn(len(tenants), queries, WIDTH)
        bank.route(tenants)
        found = module(x)
        for row, tenant in enumerate(tenants):

            def layer(path, h, adapter=served[tenant]):
                low = adapter.get(path)
                return getattr(plain, path)(h) + (0 if low is None else h @ low.a @ low.b)

            wanted = layer("down", layer("up", x[row]) * layer("gate", x[row]))
            torch.testing.assert_close(found[row], wanted, rtol=1e-4, atol=1e-3)
