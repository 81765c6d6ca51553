"""The recurrent and the non-recurrent agent: what they share is the same text, and what differs is the recurrence."""

import ast
import difflib
import json
from pathlib import Path

import pytest
import torch
from conftest import ROOT, drc, ff, run_here
from test_sokoban_agent import boards, make_agent

DIFFERENT = {"Agent.__init__", "Agent.core", "ConvLSTM.__init__", "ConvGLU.__init__", "Args", "docstring"}


def blocks(script):
    """{name: text} of a script: its functions, methods, and what stands between them."""
    text = (ROOT / script).read_text()
    lines, found, rest = text.splitlines(), {}, set(range(1, len(text.splitlines()) + 1))

    def take(name, node):
        first = min([node.lineno] + [d.lineno for d in getattr(node, "decorator_list", [])])
        found[name] = "\n".join(lines[first - 1 : node.end_lineno])
        rest.difference_update(range(first, node.end_lineno + 1))

    tree = ast.parse(text)
    take("docstring", tree.body[0])
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            take(node.name, node)
        elif isinstance(node, ast.ClassDef) and node.name == "Args":
            take("Args", node)
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    take(f"{node.name}.{method.name}", method)
    found["the lines between them and the main part"] = "\n".join(lines[i - 1] for i in sorted(rest))
    return found


def test_shared_blocks_are_the_same_text():
    ours, twins = blocks("sokoban_drc_ppo.py"), blocks("sokoban_ff_ppo.py")
    assert list(ours) == list(twins) and DIFFERENT <= set(ours)
    for name in ours.keys() - DIFFERENT:
        for a, b in zip((ours[name] + "\n<end>").splitlines(), (twins[name] + "\n<end>").splitlines()):
            assert a == b, f"{name}: the scripts differ first in\n{a}\n{b}"


def test_diff_of_the_twins_is_short_and_their_args_differ_in_defaults_alone():
    a, b = ((ROOT / f"sokoban_{name}_ppo.py").read_text().splitlines() for name in ("drc", "ff"))
    changed = [line for line in difflib.unified_diff(a, b, n=0, lineterm="") if line[:1] in "+-"][2:]
    assert len(changed) < 90
    ours, twins = (blocks(f"sokoban_{name}_ppo.py")["Args"].splitlines() for name in ("drc", "ff"))
    differ = [line.split(":")[0].strip() for line, other in zip(ours, twins) if line != other]
    assert differ == ["layers", "experts", "width"] and len(ours) == len(twins)


@pytest.mark.parametrize("cell", ["convlstm", "convglu"])
@pytest.mark.parametrize("layers, experts, options", [
    (1, 1, {}), (3, 1, {}), (2, 3, {}), (3, 5, {"aggregate": "gate", "comm_radius": 1}),
])  # fmt: skip
def test_zero_state_before_every_step_makes_the_non_recurrent_agent(cell, layers, experts, options):
    """The recurrent agent's weights, without those of the lowest level that read the state: the same logits."""
    agent = make_agent(layers, experts, cell=cell, **options)
    twin = ff.Agent(layers, experts, 8, cell, **options)
    weights = agent.state_dict()
    left_out = {k for k in weights if k.startswith(("cells.0.conv_s", "cells.0.conv_h"))}
    twin.load_state_dict({k: v for k, v in weights.items() if k not in left_out})
    assert len(left_out) == (2 if cell == "convlstm" else 1)
    obs, _ = boards(6, 4)
    every_step = torch.ones(6, 4)
    logits, values, _ = agent(obs, every_step, torch.randn(agent.initial_state(4).shape))
    twin_logits, twin_values, state = twin(obs, torch.zeros(6, 4), twin.initial_state(4))
    assert (logits - twin_logits).abs().max() < 1e-5 and (values - twin_values).abs().max() < 1e-5
    assert state.numel() == 0


