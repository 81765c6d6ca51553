"""The script as a user runs it: records, evaluation, checkpoints, stops and resumes, bad input."""

import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, drc, needs_compiler, run_here, run_script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def metrics(run_dir, *prefixes):
    """{name: [(step, value), ...]} of metrics.csv, without what depends on the clock."""
    result = {}
    with open(Path(run_dir) / "metrics.csv") as f:
        for row in csv.DictReader(f):
            timed = "SPS" in row["name"] or row["name"].startswith("stats/")
            if not timed and (not prefixes or row["name"].startswith(prefixes)):
                result.setdefault(row["name"], []).append((int(row["step"]), float(row["value"])))
    return result


def only_run(folder):
    (run_dir,) = Path(folder).iterdir()
    return run_dir


def train(tmp_path, *arguments, name="run"):
    assert run_here(*arguments, "--runs-dir", tmp_path / name) == 0
    return only_run(tmp_path / name)


def test_same_seed_same_numbers_with_evaluation_on_or_off(tiny, tmp_path):
    a = train(tmp_path, *tiny, "--total-timesteps", 3 * 40, name="a")
    b = train(tmp_path, *tiny, "--total-timesteps", 3 * 40, "--eval-every", 30, name="b")
    c = train(tmp_path, *tiny, "--total-timesteps", 3 * 40, "--seed", 2, name="c")
    losses = metrics(a, "losses/", "charts/")
    assert len(losses["losses/value_loss"]) == 3
    assert losses == metrics(b, "losses/", "charts/")
    assert len(metrics(b, "eval/")["eval/solve_rate"]) == 3
    assert losses["losses/value_loss"] != metrics(c, "losses/")["losses/value_loss"]


def test_state_is_carried_over_a_rollouts_edge_and_the_value_call_does_not_advance_it(tiny, tmp_path):
    """With a learning rate of 0 the rollouts' length cannot matter: same actions, hence the same episodes."""
    frozen = [*tiny, "--learning-rate", 0, "--total-timesteps", 8 * 320, "--eval-every", 0, "--num-minibatches", 1]
    short = train(tmp_path, *frozen, "--num-steps", 5, name="short")
    long = train(tmp_path, *frozen, "--num-steps", 40, name="long")
    names = ("charts/episodic_return", "charts/episodic_length", "charts/solve_rate")
    short, long = metrics(short, *names), metrics(long, *names)
    for name in names:
        assert set(long[name]) <= set(short[name]) and len(long[name]) > 4


def test_recorded_returns_and_lengths_equal_an_independent_count(tiny, tmp_path, monkeypatch):
    finished, pools, true_recv = [], {}, drc.EnvPoolMixin.recv

    def recv(pool):
        """EnvPool's own, which adds up the episodes on the side."""
        obs, reward, terminated, truncated, info = true_recv(pool)
        _, rewards, over = pools.setdefault(id(pool), (pool, [[] for _ in reward], [False for _ in reward]))
        for i, r in enumerate(reward):
            if over[i]:
                rewards[i], over[i] = [], False
                assert r == 0 and obs["step_count"][i] == 0
                continue
            rewards[i].append(float(r))
            if terminated[i] or truncated[i]:
                finished.append((sum(rewards[i]), len(rewards[i]), bool(info["solved"][i])))
                over[i] = True
        return obs, reward, terminated, truncated, info

    monkeypatch.setattr(drc.EnvPoolMixin, "recv", recv)
    run_dir = train(tmp_path, *tiny, "--total-timesteps", 4000, "--eval-every", 0)
    checkpoint = drc.load_checkpoint(run_dir / "last.pt")
    trained = len(checkpoint["episodes"])
    assert 20 < trained < 400
    assert np.allclose(np.array(checkpoint["episodes"], float), np.array(finished[:trained], float), atol=1e-3)
    recorded = metrics(run_dir, "charts/")
    means = np.mean(finished[:trained], 0)
    for name, mean in zip(("episodic_return", "episodic_length", "solve_rate"), means):
        assert abs(recorded[f"charts/{name}"][-1][1] - mean) < 1e-3
    # the step counter leaves autoresets out: they are the rows between an episode's end and the next one's start
    assert 4000 - trained <= checkpoint["global_step"] <= 4000 - trained + 8


