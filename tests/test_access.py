"""The access ledger against numbers recomputed from the teams that the reference says were selected."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from latent_santa import AccessLedger, access
from latent_santa import naive as ref
from latent_santa.access import GQA_SCAN_UNIT, GQA_UNIT, MLA_SCAN_UNIT, MLA_UNIT, PACK, partial_unit

from .cases import make_case

LENGTHS = (21, 34, 9)
SETUPS = {
    "mla": ("mla", 1, "santa++", MLA_UNIT),
    "mla-rows": ("mla", 1, "gumbel_rows", MLA_UNIT),
    "gqa": ("gqa", 2, "santa++", GQA_UNIT),
    "gqa-rows": ("gqa", 2, "gumbel_rows", GQA_SCAN_UNIT),
}


def percent(setup, counts, routing=True):
    """The reference's Equation 13 or 14."""
    counts = [c if routing else c._replace(routing=0) for c in counts]
    return ref.access_mla(counts) if setup.startswith("mla") else ref.access_gqa(counts, setup == "gqa-rows")


@pytest.fixture(scope="module", params=SETUPS)
def recorded(request):
    """Real calls of three layers at three steps: the ledger, and the reference's counts.

    The counts are keyed by (layer, step, sequence, group). Layer 4 has one step only.
    """
    layout, groups, method, unit = SETUPS[request.param]
    ledger, expected = AccessLedger(), {}
    cases = {layer: make_case(layout, 3, groups, LENGTHS, suffix=3, seed=layer) for layer in (5, 1, 4)}
    for step in range(3):
        for layer, whole in cases.items():
            if layer == 4 and step:
                continue
            case = whole.at_step(step + 1, layer)
            # at step 2 the budget reaches the short sequence's team count, whose routing then costs nothing
            k = (2, 3, 5)[step]
            output = case.run(k, "pooled" if step else "per_head", "independent", method)
            dense = case.draw.step[:, None].expand(-1, groups)
            ledger.record(layer, unit, output.routing, output.union, output.suffix, dense)
            for b in range(3):
                for g in range(groups):
                    counts = case.reference(b, g, k, "pooled" if step else "per_head", "independent", method).counts
                    expected[layer, step, b, g] = counts
    return request.param, ledger, expected


def check(setup, row, counts, calls):
    """One table row against the reference's counts."""
    assert row["percent"] == pytest.approx(percent(setup, counts), rel=1e-12)
    assert row["percent_without_routing"] == pytest.approx(percent(setup, counts, routing=False), rel=1e-12)
    assert [row[name] for name in ("routing", "union", "suffix", "dense")] == [sum(part) for part in zip(*counts)]  # noqa: B905
    assert row["calls"] == calls


def test_totals(recorded):
    setup, ledger, expected = recorded
    counts = list(expected.values())
    assert ledger.percent == pytest.approx(percent(setup, counts), rel=1e-12)
    assert ledger.percent_without_routing == pytest.approx(percent(setup, counts, routing=False), rel=1e-12)
    assert ledger.percent_without_routing < ledger.percent
    totals = ledger.totals()
    check(setup, {**totals, "percent": ledger.percent, "percent_without_routing": ledger.percent_without_routing},
          counts, 7)  # fmt: skip
    # pooled by sums, which is not the mean of the calls' percentages
    alone = [percent(setup, [c]) for c in counts]
    assert ledger.percent != pytest.approx(sum(alone) / len(alone), rel=1e-3)
    assert totals["numerator"] == totals["routing_read"] + totals["row_read"]
    assert 100 * totals["numerator"] / totals["denominator"] == ledger.percent


def test_routing_is_counted_where_it_happened(recorded):
    setup, _, expected = recorded
    at_end = [counts.routing for (_, step, b, _), counts in expected.items() if step == 2 and b == 2]
    assert all(at_end) if "rows" in setup else not any(at_end)
    assert all(counts.routing for (_, step, _, _), counts in expected.items() if step < 2)


def test_per_layer(recorded):
    setup, ledger, expected = recorded
    table = ledger.per_layer()
    assert [row["layer"] for row in table] == [1, 4, 5]
    for row in table:
        counts = [c for (layer, *_), c in expected.items() if layer == row["layer"]]
        check(setup, row, counts, 1 if row["layer"] == 4 else 3)


def test_per_step(recorded):
    setup, ledger, expected = recorded
    table = ledger.per_step()
    assert [row["step"] for row in table] == [0, 1, 2]
    for row in table:
        counts = [c for (_, step, *_), c in expected.items() if step == row["step"]]
        check(setup, row, counts, 2 if row["step"] else 3)


def test_per_sequence(recorded):
    setup, ledger, expected = recorded
    table = ledger.per_sequence()
    assert [row["sequence"] for row in table] == [0, 1, 2]
    for row in table:
        check(setup, row, [c for (_, _, b, _), c in expected.items() if b == row["sequence"]], 7)


