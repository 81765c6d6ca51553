"""Model, recurrence, masks, advantages and loss of the recurrent agent."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import drc, moves_of, needs_compiler
from scipy.stats import binomtest


def boards(T, B, seed=0):
    """Random rollout: obs (T, B, 10, 10, 2) of real levels, first (T, B) with resets."""
    levels, _ = drc.generate_levels("easy", T * B, seed=seed)
    obs = torch.from_numpy(levels[..., ::-1].copy()).view(T, B, 10, 10, 2)
    first = (torch.rand(T, B, generator=torch.Generator().manual_seed(seed)) < 0.25).float()
    return obs, first


def make_agent(layers=2, experts=3, width=8, seed=0, script=drc, **options):
    torch.manual_seed(seed)
    agent = script.Agent(layers, experts, width, **options)
    with torch.no_grad():
        for level in agent.cells:
            level.scale.normal_(1, 0.3)
            level.conv_x.bias.normal_(0, 0.3)
        agent.norm.normal_(1, 0.3)
        if agent.merge_logits is not None:
            agent.merge_logits.normal_()
    return agent


def set_gates(agent, gates):
    for cell in agent.cells:
        cell.gates = gates


def plain_gates(z, c, scale):
    """`lstm_gates` works in float32; this is the same in the type that comes in."""
    z = z / (z.square().mean(2, keepdim=True) + 1e-5).sqrt() * scale
    i, f, o, g = z.chunk(4, 2)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def merged(agent, outputs, l, heard):
    """The outputs of those experts of level l that are heard, as App. D states the merges."""
    n = len(heard)
    if agent.aggregate == "gate":
        shares = torch.softmax(agent.merge_logits[l][heard], 0)
        return sum(share * outputs[e] for share, e in zip(shares, heard)) * n**0.5
    return sum(outputs[e] for e in heard) / {"sqrt_sum": n**0.5, "sum": 1, "mean": n}[agent.aggregate]


def reference_core(agent, obs, first, radius=None):
    """The architecture as the paper states it, from zero state: embeddings, one convolution of all inputs an expert,
    loops everywhere, no tensor that holds two experts."""
    (T, B), E, d, L = first.shape, agent.experts, agent.width, len(agent.cells)
    glu = isinstance(agent.cells[0], drc.ConvGLU)
    distance = [[min((e - f) % E, (f - e) % E) for e in range(E)] for f in range(E)]
    heard = [[e for e in range(E) if radius is None or distance[f][e] <= radius] for f in range(E)]
    zero = torch.zeros(B, d, 10, 10, dtype=first.dtype)
    s, h, c = [zero] * E, [zero] * E, [[zero] * E for _ in range(L)]
    outputs = []
    for t in range(T):
        x = torch.cat([agent.embedding[k][obs[t, ..., k].long()] for k in range(2)], -1).permute(0, 3, 1, 2)
        x = x / (x.square().mean((1, 2, 3), keepdim=True) + 1e-5).sqrt()
        keep = (1 - first[t]).view(B, 1, 1, 1)
        s, h, c = [v * keep for v in s], [v * keep for v in h], [[v * keep for v in c_l] for c_l in c]
        for l, level in enumerate(agent.cells):
            convs = (level.conv_x, level.conv_s) if glu else (level.conv_x, level.conv_s, level.conv_h)
            parts = [conv.weight.split(level.conv_x.out_channels // E) for conv in convs]
            out = []
            for e in range(E):
                weight, bias = torch.cat([p[e] for p in parts], 1), level.conv_x.bias.chunk(E)[e]
                z = F.conv2d(torch.cat([x, s[e]] if glu else [x, s[e], h[e]], 1), weight, bias, padding=1)
                if glu:
                    value, gate = z.chunk(2, 1)
                    z = value * gate.sigmoid()
                    out.append(z / (z.square().mean((1, 2, 3), keepdim=True) + 1e-5).sqrt() * level.scale[e])
                else:
                    out_e, c_e = plain_gates(z.unsqueeze(1), c[l][e].unsqueeze(1), level.scale[e])
                    c[l][e] = c_e.squeeze(1)
                    out.append(out_e.squeeze(1))
            h, s = out, [merged(agent, out, l, heard[e]) for e in range(E)]
        outputs.append(merged(agent, out, l, range(E)))
    return torch.stack(outputs)


def check_core(agent, radius=None):
    agent.double()
    obs, first = boards(5, 3)
    first = first.double()
    if isinstance(agent.cells[0], drc.ConvLSTM):
        set_gates(agent, plain_gates)
    state = agent.initial_state(3).double()
    whole, end = agent.core(obs, first, state)
    assert torch.allclose(whole, reference_core(agent, obs, first, radius), atol=1e-6)
    # in two pieces: the state holds all that is carried
    start, state = agent.core(obs[:2], first[:2], state)
    rest, state = agent.core(obs[2:], first[2:], state)
    assert torch.allclose(torch.cat([start, rest]), whole) and torch.allclose(state, end)


@pytest.mark.parametrize("cell", ["convlstm", "convglu"])
@pytest.mark.parametrize("layers, experts", [(1, 1), (3, 1), (1, 4), (2, 3)])
def test_core_equals_a_plain_loop_over_experts(layers, experts, cell):
    check_core(make_agent(layers, experts, cell=cell))


@pytest.mark.parametrize("cell", ["convlstm", "convglu"])
@pytest.mark.parametrize("aggregate", ["sqrt_sum", "sum", "mean", "gate"])
@pytest.mark.parametrize("radius", [None, 0, 1, 2])
def test_merges_and_radius_equal_a_plain_loop_over_experts(cell, aggregate, radius):
    check_core(make_agent(2, 5, 4, cell=cell, aggregate=aggregate, comm_radius=radius), radius)


def test_gate_begins_as_the_variance_normalising_sum():
    torch.manual_seed(0)
    gate = drc.Agent(2, 4, 8, aggregate="gate")
    plain = drc.Agent(2, 4, 8)
    plain.load_state_dict({k: v for k, v in gate.state_dict().items() if k != "merge_logits"})
    obs, first = boards(3, 2)
    outputs = [agent(obs, first, agent.initial_state(2))[0] for agent in (gate, plain)]
    assert torch.allclose(*outputs, atol=1e-6)
    outputs[0].square().sum().backward()
    assert gate.merge_logits.grad.abs().min() > 0


def gradients(agent, obs, first, state):
    agent.zero_grad()
    logits, value, state = agent(obs, first, state)
    (logits.square().sum() + value.sum() + state.square().sum()).backward()
    return [logits, value, state] + [p.grad.clone() for p in agent.parameters()]


@pytest.mark.parametrize("experts", [1, 3])
def test_backward_by_hand_equals_autograd(experts):
    agent = make_agent(2, experts)
    obs, first = boards(5, 3)
    state = torch.randn(3, sum(agent.state_channels), 10, 10)
    by_hand = gradients(agent, obs, first, state)
    set_gates(agent, drc.lstm_gates)
    for ours, reference in zip(by_hand, gradients(agent, obs, first, state)):
        assert torch.allclose(ours, reference, rtol=1e-4, atol=1e-5 * float(reference.detach().abs().max()))


@needs_compiler
def test_compiled_gates_equal_eager_ones():
    agent = make_agent(1, 2, 4)
    obs, first = boards(3, 2)
    eager = gradients(agent, obs, first, agent.initial_state(2))
    set_gates(agent, torch.compile(drc.lstm_gates, dynamic=False))
    for ours, reference in zip(gradients(agent, obs, first, agent.initial_state(2)), eager):
        assert torch.allclose(ours, reference, rtol=1e-4, atol=1e-5 * float(reference.detach().abs().max()))


def test_two_episodes_in_one_stream_equal_two_runs():
    agent = make_agent()
    obs, _ = boards(9, 2)
    first = torch.zeros(9, 2)
    first[0], first[4] = 1, 1
    garbage = torch.randn(2, sum(agent.state_channels), 10, 10)  # must not be seen: the first step opens an episode
    logits, value, state = agent(obs, first, garbage)
    a = agent(obs[:4], torch.zeros(4, 2), agent.initial_state(2))
    b = agent(obs[4:], torch.zeros(5, 2), agent.initial_state(2))
    assert torch.allclose(logits, torch.cat([a[0], b[0]]), atol=1e-6)
    assert torch.allclose(value, torch.cat([a[1], b[1]]), atol=1e-6)
    assert torch.allclose(state, b[2], atol=1e-6)


def test_state_is_exactly_zero_at_a_first_observation():
    agent = make_agent()
    seen = []
    conv = F.conv2d
    set_gates(agent, lambda z, c, scale: (seen.append(c.clone()), drc.lstm_gates(z, c, scale))[1])
    obs, _ = boards(1, 2)
    try:
        F.conv2d = lambda x, *args, **kwargs: (seen.append(x.clone()), conv(x, *args, **kwargs))[1]
        agent(obs, torch.tensor([[1.0, 0.0]]), torch.ones(2, sum(agent.state_channels), 10, 10))
    finally:
        F.conv2d = conv
    planes = 2  # one convolution a level reads the observation
    s_and_h, c = seen[planes], seen[planes + 1]
    assert s_and_h.shape[1] == 3 * 2 * agent.width  # both, for each of the 3 experts
    for carried in (s_and_h, c):
        assert (carried[0] == 0).all() and (carried[1] == 1).all()
    assert sum(len(x) == 2 and bool((x[0] == 0).all()) for x in seen) == 3  # and the second level's c


@pytest.mark.parametrize("experts", [1, 2])
def test_replay_of_a_rollout_gives_the_same_policy(experts):
    """Steps one by one, as a rollout makes them, then all at once, as the update does: ratio 1, across resets."""
    agent = make_agent(2, experts)
    obs, first = boards(20, 4)
    start = state = torch.randn(4, sum(agent.state_channels), 10, 10)
    stepwise = []
    with torch.no_grad():
        for t in range(20):
            logits, _, state = agent(obs[t : t + 1], first[t : t + 1], state)
            stepwise.append(logits[0].log_softmax(-1))
        logits, _, end = agent(obs, first, start)
    assert first.sum() > 5
    assert ((logits.log_softmax(-1) - torch.stack(stepwise)).exp() - 1).abs().max() < 1e-5
    assert torch.allclose(state, end, atol=1e-5)


def test_encoding_and_its_kernels_equal_the_convolution_of_the_embedded_board():
    agent = make_agent()
    obs, _ = boards(1, 5)
    embedded = torch.cat([agent.embedding[k][obs[0, ..., k].long()] for k in range(2)], -1).permute(0, 3, 1, 2)
    embedded = embedded / (embedded.square().mean((1, 2, 3), keepdim=True) + drc.EPS).sqrt()
    x, r, kernels = agent.encode(obs[0])
    for kernel, cell in zip(kernels, agent.cells):
        whole = F.conv2d(embedded, cell.conv_x.weight, padding=1)
        assert whole.std() > 0.1 and torch.allclose(r * F.conv2d(x, kernel, padding=1), whole, atol=1e-5)
    sum(
        (r * F.conv2d(x, kernel)).square().sum() for kernel in kernels
    ).backward()  # RMS 1 whatever the embedding's scale is
    along = (agent.embedding.grad * agent.embedding).sum()
    assert agent.embedding.grad.norm() > 1 and along.abs() < 1e-2 * agent.embedding.grad.norm()


# ---- advantages
def test_advantages_by_hand():
    """One column each: a termination, a time limit, a level solved on its last step; gamma 0.5, lambda 0.5."""
    rewards = torch.tensor([[1.0, 1.0, 11.0], [9.0, 9.0, 9.0], [2.0, 2.0, 2.0]])
    values = torch.tensor([[3.0, 3.0, 3.0], [8.0, 8.0, 8.0], [4.0, 4.0, 4.0], [6.0, 6.0, 6.0]])
    dones = torch.tensor([[0.0, 0, 0], [1.0, 1, 1], [0.0, 0, 0], [0.0, 0, 0]])  # the second row is an autoreset
    timeouts = torch.tensor([[0.0, 0, 0], [0.0, 1, 0], [0.0, 0, 0], [0.0, 0, 0]])
    advantages = drc.gae(rewards, values, dones, timeouts, 0.5, 0.5)
    last = 2 + 0.5 * 6 - 4
    expected = torch.tensor([[1 - 3, 1 + 0.5 * 8 - 3, 11 - 3], [0, 0, 0], [last, last, last]])
    assert torch.equal(advantages, expected)


def test_advantages_equal_a_sum_of_discounted_errors_and_do_not_cross_episodes():
    torch.manual_seed(0)
    rewards, values = torch.randn(12, 5), torch.randn(13, 5)
    dones = (torch.rand(13, 5) < 0.2).float()
    dones[1:] *= 1 - dones[:-1]  # EnvPool never gives two in a row
    advantages = drc.gae(rewards, values, dones, torch.zeros(13, 5), 0.97, 0.9)
    for b in range(5):
        for t in range(12):
            total, weight, k = 0.0, 1.0, t
            while k < 12 and not dones[t, b]:
                over = dones[k + 1, b] > 0
                total += weight * float(rewards[k, b] + (0 if over else 0.97 * values[k + 1, b]) - values[k, b])
                weight *= 0.97 * 0.9
                k += 1
                if over:
                    break
            assert abs(total - float(advantages[t, b])) < 1e-4


# ---- loss
def minibatch(agent, T=6, B=4, seed=1):
    obs, first = boards(T, B, seed)
    torch.manual_seed(seed)
    state = torch.randn(B, sum(agent.state_channels), 10, 10)
    dones = torch.zeros(T, B)
    for t, b in ((2, 1), (4, 3), (0, 0)):
        dones[t % T, b % B] = 1
    first = torch.cat([torch.zeros(1, B), dones[:-1]])
    with torch.no_grad():
        logits, _, _ = agent(obs, first, state)
    actions = torch.distributions.Categorical(logits=logits).sample()
    logprobs = logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    mb = {"obs": obs, "firsts": first, "dones": dones, "actions": actions, "logprobs": logprobs, "state": state}
    return mb | {"advantages": torch.randn(T, B), "returns": torch.randn(T, B)}


def loss_gradients(agent, mb, args):
    agent.zero_grad()
    loss, scalars = drc.ppo_loss(agent, mb, args)
    loss.backward()
    return [loss.detach()] + [p.grad.clone() for p in agent.parameters()], scalars


def test_rows_of_an_autoreset_do_not_matter():
    agent, args = make_agent(), drc.Args()
    mb = minibatch(agent)
    clean, scalars = loss_gradients(agent, mb, args)
    phantom = mb["dones"].bool()
    dirty = {k: v.clone() for k, v in mb.items()}
    for key, value in {"advantages": 1e3, "returns": -1e3, "logprobs": -50.0, "actions": 2}.items():
        dirty[key][phantom] = value
    dirty["obs"][phantom] = 4
    garbage, garbage_scalars = loss_gradients(agent, dirty, args)
    for a, b in zip(clean, garbage):
        assert torch.allclose(a, b, atol=1e-6)
    for name in scalars:
        assert torch.allclose(scalars[name], garbage_scalars[name], atol=1e-6), name


def test_one_epoch_and_one_minibatch_is_the_papers_actor_critic():
    agent, args = make_agent(), drc.Args()
    mb = minibatch(agent)
    ours, scalars = loss_gradients(agent, mb, args)
    assert abs(float(scalars["approx_kl"])) < 1e-6 and float(scalars["clipfrac"]) == 0
    agent.zero_grad()
    logits, value, _ = agent(mb["obs"], mb["firsts"], mb["state"])
    rows = mb["dones"] == 0  # select instead of weighting
    policy = torch.distributions.Categorical(logits=logits[rows])
    loss = -(policy.log_prob(mb["actions"][rows]) * mb["advantages"][rows]).mean()
    loss = loss + 0.5 * F.mse_loss(value[rows], mb["returns"][rows]) - 0.01 * policy.entropy().mean()
    loss = loss + 1e-4 * logits[rows].square().sum(-1).mean()
    loss.backward()
    for a, p in zip(ours[1:], agent.parameters()):
        assert torch.allclose(a, p.grad, atol=1e-5)


@pytest.mark.parametrize("masked", [0, 1, 7])
def test_entropy_of_a_uniform_policy_is_ln_4_with_any_mask(masked):
    agent = make_agent()
    with torch.no_grad():
        agent.actor.weight.zero_()
    mb = minibatch(agent, 2, 4)
    mb["dones"] = torch.zeros(2, 4)
    mb["dones"].view(-1)[:masked] = 1
    _, scalars = drc.ppo_loss(agent, mb, drc.Args())
    assert abs(scalars["entropy"].item() - np.log(4)) < 1e-6


def test_the_smallest_batches_are_finite():
    agent = make_agent(1, 1, 1)
    for dones in (0.0, 1.0):  # one environment, one step, even where that is an autoreset
        mb = minibatch(agent, 1, 1) | {"dones": torch.full((1, 1), dones)}
        grads, _ = loss_gradients(agent, mb, drc.Args())
        assert all(g.isfinite().all() for g in grads)


# ---- evaluation
def test_gif_shows_the_four_longest_solved_episodes(tmp_path, capsys):
    levels, pushes = drc.generate_levels("easy", 7, seed=6)
    moves = [moves_of(level, p) for level, p in zip(levels, pushes)]
    lengths = np.array(list(map(len, moves)))
    result = {"solved": np.array([True] * 6 + [False]), "lengths": lengths, "actions": np.zeros((7, 120), np.int8)}
    result["lengths"][6] = 120
    for k in range(6):
        result["actions"][k, : len(moves[k])] = moves[k]
    drc.write_gif(tmp_path / "boards.gif", levels, result)
    boxes = {(176, 120, 60): "off", (80, 160, 80): "on"}  # colour: a box off its target, on it
    with drc.Image.open(tmp_path / "boards.gif") as gif:
        assert gif.size == (640, 160) and gif.n_frames == 1 + lengths[:6].max()
        for frame, boards in ((0, levels[np.argsort(-lengths[:6], kind="stable")[:4]]), (gif.n_frames - 1, None)):
            gif.seek(frame)
            pixels = np.array(gif.convert("RGB"))[8::16, 8::16].reshape(10, 4, 10, 3).swapaxes(0, 1)
            shown = [[boxes.get(tuple(p)) for p in board.reshape(100, 3).tolist()] for board in pixels]
            for k in range(4):
                off = 0 if boards is None else ((boards[k][..., 1] == 4) & (boards[k][..., 0] != 2)).sum()
                assert shown[k].count("off") == off and shown[k].count("on") == 4 - off


def test_evaluation_plays_every_level_once_and_leaves_random_state_alone():
    agent = make_agent(1, 1, 4)
    levels, _ = drc.generate_levels("easy", 130, seed=6)
    before = torch.get_rng_state()
    device = torch.device("cpu")
    result = drc.evaluate(agent, levels, device, sample=True)
    assert torch.equal(before, torch.get_rng_state())
    assert len(result["solved"]) == 130 and result["lengths"].max() <= 120
    assert (result["lengths"][~result["solved"]] == 120).all()
    again = drc.evaluate(agent, levels, device, sample=True)
    other = drc.evaluate(agent, levels, device, sample=True, seed=1)
    assert np.array_equal(result["lengths"], again["lengths"]) and not np.array_equal(
        result["lengths"], other["lengths"]
    )


class Expert:
    """Plays the known solutions: what an evaluation must report is then known too."""

    def __init__(self, levels, paths):
        self.paths = {level.tobytes(): list(path) for level, path in zip(levels[..., ::-1], paths)}
        self.rows = None

    def initial_state(self, batch, device):
        return torch.arange(batch).unsqueeze(1)

    def __call__(self, obs, first, state):
        if self.rows is None:
            self.rows = [self.paths[grid.numpy().tobytes()] for grid in obs[0]]
        logits = torch.zeros(1, len(state), 4)
        for i, row in enumerate(state[:, 0].tolist()):
            logits[0, i, self.rows[row].pop(0) if self.rows[row] else 0] = 9
        return logits, torch.zeros(1, len(state)), state


def test_one_move_again_and_again_solves_a_few_easy_levels_and_no_others():
    solved = {}
    for kind in ("easy", "medium-easy", "boxoban-test"):
        levels, _ = drc.load_levels(kind)
        for move in range(4):
            agent = Expert(levels, [[move] * 120] * len(levels))
            solved[kind, move] = drc.evaluate(agent, levels, torch.device("cpu"))["solved"].mean()
    # as the README says
    assert [round(float(solved["easy", move]), 3) for move in range(4)] == [0.178, 0.082, 0.142, 0.128]
    assert not any(share for (kind, _), share in solved.items() if kind != "easy")


def test_evaluation_of_known_solutions():
    levels, pushes = drc.generate_levels("generated", 200, seed=8)
    paths = [moves_of(*pair) for pair in zip(levels, pushes)]
    short = [len(path) <= 120 for path in paths]
    levels, paths = levels[short], [path for path in paths if len(path) <= 120]
    assert len(levels) > 110
    result = drc.evaluate(Expert(levels, paths), levels, torch.device("cpu"))
    lengths = np.array([len(path) for path in paths])
    assert result["solved"].all() and np.array_equal(result["lengths"], lengths)
    # 4 boxes come onto targets for +1 (on and off cancels), +10 at the end, -0.1 a step
    assert np.allclose(result["returns"], 14 - 0.1 * lengths, atol=1e-3)


def test_interval_is_wilsons(capsys):
    for solved, n in ((0, 7), (7, 7), (123, 256), (998, 999)):
        played = {"solved": np.arange(n) < solved, "returns": np.zeros(n), "lengths": np.ones(n)}
        assert drc.summarise(played)["eval/solve_rate"] == solved / n
        interval = binomtest(solved, n).proportion_ci(0.95, "wilson")
        assert f"(95 % interval {interval.low:.2%} to {interval.high:.2%})" in capsys.readouterr().out


def test_thinking_steps_only_advance_the_state():
    agent = make_agent(1, 1, 4)
    levels, _ = drc.generate_levels("easy", 5, seed=6)
    calls, forward = [], agent.forward

    def record(obs, first, state):
        result = forward(obs, first, state)
        calls.append((obs, first, state, result[2]))
        return result

    agent.forward = record
    result = drc.evaluate(agent, levels, torch.device("cpu"), thinking_steps=3)
    for k in range(4):  # three passes to think, and the one that chooses the first move
        assert torch.equal(calls[k][0], calls[0][0]) and (calls[k][1] == (k == 0)).all()
        assert k == 0 or torch.equal(calls[k][2], calls[k - 1][3])
    assert len(calls) == 3 + result["lengths"].max()


def test_every_argument_is_read():
    source = (drc.Path(drc.__file__)).read_text()
    for f in dataclasses.fields(drc.Args):
        assert f"args.{f.name}" in source, f.name
