"""The embedded model as shipped: it loads offline, answers when dense, and its answers come from the prompt."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from latent_santa.eval.tiny import TASKS, load_tiny
from latent_santa.eval.tiny.encoder import PieceEncoder
from latent_santa.eval.tiny.load import MODEL_DIRECTORY
from latent_santa.eval.tiny.training.evaluate import prompts, scores
from latent_santa.eval.tiny.training.network import Network

LEAST = dict.fromkeys(TASKS, 0.95) | {"fwe": 0.90}


@pytest.fixture(scope="module")
def tiny():
    return load_tiny()


@pytest.fixture(scope="module")
def encoder(tiny):
    return PieceEncoder(tiny[1].backend_tokenizer)


@pytest.mark.parametrize("task", TASKS)
def test_dense_score_at_1k(task, tiny, encoder):
    found = scores(*tiny, prompts(task, 20, 1024, encoder, seed=20261130))
    assert sum(found) / len(found) >= LEAST[task]


def test_keys_outside_the_lists_and_apart_from_their_values(tiny, encoder):
    """What the model before this one could not do at all."""
    for keys in ("made", "english"):
        found = scores(*tiny, prompts("multikey", 6, 1024, encoder, seed=5, keys=keys, gap=2, distractors=16))
        assert sum(found) / len(found) >= 0.75


def test_without_the_answers_in_the_prompt_the_score_is_gone(tiny, encoder):
    found = []
    for task in TASKS:
        found += scores(*tiny, prompts(task, 4, 512, encoder, seed=20261130, control=True))
    assert sum(found) / len(found) < 0.05


def test_the_training_twin_is_the_model(tiny):
    """Same names, same numbers: so the shipped config is the trained one."""
    model, _ = tiny
    twin = Network()
    twin.load_state_dict({k: v for k, v in model.state_dict().items() if k != "lm_head.weight"})
    ids = torch.randint(5, 4096, (2, 150), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = twin.logits(twin(ids)).view(2, 150, -1)
        theirs = model(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)
    assert model.config.max_position_embeddings == twin.shape.positions == 8704


def test_the_tokenizer_gives_every_listed_word_one_token(tiny):
    lists = json.loads((MODEL_DIRECTORY.parent / "lexicon.json").read_text())
    for name in set(lists) - {"outside"}:
        ids = tiny[1]([" " + word for word in lists[name]], add_special_tokens=False)["input_ids"]
        assert all(len(one) == 1 for one in ids), name


def test_dtype_is_chosen(tiny):
    model, tokenizer = load_tiny(dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 2


def test_missing_files_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr("latent_santa.eval.tiny.load.MODEL_DIRECTORY", tmp_path)
    with pytest.raises(FileNotFoundError, match="config.json, model.safetensors, tokenizer.json"):
        load_tiny()


def test_it_loads_in_a_fresh_process_with_sockets_blocked():
    script = """
import socket
tried = []
def refuse(*a, **k):
    tried.append(a)
    raise OSError("no network here")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
from latent_santa.eval.tiny import load_tiny, samples
model, tokenizer = load_tiny()
sample = samples("single", 1, 512, tokenizer)[0]
turn = [{"role": "user", "content": sample.input}]
text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) + sample.answer_prefix
ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
out = model.generate(ids, do_sample=False, max_new_tokens=sample.max_new_tokens)
assert sample.references[0] in tokenizer.decode(out[0, ids.shape[1]:])
assert not tried, tried
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