def test_one_episode_is_enough_to_be_recorded(level_files, tmp_path):
    levels = ["--levels", level_files / "train.npy", "--eval-levels", level_files / "eval.npy", "--eval-every", 0]
    sizes = ["--num-envs", 1, "--num-minibatches", 1, "--num-steps", 1, "--layers", 1, "--width", 2, "--experts", 1]
    run_dir = train(tmp_path, *levels, *sizes, "--total-timesteps", 121, "--log-every", 1000)
    assert len(metrics(run_dir)["charts/episodic_return"]) == 1


def test_two_runs_in_the_same_second_get_two_folders(tiny, tmp_path):
    command = [sys.executable, ROOT / "sokoban_drc_ppo.py", *tiny, "--total-timesteps", 40, "--runs-dir", tmp_path]
    # the same clock for both: the script reads it through time.strftime alone
    patch = f"import sys, time, runpy; time.strftime = lambda f: 'now'; sys.argv = {list(map(str, command[1:]))!r}; "
    patch += "runpy.run_path(sys.argv[0], run_name='__main__')"
    processes = [subprocess.Popen([sys.executable, "-c", patch], stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [p.wait() for p in processes] == [0, 0]
    folders = sorted(p.name for p in tmp_path.iterdir())
    assert len(folders) == 2 and folders[1] == folders[0] + "-2"
    for folder in folders:
        assert {"args.json", "last.pt", "best.pt", "metrics.csv"} <= set(os.listdir(tmp_path / folder))


def test_args_json_tells_what_was_run(tiny, tmp_path):
    about = json.loads((train(tmp_path, *tiny, "--total-timesteps", 40) / "args.json").read_text())
    assert about["args"]["layers"] == 1 and about["args"]["num_iterations"] == 1
    assert about["model"]["W"] == 1 * 1 * 4 * (32 + 8) and about["model"]["flops_per_step"] > 0
    assert about["levels"]["count"] == 64 and len(about["levels"]["sha256"]) == 16 and "torch" in about["versions"]


def test_return_rises_when_one_box_is_one_or_two_pushes_from_its_target(tmp_path):
    drc.KINDS["easiest"] = (1, 1, 1, 2, 0)
    try:
        levels, _ = drc.generate_levels("easiest", 3000, seed=1)
    finally:
        del drc.KINDS["easiest"]
    np.save(tmp_path / "train.npy", levels[100:])
    np.save(tmp_path / "eval.npy", levels[:100])
    arguments = ["--levels", tmp_path / "train.npy", "--eval-levels", tmp_path / "eval.npy", "--eval-every", 0]
    arguments += ["--layers", 1, "--width", 16, "--learning-rate", 3e-3, "--gamma", 0.95, "--no-anneal-lr"]
    arguments += ["--num-envs", 128, "--num-steps", 10, "--max-episode-steps", 20, "--vf-coef", 0.25]
    recorded = metrics(train(tmp_path, *arguments, "--total-timesteps", 80_000))
    returns = [value for _, value in recorded["charts/episodic_return"]]
    assert returns[-1] > min(returns) + 5
    assert recorded["eval/solve_rate"][-1][1] > 0.5


# ---- stop and resume
def start(tmp_path, *arguments):
    command = [sys.executable, ROOT / "sokoban_drc_ppo.py", *arguments, "--runs-dir", tmp_path]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition, seconds=60):
    end = time.time() + seconds
    while time.time() < end:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError("it did not come to that")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_goes_on_where_it_was(tiny, tmp_path, signum):
    process = start(tmp_path, *tiny, "--total-timesteps", 10**7, "--eval-every", 0, "--checkpoint-every", 10**6)
    wait_for(lambda: list(tmp_path.glob("*/metrics.csv")) and len(metrics(only_run(tmp_path))) > 3)
    process.send_signal(signum)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signum and "--resume" in output
    run_dir = only_run(tmp_path)
    before = drc.load_checkpoint(run_dir / "last.pt")
    stopped = before["iteration"]
    assert max(step for step, _ in metrics(run_dir)["losses/value_loss"]) == before["global_step"]

    # what a kill leaves behind: records after the checkpoint
    with open(run_dir / "metrics.csv", "ab") as f:
        f.write(f"{before['global_step'] + 7},losses/value_loss,1.0\n{before['global_step'] + 9},losses/val".encode())
        f.write(bytes(range(256)))
    writer = drc.SummaryWriter(run_dir)
    writer.add_scalar("losses/value_loss", 1.0, before["global_step"] + 7)
    writer.close()

    total = (stopped + 5) * 40
    run_script("--resume", run_dir, "--total-timesteps", total)
    assert json.loads((run_dir / "args.json").read_text())["args"]["total_timesteps"] == total  # for the next resume
    after = drc.load_checkpoint(run_dir / "last.pt")
    assert after["iteration"] == stopped + 5 and after["finished"]
    assert after["optimizer"]["state"][0]["step"] == before["optimizer"]["state"][0]["step"] + 5 * 4  # minibatches
    recorded = metrics(run_dir)
    steps = [step for step, _ in recorded["losses/value_loss"]]
    assert steps == sorted(set(steps)) and before["global_step"] + 7 not in steps
    rates = [value for _, value in recorded["charts/learning_rate"]][-5:]
    assert np.allclose(rates, [1e-3 * (1 - (stopped + k) / (stopped + 5)) for k in range(5)])
    events = EventAccumulator(str(run_dir)).Reload().Scalars("losses/value_loss")
    assert [e.step for e in events] == steps


def test_an_evaluation_that_a_stop_cut_short_is_made_up_for(tiny, tmp_path, monkeypatch):
    true_recv = drc.EnvPoolMixin.recv

    def recv(pool):
        if len(pool) == 6 and not stopped:  # of an evaluation
            stopped.append(os.kill(os.getpid(), signal.SIGTERM))
        return true_recv(pool)

    stopped, arguments = [], [*tiny, "--total-timesteps", 400, "--eval-every", 150, "--runs-dir", tmp_path / "run"]
    monkeypatch.setattr(drc.EnvPoolMixin, "recv", recv)
    assert run_here(*arguments) == 128 + signal.SIGTERM
    run_dir = only_run(tmp_path / "run")
    assert "eval/solve_rate" not in metrics(run_dir)
    assert run_here("--resume", run_dir) == 0
    (first, _), (second, _), (last, _) = metrics(run_dir)["eval/solve_rate"]
    assert 150 < first <= 240 and first < second < last  # an iteration later; 300; the end


def test_a_best_agent_that_could_not_be_written_is_not_taken_for_written(tiny, tmp_path, monkeypatch, capsys):
    def save(state, file):
        if state["optimizer"] is None:  # best.pt
            raise OSError(28, "No space left on device")
        true_save(state, file)

    true_save = torch.save
    monkeypatch.setattr(torch, "save", save)
    run_dir = train(tmp_path, *tiny, "--total-timesteps", 160, "--eval-every", 40)
    assert "best.pt: [Errno 28]" in capsys.readouterr().out and not (run_dir / "best.pt").exists()
    assert drc.load_checkpoint(run_dir / "last.pt")["best"] == -1


def test_a_clip_of_0_is_none(tiny, tmp_path):
    recorded = [
        metrics(train(tmp_path, *tiny, "--total-timesteps", 120, "--max-grad-norm", clip, name=str(clip)))
        for clip in (0, 1e5)
    ]
    assert recorded[0] == recorded[1]


def test_a_resume_may_change_the_interval_of_evaluations(tiny, tmp_path):
    run_dir = train(tmp_path, *tiny, "--total-timesteps", 200, "--eval-every", 0)
    assert len(metrics(run_dir, "eval/")["eval/solve_rate"]) == 1
    assert run_here("--resume", run_dir, "--total-timesteps", 400, "--eval-every", 30) == 0
    assert len(metrics(run_dir, "eval/")["eval/solve_rate"]) == 1 + 5  # one an iteration, the last of all levels


@pytest.mark.parametrize("changed", ["levels", "eval-levels"])
def test_a_resume_on_other_levels_is_refused(tiny, level_files, tmp_path, changed, capsys):
    path = tmp_path / "levels.npy"
    path.write_bytes((level_files / ("train.npy" if changed == "levels" else "eval.npy")).read_bytes())
    run_dir = train(tmp_path, *tiny, f"--{changed}", path, "--total-timesteps", 80)
    before = (run_dir / "last.pt").read_bytes()
    np.save(path, drc.generate_levels("easy", 20, seed=103)[0])  # the same name, another content
    assert run_here("--resume", run_dir, "--total-timesteps", 160) == 2
    assert "has played the levels" in capsys.readouterr().err
    assert (run_dir / "last.pt").read_bytes() == before


def test_a_resume_restores_model_optimizer_counters_and_random_state(tiny, tmp_path):
    """Resumed at once and stopped before the first update: the next checkpoint equals the last one."""
    run_dir = train(tmp_path, *tiny, "--total-timesteps", 400, "--num-minibatches", 2)
    path = run_dir / "last.pt"
    before = drc.load_checkpoint(path)
    torch.save(before | {"finished": False}, path)  # as if stopped before the final evaluation
    run_script("--resume", run_dir)
    after = drc.load_checkpoint(path)
    for key in ("iteration", "global_step", "best", "episodes", "levels"):
        assert before[key] == after[key], key
    for name, tensor in before["agent"].items():
        assert torch.equal(tensor, after["agent"][name])
    for k, state in before["optimizer"]["state"].items():
        assert all(torch.equal(state[name], after["optimizer"]["state"][k][name]) for name in state)
    assert before["optimizer"]["param_groups"] == after["optimizer"]["param_groups"]
    assert torch.equal(before["rng"][0], after["rng"][0])


def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tiny, tmp_path):
    """Checkpoints after every iteration, so that most kills hit one being written."""
    for delay in (0.03, 0.11):
        folder = tmp_path / str(delay)
        process = start(folder, *tiny, "--width", 16, "--total-timesteps", 10**7, "--checkpoint-every", 1)
        wait_for(lambda folder=folder: list(folder.glob("*/last.pt")))
        time.sleep(delay)
        process.kill()
        process.wait()
        run_dir = only_run(folder)
        iteration = drc.load_checkpoint(run_dir / "last.pt")["iteration"]
        assert iteration >= 1
    (run_dir / "last.pt.1.tmp").write_bytes(b"half of one")
    run_script("--resume", run_dir, "--total-timesteps", (iteration + 2) * 40)
    steps = [step for step, _ in metrics(run_dir)["losses/value_loss"]]
    assert steps == sorted(set(steps)) and len(steps) == iteration + 2
    assert not [name for name in os.listdir(run_dir) if name.endswith(".tmp")]


