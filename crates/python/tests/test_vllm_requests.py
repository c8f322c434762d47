"""The parameters of vLLM's requests: this package draws with most of them, and leaves the other requests to vLLM."""

from types import SimpleNamespace

import numpy
import pytest
from conftest import library

torch = library("torch")
import stub_vllm as stub  # noqa: E402
from engines import Reads  # noqa: E402
from vllm_server import VOCAB, engine, server  # noqa: E402, F401

from flash_sampling import _vllm_requests, _vllm_rows  # noqa: E402


def of_grammar(server):
    return stub.GrammarOutput(structured_output_request_ids=["r9", "r1"], grammar_bitmask=None)


def of_thinking(server):
    state = server.sampler.thinking_budget_state
    state.enabled, state.use_thinking_budget = True, numpy.arange(8) == server.slots[1]


def of(get, value):
    def change(server):
        get(server.sampler)[server.slots[1]] = value

    return change


def penalised_beyond_the_maximum(server):
    server.draws.max_penalised = 0
    server.sampler.penalties_state.add_request(server.slots[1], repetition_penalty=2.0)


ROWS_OF_THE_ENGINE = {
    "many log-probabilities": of(lambda sampler: sampler.sampling_states.num_logprobs, 129),
    "logprob_token_ids": of(lambda sampler: sampler.logprob_token_ids_state.num_token_ids.np, 2),
    "penalties of too many tokens": penalised_beyond_the_maximum,
    "restored stop tokens": of(lambda sampler: sampler.logits_processors[0].restore_when_all_masked.np, 1),
    "thinking_token_budget": of_thinking,
    "structured_outputs": of_grammar,
}


@pytest.mark.parametrize("change", ROWS_OF_THE_ENGINE.values(), ids=ROWS_OF_THE_ENGINE)
def test_vllm_draws_a_row_with_other_parameters(server, change):
    want = server.direct()
    assert server.step() == want and stub.ENGINE_TOKEN not in want
    grammar = change(server)
    want[1] = stub.ENGINE_TOKEN
    assert server.step(grammar=grammar) == want
    assert server.step([1], grammar) == [stub.ENGINE_TOKEN]


def test_vllm_draws_a_row_with_a_large_top_k():
    """The limit of top_k is 1024, so the vocabulary of the other tests is too small."""
    states, draws = stub.Sampler(4, 5000, 8, "cpu"), SimpleNamespace(vocab_size=5000, max_penalised=8, max_logprobs=8)
    states.sampling_states.top_k.np[:] = [1024, 1025, 4999, 5000]
    requests = _vllm_requests.Requests(draws, states, numpy.arange(4))
    assert requests.is_supported.tolist() == [True, False, False, True]


def bias_of(server, row):
    """Allowed tokens with duplicates, biases, and stop tokens, all likely ones of a row."""
    logits = server.hidden[row] @ server.weight[:VOCAB].T
    best = logits.argsort(descending=True).tolist()
    bias = {best[3]: 4.0, best[9]: -3.0, best[5]: 50.0}
    return {"allowed": best[1:600:2] + best[1:9], "bias": bias, "stop": best[:128]}


@pytest.mark.parametrize("names", [["allowed"], ["bias"], ["stop"], ["allowed", "bias", "stop"]], ids=" ".join)
def test_biases_are_those_of_the_request(server, names):
    server.set("top_p", [0.9, 1.0, 0.5, 0.7])
    plain, state = server.step(), server.sampler.logits_processors[0]
    given = {row: {name: bias_of(server, row)[name] for name in names} for row in (0, 3)}
    differ = 0
    for more_tokens, is_short in ((1, True), (0, False)):
        for row, lists in given.items():
            prompt_len, outputs = int(server.prompt_lens[row]), len(server.history(row)[1])
            state.add_request(server.slots[row], prompt_len, min_tokens=outputs + more_tokens, **lists)
        more = {}
        for row, lists in given.items():
            banned = lists.get("stop", []) if is_short else []
            biases = {"allowed_token_ids": lists.get("allowed"), "logit_bias": lists.get("bias")}
            more[row] = biases | {"banned_token_ids": banned}
        want = [row.token for row in server.sample(more)]
        assert server.step() == want and server.step([3, 1]) == [want[3], want[1]]
        differ += want[0] != plain[0] and want[3] != plain[3]
    assert differ == (1 if names == ["stop"] else 2)
    with Reads():
        server.runner.sample(*server.batch(), None)


def test_bitmaps_have_each_allowed_token():
    rows = [[5, 31, 5, 99, 0], [0, 32, 31, 32, 99], [7, 7, 7, 7, 7], [128, 1 << 30, 33, 128, 0]]
    mask = _vllm_rows.bitmaps(torch.tensor(rows).int(), torch.tensor([3, 5, 0, 4]).int(), 100)
    want = torch.tensor([[1 << 5 | 1 << 31, 0, 0, 0], [1 | 1 << 31, 1, 0, 1 << 3], [-1] * 4, [0, 2, 0, 0]]).int()
    assert mask.dtype == torch.int32 and torch.equal(mask, want)
