"""The plugin over vLLM's own code: its states of requests, its processed logits, and its log-probabilities."""

from types import SimpleNamespace

import numpy
import pytest
import stub_vllm as stub
import torch
from engines import warnings
from test_vllm_history import PENALTIES, bad_words_of
from vllm_server import HIDDEN, NEUTRAL, ROWS, VOCAB, Server, engine  # noqa: F401
from vllm_source import Engine

import flash_sampling
from flash_sampling import vllm as plugin


@pytest.fixture
def source(monkeypatch):
    """vLLM's own code, patched by the plugin."""
    source = Engine()
    source.install(monkeypatch)
    plugin.register()
    return source


def server_of(source, requests, mode="raw_logprobs"):
    """A server whose requests were added by vLLM. requests: the parameters of each row that are not neutral."""
    server = Server(engine=source)
    server.weight[:VOCAB] += torch.randn(VOCAB, HIDDEN, generator=torch.manual_seed(1))  # no logits tie
    server.runner.model.lm_head.weight.data.copy_(server.weight)
    server.sampler.logprobs_mode = mode
    states = server.runner.req_states
    for row, request in enumerate(requests):
        history = server.history(row)
        states.all_token_ids.gpu[server.slots[row], : len(sum(history, []))] = 0
        states.add_request(f"r{row}", len(history[0]), sum(history, []), 0, 20)
        assert states.req_id_to_index[f"r{row}"] == server.slots[row]
        server.sampler.add_request(server.slots[row], SimpleNamespace(**NEUTRAL | {"seed": row - 2} | request))
    states.apply_staged_writes()
    server.sampler.apply_staged_writes()
    return server


def test_vllm_has_the_known_interfaces(source, caplog):
    assert hasattr(source.names["GPUModelRunner"].sample, "is_flash_sampling") and not warnings(caplog)
    server = server_of(source, [{}] * ROWS)
    assert server.step() == server.direct() and server.runner.model.rows == 1 and not warnings(caplog)
    assert type(server.output) is source.names["SamplerOutput"] and server.output.num_sampled.tolist() == [1] * ROWS


def test_other_states_are_refused(source, caplog):
    """The negative control of the test above."""
    server = server_of(source, [{}] * ROWS)
    server.sampler.penalties_state.decay = 1.0
    assert server.step() == [stub.ENGINE_TOKEN] * ROWS
    [warning] = warnings(caplog)
    assert warning.endswith("PenaltiesState has unknown or missing attributes: decay")


def processed_logits(server):
    """vLLM's logits of all rows: those of the model, and those after all parameters."""
    _, batch = server.batch()
    slots, zeros = batch.expanded_idx_mapping, torch.zeros(ROWS, dtype=torch.int32)
    raw = server.hidden @ server.weight[:VOCAB].T
    at = (slots, batch.idx_mapping, batch.idx_mapping_np, torch.tensor(server.positions))
    return raw, server.sampler.sample(raw, *at, zeros, zeros, server.positions + 1)[1]


def perturbed_argmax(server, logits):
    """The definition of the draw, from processed logits."""
    states, want = server.sampler.sampling_states, []
    for row, slot in enumerate(server.slots):
        is_greedy = states.temperature.np[slot] == 0
        seed, position = int(states.seeds.np[slot]) % 2**64, int(server.positions[row]) + 1
        noise = 0 if is_greedy else flash_sampling.noise(seed, position, 0, range(VOCAB))
        want.append(int(numpy.argmax(logits[row].numpy() + noise)))
    return want


def test_tokens_are_those_of_the_logits_that_vllm_processed(source):
    words, _ = bad_words_of(Server(), 2)
    likely = [19, 300, 7]
    requests = [
        PENALTIES[0] | {"top_p": 0.9, "temperature": 0.7, "logit_bias": {likely[0]: 30.0, likely[1]: 29.5}},
        {"allowed_token_ids": [*range(0, VOCAB, 7), 7], "top_k": 20, "temperature": 2.0},
        PENALTIES[2] | {"bad_words_token_ids": words, "temperature": 2.0},
        PENALTIES[3] | {"min_p": 0.02, "temperature": 3.0, "min_tokens": 50, "all_stop_token_ids": {*likely}},
    ]
    server, differ = server_of(source, requests), set()
    for step in range(15):
        raw, processed = processed_logits(server)
        want = perturbed_argmax(server, processed)
        assert server.step() == want and server.step([3, 1]) == [want[3], want[1]]
        differ |= {row for row, token in enumerate(perturbed_argmax(server, raw)) if token != want[row]}
        server.set("seeds", [4 * step + row for row in range(ROWS)])
    assert differ == {0, 1, 2, 3}


def test_greedy_tokens_are_those_of_the_logits_that_vllm_processed(source):
    words, _ = bad_words_of(Server(), 2)
    requests = [PENALTIES[0], {}, PENALTIES[2] | {"bad_words_token_ids": words}, PENALTIES[3]]
    server = server_of(source, [request | {"temperature": 0.0} for request in requests])
    raw, processed = processed_logits(server)
    assert server.step() == processed.argmax(1).tolist() != raw.argmax(1).tolist()


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("beside_vllm", [False, True])
def test_log_probabilities_are_those_of_vllm(source, mode, beside_vllm):
    """vLLM computes the log-probabilities of the same tokens from logits."""
    requests = [
        PENALTIES[0] | {"logprobs": 5, "temperature": 0.7},
        {"logprobs": None if not beside_vllm else 200},
        {"logprobs": 0, "temperature": 0.0},
        PENALTIES[3] | {"logprobs": 3, "temperature": 2.0, "top_k": 4},
    ]
    server = server_of(source, requests, mode)
    ours = [0, 2, 3] if beside_vllm else [*range(ROWS)]
    logits = processed_logits(server)[mode == "processed_logprobs"]
    ranks = set()
    for step in range(10):
        drawn = server.step()
        assert (drawn[1] == stub.ENGINE_TOKEN) == beside_vllm
        tensors, top_n = server.output.logprobs_tensors, 200 if beside_vllm else 5
        assert type(tensors) is source.names["LogprobsTensors"]
        want = source.names["compute_topk_scores"](logits, top_n, torch.tensor(drawn))
        for found, expected in zip(tensors[:3], want[:3], strict=True):
            assert found.shape == expected.shape and found.dtype == expected.dtype
        for row in ours:
            columns = 1 + (requests[row]["logprobs"] or 0)
            assert tensors.logprob_token_ids[row, :columns].tolist() == want.logprob_token_ids[row, :columns].tolist()
            found, expected = tensors.logprobs[row, :columns].tolist(), want.logprobs[row, :columns].tolist()
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)
            assert tensors.selected_token_ranks[row] == want.selected_token_ranks[row]
            ranks.add(int(want.selected_token_ranks[row]))
        server.set("seeds", [4 * step + row for row in range(ROWS)])
    assert {1, 2, 3} <= ranks