def test_a_sequence_that_ended_is_counted_to_its_end(recorded):
    setup, ledger, expected = recorded
    ends = (1, 3, 2)
    for b, (end, total) in enumerate(zip(ends, ledger.sequence_totals(ends), strict=True)):
        counts = [c for (_, step, sequence, _), c in expected.items() if sequence == b and step < end]
        check(setup, access._with_percent(total), counts, {1: 3, 2: 5, 3: 7}[end])
        alone = AccessLedger()
        for layer, number, unit, entry in ledger._entries():
            if number < end:
                alone.record(layer, unit, *entry[:, b : b + 1])
        assert total == alone.totals()
    assert [total["calls"] for total in ledger.sequence_totals((0, 9, 1))] == [0, 7, 3]


def test_ends_of_another_batch_are_refused(recorded):
    with pytest.raises(ValueError, match="calls has 2 entries, but the recorded calls had a batch of 3"):
        recorded[1].sequence_totals([1, 1])
    # an answer of one token has no dense decoding call at all
    assert AccessLedger().sequence_totals([0, 0]) == [AccessLedger().totals()] * 2


def test_as_dict_is_json(recorded):
    _, ledger, _ = recorded
    data = ledger.as_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["totals"]["percent"] == ledger.percent
    assert data["per_layer"] == ledger.per_layer() and data["per_step"] == ledger.per_step()


def counts(*rows):
    return tuple(torch.tensor(part, dtype=torch.int64) for part in rows)


def test_equation_14_by_hand():
    """Ten teams scored, seven distinct rows, two suffix rows, of 40; and a call that routed nothing."""
    ledger = AccessLedger()
    ledger.record(0, MLA_UNIT, *counts([[10]], [[7]], [[2]], [[40]]))
    assert ledger.percent == pytest.approx(100 * 19 / 40)
    ledger.record(1, MLA_UNIT, *counts([[0]], [[20]], [[0]], [[20]]))
    assert ledger.percent == pytest.approx(100 * 39 / 60)
    assert ledger.percent_without_routing == pytest.approx(100 * 29 / 60)


def test_equation_13_by_hand():
    """A key per representative, a key and a value per row; after a scan: all keys, then a value per row."""
    ledger = AccessLedger()
    ledger.record(0, GQA_UNIT, *counts([[10, 4]], [[7, 5]], [[2, 2]], [[40, 40]]))
    assert ledger.percent == pytest.approx(100 * (14 + 2 * 16) / 160)
    ledger.reset()
    ledger.record(0, GQA_SCAN_UNIT, *counts([[40]], [[7]], [[2]], [[40]]))
    assert ledger.percent == pytest.approx(100 * (40 + 9) / 80)
    # both kinds in one ledger, as after the method was changed between generations
    ledger.record(0, GQA_UNIT, *counts([[10]], [[7]], [[2]], [[40]]))
    assert ledger.percent == pytest.approx(100 * (49 + 28) / 160)
    assert [row["calls"] for row in ledger.per_step()] == [1, 1]
    assert [row["calls"] for row in ledger.per_layer()] == [2]


def test_the_bound_leaves_out_what_a_scan_read():
    """u + e of N in both layouts; without a scan it is the access without routing."""
    for unit, without in ((GQA_SCAN_UNIT, 100 * 9 / 80), (MLA_SCAN_UNIT, 0), (GQA_UNIT, 100 * 9 / 40)):
        ledger = AccessLedger()
        assert math.isnan(ledger.percent_bound) and ledger.as_dict()["totals"]["percent_bound"] is None
        ledger.record(0, unit, *counts([[40]], [[7]], [[2]], [[40]]))
        assert ledger.percent_bound == ledger.per_layer()[0]["percent_bound"] == 100 * 9 / 40
        assert ledger.percent_without_routing == without
        assert ledger.totals()["bound"] == 9 * unit.dense


def test_fractions_are_exact():
    """A third of a vector, three thousand times, is a thousand vectors; no sum of floats would say so."""
    third = replace(MLA_UNIT, routing=Fraction(1, 3), routing_bytes=Fraction(1, 8), row_bytes=4, dense_bytes=4)
    ledger = AccessLedger()
    for _ in range(3000):
        ledger.record(0, third, *counts([[1]], [[0]], [[0]], [[7]]))
    totals = ledger.totals()
    assert totals["routing_read"] == totals["numerator"] == 1000 and type(totals["numerator"]) is int
    assert totals["bytes"] == 375 and totals["dense_bytes"] == 4 * 21000
    assert ledger.percent == 100 * 1000 / 21000
    ledger.record(0, third, *counts([[1]], [[0]], [[0]], [[7]]))
    data = ledger.as_dict()
    assert data["totals"]["numerator"] == 1000 + 1 / 3 and json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["totals"]["percent"] == ledger.per_sequence()[0]["percent"] == float(Fraction(100 * 3001, 3 * 21007))
    assert ledger.sequence_totals([2])[0]["routing_read"] == 2 / 3


