"""HELMET's 13 tasks from a made-up copy: prompts, draws, cuts, refusals, a run and the paper's aggregation."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from latent_santa.config import SantaConfig
from latent_santa.eval.cli import main
from latent_santa.eval.errors import EvalError
from latent_santa.eval.report import paper_tables
from latent_santa.eval.run import answers
from latent_santa.eval.run.render import Renderer
from latent_santa.eval.sources import Request, load_samples
from latent_santa.eval.sources.helmet import files, items, labels
from latent_santa.eval.sources.request import Loaded
from latent_santa.eval.sources.tasks import HELMET, RAG, mean_label, resolve_tasks
from latent_santa.eval.tiny.load import MODEL_DIRECTORY
from tests import helmet_files
from tests.eval_support import block_network, save_random_model, tokenizer

MORE = {"shots": 2, "book_tokenizer": str(MODEL_DIRECTORY), "chat": "helmet"}


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    return helmet_files.write(tmp_path_factory.mktemp("HELMET"))


@pytest.fixture
def own(tmp_path) -> Path:
    return helmet_files.write(tmp_path / "HELMET")


def load(directory: Path, *tasks: str, n: int = 3, select: str = "first", length: int = 8192, **more) -> Loaded:
    request = Request(f"helmet:{directory}", tasks, n, length, select=select, more=MORE | more)
    return load_samples(request, Renderer(tokenizer()), tiny=False)


def test_every_task_makes_prompts_that_fit(copy, monkeypatch):
    monkeypatch.setattr(answers, "check_rouge", lambda: None)
    block_network(monkeypatch)
    loaded = load(copy, *HELMET, n=2, select="sample")
    renderer = Renderer(tokenizer())
    assert [sample.task for sample in loaded.samples] == [task for task in HELMET for _ in range(2)]
    for sample in loaded.samples:
        form = HELMET[sample.task]
        assert (sample.metric, sample.max_new_tokens) == (form.metric, form.max_new_tokens)
        assert sample.chat == sample.task.startswith("infbench")  # HELMET's configurations
        assert bool(sample.stop) == (not sample.chat and sample.task != "json_kv")
        assert renderer.count(sample.input, sample.answer_prefix, sample.chat) + sample.max_new_tokens <= 8192
    assert set(loaded.origin["files_sha256"]) >= {"trec_fine/test.jsonl", "nlu/train.jsonl"}


def test_a_question_over_pages_is_written_out(copy):
    (sample,) = load(copy, "nq", n=1).samples
    record = json.loads((copy / "data/kilt/nq-dev-multikilt_1000_k50_dep6.jsonl").read_text().split("\n")[0])
    passages = "\n\n".join(f"Page {page['title']}: {page['text']}" for page in record["ctxs"])
    demos = re.findall(r"Asked: (.*)\nAnswer: (.*)", sample.input)
    assert sample.input.startswith("Answer from these pages.\n\nPage T")
    assert sample.input.endswith(f"\n\n{passages}\n\nAsked: What of nq 0?") and sample.answer_prefix == "\nAnswer:"
    assert len(demos) == 2 and demos[0] != demos[1]
    assert all(re.fullmatch(r"What of nq-demo \d\?", question) for question, _ in demos)
    assert all(answer == f"thing {question[-2]}" for question, answer in demos)
    assert sample.references == ("thing 0", "item 0")


def test_popqa_keeps_rare_subjects_and_asks_no_example_again(copy):
    loaded = load(copy, "popqa", n=99)
    asked = {re.search(r"popqa (\d)\?$", sample.input)[1] for sample in loaded.samples}
    assert len(loaded.samples) == 12 and asked == {"0", "1", "2", "5", "6", "7"}  # 10**0 to 10**2 views
    for sample in loaded.samples:
        questions = re.findall(r"Asked: (.*)", sample.input)
        assert len(set(questions)) == 3 and not any(re.search("[3489]", question) for question in questions)


def test_questions_are_drawn_whole_and_prompts_one_by_one(copy):
    def asked(select: str, n: int) -> list[str]:
        return [sample.input.rpartition(" ")[2] for sample in load(copy, "triviaqa", n=n, select=select).samples]

    whole = asked("questions", 3)
    assert len(whole) == 6 and {whole.count(question) for question in whole} == {2}
    assert len(asked("sample", 5)) == 5 and asked("first", 3) == ["0?", "0?", "1?"]
    assert len(load(copy, "json_kv", n=3, select="questions").samples) == 3


def test_reranking_holds_the_judgements_and_a_perfect_answer_scores_one(copy):
    (sample,) = load(copy, "msmarco", n=1).samples
    ranking = [name for name, _ in sorted((r.split() for r in sample.references), key=lambda pair: -int(pair[1]))]
    assert answers.ndcg_10("Ranking: " + " > ".join(ranking), sample.references) == pytest.approx(1)
    shown = re.findall(r"Wanted: find q (\d+)\nRanking: ([\d >]+)\n\n", sample.input)
    assert len({qid for qid, _ in shown}) == 2 and "0" not in {qid for qid, _ in shown}
    assert all(len(order.split(" > ")) == 4 for _, order in shown)


def test_labels_are_numbers_in_balance_drawn_anew_for_each_text(copy):
    train = [json.loads(line) for line in (copy / "data/icl/trec/train.jsonl").read_text().splitlines()]
    of_text = {record["text"]: record["coarse_label"] for record in train}
    mappings = []
    for sample in load(copy, "trec_coarse", n=3).samples:
        pairs = re.findall(r"(text .*)\nis (\d+)", sample.input)
        assert len(pairs) == labels.shots_at("trec_coarse", 8192) == 400
        mapping = {(of_text[text], number) for text, number in pairs}
        assert len(mapping) == 6 == len(dict(mapping))  # one number per class
        assert {of_text[text] for text, _ in pairs[:6]} == set(range(6))  # a round has every class once
        test = json.loads((copy / "data/icl/trec/test.jsonl").read_text().split("\n")[int(sample.id[-6:])])
        assert sample.input.endswith(test["text"]) and sample.references == (dict(mapping)[test["coarse_label"]],)
        mappings.append(tuple(sorted(mapping)))
    assert len(set(mappings)) > 1


def test_draws_are_those_of_the_package_datasets():
    datasets = pytest.importorskip("datasets")
    order = datasets.Dataset.from_dict({"i": list(range(50))})
    assert order.shuffle(seed=7)["i"][:] == items.shuffled(50, 7)
    parts = order.train_test_split(test_size=0.1, seed=42)
    train, test = labels.split([{"i": i} for i in range(50)], 42)
    assert [r["i"] for r in train] == parts["train"]["i"][:] and [r["i"] for r in test] == parts["test"]["i"][:]


def test_a_set_in_balance_has_each_label_equally_often():
    many = [0] * 50 + [1] * 3 + [2] * 20
    chosen = labels.balanced(many, 30, 1)
    assert [sum(many[i] == label for i in chosen) for label in range(3)] == [10, 10, 10]
    assert len({i for i in chosen if many[i] == 1}) == 3  # few records of a label come several times
    assert labels.balanced(many, 30, 1) == chosen != labels.balanced(many, 30, 2)
    assert len(labels.chosen([{"x": i % 4} for i in range(40)], "x", 8, 42, "sample")) == 8


def test_parquet_is_read_as_json_lines_are(own):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table
    before = load(own, "clinc150").samples
    path = own / "data/icl/clinc_oos/train.jsonl"
    records, _ = files.table(path)
    parquet.write_table(table.from_pylist(records), path.with_suffix(".parquet"))
    path.unlink()
    assert load(own, "clinc150").samples == before


def test_books_are_cut_with_the_book_tokenizer_and_options_are_lettered(copy):
    (sample,) = load(copy, "infbench_mc", n=1).samples
    book = sample.input.split("Now this one:\n\n")[1].split(" ... and so on")[0]
    cut = tokenizer()(book)["input_ids"]
    assert abs(len(cut) + len(tokenizer()(" ... and so on")["input_ids"]) - (8192 - 210)) < 4
    assert sample.input.endswith("Asked: Who is in book 0?\nA. name 0\nB. name 1\nC. name 2\nD. name 3")
    assert sample.references == ("A", "A. name 0") and sample.answer_prefix == ""
    assert sample.input.count("[a book]\n") == 2 and "Asked: Who is in book 0?" not in sample.input[:200]


def test_without_a_chat_template_the_books_have_the_prefix_that_helmet_gives_them(copy):
    request = Request(f"helmet:{copy}", ("infbench_mc",), 1, 8192, select="first", more=MORE | {"chat": "helmet"})
    (sample,) = load_samples(request, Renderer(tokenizer(), chat=False), tiny=False).samples
    assert (sample.chat, sample.answer_prefix) == (False, "\n\nAnswer:")


def test_a_context_that_is_too_long_loses_its_end_and_nothing_else(own, monkeypatch):
    path = own / "data/kilt/triviaqa-dev-multikilt_1000_k50_dep6.jsonl"
    record = json.loads(path.read_text().split("\n")[0])
    record["ctxs"] *= 100
    path.write_text(json.dumps(record) + "\n")
    (sample,) = load(own, "triviaqa", n=9).samples
    used = Renderer(tokenizer()).count(sample.input, sample.answer_prefix, False) + 20
    assert 8180 <= used <= 8192 and sample.input.endswith("\n\nAsked: What of triviaqa 0?")
    monkeypatch.setattr(files, "LENGTHS", (64,))
    monkeypatch.setattr(files, "DOCUMENTS", {64: 50})
    with pytest.raises(EvalError, match="--length 64: triviaqa/000000 does not fit, not even without its context"):
        load(own, "triviaqa", n=1, length=64)


def test_shots_and_chat_are_asked_for(copy):
    (bare,) = load(copy, "json_kv", n=1, shots=0).samples
    assert bare.input.count("Name: ") == 1
    (shown,) = load(copy, "json_kv", n=1, shots=1, chat="all").samples
    assert "Name: k30\nCorresponding value: v-30\n\n" in shown.input and shown.chat
    assert shown.references == ("v-0",) and shown.answer_prefix == "\nCorresponding value:"


NOTHING = (
    "lacks:\n  data/kilt/nq-dev-multikilt_1000_k50_dep6.jsonl .of HELMET's data.tar.gz.\n  data/kilt/nq-train.*\n"
    "  data/icl/nlu_evaluation_data/train.parquet or data/icl/nlu_evaluation_data/train.jsonl .columns and label "
    "numbers of the hub's xingkun.*\n  data/infbench/longbook_choice_eng.jsonl .of the hub's xinrongzhang2022"
)
PAIRS = "data/json_kv/test_k105_dep6.jsonl"


@pytest.mark.parametrize(
    ("tasks", "file", "content", "said"),
    [
        ("nq", "data.py", None, "no data.py there; HELMET's prompts are not part of this package"),
        ("nq", "data.py", "def (", "data.py is not Python"),
        ("nq", "data.py", "x = 1", "no text user_template, .* in load_qa.*another version"),
        ("nq nlu infbench_mc", "data", None, NOTHING),
        (
            "json_kv",
            PAIRS,
            '{"context": "x"}\n',
            f"json_kv: a record of .*{PAIRS} is not of HELMET's form: KeyError 'demos'",
        ),
        ("json_kv", PAIRS, "no\n", f"{PAIRS}, byte 0: not JSON"),
        ("json_kv", PAIRS, "[]\n", f"{PAIRS}, byte 0: expected a JSON object, got list"),
    ],
)
def test_what_is_missing_is_named(own, tasks, file, content, said):
    if content is None:
        (own / file).rename(own / "elsewhere")
    else:
        (own / file).write_text(content)
    with pytest.raises(EvalError, match=said):
        load(own, *tasks.split())


def test_lengths_and_book_tokenizers_that_there_are_not(copy, tmp_path, monkeypatch):
    with pytest.raises(EvalError, match="--length 9000: HELMET's files have the lengths 8192, 16384"):
        load(copy, "nq", length=9000)
    block_network(monkeypatch)
    with pytest.raises(EvalError, match="--book-tokenizer .*none: cannot be loaded .*Llama 2"):
        load(copy, "infbench_mc", book_tokenizer=str(tmp_path / "none"))


def test_names_of_tasks_and_means():
    assert resolve_tasks("rag", "helmet") == RAG and len(resolve_tasks("icl", "helmet")) == 5
    assert resolve_tasks("all", "helmet") == tuple(HELMET)
    assert (mean_label(tuple(HELMET)), mean_label(RAG)) == (
        "all 13 HELMET tasks of the paper",
        "HELMET RAG, mean of 4 tasks",
    )


def test_the_papers_values_of_helmet_stand_beside_its_settings():
    settings = {"model": "Qwen/Qwen2.5-7B-Instruct", "length": 32768, "data": "helmet", "draws": "independent"}
    kmeans = SantaConfig(budget=128)

    def value(tasks, column, **changes):
        return paper_tables.lookup(settings | changes, tuple(tasks), kmeans, column)

    assert value(HELMET, "json_kv").score == 45.60 and value(HELMET, "mean").score == 56.35
    assert value(RAG, "mean").table == "2" and value(RAG, "mean").access == 17.49
    assert value(RAG, "mean", length=8192).table == "8" and value(RAG, "nq", length=8192).table == "9"
    assert value(HELMET, "json_kv", data="builtin") is None
    assert value(["longbench_v2"], "longbench_v2", data="longbench").score == 31.61


def test_a_run_weights_tasks_equally_in_scores_and_in_rows(own, tmp_path, monkeypatch, capsys):
    block_network(monkeypatch)
    for task in (*RAG, "json_kv"):
        monkeypatch.setitem(HELMET, task, replace(HELMET[task], max_new_tokens=4))
    for path in own.glob("data/kilt/*dev*"):  # prompts of very different lengths
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            record["ctxs"] = record["ctxs"][: 1 if path.name.startswith("nq") else 8]
        least = 1 if path.name.startswith("nq") else 2  # fewer than are asked for
        path.write_text("".join(json.dumps(record) + "\n" for record in records[:least]))
    model, out = save_random_model(tmp_path / "model"), tmp_path / "run"
    command = ["helmet", "--model", str(model), "--data", str(own), "--tasks", "rag,json_kv", "--n", "2"]
    command += ["--shots", "0", "--budgets", "32", "--parents", "contiguous", "--context-limit", "8192"]
    command += ["--no-plot", "--out", str(out)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "HELMET prompts, from its files and templates in a local folder" in shown
    summary = json.loads((out / "summary.json").read_text())
    cells = summary["conditions"][1]["cells"]
    assert summary["groups"] == {"rag": list(RAG)} and list(cells) == ["mean", "rag", *RAG, "json_kv"]
    for column, tasks in (("mean", (*RAG, "json_kv")), ("rag", RAG)):
        assert cells[column]["access"] == pytest.approx(np.mean([cells[t]["access"] for t in tasks]), abs=0.01)
        assert cells[column]["score"]["value"] == pytest.approx(np.mean([cells[t]["score"]["value"] for t in tasks]))
    lines = [json.loads(line) for line in next((out / "results").glob("santapp*")).read_text().splitlines()]
    rag = [line["access"] for line in lines if not line["id"].startswith("json_kv")]
    pooled = 100 * sum(access["numerator"] for access in rag) / sum(access["denominator"] for access in rag)
    assert abs(pooled - cells["rag"]["access"]) > 0.5  # the mean of percentages is another number
    table = (out / "table.md").read_text()
    assert (
        "HELMET RAG, mean of 4 tasks, up to 2 prompts per task" in table and "mean of the tasks' percentages" in table
    )
    assert main([*command, "--resume"]) == 0
    assert main(["paper", str(out), "--table", "10"]) == 0


def test_offline_there_is_json_kv_only(tmp_path, capsys):
    model = save_random_model(tmp_path / "model")
    assert main(["helmet", "--model", str(model), "--tasks", "nq"]) == 2
    assert "offline there is json_kv only" in capsys.readouterr().err
    command = ["helmet", "--model", str(model), "--length", "512", "--n", "1", "--budgets", "16", "--out"]
    assert main([*command, str(tmp_path / "run"), "--parents", "contiguous", "--methods", "dense"]) == 0
    assert "these are not HELMET scores" in capsys.readouterr().out
