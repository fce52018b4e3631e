"""Which decode steps are recorded, and, on a GPU, that a replay computes what the launches do."""

from __future__ import annotations

import logging

import pytest
import torch

from worker.cuda_graph import DecodeGraphs, graph_sizes


@pytest.mark.parametrize("max_rows", [1, 2, 3, 4, 5, 8, 9, 24, 100, 255, 256, 257, 300, 512, 1000, 1024])
def test_every_number_of_rows_has_a_graph_with_little_surplus(max_rows: int) -> None:
    sizes = graph_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    for rows in range(1, max_rows + 1):
        padded = next(size for size in sizes if size >= rows)
        assert padded - rows < max(2, 8 if rows <= 256 else 16 if rows <= 512 else 32)
    assert len(sizes) <= 67


def test_more_rows_than_are_recorded_have_none() -> None:
    assert graph_sizes(5000)[-1] == 1024


def test_without_graphs_no_step_is_padded() -> None:
    assert DecodeGraphs().padded_rows(1) is None


def test_the_log_says_what_each_graph_takes(caplog: pytest.LogCaptureFixture) -> None:
    graphs = DecodeGraphs()
    graphs.num_bytes, graphs.seconds = 30 << 20, 1.5
    graphs._recorded = dict.fromkeys([1, 2, 4, 8])  # type: ignore[arg-type]
    graphs._sizes = [1, 2, 4, 8]
    with caplog.at_level(logging.INFO):
        graphs.log()
    assert caplog.messages == ["4 CUDA graphs of 1 to 8 rows: 1.5 s, 30 MiB, 7.5 MiB each"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replays_read_what_lies_in_the_buffers_then() -> None:
    source, target = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    graphs = DecodeGraphs()
    stream = torch.cuda.Stream()
    graphs.record([2, 8], {}, lambda _: None, lambda rows: target[:rows].copy_(source[:rows]), stream)
    assert (len(graphs), graphs.padded_rows(1), graphs.padded_rows(3), graphs.padded_rows(9)) == (2, 2, 8, None)
    source.copy_(torch.arange(8.0))
    assert graphs.replay(2, {})
    torch.cuda.synchronize()
    assert target.tolist() == [0.0, 1.0] + [0.0] * 6
    assert graphs.replay(8, {})
    torch.cuda.synchronize()
    assert target.tolist() == list(range(8))
