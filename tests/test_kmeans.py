"""Minibatch k-means: the reference engine is scikit-learn's, and the torch engine follows the same rules."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from latent_santa import naive
from latent_santa.in_parts import result_of
from latent_santa.kmeans import minibatch_kmeans, seeding, torch_engine
from latent_santa.kmeans.distances import row_factors
from latent_santa.kmeans.fitting import fit_centers
from latent_santa.kmeans.seeding import init_size, seed_centers
from latent_santa.kmeans.torch_engine import cluster_group
from latent_santa.parents import kmeans_parents

ENGINES = ("sklearn", "torch")


def mixture(rows: int, width: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(60, width, generator=g)
    return means[torch.randint(60, (rows,), generator=g)] + torch.randn(rows, width, generator=g)


def latent_like(rows: int, width: int, seed: int) -> torch.Tensor:
    """Power-law spectrum in a random basis, neighbours correlated, and an offset shared by all rows."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, width, generator=g)
    z = (z + 0.8 * z.roll(1, 0)) * 5 * torch.arange(1, width + 1) ** -0.7
    basis = torch.linalg.qr(torch.randn(width, width, generator=g))[0]
    return z @ basis + 3 * torch.randn(width, generator=g)


def stack(make, lengths, width, rows=None) -> torch.Tensor:
    """Problems of these lengths; NaN in the padding, which nobody may read."""
    points = torch.full((len(lengths), rows or max(lengths), width), torch.nan)
    for q, n in enumerate(lengths):
        points[q, :n] = make(n, width, seed=q).bfloat16().float()
    return points


def table_of(points: torch.Tensor) -> torch.Tensor:
    return row_factors(points, points.float().square().sum(-1))


