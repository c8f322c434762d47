"""Log-probabilities of vLLM's requests: this package returns them in vLLM's type, without logits."""

import numpy
import pytest
from conftest import library, no_waits

torch = library("torch")
import stub_vllm as stub  # noqa: E402
from engines import Reads, warnings  # noqa: E402
from vllm_server import ROWS, VOCAB, Server, engine, server, server_on_gpu  # noqa: E402, F401

from flash_sampling import vllm as plugin  # noqa: E402

MODES = ["raw_logprobs", "processed_logprobs"]
NONE = -1


def server_of(mode, counts):
    """A server whose rows have filters and penalties, and `counts` log-probabilities."""
    plugin.register()
    server = Server()
    server.sampler.logprobs_mode = mode
    server.set("temperature", [0.7, 1.0, 0.0, 2.0])
    server.set("top_k", [VOCAB, 3, VOCAB, VOCAB])
    server.set("top_p", [0.9, 1.0, 1.0, 1.0])
    server.sampler.penalties_state.add_request(server.slots[3], repetition_penalty=1.125)
    server.sampler.sampling_states.num_logprobs[server.slots] = counts
    return server


def direct(server, mode, top_n=5):
    return server.sample({3: {"repetition_penalty": 1.125}}, logprobs=top_n, logprobs_mode=mode, ranks=True)


def check(server, row, place, want, top_n):
    """Compares a row of the last output with the result of a direct draw."""
    found = server.output.logprobs_tensors
    ids, logprobs = found.logprob_token_ids[place, : top_n + 1].tolist(), found.logprobs[place, : top_n + 1].tolist()
    top = [*want[row].top[:top_n]]
    assert ids[: len(top) + 1] == [want[row].token, *(token for token, _ in top)]
    assert logprobs[: len(top) + 1] == pytest.approx([want[row].logprob, *(nats for _, nats in top)], rel=1e-6)
    assert found.selected_token_ranks[place] == want[row].rank
    # Impossible tokens follow: other tokens, because vLLM makes a dictionary of the tokens.
    assert logprobs[len(top) + 1 :] == [-numpy.inf] * (top_n - len(top))
    assert len({*ids[1:]}) == top_n and 0 <= min(ids) and max(ids) < VOCAB


@pytest.mark.parametrize("mode", MODES)
def test_log_probabilities_are_those_of_a_direct_draw(mode):
    server = server_of(mode, [5, 5, 0, NONE])
    for _ in range(5):
        want = direct(server, mode)
        assert server.step() == [row.token for row in want]
        tensors = server.output.logprobs_tensors
        assert type(tensors) is stub.LogprobsTensors and tensors[3:] == (None, None)
        assert (tensors.logprob_token_ids.dtype, tensors.logprobs.dtype) == (torch.int64, torch.float32)
        assert tensors.logprob_token_ids.shape == tensors.logprobs.shape == (ROWS, 6)
        assert tensors.selected_token_ranks.dtype == torch.int64 and tensors.selected_token_ranks.shape == (ROWS,)
        for row in range(ROWS):
            check(server, row, row, want, 5)
        # The same numbers in another batch.
        server.step([1, 0])
        check(server, 1, 0, want, 5)
        check(server, 0, 1, want, 5)
        server.step([2])
        assert server.output.logprobs_tensors.logprobs.shape == (1, 1)
        check(server, 2, 0, want, 0)
        server.step([3])
        assert server.output.logprobs_tensors is None
        server.positions = server.positions + 1
    assert server.runner.model.rows == 1  # no step computed logits
    if mode == "processed_logprobs":
        assert len(want[1].top) == 3
    # The negative control: the other mode has other log-probabilities.
    other = direct(server, MODES[mode == MODES[0]])
    assert all(abs(other[row].top[0][1] - want[row].top[0][1]) > 1e-3 for row in (0, 1, 3))


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_this_package_have_its_log_probabilities_beside_rows_of_vllm(mode):
    server = server_of(mode, [2, 200, 0, NONE])
    want = direct(server, mode)
    tokens = server.step()
    assert tokens == [want[0].token, stub.ENGINE_TOKEN, want[2].token, want[3].token]
    tensors = server.output.logprobs_tensors
    assert tensors.logprobs.shape == (ROWS, 201)
    check(server, 0, 0, want, 2)
    check(server, 2, 2, want, 0)
    # vLLM's own row is unchanged.
    assert set(tensors.logprob_token_ids[1].tolist()) == {stub.ENGINE_TOKEN}
    assert set(tensors.logprobs[1].tolist()) == {-7}
    assert tensors.selected_token_ranks[1] == stub.ENGINE_TOKEN


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_vllm_draws_rows_with_logits(mode):
    server = server_of(mode, [NONE, 0, NONE, 3])
    want = [row.token for row in direct(server, "raw_logprobs")]
    assert server.step() == [want[0], stub.ENGINE_TOKEN, want[2], stub.ENGINE_TOKEN]
    assert not any("logprobs" in call for call in server.draws.sampler.calls)


def test_the_first_step_loads_the_kernels_of_log_probabilities():
    server = server_of("raw_logprobs", [NONE] * ROWS)
    server.step()
    calls = server.draws.sampler.calls[:-1]
    assert [("logprobs" in call, "top_p" in call, "mask" in call) for call in calls] == [
        (False, False, False),
        (False, True, False),
        (False, False, True),
        (False, True, True),
        (True, False, False),
        (True, True, False),
        (True, False, True),
        (True, True, True),
    ]


def test_a_failed_row_has_a_token_of_probability_0(caplog):
    server = server_of("raw_logprobs", [3] * ROWS)
    want = direct(server, "raw_logprobs")
    server.hidden[2] = float("nan")
    assert server.step()[2] == 0 and not warnings(caplog)
    found = server.output.logprobs_tensors
    assert found.logprob_token_ids[2].tolist() == [0, 0, 1, 2] and found.logprobs[2].tolist() == [-numpy.inf] * 4
    assert found.selected_token_ranks[2] == 0
    check(server, 1, 1, want, 3)


def test_no_step_reads_values_of_log_probabilities():
    server = server_of("processed_logprobs", [2, 200, 0, NONE])
    server.step([0])
    with Reads():
        server.runner.sample(*server.batch([0, 2]), None)
        server.runner.sample(*server.batch(), None)


@pytest.mark.parametrize("mode", MODES)
def test_log_probabilities_do_not_wait_for_a_gpu(monkeypatch, mode):
    server = server_on_gpu(monkeypatch)
    server.sampler.logprobs_mode = mode
    server.set("top_k", [VOCAB, 3, VOCAB, VOCAB])
    server.sampler.sampling_states.num_logprobs[server.slots] = [5, 5, 0, 200]
    want = server.sample({}, logprobs=5, logprobs_mode=mode, ranks=True)
    server.step()
    batches = [server.batch([0, 1, 2]), server.batch()]
    with no_waits():
        outputs = [server.runner.sample(*batch, None)[0] for batch in batches]
    for server.output in outputs:
        for row, top_n in ((0, 5), (1, 5), (2, 0)):
            check(server, row, row, want, top_n)
