"""MagicPIG: its law over draws of the directions, loops in float64, dense attention with many tables, the ledger."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import latent_santa
from latent_santa import naive as ref
from latent_santa.estimator import attend_teams
from latent_santa.eval.run.conditions import expand, label, slug
from latent_santa.methods import METHODS, magicpig
from latent_santa.methods.magicpig import directions, log_sampled
from latent_santa.rows import Rows

from .cases import make_case
from .tiny_models import assert_same, cache_of, generate, padded, prompt, tiny_model

METHOD = METHODS["magicpig"]
SMALL = {"method": "magicpig", "hash_bits": 2, "hash_tables": 4}


@pytest.fixture(autouse=True)
def few_rows_read_always(monkeypatch):
    """Prompts of the tests are shorter than the 68 rows that the method always reads."""
    monkeypatch.setattr(magicpig, "FIRST", 1)
    monkeypatch.setattr(magicpig, "LAST", 3)


def built(case, config):
    """The case's step with the records that the method builds on the cache as it was at prefill."""
    mla = case.rows.values is case.rows.keys[0]
    before = Rows(case.frozen, case.frozen[0] if mla else case.rows.values[:, :, : case.prompt.shape[1]])
    (teams,) = METHOD.build([case.points], [before], case.prompt, config)
    return replace(case.step, teams=teams)


def in_loops(case, config, b, g):
    """One sequence and group: outputs ``(H, V)`` and (routing, union, suffix)."""
    inputs = case.reference_inputs(b, g, 1)
    queries, keys, values = inputs["queries"], inputs["keys"], inputs["values"]
    real = case.prompt[b].numpy()
    frozen = np.concatenate([part[b, g].double().numpy() for part in case.frozen], -1)[real]
    suffix, total = list(inputs["suffix"]), len(frozen)
    hashed = [i for i in range(total) if 1 <= i < total - 3]
    mean = np.mean([frozen[i] for i in hashed], 0) if hashed else None
    towards = directions(frozen.shape[-1], config.hash_bits, config.hash_tables, config.seed, torch.device("cpu"))
    towards = towards.numpy().T.reshape(config.hash_tables, config.hash_bits, -1)
    outputs, union = [], set(range(total)) - set(hashed)
    for query in queries:
        weight = {i: 1.0 for i in [*union - set(hashed), *suffix]}
        for i in hashed:
            centred = frozen[i] - mean
            hits = sum(all((d @ query > 0) == (d @ centred > 0) for d in table) for table in towards)
            if hits >= 2:
                cosine = query @ centred / np.linalg.norm(query) / np.linalg.norm(centred)
                p = (1 - math.acos(cosine) / math.pi) ** config.hash_bits
                tables = config.hash_tables
                weight[i] = 1 / sum(math.comb(tables, n) * p**n * (1 - p) ** (tables - n) for n in range(2, tables + 1))
        mass = {i: w * math.exp(ref.score(query, keys[i], inputs["scale"])) for i, w in weight.items()}
        outputs.append(sum(m * values[i] for i, m in mass.items()) / sum(mass.values()))
        union |= set(weight) - set(suffix)
    return np.array(outputs), [len(hashed), len(union), len(suffix)]


@pytest.mark.parametrize("layout", ["mla", "gqa"])
@pytest.mark.parametrize(("bits", "tables"), [(2, 4), (1, 2), (3, 40)])
def test_equals_its_loops(layout, bits, tables):
    groups = 1 if layout == "mla" else 2
    case = make_case(layout, 3, groups, (30, 4, 17), suffix=3, hidden=((1, 0),))
    config = latent_santa.SantaConfig(method="magicpig", hash_bits=bits, hash_tables=tables, seed=5)
    output = METHOD.attend(built(case, config), config, None)
    for b in range(3):
        for g in range(groups):
            outputs, counts = in_loops(case, config, b, g)
            np.testing.assert_allclose(output.out[b, g].numpy(), outputs, rtol=2e-5, atol=2e-6)
            assert [int(part[b, g]) for part in (output.routing, output.union, output.suffix)] == counts


def test_rows_are_read_as_often_as_the_law_says_and_both_sums_are_unbiased():
    """Over draws of the directions; z bounds that chance breaks once in about ten thousand runs."""
    case = make_case("gqa", 2, 1, (16,), suffix=1, scale=0.4)
    draws, read, sums = 400, [], []
    for seed in range(draws):
        config = latent_santa.SantaConfig(**SMALL, seed=seed)
        step = built(case, config)
        picked = METHOD.selected(step, config)
        read.append(picked.log_correction[0, 0].isfinite())
        output = attend_teams(step, picked, step.teams.M)
        mass = output.lse[0, 0].double().exp()
        sums.append(torch.cat((mass[:, None], output.out[0, 0].double() * mass[:, None]), -1))
    u = log_sampled(METHOD.cosines(step), 2, 4)[0, 0].exp()
    u[:, [0, -3, -2, -1]] = 1.0
    assert 0.02 < u.min() < 0.1 and 0.6 < u[:, 1:-3].max() < 1
    found = torch.stack(read).double().mean(0)
    assert bool(((found - u).abs() <= 4.5 * (u * (1 - u) / draws).sqrt() + 1e-12).all())
    s = 0.4 * case.query[0][0, 0].double() @ case.rows.keys[0][0, 0].double().T
    exact = torch.cat((s.exp().sum(-1, keepdim=True), s.exp() @ case.rows.values[0, 0].double()), -1)
    every = torch.stack(sums)
    error = every.std(0) / draws**0.5
    assert bool(((every.mean(0) - exact).abs() <= 4.5 * error).all())
    assert bool((error < 0.05 * exact[:, :1]).all())  # or the bound would say nothing


