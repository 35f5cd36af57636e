"""``latent-santa bench``: time and memory. One subcommand per kind of measurement."""

from __future__ import annotations

from typing import Any

from latent_santa.eval.commands import (
    bench_capture,
    bench_decode,
    bench_error,
    bench_operator,
    bench_profile,
    bench_vllm,
)


def add_parser(subparsers: Any) -> None:
    """Add the command and its subcommands."""
    parser = subparsers.add_parser(
        "bench",
        help="time and memory: decode (whole model), operator (one layer), error, profile (its kernels), vllm, capture",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for module in (bench_decode, bench_error, bench_operator, bench_profile, bench_vllm, bench_capture):
        module.add_parser(kinds)
