"""The first example runs, commands have the options that are shown, numbers are in the results, links exist."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest

from latent_santa.eval.cli import COMMANDS, build_parser
from latent_santa.eval.commands import options
from latent_santa.eval.report import screen
from latent_santa.methods import METHODS

ROOT = Path(__file__).parents[1]
FOLDERS = ("", "latent_santa/", "latent_santa/methods/", "patches/", "patches/vllm/", "kernels/", "eval/")
PAGES = [*(f"{folder}README.md" for folder in FOLDERS), "kernels/NOTES.md", "eval/results/real/README.md"]
TEXT = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.S | re.M)


def commands() -> list[str]:
    shell = "\n".join(block for language, block in BLOCKS if not language).replace("\\\n", " ")
    lines = [line.partition("#")[0].strip() for line in shell.splitlines()]
    return [line for line in lines if re.match(r"latent-santa |.* -m latent_santa\.eval ", line)]


def test_the_first_example_runs(capsys):
    example = next(block for language, block in BLOCKS if language == "python")
    exec(compile(example, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "6 MLA layers patched" in shown and 0 < float(shown.split()[-1]) < 100


@pytest.mark.parametrize("line", commands())
def test_commands_have_the_options_that_are_shown(line):
    words = shlex.split(re.sub(r".*(latent-santa|-m latent_santa\.eval) ", "", line))
    assert words[0] in COMMANDS
    build_parser(words[0]).parse_args(words)


def test_every_python_block_is_valid():
    blocks = [block for language, block in BLOCKS if language == "python"]
    assert len(blocks) >= 4 and all(compile(block, "README.md", "exec") for block in blocks)


def anchors(page: Path) -> set[str]:
    """What GitHub names the headings of a page."""
    titles = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_lead_somewhere(page):
    text, here = (ROOT / page).read_text(encoding="utf-8"), (ROOT / page).parent
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = here / path if path else ROOT / page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
    for path in re.findall(r"`((?:latent_santa|patches|kernels|eval|tests)/[\w./*-]*)`", text):
        assert "NAME" in path or list(ROOT.glob(path.rstrip("/"))), path


def test_every_command_is_named():
    assert len(commands()) >= 10
    assert not [name for name in COMMANDS if f"latent-santa {name}" not in TEXT]


def test_every_method_is_named():
    assert not [name for name in METHODS if f'`"{name}"`' not in TEXT]
    parser = argparse.ArgumentParser()
    options.add_method_options(parser, "", "")
    shown = next(action.help for action in parser._actions if action.dest == "methods")
    assert not set(METHODS) - set(re.findall(r"[\w+]+", shown))


def test_the_first_screen_is_that_of_the_kept_run():
    summary = json.loads((ROOT / "eval/results/first_look/summary.json").read_text(encoding="utf-8"))
    words = " ".join(TEXT.split())
    assert screen.meaning(summary) in words
    for item in summary["conditions"]:
        cell = item["cells"]["mean"]
        line = f"{item['name']} {item['S'] or '-'} {cell['retained']:.1f} % {cell['access']:.1f} % "
        assert line + f"{cell['score']['value']:.1f} ± {cell['score']['half']:.1f}" in words


@pytest.mark.parametrize(("length", "folder"), [("2,048", "tiny"), ("4,096", "tiny_4096"), ("8,192", "tiny_8192")])
def test_what_the_embedded_model_keeps_is_that_of_the_kept_runs(length, folder):
    summary = json.loads((ROOT / f"eval/results/{folder}/summary.json").read_text(encoding="utf-8"))
    cells = {(str(item["S"]), item["estimator"]): item["cells"]["mean"] for item in summary["conditions"]}
    shown = [line.strip("| ").split(" | ")[1:] for line in TEXT.splitlines() if line.startswith(f"| {length} | ")]
    assert len(shown) >= 2 and summary["n"] == 12
    for budget, *numbers in shown:
        pooled, per_head = cells[budget, "pooled"], cells[budget, "per_head"]
        assert numbers == [f"{n:.1f}" for n in (pooled["access"], per_head["retained"], pooled["retained"])]


@pytest.mark.parametrize("layout", ["mla", "gqa"])
def test_the_table_of_real_weights_is_that_of_the_kept_run(layout):
    summary = json.loads((ROOT / f"eval/results/real/{layout}_8192/summary.json").read_text(encoding="utf-8"))
    scores = {(item["parents"], item["S"], item["estimator"]): item["cells"]["mean"] for item in summary["conditions"]}
    for entry in summary["estimators"]["settings"]:
        parents = "kmeans" if "k-means" in entry["name"] else "contiguous"
        pooled, per_head = (scores[parents, entry["S"], estimator] for estimator in ("pooled", "per_head"))
        span = entry["difference"]
        numbers = (entry["S"], pooled["access"], per_head["score"]["value"], pooled["score"]["value"])
        line = f"| {layout.upper()} | {parents.replace('kmeans', 'k-means')} | {numbers[0]} | "
        shown = next(text for text in TEXT.splitlines() if text.startswith(line)).strip("| ").split(" | ")
        assert [float(text) for text in shown[3:6]] == pytest.approx(numbers[1:], abs=0.051)
        assert [float(text) for text in re.findall(r"[-+][\d.]+", shown[6])] == pytest.approx(
            [span["value"], span["low"], span["high"]], abs=0.051
        )


def test_the_accuracy_table_is_that_of_the_kept_run():
    summary = json.loads((ROOT / "eval/results/two_stage/mla_8192/summary.json").read_text(encoding="utf-8"))
    cells = [item["cells"]["mean"] for item in summary["conditions"]]
    shown = [line.strip("| ").split(" | ")[1:3] for line in README.split("| MLA, k-means 16/4 |")[1].splitlines()[2:7]]
    kept = [[f"{cell['access']:.1f}", f"{cell['score']['value']:.1f}"] for cell in cells]
    assert shown == kept[:4] + kept[5:]  # the fifth, K1 = 128, is in the folder alone


def test_the_times_of_one_layer_are_those_of_the_table():
    """README's sentence says what kernels/README.md's table says."""
    ours, dense, small, exact = re.search(
        r"16 MLA heads at batch 8 and 128K, takes (\d+) us .* takes (\d+), and (\d+) at .* kernel takes (\d+)\.",
        " ".join(README.split()),
    ).groups()
    lines = {line.split(" | ")[0]: line.split(" | ")[1:3] for line in TEXT.splitlines() if line.startswith("| MLA, 16")}
    assert [dense, ours] == [f"{float(us):.0f}" for us in lines["| MLA, 16 heads, batch 8, 128K"]]
    assert small == f"{float(lines['| MLA, 16 heads, batch 1, 32K'][1]):.0f}"
    assert exact == f"{float(re.search(r'own exact kernel took ([0-9.]+)', TEXT).group(1)):.0f}"


def test_the_long_generation_is_that_of_the_kept_run():
    summary = json.loads((ROOT / "eval/results/long_generation/curve/generation.json").read_text(encoding="utf-8"))
    ends = {line["regroup_after"]: line["curve"][-1] for line in summary["lines"] if "curve" in line}
    wanted = (
        f"with {summary['first']} of 4,096 tokens prefilled reads {ends['auto']:.1f} % of its rows at the end, and "
    )
    assert wanted + f"{ends[0]:.1f} % without regrouping" in " ".join(TEXT.split())
    assert all(line["score"]["mean"] == 1 for line in summary["lines"]) and summary["settings"]["length"] == 4096
    summary = json.loads((ROOT / "eval/results/long_generation/answers/generation.json").read_text(encoding="utf-8"))
    lines = {line.get("regroup_after"): line for line in summary["lines"]}
    score, dense, never = (f"{100 * lines[after]['score']['mean']:.1f}" for after in ("auto", None, 0))
    span = "{mean:+.1f} [{low:+.1f}, {high:+.1f}]".format(
        **{k: 100 * v for k, v in lines["auto"]["minus_dense"].items()}
    )
    wanted = f"it scores {score} % where dense decoding has {dense} ({span}, paired), and without regrouping {never}."
    assert wanted in " ".join(TEXT.split())


def test_the_table_of_vllm_is_the_one_that_the_command_prints(capsys):
    from latent_santa.eval.cli import main

    assert main(["bench", "vllm", "--table", str(ROOT / "eval/results/vllm/bench.jsonl")]) == 0
    assert capsys.readouterr().out.strip() in TEXT


def test_the_table_of_whole_steps_is_the_one_that_the_command_prints(capsys):
    from latent_santa.eval.cli import main

    settings = "absorbed_dense,per_head,absorbed_dense+compile,per_head+compile,pooled+two_stage+compile"
    runs = ROOT / "eval" / "results" / "decode"
    assert main(["bench", "decode", "--table", str(runs / "own_kernels"), "--settings", settings]) == 0
    assert capsys.readouterr().out.strip() in README
    assert main(["bench", "decode", "--table", str(runs / "graphs"), "--settings", "transformers"]) == 0
    _, *earlier = re.findall(r"[\d.]+(?= \|$)", capsys.readouterr().out, re.M)  # batch 1 and 32K comes first
    assert "transformers itself took {}, {} and {} in an earlier run".format(*earlier) in README
