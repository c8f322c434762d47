"""Penalties and bad words of vLLM's requests read the tokens of the sequences where vLLM keeps them."""

import numpy
import pytest
from conftest import library, no_waits

torch = library("torch")
import stub_vllm as stub  # noqa: E402
from engines import Reads, warnings  # noqa: E402
from vllm_server import MAX_LEN, ROWS, Server, engine, server, server_on_gpu  # noqa: E402, F401

from flash_sampling import _vllm_draws, _vllm_requests, _vllm_rows  # noqa: E402
from flash_sampling import vllm as plugin  # noqa: E402

PENALTIES = {
    0: {"repetition_penalty": 1.5},
    2: {"frequency_penalty": 0.5, "presence_penalty": 0.25},
    3: {"repetition_penalty": 1.125, "frequency_penalty": -0.5, "presence_penalty": 2.0},
}


def add_penalties(server, given=PENALTIES):
    for row, penalties in given.items():
        server.sampler.penalties_state.add_request(server.slots[row], **penalties)


def tokens(samples):
    return [sample.token for sample in samples]


def test_penalties_are_those_of_the_request(server):
    server.set("temperature", [2.0, 1.0, 2.0, 2.0])
    server.set("top_p", [0.9, 1.0, 1.0, 0.9])
    add_penalties(server)
    # The negative controls: with other histories, the penalised rows draw other tokens.
    histories = {
        "no tokens": lambda row: ([], []),
        "no prompt": lambda row: ([], server.history(row)[1]),
        "all is prompt": lambda row: (sum(server.history(row), []), []),
        "all is output": lambda row: ([], sum(server.history(row), [])),
    }
    differ = {name: set() for name in histories}
    for _ in range(30):
        want = tokens(server.sample(PENALTIES))
        assert server.step() == want and server.step([3, 1]) == [want[3], want[1]]
        assert server.step([2]) == [want[2]]
        for name, history in histories.items():
            other = tokens(server.sample(PENALTIES, history))
            differ[name] |= {row for row in range(ROWS) if other[row] != want[row]}
        server.positions = server.positions + 1
    assert differ == {"no tokens": {0, 2, 3}, "no prompt": {0, 3}, "all is prompt": {2, 3}, "all is output": {2, 3}}


@pytest.mark.parametrize("name", PENALTIES[3])
def test_one_penalty_needs_no_other(server, name):
    given = {row: {name: penalties[name]} for row, penalties in PENALTIES.items() if name in penalties}
    add_penalties(server, given)
    differ = 0
    for _ in range(20):
        want = tokens(server.sample(given))
        assert server.step() == want
        differ += want != tokens(server.sample({}))
        server.positions = server.positions + 1
    assert differ > 0
    lists = {"prompt_begin", "prompt_end", "prompt_tokens", "output_begin", "output_end", "output_tokens"}
    assert set(server.draws.sampler.calls[-1]) == {"temperature", name} | lists


def test_a_prompt_that_is_not_complete_has_no_output(server, caplog):
    add_penalties(server)
    want = tokens(server.sample(PENALTIES))
    requests = server.sampler.req_states
    for lens in (requests.prompt_len, requests.prefill_len):
        lens.np[server.slots[0]] = 50
        lens.copy_to_uva()
    assert server.step()[1:] == want[1:] and server.output.num_sampled.tolist() == [0, 1, 1, 1]
    server.step()
    assert not warnings(caplog)
    lists = _vllm_requests._LAST[server.sampler].rows.arguments()
    lens = {name: lists[f"{name}_end"] - lists[f"{name}_begin"] for name in ("prompt", "output")}
    assert lens["prompt"][server.slots].tolist() == [50, 1, 60, 3]
    assert lens["output"][server.slots].tolist() == [0, 0, 31, 5]


def test_a_row_may_have_all_adjusted_tokens_at_once(server):
    server.step()
    biases, _, bad_words = server.sampler.logits_processors
    lists = (biases.logit_bias_token_ids, biases.stop_token_ids, bad_words.bad_word_offsets)
    assert [tokens.gpu.shape[1] for tokens in lists] == [1024, 128, 129]
    assert server.draws.sampler.max_adjusted == 1024 + 128 + 128 + MAX_LEN


def test_vllm_draws_rows_with_too_many_penalised_tokens(monkeypatch):
    """Tokens of a prompt count for the repetition penalty only."""
    monkeypatch.setattr(_vllm_draws, "_MAX_PENALISED", 31)
    plugin.register()
    server = Server()
    given = {1: {"repetition_penalty": 1.5}, 2: {"presence_penalty": 1.5}, 3: {"repetition_penalty": 1.5}}
    add_penalties(server, given)
    want = tokens(server.sample(given))
    assert server.positions[2] + 1 - server.prompt_lens[2] == 31 and server.step() == want
    server.positions = server.positions + numpy.array([0, 30, 0, 23])
    assert server.step() == tokens(server.sample(given))
    server.positions = server.positions + 1
    assert server.step()[1:] == [stub.ENGINE_TOKEN] * 3
    # A row's sampler depends on its own tokens.
    assert server.step([0]) == [server.step()[0]] == tokens(server.sample(given))[:1]
    server.sampler.penalties_state.add_request(server.slots[2], repetition_penalty=1.5)
    server.positions = server.positions - 1
    assert server.step([1, 2]) == [tokens(server.sample(given))[1], stub.ENGINE_TOKEN]


