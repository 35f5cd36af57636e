"""The training of the embedded model, in small: the loss falls and an interrupted run goes on where it was."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from latent_santa.eval.tiny.training import samples
from latent_santa.eval.tiny.training.curriculum import mix
from latent_santa.eval.tiny.training.train import Settings, Trainer, main, train


@pytest.fixture(autouse=True)
def little_prose(monkeypatch):
    """Two haystacks are enough here; parsing the standard library's docstrings takes seconds."""
    monkeypatch.setattr("latent_santa.eval.tiny.haystack.docstrings", lambda: [" A small stone lies here."] * 50)


def settings(out, **changes) -> Settings:
    given = {"steps": 12, "device": "cpu", "small": True, "tokens": 1088, "longest": 136, "workers": 0}
    return Settings(out=out, **(given | changes))


def test_the_loss_falls(tmp_path):
    run = settings(tmp_path, steps=60)
    train(run, until=5)
    train(Settings(**vars(run) | {"resume": True}), until=55)
    done = train(Settings(**vars(run) | {"resume": True}))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["step"] in (5, 55, 60)] == [5, 55, 60]
    first, last = lines[0], lines[-1]
    assert last["text"] < 0.8 * first["text"] and last["answers"] < 0.9 * first["answers"]
    assert done.step == 60 and done.progress == 1.0


def test_a_resumed_run_is_the_uninterrupted_run(tmp_path):
    whole = train(settings(tmp_path / "whole"))
    half = train(settings(tmp_path / "parts"), until=5)
    assert half.step == 5
    rest = train(settings(tmp_path / "parts", resume=True))
    assert rest.step == whole.step == 12
    for name, weight in whole.network.state_dict().items():
        assert torch.equal(weight, rest.network.state_dict()[name]), name
    assert not list((tmp_path / "parts").glob("*.part*"))
    stored = load_file(tmp_path / "parts" / "model.safetensors")
    assert stored.keys() == rest.network.state_dict().keys()
    assert all(weight.dtype == torch.bfloat16 for weight in stored.values())


def test_workers_make_the_data(tmp_path):
    assert train(settings(tmp_path, steps=3, workers=2)).step == 3


def test_a_new_run_starts_afresh(tmp_path):
    """--resume goes on only if there is a checkpoint; without it an old log goes."""
    assert train(settings(tmp_path, steps=2, resume=True)).step == 2
    train(settings(tmp_path, steps=1))
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1]


def test_rates_warm_up_and_fall_to_zero(tmp_path):
    trainer = Trainer(settings(tmp_path, steps=1000))
    rates = []
    for trainer.step in (0, 49, 100, 560, 999):
        rates.append(trainer.rate())
    assert rates[0] == pytest.approx(0.01) and rates[1] == pytest.approx(0.5) and rates[2] == 1.0
    assert rates[3] == pytest.approx(0.5) and 0 < rates[4] < 0.01


def test_the_curriculum_grows():
    start, middle, end = mix(0.0), mix(0.2), mix(1.0)
    assert start.apart == start.made == start.english == 0.0
    assert 0 < middle.apart < end.apart and middle.gap <= end.gap
    assert max(start.lengths) < max(middle.lengths) < max(end.lengths) == 8704
    assert set(mix(1.0, longest=272).lengths) == {272}
    assert len(samples.KINDS) == 5


def test_help_says_what_it_does(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "--resume" in text and "checkpoint.pt" in text and "under ten minutes" in text
