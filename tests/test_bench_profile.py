"""What kernels take of a device: compiled without one, occupancy by hand, and Nsight Compute's output as it comes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from latent_santa.eval.bench import counters
from latent_santa.eval.bench.profile import Compiled, Device
from latent_santa.eval.cli import main
from latent_santa.eval.errors import EvalError


def kernel(grid, warps, registers, shared):
    return Compiled("attend", "attend_kernel", grid, warps, registers, 0, shared)


def test_occupancy_is_the_tightest_of_registers_memory_warps_and_grid():
    device = Device()
    # 144 registers take 4608 per warp: 14 warps, so three programs of four
    assert kernel((128, 1, 1), 4, 144, 0).resident(device) == 3
    assert kernel((128, 1, 1), 4, 32, 100 * 1024).resident(device) == 2  # memory, with 1 KiB besides
    assert kernel((128, 1, 1), 8, 16, 0).resident(device) == 8  # warps
    assert kernel((128, 1, 1), 1, 16, 0).resident(device) == 32  # slots
    assert kernel((66, 2, 1), 16, 32, 0).occupancy(device) == pytest.approx(25.0)  # one program per processor
    assert kernel((9999, 1, 1), 4, 144, 0).occupancy(device) == pytest.approx(100 * 3 * 4 / 64)


def test_a_step_is_compiled_without_a_gpu():
    """In a process of its own, as these tests interpret Triton."""
    pytest.importorskip("triton")
    command = "bench profile --layout gqa --heads 8 --groups 2 --context 1024 --budget 64"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "latent_santa.eval", *command.split()], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if "_kernel" in line]
    assert [line[0] for line in lines] == ["route", "select", "attend", "combine"]
    assert all(16 <= int(line[4]) <= 255 for line in lines)  # registers per thread
    assert int(lines[1][2]) == 8  # one program per head selects


def test_what_interprets_kernels_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["bench", "profile", "--context", "64", "--budget", "8"]) == 2
    assert "unset it" in capsys.readouterr().err


def ncu_line(number, name, metric, unit, value):
    middle = '"1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","s"'
    return f'"{number}","1","python","host","{name}",{middle},"{metric}","{unit}","{value}"'


HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def ncu_output(times):
    duration, dram = "gpu__time_duration.sum", "dram__throughput.avg.pct_of_peak_sustained_elapsed"
    lines = ["==PROF== Connected", HEADER]
    for i, value in enumerate(times):
        name = ("route_kernel", "attend_kernel")[i % 2]
        lines += [ncu_line(i, name, duration, "nsecond", value), ncu_line(i, name, dram, "%", "12.5")]
    return "\n".join(lines)


def test_counters_are_medians_over_equal_steps():
    output = ncu_output(["1,000", "20", "3,000", "40", "2,000", "30"])
    found = counters.medians(counters.launches(output))
    assert [name for name, _ in found] == ["route_kernel", "attend_kernel"]
    assert [values["ncu us"] for _, values in found] == pytest.approx([2.0, 0.03])
    assert found[0][1]["DRAM %"] == 12.5
    with pytest.raises(EvalError, match="5 launches"):
        counters.medians(counters.launches(ncu_output(["1"] * 5)))


def test_ncu_that_may_not_count_says_so(tmp_path, monkeypatch):
    fake = tmp_path / "ncu"
    fake.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM'\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(EvalError, match="only administrators"):
        counters.counters(["true"], ["route_kernel"])


def test_only_the_steps_own_kernels_are_counted(tmp_path, monkeypatch):
    """PyTorch's kernels end in _kernel, too."""
    fake = tmp_path / "ncu"
    fake.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/given\nexit 3\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(EvalError, match="ncu stopped with 3"):
        counters.counters(["true"], ["route_kernel", "attend_kernel", "route_kernel"])
    assert (tmp_path / "given").read_text().startswith("--kernel-name regex:^(attend_kernel|route_kernel)$ --csv ")
    assert "--print-units base" in (tmp_path / "given").read_text()


def test_a_value_that_is_no_number_is_told():
    with pytest.raises(EvalError, match="gives gpu__time_duration.sum as 'n/a' nsecond"):
        counters.launches(ncu_output(["n/a"]))