def test_a_full_disk_leaves_the_previous_file(tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    drc.write_atomically(path, lambda f: torch.save({"x": 1}, f))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drc.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        drc.write_atomically(path, lambda f: torch.save({"x": 2}, f))
    assert torch.load(path, weights_only=True) == {"x": 1} and os.listdir(tmp_path) == ["last.pt"]


def test_weights_that_are_not_finite_stop_the_run_and_leave_the_checkpoint_from_before(tiny, tmp_path, capsys):
    assert (
        run_here(*tiny, "--total-timesteps", 80, "--learning-rate", 2e9, "--clip-coef", 1e9, "--runs-dir", tmp_path)
        == 2
    )
    assert "the weights are not finite" in capsys.readouterr().err
    assert not list(tmp_path.glob("*/*.pt"))


def test_a_full_disk_is_told_and_at_the_end_also_by_the_exit_status(tiny, tmp_path, monkeypatch, capsys):
    replace = drc.os.replace

    def full(source, target):
        if str(target).endswith("last.pt"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(drc.os, "replace", full)
    assert run_here(*tiny, "--total-timesteps", 80, "--checkpoint-every", 1, "--runs-dir", tmp_path) == 1
    assert capsys.readouterr().out.count("last.pt: [Errno 28]") == 3  # nor does it end the training: 2 rounds, the end
    assert len(metrics(only_run(tmp_path))["losses/value_loss"]) == 2
    assert not [path for path in only_run(tmp_path).iterdir() if path.suffix == ".tmp"]


def test_a_run_folder_that_cannot_be_filled_is_not_left_behind(tiny, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    run_here(*tiny, "--total-timesteps", 40, "--runs-dir", tmp_path / "other")  # so that the level files exist
    monkeypatch.setattr(drc.os, "fsync", full)
    assert run_here(*tiny, "--total-timesteps", 40, "--runs-dir", tmp_path / "runs") == 2
    assert "cannot be written to" in capsys.readouterr().err and not list((tmp_path / "runs").iterdir())


# ---- evaluation of a checkpoint
@pytest.fixture(scope="module")
def trained(level_files, tmp_path_factory):
    shape = ["--layers", 1, "--experts", 2, "--width", 4, "--num-envs", 8, "--num-steps", 5]
    levels = ["--levels", level_files / "train.npy", "--eval-levels", level_files / "eval.npy"]
    return train(tmp_path_factory.mktemp("trained"), *levels, *shape, "--total-timesteps", 80)


def test_evaluate_needs_nothing_but_the_checkpoint(trained, level_files):
    result = run_script("--evaluate", trained / "last.pt", "--capture-video")
    assert "of 6 levels solved" in result.stdout
    with drc.Image.open(trained / "last.gif") as gif:
        assert gif.n_frames > 1 and gif.size == (640, 160)
    result = run_script(
        "--evaluate", trained / "last.pt", "--eval-levels", level_files / "train.npy", "--thinking-steps", 2
    )
    assert "of 64 levels solved" in result.stdout


@needs_compiler
def test_checkpoint_of_a_compiled_run_loads_into_a_plain_agent(level_files, tmp_path, tiny):
    run_dir = train(tmp_path, *tiny, "--total-timesteps", 80, "--compile", "--amp")
    checkpoint = torch.load(run_dir / "last.pt", map_location="cpu", weights_only=True)
    assert not any("_orig_mod" in name for name in checkpoint["agent"])
    agent = drc.Agent(1, 1, 4)
    agent.load_state_dict(checkpoint["agent"])


# ---- bad input: exit status 2, a message that names the fault, nothing written
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--num-envs", "8", "--num-minibatches", "3"], "not divisible"),
        (["--total-timesteps", "39"], "less than one rollout"),
        (["--layers", "0"], "--layers must be from 1"),
        (["--checkpoint-every", "0"], "--checkpoint-every must be from 1"),
        (["--seed", "99999999999"], "--seed must be from 0 to"),
        (["--learning-rate", "-1"], "--learning-rate must be from 0"),
        (["--ent-coef", "nan"], "--ent-coef must be from 0"),
        (["--gamma", "1.01"], "--gamma must be from 0 to 1, not 1.01"),
        (["--levels", ""], "--levels is empty"),
        (["--comm-radius", "-1"], "--comm-radius must be from 0"),
        (["--resume", ""], "--resume is empty"),
        (["--levels", "EMPTY"], "no .txt file"),
        (["--levels", "BROKEN"], "broken.txt, level 1"),
        (["--levels", "no/such/path"], "no such file"),
        (["--levels", "TRUNCATED_NPY"], "not a readable level file"),
        (["--eval-levels", "WRONG_NPY"], "uint8 (N, 10, 10, 2) wanted"),
        (["--levels", "EVAL"], "none is left to train on"),
        (["--resume", "no/such/run"], "missing or damaged"),
        (["--evaluate", "no/such/checkpoint"], "there is no checkpoint"),
        (["--evaluate", "TRUNCATED_PT"], "no whole checkpoint"),
        (["--evaluate", "CHECKPOINT", "--layers", "2"], "differs from the saved run's 1"),
        (["--evaluate", "CHECKPOINT", "--levels", "EVAL"], "plays --eval-levels"),
        (["--resume", "RUN", "--learning-rate", "0.5"], "--learning-rate 0.5 differs"),
        (["--resume", "RUN"], "is finished"),
        (["--resume", "COPY", "--total-timesteps", "400"], "it is a copy of best.pt"),
        (["--device", "cuda"], "cannot be used here"),
    ],
)
def test_bad_input(arguments, message, tiny, trained, level_files, tmp_path, monkeypatch, capsys):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    (tmp_path / "empty").mkdir()
    level = "\n".join(["##########"] * 8)
    (tmp_path / "broken.txt").write_text("; 0\n" + "".join(text_rows()) + "\n; 1\n" + level + "\n")
    (tmp_path / "truncated.npy").write_bytes((level_files / "train.npy").read_bytes()[:999])
    np.save(tmp_path / "wrong.npy", np.zeros((3, 10, 10), np.uint8))
    (tmp_path / "truncated.pt").write_bytes((trained / "last.pt").read_bytes()[:-500])
    names = {"EMPTY": "empty", "BROKEN": "broken.txt", "TRUNCATED_NPY": "truncated.npy", "WRONG_NPY": "wrong.npy"}
    names = {k: tmp_path / v for k, v in (names | {"TRUNCATED_PT": "truncated.pt"}).items()}
    shutil.copytree(trained, tmp_path / "copy")
    shutil.copy(trained / "best.pt", tmp_path / "copy" / "last.pt")
    names |= {
        "COPY": tmp_path / "copy",
        "EVAL": level_files / "eval.npy",
        "CHECKPOINT": trained / "last.pt",
        "RUN": trained,
    }
    given = [str(names.get(a, a)) for a in arguments]
    new_run = [*tiny, "--total-timesteps", 400, "--runs-dir", tmp_path / "runs"]
    base = [] if arguments[0] in ("--resume", "--evaluate") else new_run
    before = set(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    assert run_here(*base, *given) == 2 and message in capsys.readouterr().err
    assert set(tmp_path.rglob("*")) == before


def text_rows():
    rows = ["##########"] * 5 + ["# $ $$$  #", "# ..  . .#", "# @      #"] + ["##########"] * 2
    return [row + "\n" for row in rows]


def test_learning_curves_tell_when_half_and_nine_tenths_were_solved(tmp_path, capsys):
    rates = {"a": [(100, 0.2), (200, 0.5), (300, 0.95)], "b": [(100, 0.4), (200, 0.3)], "c": []}
    for name, points in rates.items():
        rows = ["step,name,value"] + [f"{step},eval/solve_rate,{rate}" for step, rate in points]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("\n".join([*rows, "250,charts/SPS,0.99", ""]))
    folders = [tmp_path / name for name in rates]
    assert run_here(*folders, "--output", tmp_path / "curves.png", script="figures/learning_curves.py") == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "a: 50 % solved: 200 steps, 90 %: 300 steps; last: 95.0% at step 300",
        "b: 50 % solved: never, 90 %: never; last: 30.0% at step 200",
        "c: 50 % solved: never, 90 %: never; last: no evaluation yet",
    ]
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_help_is_whole():
    result = run_script("--help")
    assert not result.stderr and "warning" not in result.stdout.lower()
    for f in drc.fields(drc.Args):
        if f.init:
            assert "--" + f.name.replace("_", "-") in result.stdout


# ---- README
def readme_commands():
    text = (ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else ""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return sorted({line for line in lines if line.startswith("python sokoban_")})


@pytest.mark.parametrize("command", readme_commands())
def test_readme_commands_run(command, trained, level_files, tmp_path):
    script, *arguments = shlex.split(command)[1:]
    if "--evaluate" in arguments:
        path = arguments[arguments.index("--evaluate") + 1]
        arguments = [trained / "best.pt" if "NAME" in str(a) else a for a in arguments]
        if "NAME" not in path:
            assert (ROOT / path).is_file()
            copy = tmp_path / Path(path).name  # a GIF is written beside the checkpoint
            copy.write_bytes((ROOT / path).read_bytes())
            arguments = [copy if a == path else a for a in arguments]
        if "--save-states" in arguments:
            arguments += ["--save-states", tmp_path / "states", "--state-episodes", 6]
        assert run_here(*arguments, "--eval-levels", level_files / "eval.npy", "--offline", script=script) == 0
    elif "--resume" in arguments:
        drc.parse_args(["--resume", str(trained)])
    else:
        levels = ["--levels", level_files / "train.npy", "--eval-levels", level_files / "eval.npy", "--eval-every", 0]
        short = ["--total-timesteps", 160, "--num-envs", 8, "--num-steps", 5, "--offline", "--runs-dir", tmp_path]
        assert run_here(*arguments, *levels, *short, script=script) == 0  # of a flag given twice the last one counts
