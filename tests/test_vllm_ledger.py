"""The ledger of the vLLM plugin: counts of batch places become those of requests, whoever comes, goes and returns."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from latent_santa.patches.vllm import ledger
from latent_santa.patches.vllm.ledger import COLUMNS, Ledger

LAYERS, PLACES = 3, 4


@pytest.fixture
def counted() -> tuple[Ledger, dict[str, list[int]]]:
    """A ledger after 60 steps of ten requests that share four places, and what a dictionary counted."""
    found, expected, draw = Ledger(PLACES, LAYERS, torch.device("cpu"), {"settings": "S"}), {}, random.Random(3)
    for _ in range(60):
        ids = draw.sample([f"request {i}" for i in range(10)], draw.randint(1, PLACES))
        decodes, rows = draw.randint(0, len(ids)), [draw.randint(20, 99) for _ in ids]
        found.before_step(ids, rows, decodes)
        for place in range(decodes):
            own = expected.setdefault(ids[place], [0] * 6)
            for _ in range(LAYERS):
                read = [draw.randint(0, 9) for _ in COLUMNS]
                found.counts[place] += torch.tensor(read)
                own[:4] = [a + b for a, b in zip(own, read, strict=False)]
            own[4:] = own[4] + 1, own[5] + rows[place] * LAYERS
    return found, expected


def test_every_request_gets_its_own(counted: tuple[Ledger, dict[str, list[int]]]) -> None:
    found, expected = counted
    for _ in range(2):  # looking changes nothing
        told = found.as_dict()
        named = {name: [own[c] for c in (*COLUMNS, "steps", "dense")] for name, own in told["requests"].items()}
        assert {name: own for name, own in named.items() if any(own)} == expected
        totals = [sum(column) for column in zip(*expected.values(), strict=True)]
        assert [told["totals"][c] for c in (*COLUMNS, "steps", "dense")] == totals
        assert told["totals"]["percent"] == pytest.approx(100 * sum(totals[:4]) / totals[5])
        assert told["engine_steps"] == 60


def test_old_requests_are_kept_in_the_totals_only(
    counted: tuple[Ledger, dict[str, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, expected = counted
    before = found.as_dict()["totals"]
    monkeypatch.setattr(ledger, "KEPT", 2)
    found.before_step(["someone new"], [5], 1)
    for i in range(3 * PLACES):
        found.before_step([f"later {i}"], [1], 0)
    found.as_dict()
    told = found.as_dict()
    assert len(told["requests"]) < len(expected)
    assert all(told["totals"][c] == before[c] for c in COLUMNS)


def test_the_file_is_whole_and_says_what_was_not_sampled(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "ledger.json"
    found = Ledger(2, LAYERS, torch.device("cpu"), {"settings": "S"}, str(path))
    found.before_step(["a", "b"], [10, 20], 1)
    found.counts[0] += torch.tensor([1, 2, 3, 0])
    found.unsampled("several tokens", 40)
    found.write()
    told = json.loads(path.read_text(encoding="utf-8"))
    assert told["requests"]["a"]["union"] == 2 and told["requests"]["a"]["percent"] == 20.0
    assert told["unsampled"] == {"several tokens": {"steps": 1, "rows": 40 * LAYERS}}
    assert [p.name for p in path.parent.iterdir()] == ["ledger.json"]
    assert "read 20.0 % of dense's rows in 1 decoding steps" in found.line(told)


def test_a_file_that_cannot_be_written_is_told_of_once_and_tried_again(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "folder" / "ledger.json"
    path.parent.touch()  # a file where the folder should be
    found = Ledger(2, LAYERS, torch.device("cpu"), {}, say=said.append)
    found._path = str(path)
    for _ in range(2):
        found._try_to_write()
    assert len(said) == 1 and "cannot be written" in said[0] and str(path.parent) in said[0]
    path.parent.unlink()
    found._try_to_write()
    assert path.is_file() and len(said) == 1
