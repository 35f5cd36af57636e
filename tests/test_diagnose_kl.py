"""`latent-santa diagnose kl` against Equation 11 in loops and float64."""

from __future__ import annotations

import json
import math

import pytest
import torch

from latent_santa.config import SantaConfig
from latent_santa.eval.cli import main
from latent_santa.eval.diagnose.kl import EXACT, MEAN_KEY, REPRESENTATIVE, Divergence
from latent_santa.eval.diagnose.paper import paper_value

from .diagnose_cases import LENGTH, recorded
from .eval_support import save_random_model


def in_loops(keys, query, scale, groups, representative):
    """KL of one head by each routing key. keys: the prompt's N full keys; groups: lists of rows."""
    s = [scale * float(score) for score in keys @ query]
    z = sum(map(math.exp, s))
    p = [math.exp(x) / z for x in s]
    found = {}
    for name in (REPRESENTATIVE, MEAN_KEY, EXACT):
        weights = []
        for number, group in enumerate(groups):
            if name == EXACT:
                weights.append(sum(p[i] for i in group))
                continue
            key = keys[representative[number]] if name == REPRESENTATIVE else keys[group].mean(0)
            weights.append(len(group) * math.exp(scale * float(key @ query)))
        total = sum(weights)
        found[name] = sum(
            p[i] * math.log(p[i] / (weight / total / len(group)))
            for weight, group in zip(weights, groups, strict=True)
            for i in group
        )
    return found


@pytest.mark.parametrize("name", ["deepseek_v2-yarn", "qwen2"])
@torch.no_grad()
def test_divergence_is_equation_11(name):
    santa, record = recorded(name)
    diagnostic = Divergence(SantaConfig(method="dense"))
    for key in ("teams k-means 16/4", "clusters k-means B=4"):
        result = diagnostic.measure(santa, record, key)["layers"]
        wanted: dict[str, list[float]] = {}
        for layer, teams in enumerate(record.teams()):
            rows = record.rows(layer)
            full = torch.cat([part[0, :, :LENGTH].double() for part in rows.keys], -1).numpy()
            sums: dict[str, list[float]] = {}
            for call in range(1, record.calls):
                query, scale = record.query(layer, call)
                heads = torch.cat([part[0].double() for part in query], -1).numpy()
                for g in range(full.shape[0]):
                    team = teams.team_of_row[0, g]
                    groups = [(team == n).nonzero().flatten().tolist() for n in range(int(teams.count[0, g]))]
                    for head in heads[g]:
                        own = in_loops(full[g], head, scale, groups, teams.representative[0, g].tolist())
                        for what, value in own.items():
                            sums.setdefault(what, []).append(value)
            for what, values in sums.items():
                wanted.setdefault(what, []).append(sum(values) / len(values))
        assert set(result) == {REPRESENTATIVE, MEAN_KEY, EXACT} - ({REPRESENTATIVE} if "clusters" in key else set())
        for what, layers in result.items():
            assert layers == pytest.approx(wanted[what], rel=2e-4, abs=1e-6)
            assert all(exact <= own + 1e-6 for exact, own in zip(result[EXACT], layers, strict=True))


def test_single_rows_are_routed_exactly():
    santa, record = recorded("qwen2")
    diagnostic = Divergence(SantaConfig(method="dense"))
    diagnostic._partitions["rows"] = SantaConfig(
        method="santa++", parents="contiguous", parent_size=1, representatives=1, budget=1
    )
    for layers in diagnostic.measure(santa, record, "rows")["layers"].values():
        assert max(map(abs, layers)) < 1e-5


def test_command_leaves_the_first_call_out(tmp_path, capsys):
    model = save_random_model(tmp_path)
    words = "--data builtin --tasks niah_single_1,fwe --length 256 --n 1 --calls 2 --no-plot".split()
    out = tmp_path / "run"
    assert main(["diagnose", "kl", "--model", str(model), *words, "--out", str(out)]) == 0
    summary = json.loads((out / "kl.json").read_text())
    assert summary["calls_per_prompt"] == {"niah_single_1": 1.0, "fwe": 1.0} and len(summary["lines"]) == 10
    header, lines = Divergence(SantaConfig(method="dense")).tables(summary)[""]
    assert header == ["Partition", "routed by", "niah_single_1", "fwe"]
    text = (out / "kl.md").read_text()
    assert all("| " + " | ".join(line) + " |" in text for line in lines)
    assert "k-means" in capsys.readouterr().out


def test_the_papers_numbers_stand_beside_its_conditions_only():
    settings = {"model": "a/Qwen2.5-7B-Instruct", "data": "jsonl:x", "length": 8192, "quant": "none"}
    assert paper_value("1", settings, "cwe", "teams") == "1.621"
    assert paper_value("7", {**settings, "length": 32768}, "niah_multivalue", "0.9") == "15.1 [13.4, 17.0]"
    assert paper_value("1", settings, "fwe", "teams") is None
    for other in ({"model": "a/Qwen2.5-7B"}, {"data": "builtin"}, {"length": 4096}, {"quant": "int8"}):
        assert paper_value("1", settings | other, "cwe", "teams") is None
