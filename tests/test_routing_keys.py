"""Routing keys in the cache's dtype and in 8 and 4 bits: what codes stand for, and that estimators take both."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from latent_santa.estimator import sampled_attention
from latent_santa.routing_keys import CodedKeys, PlainKeys, coded_query, quantise, quantise_parts, scale_group
from latent_santa.step import DecodeStep, Sampling
from latent_santa.two_stage import select_teams

from .cases import Case, make_case
from .kernel_cases import make_step


@pytest.mark.parametrize(("routing_dtype", "largest"), [("int8", 127), ("int4", 7)])
def test_codes_are_the_nearest_multiples_of_their_scale(routing_dtype: str, largest: int) -> None:
    keys = torch.randn(2, 1, 5, 96, generator=torch.Generator().manual_seed(0)) * 3
    held = CodedKeys.of(keys, {"int8": 8, "int4": 4}[routing_dtype], 16)
    step = held.scales.float().repeat_interleave(16, -1)
    ratio = keys / step
    values = held.float()
    torch.testing.assert_close(values / step, ratio.round().clamp(-largest, largest), rtol=0, atol=1e-4)
    # the scale was rounded to float16, so the largest of a group may miss its code by that
    assert bool(((values - keys).abs() <= step * (0.5 + largest * 2**-10)).all())
    assert held.shape == keys.shape and held.float().dtype == torch.float32


def test_four_bits_pack_two_groups() -> None:
    keys = torch.tensor([[[[7.0, -7.0, 3.0, 0.0, 1.0, 7.0, -5.0, -7.0]]]])
    held = CodedKeys.of(keys, 4, 4)
    assert held.codes.dtype == torch.uint8 and held.codes.shape == (1, 1, 1, 4)
    assert [int(byte) for byte in held.codes.flatten()] == [15 + (9 << 4), 1 + (15 << 4), 11 + (3 << 4), 8 + (1 << 4)]
    assert torch.equal(held.float(), keys)


def test_values_are_codes_times_scales() -> None:
    keys = torch.randn(1, 1, 3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    held = quantise(keys, "int8")
    assert torch.equal(held.float(), held.codes.float() * held.scales.float().repeat_interleave(64, -1))


def test_neighbouring_groups_share_bytes() -> None:
    """Group 2 p in the low nibbles, group 2 p + 1 in the high ones."""
    codes = torch.randint(-7, 8, (1, 1, 3, 48), generator=torch.Generator().manual_seed(2))
    codes[..., ::8] = 7  # every scale is 1
    held = CodedKeys.of(codes.float(), 4, 8)
    for p in range(3):
        packed = held.codes[..., 8 * p : 8 * p + 8]
        assert torch.equal((packed & 15).int() - 8, codes[..., 16 * p : 16 * p + 8].int())
        assert torch.equal((packed >> 4).int() - 8, codes[..., 16 * p + 8 : 16 * p + 16].int())
    assert torch.equal(held.float(), codes.float())


@pytest.mark.parametrize("routing_dtype", ["int8", "int4"])
def test_what_all_keys_have_in_common_costs_nothing(routing_dtype: str) -> None:
    """A common part would set the scales; it moves every score of a head alike, so it is left out."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.randint(-7, 8, (2, 1, 40, 32), generator=generator).float()
    keys[:, :, 0] = 7  # every group has its largest code, so codes are exact up to the rounding of the mean
    keys = torch.cat((keys, -keys), 2)  # the mean is zero
    real = torch.ones(keys.shape[:3], dtype=torch.bool)
    common = 1000 * torch.randn(2, 1, 1, 32, generator=generator).round()
    (plain,) = quantise_parts((PlainKeys(keys),), routing_dtype, real)
    (moved,) = quantise_parts((PlainKeys(keys + common),), routing_dtype, real)
    assert plain.scales is not None and moved.scales is not None
    assert torch.equal(plain.codes, moved.codes) and torch.equal(plain.scales, moved.scales)
    assert moved.center is not None and torch.equal(moved.center, common)
    whole = quantise(keys + common, routing_dtype)
    assert (whole.float() - keys - common).abs().max() > 3 > 0.6 > (moved.float() - keys).abs().max()


def test_padding_teams_do_not_move_the_mean() -> None:
    keys = torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(4)).bfloat16()
    padded = torch.nn.functional.pad(keys, (0, 0, 0, 5), value=50)
    real = torch.arange(14) < 9
    (held,) = quantise_parts((PlainKeys(padded),), "int8", real.expand(1, 2, -1))
    (alone,) = quantise_parts((PlainKeys(keys),), "int8", real[:9].expand(1, 2, -1))
    assert held.scales is not None and alone.scales is not None
    assert torch.equal(held.codes[:, :, :9], alone.codes) and torch.equal(held.scales[:, :, :9], alone.scales)


def test_a_key_of_zeros() -> None:
    assert not quantise(torch.zeros(1, 1, 2, 32), "int4").float().any()


def test_groups() -> None:
    assert [scale_group(d, "int8") for d in (512, 64, 96, 16)] == [512, 64, 96, 16]
    assert [scale_group(d, "int4") for d in (512, 64, 128, 96)] == [64, 32, 64, 16]
    with pytest.raises(ValueError, match="20 key dimensions"):
        scale_group(20, "int4")
    with pytest.raises(ValueError, match="group=24"):
        CodedKeys.of(torch.zeros(1, 1, 1, 64), 4, 24)
    with pytest.raises(ValueError, match="routing_dtype='int2'"):
        quantise(torch.zeros(1, 1, 1, 64), "int2")