def test_the_chance_of_two_tables_is_the_binomial_one():
    cosine = torch.tensor([-1.0, -0.999, 0.0, 0.9, 1.0], dtype=torch.float64)
    p = [(1 - math.acos(c) / math.pi) ** 3 for c in cosine.tolist()]
    wanted = [sum(math.comb(9, n) * q**n * (1 - q) ** (9 - n) for n in range(2, 10)) for q in p]
    np.testing.assert_allclose(log_sampled(cosine, 3, 9).exp().numpy(), wanted, rtol=1e-6, atol=1e-300)


# Through the patch: tiny models of both layouts


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


def test_many_tables_are_dense_attention(model):
    """One bit and two thousand tables find every row, whose weight is then 1."""
    ids, mask = padded([19, 40])
    wanted = generate(model, ids, 4, attention_mask=mask)
    with latent_santa.patch(model, method="magicpig", hash_bits=1, hash_tables=2000) as santa:
        assert_same(generate(model, ids, 4, attention_mask=mask), wanted)
        assert santa.full_calls == 0 and santa.access.percent_without_routing == 100
        santa.configure(hash_bits=3, hash_tables=4)
        santa.reset()
        found = generate(model, ids, 4, attention_mask=mask)
        assert 0 < santa.access.percent_without_routing < 90
        assert not found.scores[0].allclose(wanted.scores[0], atol=1e-2)


def test_a_batch_is_as_alone(model):
    ids, mask = padded([19, 40])
    with latent_santa.patch(model, **SMALL) as santa:
        together, rows = generate(model, ids, 4, attention_mask=mask), santa.access.per_sequence()
        for b, length in enumerate((19, 40)):
            santa.reset()
            alone = generate(model, prompt(length, seed=b), 4)
            assert alone.sequences[0, length:].tolist() == together.sequences[b, 40:].tolist()
            for one, many in zip(alone.scores, together.scores, strict=True):
                np.testing.assert_allclose(many[b].numpy(), one[0].numpy(), rtol=1e-4, atol=1e-4)
            assert santa.access.per_sequence()[0] == {**rows[b], "sequence": 0}


def test_a_second_turn_is_hashed_from_its_own_mean(model):
    """With every row found, the two turns' records together are dense attention; few tables read less of both."""
    ids = prompt(40)
    with latent_santa.patch(model, method="magicpig", hash_bits=1, hash_tables=2000) as santa:
        first = generate(model, ids, 4)
        second = torch.cat((first.sequences, prompt(20, seed=8)), 1)
        found = generate(model, second, 4, cache=cache_of(first))
        parents = cache_of(found).layers[1].grouped.teams.parents
        # the second is the answer's last token and the turn; four rows of each are read always
        assert parents.C == 2 and parents.sizes[0, 0].tolist() == [36, 17]
        santa.configure(hash_bits=3, hash_tables=4)
        santa.reset()
        first = generate(model, ids, 4)
        generate(model, second, 4, cache=cache_of(first))
        assert santa.access.percent_without_routing < 90
    assert_same(found, generate(model, second, 4))


def test_signatures_are_counted_as_shares_of_a_key(model):
    """36 of 40 rows are hashed to 8 bits: of MLA rows of 24 numbers, and of GQA keys of 8, in four bytes each."""
    with latent_santa.patch(model, **SMALL) as santa:
        generate(model, prompt(40), 3)
        totals, mla = santa.access.totals(), santa.layout == "mla"
        groups, calls = (1 if mla else 2), 2 * 3
        assert totals["routing"] == calls * groups * 36
        assert totals["routing_read"] == pytest.approx(totals["routing"] * 8 / (768 if mla else 256))
        attended = totals["union"] + totals["suffix"]
        assert totals["bytes"] == totals["routing"] + attended * (96 if mla else 64)
        assert totals["numerator"] == pytest.approx(totals["routing_read"] + attended * (1 if mla else 2))
        assert "K=2 bits, L=4 tables" in " ".join(santa.report().split())


def test_another_seed_hashes_other_rows(model):
    with latent_santa.patch(model, **SMALL) as santa:
        wanted = generate(model, prompt(40), 3)
        santa.configure(seed=1)
        assert not generate(model, prompt(40), 3).scores[0].allclose(wanted.scores[0], atol=1e-3)


def test_short_prompts_are_read_whole(model):
    with latent_santa.patch(model, **SMALL) as santa:
        found = generate(model, prompt(4), 3)
        assert santa.full_calls == 3 and santa.access.totals()["routing"] == 0
    assert_same(found, generate(model, prompt(4), 3))


def test_settings_in_a_run():
    hashes = [{"hash_bits": k, "hash_tables": n} for k, n in ((10, 150), (8, 75))]
    base = latent_santa.SantaConfig(method="dense")
    found = expand(base, ["magicpig"], [8, 16], [], [], [], [], hashes=hashes)
    assert [label(config) for config in found] == ["magicpig K=10 L=150", "magicpig K=8 L=75"]
    assert [slug(config) for config in found] == ["magicpig_k10_l150", "magicpig_k8_l75"]
    for bad, rule in (({"hash_bits": 16}, "at most 15 bits"), ({"hash_tables": 1}, "rows found in 2 tables")):
        with pytest.raises(ValueError, match=rule):
            latent_santa.SantaConfig(method="magicpig", **bad)