def test_the_non_recurrent_agent_forgets():
    agent = make_agent(2, 2, script=ff)
    obs, first = boards(5, 3)
    together = agent(obs, first, agent.initial_state(3))[0]
    for t in range(5):
        assert torch.allclose(
            together[t], agent(obs[t : t + 1], first[t : t + 1], agent.initial_state(3))[0][0], atol=1e-6
        )


# ---- matched work
def test_every_row_of_the_papers_tables_is_within_15_percent_of_its_budget_but_for_three():
    tables = {  # width: layers x experts
        "small": {128: "1x1", 64: "1x4 2x2 4x1", 32: "1x12 2x6 3x4 4x3 8x2", 16: "1x36 2x18 3x12 4x9 8x5"},
        "medium": {256: "1x1", 128: "1x4 2x2 3x1 4x1", 64: "1x14 2x7 3x5 4x3 8x2", 32: "1x45 2x23 3x15 4x11 8x6",
                   16: "1x136 2x68 3x45 4x34 8x17"},
        "large": {1024: "1x1", 512: "1x4 2x2 4x1", 256: "1x15 2x8 3x5 4x4 8x2", 128: "1x58 2x29 3x19 4x14 8x7",
                  64: "1x208 2x104 3x69 4x52"},
    }  # fmt: skip
    outside, rows = {}, 0
    for budget, table in tables.items():
        w, widest = drc.BUDGETS[budget]
        for width, allocations in table.items():
            for allocation in allocations.split():
                layers, experts = map(int, allocation.split("x"))
                rows += 1
                ratio = drc.work("convlstm", layers, experts, width) / w
                if abs(ratio - 1) > 0.15:
                    outside[budget, width, allocation] = round(ratio, 2)
                assert width <= widest[layers][1] and (width < widest[layers][1] or experts == widest[layers][0])
    published = {("small", 32, "8x2"): 1.33, ("medium", 128, "3x1"): 0.79, ("medium", 64, "8x2"): 1.18}
    assert rows == 14 + 20 + 18 and outside == published


def test_budget_takes_the_widest_agent_of_that_depth_and_refuses_depths_that_are_not_there(capsys):
    args = drc.parse_args(["--budget", "small", "--layers", "4"])
    assert (args.experts, args.width) == (1, 64)
    args = ff.parse_args(["--budget", "medium", "--layers", "8"])
    assert (args.experts, args.width) == (2, 64)
    with pytest.raises(SystemExit) as stop:
        drc.parse_args(["--budget", "large", "--layers", "5"])
    assert stop.value.code == 2 and "[1, 2, 3, 4, 8]" in capsys.readouterr().err


def test_work_of_both_cells():
    assert drc.work("convlstm", 4, 1, 64) == 40_960 and drc.work("convglu", 2, 3, 16) == 2 * 3 * 16 * 48 / 2


@pytest.mark.parametrize("script, options", [
    ("sokoban_ff_ppo.py", ["--aggregate", "gate"]),
    ("sokoban_drc_ppo.py", ["--cell", "convglu", "--comm-radius", 0]),
])  # fmt: skip
def test_each_agent_trains_evaluates_and_resumes(script, options, tiny, tmp_path, capsys):
    arguments = [*tiny, "--experts", 4, *options]
    assert run_here(*arguments, "--total-timesteps", 120, "--runs-dir", tmp_path, script=script) == 0
    (run_dir,) = tmp_path.iterdir()
    about = json.loads((run_dir / "args.json").read_text())["model"]
    assert about["latency_ms_batch_1"] > 0 and about["flops_per_step"] > 0 and about["W / small budget"] > 0
    assert run_here("--resume", run_dir, "--total-timesteps", 200, script=script) == 0
    assert run_here("--evaluate", run_dir / "last.pt", script=script) == 0
    assert capsys.readouterr().out.count("of 6 levels solved") == 3
    with pytest.raises(SystemExit):
        (drc if script == "sokoban_ff_ppo.py" else ff).parse_args(["--evaluate", str(run_dir / "last.pt")])
    assert f"was written by {Path(script).stem}" in capsys.readouterr().err