def test_memory_is_what_a_routing_pass_reads() -> None:
    keys = torch.zeros(1, 1, 10, 512, dtype=torch.bfloat16)
    assert quantise(keys, "int8").bytes() == 10 * (512 + 4)
    held = quantise(keys, "int4")
    assert held.bytes() == 10 * (256 + 8 * 2)
    assert PlainKeys(keys).bytes() == 10 * 1024


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
def test_teams_route_by_quantised_keys(estimator: str) -> None:
    """The same as routing by what codes stand for, of keys and query, through every method of the records."""
    step = make_step(heads=3, lengths=(80, 50), dims=(32, 16))
    assert step.teams is not None
    assert quantise_parts(step.teams.routing_keys, "model", step.teams.sizes > 0) is step.teams.routing_keys
    held = quantise_parts(step.teams.routing_keys, "int8", step.teams.sizes > 0)
    plain = replace(step.teams, routing_keys=tuple(PlainKeys(part.float()) for part in held))
    coarse = replace(step.teams, routing_keys=held)
    routed = replace(step, query=tuple(map(coded_query, step.query)), teams=plain)
    picked = [select_teams(each, Sampling(4, estimator)) for each in (routed, replace(step, teams=coarse))]
    assert torch.equal(picked[0].log_correction, picked[1].log_correction)
    assert coarse.bytes() < step.teams.bytes()
    beams = coarse.select_batch(torch.tensor([1, 1, 0]))
    assert beams.routing_keys[0].bits == 8 and beams.routing_keys[0].shape[0] == 3
    assert torch.equal(beams.routing_keys[0].float()[2], held[0].float()[0])


def test_a_query_is_coded_as_in_loops() -> None:
    """Integers of 14 bits times a power of two, ties to even, whatever the largest number is."""
    generator = torch.Generator().manual_seed(6)
    query = torch.randn(2, 1, 40, 24, generator=generator).bfloat16().float()
    query *= 2.0 ** torch.randint(-90, 90, (2, 1, 40, 1), generator=generator)
    query[0, 0, 0], query[0, 0, 1] = 0.0, torch.tensor([2.0**13 + i / 2 for i in range(24)])  # half of them ties
    got = coded_query(query)
    for held, coded in zip(query.flatten(0, -2).tolist(), got.flatten(0, -2).tolist(), strict=True):
        _, exponent = math.frexp(max(map(abs, held)))
        unit = 2.0 ** (exponent - 14)
        assert coded == [round(x / unit) * unit for x in held]
    assert coded_query(query.bfloat16()).dtype == torch.float32
    assert torch.equal(coded_query(query.double()), got.double())


def test_tiny_and_large_queries_are_finite() -> None:
    for size in (1e-45, 1e-38, 3e38):
        coded = coded_query(torch.full((1, 8), size))
        assert bool(coded.isfinite().all()) and float((coded / size - 1).abs().max()) <= (1 if size < 1e-34 else 1e-4)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_estimate_stays_unbiased_under_routing_by_codes(bits: int) -> None:
    """Mass and weighted sum, averaged over many draws, against all rows: corrections use the scores of coded queries
    and keys too. A query of one large number beside small ones is coded coarsely."""
    case: Case = make_case("gqa", heads=2, lengths=(40,), scale=0.5)
    key = torch.nn.functional.pad(case.teams.routing_keys[0].codes, (0, 10))
    held = (CodedKeys.of(key, bits, 8 if bits == 4 else key.shape[-1]),)
    query = tuple(torch.nn.functional.pad(part, (0, 10), value=2.0**14) for part in case.query)
    assert not torch.allclose(coded_query(query[0]), query[0], atol=0.2)
    keys = tuple(torch.nn.functional.pad(part, (0, 10)) for part in case.rows.keys)
    batch = 6000
    wide = replace(case.teams, routing_keys=held).select_batch(torch.zeros(batch, dtype=torch.int64))
    rows = replace(case.rows, keys=tuple(k.expand(batch, -1, -1, -1) for k in keys))
    rows = replace(rows, values=case.rows.values.expand(batch, -1, -1, -1))
    draw = replace(case.draw, key=torch.arange(2 * batch).view(batch, 2), step=case.draw.step.expand(batch))
    for estimator in ("per_head", "pooled"):
        wanted = tuple(q.expand(batch, -1, -1, -1) for q in query)
        got = sampled_attention(DecodeStep(wanted, rows, wide, case.suffix, draw, case.scale), Sampling(5, estimator))
        logits = (query[0] @ keys[0].transpose(-1, -2) * case.scale)[0, 0]
        mass = got.lse[:, 0].double().exp()
        total = got.out[:, 0].double() * mass[..., None]
        want = logits.double().exp()
        for sample, mean in ((mass[..., None], want.sum(-1)[:, None]), (total, want @ case.rows.values[0, 0].double())):
            error = sample.std(0) / batch**0.5
            assert bool(((sample.mean(0) - mean).abs() <= 4.5 * error).all())
