"""What the plugin of vLLM keeps from step to step, while the slots of a batch have the same requests."""

import sys

import numpy
import pytest
from conftest import library, no_waits

torch = library("torch")
import stub_vllm as stub  # noqa: E402
from vllm_server import NEUTRAL, ROWS, VOCAB, engine, server, server_on_gpu  # noqa: E402, F401

from flash_sampling import _vllm_requests  # noqa: E402


def replace_request(server):
    """Replaces the request in the slot of row 1 by one with a filter, without a call of `Sampler.add_request`."""
    server.set("top_k", [VOCAB, 1, VOCAB, VOCAB])


def test_a_request_in_the_slot_of_another_request_has_its_own_parameters(server):
    server.set("temperature", [9.0] * ROWS)
    before = server.step()
    replace_request(server)
    server.sampler.add_request(server.slots[1], NEUTRAL)
    want = server.direct()
    assert server.step(is_new=False) == want and want[1] != before[1]
    assert "top_k" in server.draws.sampler.calls[-1]


def test_what_a_batch_needs_is_kept_until_vllm_adds_a_request(server):
    """The negative control of the test above: the plugin does not see a change that vLLM does not make."""
    server.set("temperature", [9.0] * ROWS)
    before = server.step()
    rows = _vllm_requests._LAST[server.sampler].rows
    replace_request(server)
    assert server.step(is_new=False) == before != server.direct()
    assert "top_k" not in server.draws.sampler.calls[-1]
    assert _vllm_requests._LAST[server.sampler].rows is rows
    assert server.step(is_new=True) == server.direct()
    assert _vllm_requests._LAST[server.sampler].rows is not rows
    assert "top_k" in server.draws.sampler.calls[-1]


def test_a_batch_with_other_slots_has_its_own_parameters(server):
    server.set("top_k", [VOCAB, 1, VOCAB, VOCAB])
    want = server.direct()
    for rows in ([0, 1, 2, 3], [0], [1, 0], [0, 1], [3, 2], [1], [0, 1, 2, 3]):
        assert server.step(rows, is_new=False) == [want[row] for row in rows]
        assert ("top_k" in server.draws.sampler.calls[-1]) == (1 in rows)


def test_kept_lists_follow_the_sequences(server):
    """Penalties, stop tokens and bad words of later steps read the tokens of these steps."""
    biases, penalties, bad_words = server.sampler.logits_processors
    penalties.add_request(server.slots[0], repetition_penalty=1.5, frequency_penalty=0.5)
    best = (server.hidden[2] @ server.weight[:VOCAB].T).argsort(descending=True).tolist()
    outputs = len(server.history(2)[1])
    biases.add_request(server.slots[2], int(server.prompt_lens[2]), min_tokens=outputs + 5, stop=best[:40])
    before = int(server.sequences[3, 11])
    bad_words.add_request(server.slots[3], [[before, token] for token in range(0, 900, 9)])
    changes = set()
    for step in range(10):
        tokens = server.step(is_new=step == 0)
        again = server.step(is_new=True)
        assert tokens == again
        banned = {2: best[:40] if step < 5 else [], 3: range(0, 900, 9) if server.positions[3] == 11 else []}
        given = {0: {"repetition_penalty": 1.5, "frequency_penalty": 0.5}}
        given |= {row: {"banned_token_ids": [*tokens]} for row, tokens in banned.items()}
        assert tokens == [row.token for row in server.sample(given)]
        changes.add((len(banned[2]), len(banned[3])))
        server.positions = server.positions + 1
    assert changes == {(40, 0), (40, 100), (0, 0)}


def test_a_row_at_the_maximum_of_penalised_tokens_moves_to_vllm(server):
    server.step()
    server.draws.max_penalised = 8
    server.sampler.penalties_state.add_request(server.slots[0], repetition_penalty=1.5)
    drawn = []
    for step in range(4):
        server.positions = server.positions + 1
        drawn.append(server.step(is_new=step == 0)[0])
    assert [token == stub.ENGINE_TOKEN for token in drawn] == [False, False, True, True]


@pytest.mark.parametrize("tokens", [1, 2])
def test_rows_of_one_token_draw_from_their_own_hidden_states(server, tokens):
    want = server.direct()
    assert server.step(tokens=tokens) == want and server.step([3, 1], tokens=tokens) == [want[3], want[1]]
    server.leave(0)
    assert server.step(tokens=tokens) == [stub.ENGINE_TOKEN, *want[1:]]


def test_hidden_states_of_single_tokens_are_not_copied(server, monkeypatch):
    server.step()
    inputs = []
    enqueue = server.draws.sampler.enqueue
    spy = lambda hidden, *out, **given: inputs.append(hidden) or enqueue(hidden, *out, **given)  # noqa: E731
    monkeypatch.setattr(server.draws.sampler, "enqueue", spy)
    hidden, batch = server.batch(tokens=1)
    padded = torch.cat((hidden, torch.full((4, hidden.shape[1]), torch.nan)))  # as a CUDA graph returns
    output, _, _ = server.runner.sample(padded, batch, None)
    assert output.sampled_token_ids.flatten().tolist() == server.direct()
    assert inputs[0].data_ptr() == padded.data_ptr() and len(inputs[0]) == ROWS


def test_the_numbers_of_tokens_are_constant_without_prompts(server, monkeypatch):
    calls = []
    count = stub.get_num_sampled_and_rejected
    module = sys.modules["vllm.v1.worker.gpu.input_batch"]
    monkeypatch.setattr(module, count.__name__, lambda *given: calls.append(1) or count(*given))
    server.step()
    first = server.output
    server.step(is_new=False)
    assert not calls and server.output.num_sampled is first.num_sampled
    for numbers, want in ((first.num_sampled, 1), (first.num_rejected, 0)):
        assert numbers.dtype == torch.int32 and numbers.tolist() == [want] * ROWS
    # A prompt that is not complete.
    server.sampler.req_states.prefill_len.np[server.slots[2]] = 120
    server.sampler.req_states.prefill_len.copy_to_uva()
    server.step()
    assert calls == [1] and server.output.num_sampled.tolist() == [1, 1, 0, 1]
    # The last part of a prompt.
    server.sampler.req_states.prefill_len.np[server.slots[2]] = server.positions[2] + 1
    server.sampler.req_states.prefill_len.copy_to_uva()
    hidden, batch = server.batch()
    batch.has_prefill = True
    assert server.runner.sample(hidden, batch, None)[1].tolist() == [1] * ROWS and calls == [1, 1]


def test_a_kept_batch_does_not_wait_for_a_gpu(monkeypatch):
    server = server_on_gpu(monkeypatch)
    server.sampler.logits_processors[1].add_request(server.slots[2], 1.5, 0.5, 0.25)
    server.sampler.sampling_states.num_logprobs[server.slots] = 5
    server.step()
    given = {2: {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.25}}
    for _ in range(70):
        want = [row.token for row in server.sample(given)]
        batch = server.batch(tokens=1)
        with no_waits():
            output = server.runner.sample(*batch, None)[0]
        assert output.sampled_token_ids.flatten().tolist() == want
        server.positions = numpy.minimum(server.positions + 1, 100)
