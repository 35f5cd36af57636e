"""Squared distances as matrix products: the nearest center, and the precision of half types."""

import pytest
import torch

from latent_santa.kmeans.distances import center_factors, copies_of, nearest_centers, opposite_factors, row_factors


def table_of(rows: torch.Tensor) -> torch.Tensor:
    return row_factors(rows, rows.float().square().sum(-1))


def nearest(rows: torch.Tensor, centers: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    table = table_of(rows)
    factors = torch.cat([table] * copies_of(table), dim=-1)
    return nearest_centers(factors, center_factors(centers, real, table))


def test_nearest_takes_the_lowest_of_equal_centers_and_no_padding_center():
    centers = torch.tensor([[[5.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]])
    real = torch.tensor([[True, True, True, False]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = torch.tensor([[[1.5, 0.0], [0.0, 0.0], [4.0, 1.0]]], dtype=dtype)
        distance, label = nearest(rows, centers, real)
        assert label.tolist() == [[1, 1, 0]]
        assert distance.tolist() == [[0.25, 1.0, 2.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_rows_meet_centers_of_more_than_half_precision(dtype):
    g = torch.Generator().manual_seed(3)
    rows, centers = torch.randn(1, 50, 64, generator=g).to(dtype), torch.randn(1, 9, 64, generator=g)
    distance, label = nearest(rows, centers, torch.ones(1, 9, dtype=torch.bool))
    exact = torch.cdist(rows.double(), centers.double()).square()
    torch.testing.assert_close(distance.double(), exact.amin(-1), rtol=0, atol=2e-3)
    assert torch.equal(label, exact.argmin(-1))


@pytest.mark.parametrize("dtype, scale", [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float16, 100.0)])
def test_factors_of_rows_multiply_to_their_squared_distances(dtype, scale):
    g = torch.Generator().manual_seed(7)
    rows = (scale * torch.randn(1, 40, 24, generator=g)).to(dtype)
    right = table_of(rows)[0]
    assert right.shape[1] * right.element_size() % 16 == 0  # matrix libraries want aligned rows
    distances = opposite_factors(right, 24).double() @ right.double().T
    exact = (rows[0].double()[:, None] - rows[0].double()).square().sum(-1)
    torch.testing.assert_close(distances, exact, rtol=0, atol=2e-6 * exact.max().item())
