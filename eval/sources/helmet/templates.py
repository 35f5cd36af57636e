"""HELMET's prompt texts, read from `data.py` of the user's copy of its repository. That code is parsed and never run.

A loader of HELMET assigns its texts to names, some of them under `if "part of a name" in dataset`. Here those branches
are followed for one data set, and every text that is written out in the code is kept under its name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from latent_santa.eval.errors import EvalError
from latent_santa.eval.sources import jsonl

FILE = "data.py"
WHERE = "a copy of github.com/princeton-nlp/HELMET"


def parse(directory: Path) -> tuple[ast.Module, str]:
    """The parsed `data.py` of a copy of HELMET, and its text. Raises EvalError if there is none."""
    path = directory / FILE
    if not path.is_file():
        raise EvalError(
            f"--data {directory}: no {FILE} there; HELMET's prompts are not part of this package and are read from "
            f"{WHERE}, so give the folder of one"
        )
    source = jsonl.text(path)
    try:
        return ast.parse(source), source
    except SyntaxError as error:
        raise EvalError(f"{path} is not Python: {error}") from error


def texts(module: ast.Module, loader: str, dataset: str, wanted: Iterable[str]) -> dict[str, str]:
    """The texts of one loader for a data set, by name.

    A text with a condition in its expression is there twice: "name" without it, "name if" with it. Raises EvalError
    where the loader or a wanted name is missing.
    """
    function = next((n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == loader), None)
    found: dict[str, str] = {}
    if function is not None:
        named = function.args.args[len(function.args.args) - len(function.args.defaults) :]
        for argument, default in zip(named, function.args.defaults, strict=True):
            _keep(found, argument.arg, default)
        _gather(function.body, dataset, found)
    if missing := [name for name in wanted if name not in found]:
        raise EvalError(
            f"{FILE} of this copy of HELMET has no text {', '.join(missing)} in {loader}, so it is of another version; "
            f"use {WHERE} of 2025 (known to work: commit 4526dfb)"
        )
    return found


def _gather(statements: Iterable[ast.stmt], dataset: str, found: dict[str, str]) -> None:
    for node in statements:
        if isinstance(node, ast.If):
            holds = _holds(node.test, dataset)
            _gather(node.body if holds is not False else (), dataset, found)
            _gather(node.orelse if holds is not True else (), dataset, found)
        elif isinstance(node, (ast.FunctionDef, ast.For, ast.With)):
            _gather(node.body, dataset, found)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            _keep(found, node.targets[0].id, node.value)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(key, ast.Constant):
                    _keep(found, str(key.value), value)


def _holds(test: ast.expr, dataset: str) -> bool | None:
    """The truth of `"text" in dataset`; None for any other condition."""
    if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.In) and "dataset" in ast.dump(test)):
        return None
    part = test.left.value if isinstance(test.left, ast.Constant) else None
    return part in dataset if isinstance(part, str) else None


def _keep(found: dict[str, str], name: str, value: ast.expr) -> None:
    if isinstance(value, ast.IfExp):
        _keep(found, f"{name} if", value.body)
        value = value.orelse
    text = _text(value, found)
    if text is not None:
        found[name] = text


def _text(node: ast.expr, found: dict[str, str]) -> str | None:
    """A text that is written out: plain, of several parts, with {names} in it, or before `.format`."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return found.get(node.id)
    if isinstance(node, ast.BinOp):
        left, right = _text(node.left, found), _text(node.right, found)
        return left + right if left is not None and right is not None else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return _text(node.func.value, found)
    if isinstance(node, ast.JoinedStr):
        parts = [
            f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else _text(part, found)
            for part in node.values
        ]
        return "".join(part for part in parts if part is not None)
    return None
