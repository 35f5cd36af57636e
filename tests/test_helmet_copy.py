"""Prompts and scores beside HELMET's own loaders: HELMET_COPY=PATH, a copy of its repository, and its requirements.

The records are made up; prompt texts and loaders are the copy's. Nothing here runs without the copy.
"""

from __future__ import annotations

import importlib
import os
import random
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from latent_santa.eval.run.render import Renderer
from latent_santa.eval.run.scoring import opening, score
from latent_santa.eval.sources import Request, load_samples
from latent_santa.eval.sources.helmet import files, labels
from latent_santa.eval.sources.tasks import HELMET, RAG
from latent_santa.eval.tiny.load import MODEL_DIRECTORY
from tests import helmet_files
from tests.eval_support import tokenizer

pytestmark = pytest.mark.skipif("HELMET_COPY" not in os.environ, reason="HELMET_COPY names no copy of HELMET")

LENGTH, N, SEED = 8192, 3, 42
KEYS = {
    "substring": "substring_exact_match",
    "exact": "exact_match",
    "rouge_l": "rougeL_f1",
    "option": "exact_match",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    made = helmet_files.write(tmp_path_factory.mktemp("HELMET"))
    shutil.copy(Path(os.environ["HELMET_COPY"]) / "data.py", made / "data.py")
    return made


@pytest.fixture(scope="module")
def helmet(directory):
    """HELMET's modules, which find our files where they would ask the hub, and our tokenizer for Llama 2's."""
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("rouge_score")
    of_files = datasets.load_dataset

    def load_dataset(name: str, *args: Any, **options: Any) -> Any:
        if name == "json":
            return of_files(name, *args, **options)
        folder = name.rpartition("/")[2]
        if folder == "infinitebench":
            paths = {file.removesuffix(".jsonl"): f"infbench/{file}" for file in files.BOOKS.values()}
        else:
            paths = {path.stem: f"icl/{folder}/{path.name}" for path in (directory / "data/icl" / folder).iterdir()}
        made = {
            key: of_files("json", data_files=str(directory / "data" / path))["train"] for key, path in paths.items()
        }
        for key, data in made.items():
            for column in [column for column in data.column_names if "label" in column or column == "intent"]:
                made[key] = made[key].cast_column(column, datasets.ClassLabel(num_classes=max(labels.CLASSES.values())))
        return made

    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(os.environ["HELMET_COPY"])
        patched.setitem(sys.modules, "pytrec_eval", ModuleType("pytrec_eval"))  # NDCG is tested by its definition
        patched.setattr(datasets, "load_dataset", load_dataset)
        found = SimpleNamespace(**{name: importlib.import_module(name) for name in ("data", "model_utils")})
        patched.setattr(found.data, "filter_length", lambda data, least, field: data)
        patched.setattr(found.data, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda name: tokenizer()))
        yield found


def official(helmet, directory: Path, task: str, n: int | None) -> dict[str, Any]:
    name = {"popqa": "kilt_popqa_3", "msmarco": "msmarco_rerank_psg", "json_kv": "json_kv"}.get(task, f"kilt_{task}")
    if task in files.HUB:
        name = f"icl_{task.replace('clinc', 'clinic')}_{labels.shots_at(task, LENGTH)}shot_balance"
    elif task in files.BOOKS:
        name = f"infbench_{'qa' if task == 'infbench_qa' else 'choice'}_eng_{LENGTH - 210}"
    paths = ["", ""]
    if task not in files.HUB and task not in files.BOOKS:
        paths = [str(directory / "data" / path) for path in (*files.needed(task, LENGTH), "")][:2]
    random.seed(SEED)
    return helmet.data.load_data(SimpleNamespace(max_test_samples=n, shots=2, seed=SEED), name, *paths)


def answers_to(references: tuple[str, ...]) -> list[str]:
    first, last = references[0], references[-1]
    return ["", "no", f" {first}", f"{last}\nmore", f" Answer: {first}", f" the {first}. And\nAnswer: x", first[:2],
            f"label: {first}", f" x label: {first}", "name 3", f" B. {last}"]  # fmt: skip


@pytest.mark.parametrize("task", HELMET)
def test_prompts_and_scores_are_helmets(helmet, directory, task):
    theirs = official(helmet, directory, task, N)
    renderer, form = Renderer(tokenizer()), HELMET[task]
    more = {"shots": 2, "book_tokenizer": str(MODEL_DIRECTORY), "chat": "helmet"}
    request = Request(f"helmet:{directory}", (task,), N, LENGTH, seed=SEED, select="questions", more=more)
    samples = load_samples(request, renderer, tiny=False).samples
    assert len(samples) == len(theirs["data"]) > (N if task in (*RAG, "msmarco") else N - 1)
    for sample, item in zip(samples, theirs["data"], strict=True):
        ids = helmet.model_utils.tokenize(
            dict(item), theirs, tokenizer(), LENGTH, form.max_new_tokens, use_chat_template=sample.chat,
            system_message=None,
        ).input_ids[0].tolist()  # fmt: skip
        prompt = renderer.prompt(sample, None)
        assert renderer.ids(prompt.text, sample.chat) == ids
        if task == "msmarco":
            assert list(sample.references) == [" ".join(pair) for pair in item["qrel"]]
            continue
        opened = opening(prompt.text, sample.answer_prefix)
        assert opened == ("" if sample.chat else theirs["system_template"])
        for answer in answers_to(sample.references):
            found, _ = theirs["post_process"]({"output": opened + answer}, item)
            assert score(answer, sample.references, sample.metric, opened) == found[KEYS[sample.metric]], answer