def bad_words_of(server, row):
    """Bad words of likely tokens, and the tokens that they ban."""
    _, output = server.history(row)
    best = (server.hidden[row] @ server.weight[:1000].T).argsort(descending=True).tolist()
    before_output = server.sequences[row, server.prompt_lens[row] - 1].item()
    words = [
        [best[0]],
        [output[-1], best[1]],
        [*output[-2:], best[2]],
        [output[-1] ^ 1, output[-1], best[3]],  # the output has another token
        [*output[-1:], best[5], best[4]],
        [before_output, *output, best[6]],  # a word begins in the prompt
        [*output, best[7]],
        [best[8]],
    ]
    return words, [best[0], best[1], best[2], best[7], best[8]]


def test_bad_words_are_those_of_the_request(server):
    server.set("temperature", [0.3] * ROWS)
    state, differ = server.sampler.logits_processors[2], {}
    for _ in range(10):
        given = {row: bad_words_of(server, row) for row in (0, 2, 3)}
        more = {row: {"banned_token_ids": banned} for row, (_, banned) in given.items()}
        for row, (words, _) in given.items():
            # The words of an earlier request in this slot.
            state.add_request(server.slots[row], [[*range(20)], *[[token] for token in range(12)]])
            state.add_request(server.slots[row], words)
        want = tokens(server.sample(more))
        assert server.step() == want and server.step([3, 1]) == [want[3], want[1]]
        without = tokens(server.sample({}))
        every = {row: {"banned_token_ids": [word[-1] for word in words]} for row, (words, _) in given.items()}
        for name, other in (("no words", without), ("all words", tokens(server.sample(every)))):
            differ.setdefault(name, set()).update(row for row in range(ROWS) if other[row] != want[row])
        server.positions = server.positions + 1
    assert differ["no words"] == {0, 2, 3} and differ["all words"]


def test_bad_words_and_stop_tokens_are_banned(server):
    server.set("temperature", [0.3] * ROWS)
    words, banned = bad_words_of(server, 3)
    best = (server.hidden[3] @ server.weight[:1000].T).argsort(descending=True).tolist()
    stop = best[9:40]
    server.sampler.logits_processors[2].add_request(server.slots[3], words)
    prompt_len = int(server.prompt_lens[3])
    server.sampler.logits_processors[0].add_request(server.slots[3], prompt_len, min_tokens=100, stop=stop)
    add_penalties(server)
    given = {row: dict(penalties) for row, penalties in PENALTIES.items()}
    given[3]["banned_token_ids"] = banned + stop
    for _ in range(10):
        # The end of the output stays the same.
        assert server.step() == tokens(server.sample(given))
        server.set("seeds", server.sampler.sampling_states.seeds.np[server.slots] - 1)


def banned_by(words, output):
    """The definition: a bad word bans its last token if the output ends with its other tokens."""
    ends = lambda word: len(word) == 1 or output[-len(word) + 1 :] == word[:-1]  # noqa: E731
    return [word[-1] for word in words if ends(word)]


def test_bad_words_end_with_the_output():
    numbers = numpy.random.default_rng(5)
    requests = stub.RequestState(6, 40, "cpu")
    state, counts = stub.BadWordsState(6, requests, "cpu"), numpy.zeros(6, dtype=int)
    found = {length: 0 for length in range(1, 5)}
    for _ in range(50):
        rows, want = numpy.random.default_rng(0).permutation(6)[:4], []
        for slot in rows:
            tokens = numbers.integers(0, 3, 40).tolist()
            counts[slot], prompt = numbers.integers(1, 41), numbers.integers(1, 41)
            words = [numbers.integers(0, 3, numbers.integers(1, 5)).tolist() for _ in range(numbers.integers(0, 17))]
            requests.all_token_ids.write(slot, tokens)
            requests.prompt_len.np[slot] = prompt
            state.add_request(slot, words)
            want.append(banned_by(words, tokens[prompt : counts[slot]]))
            for word in words:
                found[len(word)] += word[-1] in banned_by([word], tokens[prompt : counts[slot]])
        requests.prompt_len.copy_to_uva()
        requests.total_len.gpu[rows] = torch.tensor(counts[rows]).int()
        words = int(state.num_bad_words.np[rows].max())
        if words == 0:
            continue
        with Reads():
            banned = _vllm_rows.last_tokens(state, torch.tensor(rows), words)
        assert banned.dtype == torch.int32
        assert [[token for token in row if token >= 0] for row in banned.tolist()] == want
    assert min(found.values()) > 5


def test_no_step_reads_the_tokens_of_sequences(server):
    add_penalties(server)
    server.sampler.logits_processors[2].add_request(server.slots[3], bad_words_of(server, 3)[0])
    server.step([1])
    with Reads():
        server.runner.sample(*server.batch(), None)


class Pinned:
    """The GPU's view of a tensor in pinned host memory, where vLLM keeps the tokens of sequences."""

    def __init__(self, tensor):
        self.tensor = tensor.pin_memory()
        shape, address = tuple(tensor.shape), (self.tensor.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<i4", "data": address, "version": 3}


def test_tokens_in_pinned_memory_are_read_without_waiting(monkeypatch):
    server = server_on_gpu(monkeypatch)
    tokens_of_requests = server.sampler.req_states.all_token_ids
    pinned = Pinned(tokens_of_requests.gpu.cpu())
    tokens_of_requests.gpu = torch.as_tensor(pinned, device="cuda")
    assert tokens_of_requests.gpu.data_ptr() == pinned.tensor.data_ptr() and tokens_of_requests.gpu.is_cuda
    add_penalties(server)
    words, banned = bad_words_of(server, 2)
    server.sampler.logits_processors[2].add_request(server.slots[2], words)
    given = {row: dict(penalties) for row, penalties in PENALTIES.items()}
    given[2]["banned_token_ids"] = banned
    want = tokens(server.sample(given))
    assert server.step() == want != tokens(server.sample({}))
    batch = server.batch()
    with no_waits():
        output = server.runner.sample(*batch, None)[0].sampled_token_ids
    assert output.flatten().tolist() == want
