"""One step of the batched k-means engine: centers, counts, and when it stops."""

import pytest
import torch

from latent_santa.kmeans import cuda_graph
from latent_santa.kmeans.fitting import Fit, sums_by_center


def new_fit(length, k, centers, **state) -> Fit:
    problems, padded, _ = centers.shape
    defaults = {
        "length": torch.tensor(length), "k": torch.tensor(k),
        "real": torch.arange(padded) < torch.tensor(k)[:, None], "centers": centers.clone(),
        "counts": torch.zeros(problems, padded), "since": torch.zeros(problems, dtype=torch.int64),
        "smooth": torch.zeros(problems, dtype=torch.float64),
        "lowest": torch.full((problems,), torch.inf, dtype=torch.float64),
        "stale": torch.zeros(problems, dtype=torch.int64), "running": torch.ones(problems, dtype=torch.bool),
    }  # fmt: skip
    return Fit(**(defaults | state))


def test_centers_move_to_the_mean_of_all_their_rows_and_stopped_ones_stay():
    g = torch.Generator().manual_seed(2)
    start = torch.randn(2, 3, 4, generator=g)
    fit = new_fit(
        [6, 6], [3, 3], start, counts=torch.tensor([[0.0, 2.0, 5.0]] * 2), running=torch.tensor([True, False])
    )
    first, second = torch.randn(2, 4, generator=g), torch.randn(4, generator=g)
    sums = torch.stack((first.sum(0), second, torch.zeros(4))).expand(2, 3, 4)
    fit.update(sums, torch.tensor([[2, 1, 0], [2, 1, 0]]))
    torch.testing.assert_close(fit.centers[0, 0], first.mean(0))
    torch.testing.assert_close(fit.centers[0, 1], (2 * start[0, 1] + second) / 3)
    assert torch.equal(fit.centers[0, 2], start[0, 2]) and torch.equal(fit.centers[1], start[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_added_up_by_center(dtype):
    g = torch.Generator().manual_seed(5)
    x, label = torch.randn(2, 50, 6, generator=g).to(dtype), torch.randint(7, (2, 50), generator=g)
    used = torch.arange(50) < torch.tensor([[50], [31]])
    belongs = torch.nn.functional.one_hot(label, 8).double() * used[:, :, None]  # the eighth center has no rows
    members = torch.zeros(2, 50, 8, dtype=dtype) if dtype.itemsize == 2 else None
    for _ in range(2):
        sums = sums_by_center(x, label, belongs.sum(1).long(), used, members)
        torch.testing.assert_close(sums.double(), belongs.transpose(1, 2) @ x.double(), rtol=1e-6, atol=1e-6)
        assert members is None or not members.any()


def test_centers_of_low_count_move_to_rows_of_the_minibatch():
    rows = torch.arange(8.0).reshape(1, 8, 1) + 100
    centers = torch.zeros(1, 7, 1)
    counts = torch.tensor([[1000.0, 3.0, 0.0, 9.0, 10.0, 50.0, 0.0]])  # six real centers: the last is padding

    fit = new_fit([8], [6], centers, counts=counts)  # an empty center: due at once; below 10: three centers
    fit.reassign(rows, torch.zeros(1, 7, dtype=torch.int64))
    assert fit.centers[0, :, 0].tolist() == [0, 101, 100, 102, 0, 0, 0]
    assert fit.counts[0, :6].tolist() == [1000, 10, 10, 10, 10, 50]
    assert fit.since.tolist() == [0]

    fit = new_fit([8], [6], centers, counts=counts, running=torch.tensor([False]))
    fit.reassign(rows, torch.zeros(1, 7, dtype=torch.int64))
    assert not fit.centers.any()

    few = counts.clone()
    few[0, 3:6] = torch.tensor([2.0, 5.0, 4.0])
    fit = new_fit([4], [6], centers, counts=few)  # five are low, but half a minibatch of four is two: the lowest counts
    fit.reassign(rows[:, :4], torch.zeros(1, 7, dtype=torch.int64))
    assert fit.centers[0, :, 0].tolist() == [0, 0, 100, 101, 0, 0, 0]
    assert fit.counts[0, :6].tolist() == [1000, 3, 3, 3, 5, 4]

    full = counts.clone()
    full[0, 2] = 1
    for since, moved in ((51, False), (52, True)):  # no empty center: due once 10 k = 60 rows were seen
        fit = new_fit([8], [6], centers, counts=full, since=torch.tensor([since]))
        fit.reassign(rows, torch.zeros(1, 7, dtype=torch.int64))
        assert bool(fit.centers.any()) == moved and fit.since.tolist() == [0 if moved else since + 8]


@pytest.mark.parametrize("length, limit", [(60, 100), (6000, 146)])
def test_stopping_follows_the_smoothed_inertia(length, limit):
    alpha = min(1.0, 2 * min(length, 4096) / (length + 1))
    g = torch.Generator().manual_seed(4)
    for means in (
        (1 + 0.3 * torch.rand(limit, generator=g, dtype=torch.float64)).tolist(),
        [0.1, *(1 / (step + 1) for step in range(limit))],
    ):
        smooth, lowest, stale, expected = None, float("inf"), 0, limit
        for step, mean in enumerate(means[1:limit], start=2):
            smooth = mean if smooth is None else smooth * (1 - alpha) + mean * alpha
            stale, lowest = (0, smooth) if smooth < lowest else (stale + 1, lowest)
            if stale >= 10:
                expected = step
                break
        fit = new_fit([length], [2], torch.zeros(1, 2, 1))
        step = 0
        while fit.running.all():
            fit.stop(torch.tensor([means[step]], dtype=torch.float64), step + 1)
            step += 1
        assert step == expected


@pytest.mark.parametrize(("free", "released"), [(2, 0), (1, 1), (0, 1)])
def test_memory_of_ended_graphs_goes_back_where_little_is_left(monkeypatch, free, released):
    calls = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 8))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("released"))
    cuda_graph.release_ended_graphs(torch.device("cuda"))
    assert len(calls) == released