def parents(lengths, size=16) -> list[int]:
    return [min(n, max(2, n // size)) for n in lengths]


def batched(points, lengths, clusters, seed) -> torch.Tensor:
    """The torch engine with all problems in one group, as on CUDA."""
    return result_of(cluster_group(points, lengths, clusters, seed))


def inertia(points, lengths, labels) -> torch.Tensor:
    """(Q,) float64: squared distances of real rows to the mean of their cluster, summed."""
    sums = []
    for rows, length, label in zip(points, lengths, labels, strict=True):
        x, label = rows[:length].double(), label[:length]
        count = torch.bincount(label, minlength=1).clamp_(min=1)
        means = x.new_zeros(count.shape[0], x.shape[1]).index_add_(0, label, x) / count[:, None]
        sums.append((x - means[label]).square_().sum())
    return torch.stack(sums)


def assert_valid(labels, lengths, clusters) -> None:
    assert labels.dtype == torch.int64
    for label, n, k in zip(labels, lengths, clusters, strict=True):
        assert (label[n:] == -1).all()
        assert 0 <= label[:n].min() and label[:n].max() < k


@pytest.mark.parametrize("engine", ["sklearn", "auto"])
def test_reference_engine_is_scikit_learn_with_the_settings_of_appendix_a(engine):
    from sklearn.cluster import MiniBatchKMeans

    lengths, clusters = [300, 450], [18, 40]
    points = stack(mixture, lengths, 8)
    labels = minibatch_kmeans(points, lengths, clusters, seed=3, engine=engine)
    for q, (n, k) in enumerate(zip(lengths, clusters, strict=True)):
        direct = MiniBatchKMeans(
            k, init="k-means++", n_init=1, batch_size=4096, max_iter=100, max_no_improvement=10, tol=0.0,
            reassignment_ratio=0.01, init_size=None, random_state=3,
        )  # fmt: skip
        assert labels[q, :n].tolist() == direct.fit(points[q, :n].numpy()).labels_.tolist()
    assert_valid(labels, lengths, clusters)


def test_parents_are_algorithm_3_around_scikit_learn():
    from sklearn.cluster import MiniBatchKMeans

    points = stack(mixture, [300], 8)
    member = torch.ones(1, 300, dtype=torch.bool)
    (labels,) = kmeans_parents([points[:, None]], member, 16, seed=3, engine="sklearn")

    def centers(k, number):
        settings = {"n_init": 1, "batch_size": 4096, "tol": 0.0, "random_state": 3}
        return MiniBatchKMeans(number, **settings).fit(k.astype("float32")).cluster_centers_

    expected = naive.kmeans_parents(points[0].numpy(), 16, centers)
    assert naive.parents_from_labels(labels[0, 0].tolist()) == expected and len(expected) > 10


@pytest.mark.parametrize(
    "make, width, lengths",
    [(mixture, 32, [3000, 5000]), (latent_like, 48, [1500, 4500]), (mixture, 8, [13000])],
    ids=["mixture", "anisotropic", "more rows than the init subset"],
)
def test_torch_engine_is_as_good_as_scikit_learn(make, width, lengths):
    points, clusters = stack(make, lengths, width), parents(lengths, 16 if max(lengths) < 12288 else 128)
    results = {}
    for name, fit in {
        "sklearn": lambda seed: minibatch_kmeans(points, lengths, clusters, seed, "sklearn"),
        "torch": lambda seed: minibatch_kmeans(points, lengths, clusters, seed, "torch"),
        "batched": lambda seed: batched(points, lengths, clusters, seed),
    }.items():
        labels = [fit(seed) for seed in range(2)]
        assert_valid(labels[0], lengths, clusters)
        results[name] = torch.stack([inertia(points, lengths, label) for label in labels]).mean(0)
    for name in ("torch", "batched"):
        ratio = results[name] / results["sklearn"]
        assert ((ratio > 0.98) & (ratio < 1.02)).all(), (name, ratio)


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_half_rows_cluster_as_float32_rows_do(offset):
    # 300 in one coordinate of every row: keys of real GQA models look like this, and plain bfloat16 centers lose them.
    lengths = [1600, 2000]
    points = stack(latent_like, lengths, 32).nan_to_num()
    points[..., 5] += offset
    points = points.bfloat16()
    clusters = parents(lengths)
    exact, halves = (
        torch.stack(
            [inertia(points, lengths, result_of(cluster_group(x, lengths, clusters, seed))) for seed in range(3)]
        )
        for x in (points.float(), points)
    )
    assert (exact.mean(0) / halves.mean(0) - 1).abs().max() < 0.02


@pytest.mark.parametrize("engine", ENGINES)
def test_a_problem_alone_gives_its_labels_in_the_batch(engine):
    lengths = [700, 1100, 90, 1]
    clusters = parents(lengths)
    points = stack(latent_like, lengths, 16, rows=1300)
    together = minibatch_kmeans(points, lengths, clusters, seed=5, engine=engine)
    for q, n in enumerate(lengths):
        alone = minibatch_kmeans(points[q : q + 1, :n], [n], [clusters[q]], seed=5, engine=engine)
        assert torch.equal(together[q : q + 1, :n], alone)
    assert_valid(together, lengths, clusters)


def test_seeding_does_not_depend_on_the_batch():
    # Small integers: every sum and product is exact, so the batched arithmetic must give the same centers bit for bit.
    g = torch.Generator().manual_seed(0)
    lengths, clusters = [400, 13000, 37], [90, 60, 5]
    points = torch.randint(-8, 9, (3, 13000, 6), generator=g).float()
    table = table_of(points)
    together = result_of(seed_centers(table, 6, lengths, clusters, 7))
    for q, (n, k) in enumerate(zip(lengths, clusters, strict=True)):
        alone = result_of(seed_centers(table[q : q + 1, :n].contiguous(), 6, [n], [k], 7))
        assert torch.equal(together[q, :k], alone[0])
        assert len(alone[0].unique(dim=0)) == k  # a row at distance 0 is never drawn


def test_seeding_does_not_depend_on_the_centers_of_a_step(monkeypatch):
    points = stack(latent_like, [300, 200], 8).nan_to_num()
    table, lengths, clusters = table_of(points), [300, 200], [20, 9]
    expected = result_of(seed_centers(table, 8, lengths, clusters, 2))
    for at_once in (7, 19, 64):
        monkeypatch.setitem(seeding.CENTERS_PER_STEP, "cpu", at_once)
        assert torch.equal(result_of(seed_centers(table, 8, lengths, clusters, 2)), expected)


def test_seeding_is_greedy_like_scikit_learn():
    from sklearn.cluster import kmeans_plusplus

    points = stack(latent_like, [800], 12)
    table = table_of(points)

    def potential(centers):
        return torch.cdist(points[0].double(), centers.double()).square().amin(1).sum()

    ours = sum(potential(result_of(seed_centers(table, 12, [800], [50], seed))[0]) for seed in range(8))
    theirs = sum(
        potential(torch.from_numpy(kmeans_plusplus(points[0].numpy(), 50, random_state=seed)[0])) for seed in range(8)
    )
    assert abs(ours / theirs - 1) < 0.03  # with one trial instead of five: 15 % more
    assert [init_size(*case) for case in ((5000, 300), (13000, 60), (200000, 12500))] == [5000, 12288, 37500]


def test_fitting_does_not_depend_on_the_batch():
    # Clusters far apart: rounding cannot change a label, so the centers agree unless draws, masks or stopping differ.
    lengths, clusters = torch.tensor([50, 5000, 300]), torch.tensor([2, 4, 3])
    g = torch.Generator().manual_seed(6)
    towns = 50 * torch.arange(4.0)[:, None].expand(4, 3)
    points = towns[torch.arange(5000) % 4] + torch.randn(3, 5000, 3, generator=g)
    table, centers = table_of(points), towns.expand(3, 4, 3)
    real = torch.arange(4) < clusters[:, None]
    together = result_of(fit_centers(table, centers, real, lengths, clusters, 9))
    for q, k in enumerate(clusters.tolist()):
        one = slice(q, q + 1)
        alone = result_of(fit_centers(table[one], centers[one, :k], real[one, :k], lengths[one], clusters[one], 9))
        torch.testing.assert_close(together[q, :k], alone[0], rtol=1e-5, atol=1e-5)
        assert not torch.equal(alone[0], towns[:k])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_seed_alone_decides(engine):
    points = stack(mixture, [600], 8)
    state, before = torch.random.get_rng_state(), points.clone()
    first, again, other = (minibatch_kmeans(points, [600], [37], seed, engine) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(points, before)


@pytest.mark.parametrize("engine", ENGINES)
def test_layout_and_dtype_do_not_matter(engine):
    points = stack(mixture, [500, 500], 8)
    expected = minibatch_kmeans(points, [500, 400], [31, 25], engine=engine)
    strided = points.transpose(0, 1).contiguous().transpose(0, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for same in (strided, points.bfloat16(), points.double()):
            assert torch.equal(minibatch_kmeans(same, [500, 400], [31, 25], engine=engine), expected)


@pytest.mark.parametrize("engine, group", [("sklearn", None), ("torch", None), ("torch", 5)])
def test_degenerate_problems(engine, group, monkeypatch):
    g = torch.Generator().manual_seed(1)
    lengths, clusters = [1, 2, 40, 40, 40], [1, 2, 40, 20, 1]
    points = torch.full((5, 40, 4), torch.nan)
    points[0, 0] = 3.0
    points[1, :2] = torch.tensor([[1.0], [2.0]])
    points[2] = torch.randn(6, 4, generator=g)[torch.arange(40) % 6]  # k = N, but six distinct rows
    points[3] = 0.3
    points[4] = torch.randn(40, 4, generator=g)
    if group:
        monkeypatch.setattr(torch_engine, "group_size", lambda *_: group)
    labels = minibatch_kmeans(points, lengths, clusters, engine=engine)
    assert_valid(labels, lengths, clusters)
    assert labels[1, 0] != labels[1, 1]
    assert len(labels[2].unique()) == 6 and torch.equal(labels[2, :6], labels[2, 30:36])
    assert len(labels[3].unique()) == 1
    assert inertia(points, lengths, labels)[:4].max() < 1e-9


def test_inertia_is_the_distance_to_cluster_means():
    points = torch.tensor([[[0.0], [2.0], [10.0], [99.0]], [[1.0], [1.0], [4.0], [4.0]]])
    labels = torch.tensor([[1, 1, 0, -1], [0, 0, 0, 0]])
    assert inertia(points, [3, 4], labels).tolist() == [2.0, 9.0]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"points": torch.zeros(6, 2)}, r"points is torch.float32 \(6, 2\)"),
        ({"points": torch.zeros(1, 6, 2, dtype=torch.int64)}, "points is torch.int64"),
        ({"lengths": [6, 6]}, "lengths has 2 entries"),
        ({"clusters": []}, "clusters has 0 entries"),
        ({"lengths": [7]}, r"lengths\[0\] is 7"),
        ({"lengths": [0]}, r"lengths\[0\] is 0"),
        ({"lengths": [5.5]}, "lengths is "),
        ({"clusters": [7]}, r"clusters\[0\] is 7"),
        ({"clusters": [0]}, r"clusters\[0\] is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"engine": "faiss"}, "engine is 'faiss'"),
        ({"points": torch.full((1, 6, 2), torch.nan)}, r"points\[0\] has a real row that is not finite"),
        ({"points": torch.full((1, 6, 2), torch.inf), "engine": "sklearn"}, r"points\[0\] has a real row"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"points": torch.zeros(1, 6, 2), "lengths": [6], "clusters": [2], "seed": 0, "engine": "torch"}
    with pytest.raises(ValueError, match=message):
        minibatch_kmeans(**(arguments | change))


def test_the_problem_with_a_nonfinite_row_is_named():
    points = torch.zeros(3, 6, 2)
    points[1, 5] = torch.nan
    minibatch_kmeans(points, [6, 5, 6], [2, 2, 2], engine="torch")
    for engine in ENGINES:
        with pytest.raises(ValueError, match=r"points\[1\]"):
            minibatch_kmeans(points, [6, 6, 6], [2, 2, 2], engine=engine)


def test_scikit_learn_is_only_needed_by_its_engine(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    points = torch.randn(1, 20, 2)
    with pytest.raises(ImportError, match="choose the engine 'torch'"):
        minibatch_kmeans(points, [20], [2])
    assert_valid(minibatch_kmeans(points, [20], [2], engine="torch"), [20], [2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_threads_cluster_at_once_on_cuda():
    lengths = [1500, 2500]
    sets = [stack(latent_like, lengths, width).cuda().bfloat16() for width in (32, 40, 48)]
    alone = [minibatch_kmeans(points, lengths, parents(lengths)) for points in sets]
    for _ in range(3):
        with ThreadPoolExecutor(len(sets)) as pool:
            together = list(pool.map(lambda points: minibatch_kmeans(points, lengths, parents(lengths)), sets))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cuda_engine_is_deterministic_and_as_good_as_scikit_learn(dtype):
    lengths = [3000, 5000]
    host = stack(latent_like, lengths, 48)
    points, clusters = host.to("cuda", dtype), parents(lengths)
    results = []
    for seed in range(3):
        labels = minibatch_kmeans(points, lengths, clusters, seed)
        assert labels.is_cuda and torch.equal(labels, minibatch_kmeans(points, lengths, clusters, seed))
        assert_valid(labels.cpu(), lengths, clusters)
        reference = minibatch_kmeans(host, lengths, clusters, seed)
        results.append(inertia(host, lengths, labels.cpu()) / inertia(host, lengths, reference))
    assert (torch.stack(results).mean(0) - 1).abs().max() < 0.02
