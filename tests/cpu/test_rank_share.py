"""What one rank holds, and the decode step that a graph is captured over; neither needs a GPU."""

from __future__ import annotations

from importlib.resources import files

import pytest
import torch

from k3stack.config.geometry import ModelGeometry, load_geometry
from k3stack.config.layout import ParallelLayout
from k3stack.config.tensors import expected_tensors, expert_tensors
from k3stack.errors import UserError
from k3stack.estimate.weights import weight_table
from k3stack.executor.torch.graphs import graph_sizes
from k3stack.models.batch import ForwardBatch
from k3stack.models.decode_batch import DecodeBatch
from k3stack.models.share import rank_share


@pytest.fixture(scope="module")
def k3() -> ModelGeometry:
    return load_geometry(str(files("k3stack.config").joinpath("data/k3_config.json")))


@pytest.mark.parametrize(("tp", "ep"), [(16, 16), (32, 32), (8, 1)])
def test_a_rank_holds_what_the_shard_table_gives_it(k3: ModelGeometry, tp: int, ep: int) -> None:
    own, share = rank_share(k3, ParallelLayout(tp=tp, ep=ep), tp - 1)
    experts = share.experts(own.moe.experts)
    assert experts.stop == own.moe.experts
    total = 0
    for spec in expected_tensors(own, vision=False, routed=False):
        # Short tensors of the heads' decay are padded on disk, and counted so in both.
        size = spec.nbytes // share.tp if spec.kind.startswith("moe.shared.") else spec.nbytes
        total += size
    for layer in own.moe_layers:
        total += len(experts) * sum(s.nbytes for s in expert_tensors(own, layer, 0))
    assert total == pytest.approx(weight_table(k3).plan(ParallelLayout(tp=tp, ep=ep), "k3").bytes_per_gpu, rel=1e-6)


def test_layouts_of_which_no_rank_runs_alone(k3: ModelGeometry) -> None:
    for layout in (ParallelLayout(tp=8, pp=2), ParallelLayout(tp=8, dcp=8), ParallelLayout(tp=16, ep=8)):
        with pytest.raises(UserError, match="cannot run alone"):
            rank_share(k3, layout, 0)


def test_rows_that_fill_a_batch_up_touch_nothing() -> None:
    batch = DecodeBatch(4, 3, torch.device("cpu"))
    given = ForwardBatch(
        ids=torch.tensor([7, 9]),
        cu=[0, 1, 2],
        starts=[64, 3],
        state_blocks=torch.tensor([5, 2]),
        page_table=torch.tensor([[11, 12], [30, 99]]),
        logit_index=torch.arange(2),
    )
    batch.fill(given, torch.tensor([65, 4]))
    assert batch.ids.tolist() == [7, 9, 7, 7]
    assert batch.step.decode_block_index.tolist() == [5, 2, -1, -1]
    assert batch.step.lengths().tolist() == [65, 4, 0, 0]
    pages, places = batch.step.cache_slots(64)
    assert pages.tolist() == [12, 30, -1, -1]
    assert places[:2].tolist() == [0, 3]


@pytest.mark.parametrize("most", [1, 3, 16, 200, 1000])
def test_graph_sizes(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, 256)
    for rows in range(9, sizes[-1] + 1):
        size = next(n for n in sizes if n >= rows)
        assert size - rows < 0.25 * rows
