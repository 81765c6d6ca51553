"""The language models against loops over tokens, levels, experts and heads in float64, and the optimiser."""

import math

import pytest
import torch

import lm_recurrent as recurrent
import lm_transformer as standard


def make(script=recurrent, vocabulary=20, scale=0.15, seed=0, **options):
    args = script.Args(**{"layers": 2, "experts": 4, "width": 16, "heads": 4, "memory": 5} | options)
    torch.manual_seed(seed)
    model = script.Model(args, vocabulary)
    for p in model.parameters():  # no zeros, as the matrices behind attention and MLP begin with
        torch.nn.init.normal_(p, std=scale)
    torch.nn.init.normal_(model.embedding.weight)  # larger than what is fed back: a stable recurrence
    return model


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + recurrent.EPS).sqrt()


def attend(q, keys, values):
    """One query (B, size) over lists of keys and values (B, size)."""
    keys, values = torch.stack(keys, 1), torch.stack(values, 1)
    p = (torch.einsum("bs,bws->bw", q, keys) / math.sqrt(q.shape[-1])).softmax(-1)
    return torch.einsum("bw,bws->bs", p, values)


def turned(x, position):
    """Rotary positions by their definition: each pair of channels is turned by position / 10,000 ** (2i / size)."""
    size, y = x.shape[-1], torch.empty_like(x)
    for i in range(size // 2):
        a, b, angle = x[..., 2 * i], x[..., 2 * i + 1], position * 10_000 ** (-2 * i / size)
        y[..., 2 * i] = a * math.cos(angle) - b * math.sin(angle)
        y[..., 2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
    return y


def reference(model, tokens, carry=True):
    """Logits (B, S, V) and the mean square, by the definitions: attention over the last `memory` positions."""
    model, d, heads = model.double(), model.width, model.heads
    (B, S), levels = tokens.shape, model.levels
    past = [[[] for _ in range(len(level.w_1))] for level in levels]
    s, outputs = torch.zeros(B, d, dtype=torch.float64), []
    for t in range(S):
        x = model.embedding(tokens[:, t])
        below = s if carry else torch.zeros_like(s)
        for l, level in enumerate(levels):
            E, experts, merged = len(level.w_1), [], 0
            for e in range(E):
                if hasattr(level, "w_in"):
                    u = torch.cat([x, below], 1) @ level.w_in[e]
                else:
                    u = x if l == 0 else below
                qkv = torch.einsum("bd,hds->hbs", rms(u), level.w_qkv[e])
                q, k, v = qkv.split([heads, heads // 2, heads // 2])
                q, k = (turned(rms(y), t) for y in (q, k))
                experts.append((u, q, k, v))
            if model.caches == 1 and E > 1:  # one cache: keys and values summed over the experts / sqrt(E)
                k, v = (sum(e[i] for e in experts) / math.sqrt(E) for i in (2, 3))
                experts = [(u, q, k, v) for u, q, _, _ in experts]
            for e, (u, q, k, v) in enumerate(experts):
                past[l][e].append((k, v))
                window = past[l][e][-model.memory :]
                a = [attend(q[h], [k[h // 2] for k, _ in window], [v[h // 2] for _, v in window]) for h in range(heads)]
                u = u + torch.cat(a, 1) @ level.w_o[e].flatten(0, 1)
                u = u + (rms(u) @ level.w_1[e]).relu() ** 2 @ level.w_2[e]
                merged = merged + (rms(u) if model.post_norm else u)
            below = merged / math.sqrt(E)
        s = below
        outputs.append(s)
    outputs = torch.stack(outputs, 1)
    return 15 * torch.tanh(model.head(rms(outputs)) / 15), outputs.square().mean()


VARIANTS = [
    (recurrent, {}),
    (recurrent, {"private_kv": True, "post_norm": False}),
    (recurrent, {"carry": False, "layers": 1}),
    (recurrent, {"experts": 1, "layers": 3}),
    (standard, {}),
    (standard, {"experts": 1, "layers": 3, "post_norm": True}),
]


@pytest.mark.parametrize("script, options", VARIANTS)
def test_tokens_with_caches_equal_full_attention_below_at_and_beyond_the_memory_and_across_segments(script, options):
    model, tokens = make(script, **options).eval(), torch.randint(0, 20, (3, 17))
    state, logits = None, []
    with torch.no_grad():
        for piece in tokens.split([1, 4, 2, 9, 1], 1):  # the memory is 5
            out, _, state = model(piece, state)
            logits.append(out)
        expected = reference(make(script, **options), tokens, options.get("carry", True))[0]
    logits = torch.cat(logits, 1)
    assert state["position"] == 17 and state["filled"] == 5
    assert torch.isfinite(logits).all() and (logits - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("script", [recurrent, standard])
def test_a_state_can_be_used_twice(script):
    model, tokens = make(script).eval(), torch.randint(0, 20, (3, 8))
    with torch.no_grad():
        state = model(tokens)[2]
        assert torch.equal(model(tokens, state)[0], model(tokens, state)[0])


@pytest.mark.parametrize("script, options", VARIANTS)
def test_gradients_equal_those_of_autograd_through_the_definition(script, options):
    options = options | ({"memory": 9} if script is standard else {})  # a training window sees all that is before
    model, tokens = make(script, **options), torch.randint(0, 20, (3, 9))
    logits, square, _ = model(tokens)
    (logits.square().mean() + square).backward()
    naive = make(script, **options)
    expected, square_ = reference(naive, tokens, options.get("carry", True))
    (expected.square().mean() + square_).backward()
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    for (name, p), q in zip(model.named_parameters(), naive.parameters()):
        assert (p.grad - q.grad).norm() <= 2e-4 * q.grad.norm(), name
        assert q.grad.norm() > 0 or not options.get("carry", True), name


def test_two_segments_are_one_in_the_forward_pass_and_no_gradient_crosses_their_edge():
    model, tokens = make(), torch.randint(0, 20, (2, 12))
    whole, _, after = model(tokens)
    first, _, state = model(tokens[:, :6])
    second, _, later = model(tokens[:, 6:], state)
    assert torch.allclose(whole, torch.cat([first, second], 1), atol=1e-5)
    assert torch.allclose(after["s"], later["s"], atol=1e-5) and torch.allclose(after["keys"], later["keys"], atol=1e-5)
    assert not any(torch.is_tensor(v) and v.requires_grad for v in state.values())
    model.embedding.weight.grad = None
    second.sum().backward()
    used = set(tokens[:, 6:].flatten().tolist())
    assert all((model.embedding.weight.grad[i].abs().sum() > 0) == (i in used) for i in range(20))


@pytest.mark.parametrize("script", [recurrent, standard])
def test_logits_depend_on_distances_and_not_on_positions(script):
    model, tokens = make(script).eval(), torch.randint(0, 20, (2, 8))
    state = model.initial_state(2)
    far = model(tokens, state | {"position": 300_000})[0]
    assert torch.allclose(model(tokens, state)[0], far, atol=1e-5)


def test_without_carry_and_with_a_memory_of_one_a_token_is_alone():
    model, tokens = make(carry=False, memory=1), torch.randint(0, 20, (1, 6))
    changed = tokens.clone()
    changed[0, 2] = (tokens[0, 2] + 1) % 20
    difference = (model(tokens)[0] - model(changed)[0]).abs().amax((0, 2))
    assert difference[2] > 1e-4 and difference[[0, 1, 3, 4, 5]].max() == 0
    carried = make(memory=1)
    difference = (carried(tokens)[0] - carried(changed)[0]).abs().amax((0, 2))
    assert difference[:2].max() == 0 and difference[2:].min() > 1e-7


@pytest.mark.parametrize("script", [recurrent, standard])
def test_bf16_autocast_is_near_float32_and_trains(script):
    model, tokens = make(script), torch.randint(0, 20, (2, 8))
    exact = model(tokens)[0]
    with torch.autocast("cpu", torch.bfloat16):
        logits, square, _ = model(tokens)
    (logits.square().mean() + square).backward()
    assert 0 < (logits - exact).abs().max() < 0.1 * exact.abs().max()
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in model.parameters())


# ---- optimiser
def test_muon_equals_torchs_muon_on_every_expert_and_head():
    model = make()
    args = recurrent.Args(width=16, weight_decay=0.0)
    muon = recurrent.make_optimisers(model, args)[0]
    slices = []
    for p in model.levels.parameters():
        matrices = p.detach().flatten(0, -3)
        slices.append((p, [m.T.clone().requires_grad_() for m in matrices]))
    assert sum(len(ms) for _, ms in slices) > 4 * len(slices)  # of every expert, level and head
    theirs = torch.optim.Muon([m for _, ms in slices for m in ms], lr=0.02, weight_decay=0.0, momentum=0.95)
    for step in range(3):
        for i, (p, ms) in enumerate(slices):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
            for m, g in zip(ms, p.grad.flatten(0, -3)):
                m.grad = g.T.clone()
        muon.step()
        theirs.step()
    for p, ms in slices:
        for mine, other in zip(p.detach().flatten(0, -3), ms):  # torch's Newton-Schulz runs in bf16
            assert (mine - other.T).norm() < 0.03 * 3 * 0.02 * max(other.shape) ** 0.5


def test_orthogonalise_makes_singular_values_near_one_in_every_slice():
    for shape in [(3, 8, 8), (2, 4, 16), (2, 3, 16, 4)]:
        values = torch.linalg.svdvals(recurrent.orthogonalise(torch.randn(shape), torch.float32).view(shape))
        assert values.shape[:-1] == shape[:-2] and values.min() > 0.4 and values.max() < 1.4


def test_weight_decay_acts_only_where_update_and_weight_agree():
    p = torch.nn.Parameter(torch.tensor([[[1.0, -1.0], [1.0, 1.0]]]))
    muon = recurrent.Muon([{"params": [p]}], lr=0.1, weight_decay=0.5)
    p.grad = torch.tensor([[[1.0, 1.0], [-1.0, 1.0]]])
    before = p.detach().clone()
    update = recurrent.orthogonalise(p.grad, torch.float32)
    muon.step()
    decayed = torch.where(update * before > 0, before * (1 - 0.1 * 0.5), before)
    assert torch.allclose(p.detach(), decayed - 0.1 * update, atol=1e-4)


def test_schedule_warms_up_from_one_percent_and_comes_back_to_it():
    rates = [recurrent.muon_rate(i, 200, 20) for i in range(201)]
    assert rates[0] == pytest.approx(0.01) and rates[20] == pytest.approx(1) and rates[200] == pytest.approx(0.01)
    assert all(a < b for a, b in zip(rates[:20], rates[1:21])) and all(a > b for a, b in zip(rates[20:], rates[21:]))


def test_the_papers_work_and_rates():
    work = {(1, 16, 768): 16 * (13 * 768**2 + 256 * 768), (2, 8, 768): 16 * (13 * 768**2 + 256 * 768)}
    for (layers, experts, width), expected in work.items():
        with torch.device("meta"):
            args = recurrent.Args(layers=layers, experts=experts, width=width, heads=8)
            model = recurrent.Model(args, 50_304)
        matrices = sum(p.numel() for p in model.parameters()) - model.embedding.weight.numel()
        assert matrices + 2 * layers * experts * 128 * width == expected + 50_304 * width
    model = make()
    adam = recurrent.make_optimisers(model, recurrent.Args(width=16))[1]
    assert [g["lr"] for g in adam.param_groups] == pytest.approx([0.2 * 48**0.5, 0.004 * 48**0.5])