def test_partial_units():
    """What is read to choose, as a share of a key's bytes: 3 of 8 numbers in MLA, 3 of 6 in GQA, bits of a key."""
    for layout, key, row in (("mla", 32, 32), ("gqa", 24, 40)):
        rows = make_case(layout).rows
        unit = partial_unit(rows, Fraction(12))
        assert unit.routing == Fraction(12, key) and unit.routing_bytes == 12
        assert (unit.row_bytes, unit.dense_bytes) == (row, row)
        assert partial_unit(rows, Fraction(5, 8)).routing == Fraction(5, 8 * key)


def test_empty_and_reset():
    ledger = AccessLedger()
    for _ in range(2):
        assert math.isnan(ledger.percent) and math.isnan(ledger.percent_without_routing)
        assert ledger.per_layer() == ledger.per_step() == ledger.per_sequence() == []
        data = ledger.as_dict()
        assert data["totals"]["percent"] is None and data["totals"]["percent_without_routing"] is None
        assert not any(value for value in data["totals"].values())
        json.dumps(data, allow_nan=False)
        ledger.record(0, MLA_UNIT, *counts([[1]], [[2]], [[3]], [[4]]))
        assert ledger.percent == 150.0
        ledger.reset()


def test_changing_batches():
    ledger = AccessLedger()
    ledger.record(0, MLA_UNIT, *counts([[1], [1]], [[2], [3]], [[0], [0]], [[9], [9]]))
    ledger.record(0, MLA_UNIT, *counts([[1]], [[4]], [[1]], [[9]]))
    assert ledger.totals()["union"] == 9
    assert [row["union"] for row in ledger.per_step()] == [5, 4]
    with pytest.raises(ValueError, match=r"batch sizes \[1, 2\].*reset\(\)"):
        ledger.per_sequence()


def test_long_runs_are_packed_without_losing_a_call():
    """Entries are folded together every 256 calls; the shape of the batch changes on the way."""
    ledger, calls = AccessLedger(), 3 * PACK + 40
    for step in range(calls):
        for layer in (0, 1):
            batch = 2 if step < PACK + 9 else 1
            ones = torch.ones(batch, 1, dtype=torch.int64)
            ledger.record(layer, MLA_UNIT, ones, (step + layer) * ones, 0 * ones, (2 * step + 5) * ones)
    held = max(len(stored) for stored in ledger._calls.values())
    assert held < 2 * PACK
    sizes = [2 if step < PACK + 9 else 1 for step in range(calls)]
    totals = ledger.totals()
    assert totals["calls"] == 2 * calls and totals["routing"] == 2 * sum(sizes)
    assert totals["union"] == sum(n * (2 * step + 1) for step, n in enumerate(sizes))
    assert totals["dense"] == sum(2 * n * (2 * step + 5) for step, n in enumerate(sizes))
    table = ledger.per_step()
    assert [row["union"] for row in table] == [n * (2 * step + 1) for step, n in enumerate(sizes)]
    assert [row["calls"] for row in ledger.per_layer()] == [calls, calls]


def test_steps_keep_their_order_when_settings_change():
    """Call numbers follow the calls, whichever unit they were counted in."""
    ledger, one = AccessLedger(), torch.ones(1, 1, dtype=torch.int64)
    units = [(GQA_UNIT, GQA_SCAN_UNIT)[step % 2] for step in range(PACK + 20)]
    for step, unit in enumerate(units):
        ledger.record(0, unit, one, step * one, one, one)
    table = ledger.per_step()
    assert [row["union"] for row in table] == list(range(len(units)))
    assert [row["row_read"] for row in table] == [unit.row * (step + 1) for step, unit in enumerate(units)]


def test_large_counts_do_not_overflow():
    ledger = AccessLedger()
    big = torch.full((4, 8), 2**30, dtype=torch.int64)
    for _ in range(3):
        ledger.record(0, GQA_UNIT, big, big, big, big)
    assert ledger.totals()["dense"] == 3 * 32 * 2**30
    assert ledger.totals()["denominator"] == 2 * 3 * 32 * 2**30


def test_recorded_counts_are_copies():
    """A caller may reuse its buffers after the call."""
    ledger = AccessLedger()
    parts = counts([[1]], [[2]], [[3]], [[4]])
    ledger.record(0, MLA_UNIT, *parts)
    for part in parts:
        part.zero_()
    assert ledger.percent == 150.0


def test_padding_is_not_counted():
    """Hidden suffix rows and left padding appear in no count."""
    case = make_case("gqa", 2, 1, (20, 5), suffix=3, hidden=((1, 1),), seed=0)
    output = case.run(1000)
    assert output.union.tolist() == [[20], [5]] and output.suffix.tolist() == [[3], [2]]
    assert case.draw.step.tolist() == [23, 7]
    few = replace(case, draw=case.draw).run(1)
    assert bool((few.routing[:, 0] == case.teams.count[:, 0]).all())
