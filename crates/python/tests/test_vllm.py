"""The plugin of vLLM, over stubs of vLLM: its tokens are those of a sampler over the rows; the rest is vLLM's."""

import pytest
from conftest import library, no_waits

torch = library("torch")
import stub_vllm as stub  # noqa: E402
from engines import Reads, warnings  # noqa: E402
from vllm_server import ROWS, VOCAB, Server, engine, server, server_on_gpu  # noqa: E402, F401

from flash_sampling import _engines  # noqa: E402
from flash_sampling import vllm as plugin  # noqa: E402


def test_tokens_are_those_of_a_direct_call(server, caplog):
    server.set("temperature", [0.7, 1.0, 0.0, 2.0])
    assert server.step() == server.direct()
    assert server.output.num_sampled.tolist() == [1] * ROWS and server.output.num_rejected.tolist() == [0] * ROWS
    assert server.output.logprobs_tensors is None and not warnings(caplog)
    server.positions = server.positions + 1
    server.set("top_p", [0.9, 1.0, 0.5, 0.7])
    server.set("top_k", [VOCAB, 5, VOCAB, 40])
    server.set("min_p", [0.0, 0.2, 0.0, 0.1])
    assert server.step() == server.direct()
    # The first calls of the sampler load its kernels, and the only logits are those of the check of the head.
    assert server.draws.sampler.calls[8:] == [["temperature"], ["min_p", "temperature", "top_k", "top_p"]]
    assert server.runner.model.rows == 1


@pytest.mark.parametrize("options", [{"soft_cap": 3.0}, {"scale": 0.25}, {"soft_cap": 5.0, "scale": 2.0}], ids=str)
def test_the_head_has_the_soft_cap_and_the_scale_of_the_model(options):
    plugin.register()
    server = Server(**options)
    assert server.step() == server.direct() and server.runner.model.rows == 1
    assert server.direct() != Server().direct()


def test_a_prompt_that_is_not_complete_has_no_token(server):
    server.sampler.req_states.prefill_len.np[server.slots[1]] = 50
    server.sampler.req_states.prefill_len.copy_to_uva()
    server.step()
    assert server.output.num_sampled.tolist() == [1, 0, 1, 1]


def test_a_token_does_not_depend_on_other_rows(server):
    server.set("top_p", [0.9, 1.0, 0.5, 0.7])
    server.set("temperature", [0.7, 1.0, 3.0, 2.0])
    want = server.step()
    assert [server.step([row]) for row in range(ROWS)] == [[token] for token in want]
    assert server.step([3, 1]) == [want[3], want[1]]
    server.leave(0)
    assert server.step([3, 0, 1]) == [want[3], stub.ENGINE_TOKEN, want[1]]


def test_vllm_draws_batches_with_drafts(server):
    assert server.step() == server.direct()
    hidden, batch = server.batch()
    batch.num_draft_tokens = 1
    output, _, _ = server.runner.sample(hidden, batch, None)
    assert output.sampled_token_ids.flatten().tolist() == [stub.ENGINE_TOKEN] * ROWS


def test_new_weights_are_read(server):
    assert server.step() == server.direct()
    for replace in (False, True):
        server.weight = server.weight.flip(0).contiguous()
        if replace:
            server.runner.model.lm_head.weight = torch.nn.Parameter(server.weight.clone(), requires_grad=False)
        else:
            server.runner.model.lm_head.weight.data.copy_(server.weight)
        assert server.step() == server.direct()


def test_a_failed_row_has_token_0_and_a_warning_in_a_later_step(server, caplog, monkeypatch):
    monkeypatch.setattr(_engines, "_STEPS", 1)
    want = server.direct()
    server.hidden[2] = float("nan")
    assert server.step() == [want[0], want[1], 0, want[3]] and not warnings(caplog)
    for _ in range(2):
        server.step([0])
        assert not warnings(caplog)  # the GPU has not run the first step
    expected = "1 of 4 rows have token 0 instead of a draw. The first is request r2: a logit is NaN"
    for _ in range(3):
        server.step([0])
        assert warnings(caplog) == [expected]


def test_no_step_reads_values_of_tensors(server):
    server.set("top_p", [0.9, 1.0, 0.5, 0.7])
    server.step([1])
    server.leave(0)
    with Reads():
        server.runner.sample(*server.batch([1, 2]), None)
        server.runner.sample(*server.batch(), None)
    with pytest.raises(AssertionError), Reads():
        torch.ones(1).item()


def test_no_step_waits_for_a_gpu(monkeypatch):
    server = server_on_gpu(monkeypatch)
    server.set("temperature", [0.7, 1.0, 0.0, 2.0])
    server.set("top_p", [0.9, 1.0, 0.5, 0.7])
    want = server.direct()
    assert server.step() == want
    server.leave(0)
    lists = {"allowed": [3, 40, 41, 40], "bias": {40: 1000.0, 41: 2000.0}, "stop": [41]}
    server.sampler.logits_processors[0].add_request(server.slots[2], int(server.positions[2]), min_tokens=2, **lists)
    want[2] = 40
    batches = [server.batch([1, 2]), server.batch()]
    with no_waits():
        outputs = [server.runner.sample(*batch, None)[0].sampled_token_ids for batch in batches]
    assert [output.flatten().tolist() for output in outputs] == [want[1:3], [stub.ENGINE_TOKEN, *want[1:]]]
