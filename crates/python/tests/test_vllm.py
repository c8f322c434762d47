"""The plugin of vLLM, over stubs of vLLM: its tokens are those of a sampler over the rows; the rest is vLLM's."""

import importlib.metadata
import sys
from types import SimpleNamespace

import numpy
import pytest
from conftest import Problem, library, skip

from flash_sampling import Head, Sampler, SamplingParams

torch = library("torch")
import stub_vllm as stub  # noqa: E402
from engines import Enqueued, Event, Reads, warnings  # noqa: E402

from flash_sampling import vllm as plugin  # noqa: E402

VOCAB, HIDDEN, ROWS = 1000, 32, 4


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """vLLM, on the CPU."""
    stub.install(monkeypatch)
    monkeypatch.setattr(plugin, "Sampler", Enqueued)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.delenv("FLASH_SAMPLING_VLLM", raising=False)


class Model(torch.nn.Module):
    def __init__(self, weight, **options):
        super().__init__()
        self.lm_head = stub.ParallelLMHead(weight)
        self.logits_processor = stub.LogitsProcessor(VOCAB, **options)
        self.rows = 0

    def compute_logits(self, hidden_states):
        self.rows += len(hidden_states)
        return self.logits_processor(self.lm_head, hidden_states)


class Server:
    """A model runner with requests in slots 7, 6, 5, ..., and a direct call of a sampler for the same rows."""

    def __init__(self, device="cpu", model=Model, **options):
        problem = Problem(rows=ROWS, vocab=VOCAB + 24, hidden=HIDDEN)
        self.device, self.options = torch.device(device), options
        self.hidden, self.weight = torch.tensor(problem.hidden), torch.tensor(problem.weight)
        self.weight[VOCAB:] = 9 * self.hidden[0]  # padding with large logits
        self.slots = numpy.arange(7, 7 - ROWS, -1)
        self.positions = numpy.array([5, 0, 90, 7])
        self.runner = stub.GPUModelRunner(model(self.weight.to(device), **options), 8, VOCAB, self.device)
        self.sampler = self.runner.sampler
        self.set("seeds", [5, -5, 6, 2**63 - 1])

    def set(self, name, values):
        """Sets a parameter of the rows."""
        getattr(self.sampler.sampling_states, name).np[self.slots] = values
        self.sampler.sampling_states.apply_staged_writes()

    def batch(self, rows=range(ROWS)):
        """The hidden states and the batch of rows. Each row has two tokens, and draws from its second."""
        rows = list(rows)
        on = lambda values: torch.as_tensor(numpy.asarray(values), device=self.device)  # noqa: E731
        slots, positions = self.slots[rows], self.positions[rows]
        hidden = torch.stack([torch.full((len(rows), HIDDEN), 9.0), self.hidden[rows]], 1).reshape(-1, HIDDEN)
        batch = stub.InputBatch(
            req_ids=[f"r{row}" for row in rows],
            num_reqs=len(rows),
            idx_mapping=on(slots),
            idx_mapping_np=slots,
            expanded_idx_mapping=on(slots),
            num_draft_tokens=0,
            seq_lens=on(positions + 1),
            positions=on(numpy.stack([positions - 1, positions], 1).flatten()),
            logits_indices=on(numpy.arange(1, 2 * len(rows), 2, dtype=numpy.int32)),
            cu_num_logits=on(numpy.arange(len(rows) + 1, dtype=numpy.int32)),
        )
        return hidden.to(self.device), batch

    def step(self, rows=range(ROWS), grammar=None):
        """The tokens of a step."""
        output, num_sampled, num_rejected = self.runner.sample(*self.batch(rows), grammar)
        assert output.num_sampled is num_sampled and output.num_rejected is num_rejected
        assert output.sampled_token_ids.shape == (len(rows), 1) and output.sampled_token_ids.dtype == torch.int64
        self.output = output
        return output.sampled_token_ids.flatten().tolist()

    def direct(self, rows=range(ROWS)):
        """The tokens of a direct call."""
        rows = list(rows)
        states, slots = self.sampler.sampling_states, self.slots[rows]
        sampler = Sampler(Head(self.weight, vocab_size=VOCAB, **self.options))
        return sampler(
            self.hidden[rows],
            seed=[int(seed) % 2**64 for seed in states.seeds.np[slots]],
            position=self.positions[rows] + 1,
            temperature=states.temperature.np[slots],
            top_k=[0 if k == VOCAB else int(k) for k in states.top_k.np[slots]],
            top_p=states.top_p.np[slots],
            min_p=states.min_p.np[slots],
        ).tolist()

    @property
    def draws(self):
        return plugin._DRAWS[self.runner]


@pytest.fixture
def server():
    plugin.register()
    return Server()


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
    assert server.draws.sampler.calls[3:] == [["temperature"], ["min_p", "temperature", "top_k", "top_p"]]
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


def of_grammar(server):
    return stub.GrammarOutput(structured_output_request_ids=["r9", "r1"], grammar_bitmask=None)


def of_thinking(server):
    state = server.sampler.thinking_budget_state
    state.enabled, state.use_thinking_budget = True, numpy.arange(8) == server.slots[1]


def of(get, value):
    def change(server):
        get(server.sampler)[server.slots[1]] = value

    return change


ROWS_OF_THE_ENGINE = {
    "logprobs": of(lambda sampler: sampler.sampling_states.num_logprobs, 0),
    "logprob_token_ids": of(lambda sampler: sampler.logprob_token_ids_state.num_token_ids.np, 2),
    "penalties": of(lambda sampler: sampler.penalties_state.use_penalty, True),
    "restored stop tokens": of(lambda sampler: sampler.logits_processors[0].restore_when_all_masked.np, 1),
    "bad_words": of(lambda sampler: sampler.logits_processors[2].num_bad_words.np, 1),
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
    assert server.output.logprobs_tensors == "log-probabilities"
    assert server.step([1], grammar) == [stub.ENGINE_TOKEN]


def bias_of(server, row):
    """Allowed tokens with duplicates, biases, and stop tokens, all likely ones of a row."""
    logits = server.hidden[row] @ server.weight[:VOCAB].T
    best = logits.argsort(descending=True).tolist()
    return {"allowed": best[1:600:2] + best[1:9], "bias": {best[3]: 4.0, best[9]: -3.0, best[5]: 50.0}, "stop": best[:128]}


@pytest.mark.parametrize("names", [["allowed"], ["bias"], ["stop"], ["allowed", "bias", "stop"]], ids=" ".join)
def test_biases_are_those_of_the_request(server, names):
    server.set("top_p", [0.9, 1.0, 0.5, 0.7])
    plain, state = server.step(), server.sampler.logits_processors[0]
    given = {row: {name: bias_of(server, row)[name] for name in names} for row in (0, 3)}
    differ = 0
    for min_tokens, is_short in ((3, True), (2, False)):  # Two tokens of each sequence are generated.
        for row, lists in given.items():
            prompt_len = int(server.positions[row]) - 1
            state.add_request(server.slots[row], prompt_len, min_tokens=min_tokens, **lists)
        params = [SamplingParams(top_p=float(p)) for p in server.sampler.sampling_states.top_p.np[server.slots]]
        for row, lists in given.items():
            banned = lists.get("stop", []) if is_short else []
            params[row] = SamplingParams(
                top_p=params[row].top_p,
                allowed_token_ids=lists.get("allowed"),
                logit_bias=lists.get("bias"),
                banned_token_ids=banned,
            )
        direct = Sampler(Head(server.weight, vocab_size=VOCAB))
        seeds = [int(seed) % 2**64 for seed in server.sampler.sampling_states.seeds.np[server.slots]]
        rows = direct.sample(server.hidden, params, seed=seeds, position=server.positions + 1)
        want = [row.token for row in rows]
        assert server.step() == want and server.step([3, 1]) == [want[3], want[1]]
        differ += want[0] != plain[0] and want[3] != plain[3]
    assert differ == (1 if names == ["stop"] else 2)
    with Reads():
        server.runner.sample(*server.batch(), None)


def test_bitmaps_have_each_allowed_token():
    rows = [[5, 31, 5, 99, 0], [0, 32, 31, 32, 99], [7, 7, 7, 7, 7], [128, 1 << 30, 33, 128, 0]]
    mask = plugin._mask(torch.tensor(rows).int(), torch.tensor([3, 5, 0, 4]).int(), 100)
    want = torch.tensor([[1 << 5 | 1 << 31, 0, 0, 0], [1 | 1 << 31, 1, 0, 1 << 3], [-1] * 4, [0, 2, 0, 0]]).int()
    assert mask.dtype == torch.int32 and torch.equal(mask, want)


def test_vllm_draws_a_row_with_a_large_top_k():
    """The limit of top_k is 1024, so the vocabulary of the other tests is too small."""
    states = stub.Sampler(4, 5000, "cpu")
    batch = SimpleNamespace(idx_mapping_np=numpy.arange(4), num_draft_tokens=0, logits_indices=numpy.arange(4))
    states.sampling_states.top_k.np[:] = [1024, 1025, 4999, 5000]
    assert plugin._supported_rows(states, 5000, batch, None).tolist() == [0, 3]


def test_a_token_does_not_depend_on_other_rows(server):
    server.set("top_p", [0.9, 1.0, 0.5, 0.7])
    server.set("temperature", [0.7, 1.0, 3.0, 2.0])
    want = server.step()
    assert [server.step([row]) for row in range(ROWS)] == [[token] for token in want]
    assert server.step([3, 1]) == [want[3], want[1]]
    server.sampler.penalties_state.use_penalty[server.slots[0]] = True
    assert server.step([3, 0, 1]) == [want[3], stub.ENGINE_TOKEN, want[1]]


def change_sampler(server):
    class GPUWatermarkSampler(stub.Sampler):
        pass

    server.sampler.__class__ = GPUWatermarkSampler


RUNNERS_OF_THE_ENGINE = {
    "the sampler is a GPUWatermarkSampler": change_sampler,
    "Sampler has unknown or missing attributes: nonce": lambda server: setattr(server.sampler, "nonce", 1),
    "LogitBiasState has unknown or missing attributes: spare": lambda server: setattr(
        server.sampler.logits_processors[0], "spare", 1
    ),
    "SamplingStates has unknown or missing attributes: typical_p": lambda server: setattr(
        server.sampler.sampling_states, "typical_p", 1
    ),
    "the device is xpu": lambda server: setattr(server.runner, "device", torch.device("xpu")),
    "the batch is sharded": lambda server: setattr(server.runner, "batch_sharder", 1),
    "speculative decoding is on": lambda server: setattr(server.runner, "rejection_sampler", 1),
    "LoRA is enabled": lambda server: setattr(server.runner, "lora_config", 1),
    "the logits processors are": lambda server: server.sampler.logits_processors.append(1),
    "the sampling mask is returned": lambda server: setattr(server.sampler, "return_sampling_mask", True),
    "NaNs are counted": lambda server: setattr(server.sampler, "compute_nans", True),
    "the noise is in float64": lambda server: setattr(server.sampler, "use_fp64_gumbel", True),
    "tokens are replayed": lambda server: setattr(server.sampler, "trace_replay_state", 1),
    "has no attribute 'lora_config'": lambda server: delattr(server.runner, "lora_config"),
    "has no attribute 'use_penalty'": lambda server: delattr(server.sampler.penalties_state, "use_penalty"),
    "the head is sharded over 2 ranks": lambda server: setattr(server.runner.model.lm_head, "tp_size", 2),
    "the head's quantization method is int": lambda server: setattr(server.runner.model.lm_head, "quant_method", 1),
    "the head computes in torch.bfloat16": lambda server: setattr(
        server.runner.model.logits_processor, "head_dtype", torch.bfloat16
    ),
    "the model's output is logits": lambda server: setattr(
        server.runner.model.logits_processor, "logits_as_input", True
    ),
}


@pytest.mark.parametrize("reason, change", RUNNERS_OF_THE_ENGINE.items(), ids=RUNNERS_OF_THE_ENGINE)
def test_vllm_draws_what_is_not_supported(server, caplog, reason, change):
    change(server)
    assert server.step() == [stub.ENGINE_TOKEN] * ROWS and server.step() == [stub.ENGINE_TOKEN] * ROWS
    [warning] = warnings(caplog)
    assert warning.startswith("vLLM draws its own tokens: ") and reason in warning


def test_vllm_draws_if_there_is_no_sampler(server, monkeypatch, caplog):
    """For example, because NVRTC is not installed."""
    monkeypatch.setattr(Enqueued, "enqueue", None)
    assert server.step() == server.step() == [stub.ENGINE_TOKEN] * ROWS
    assert warnings(caplog) == ["vLLM draws its own tokens: 'NoneType' object is not callable"]


def test_vllm_draws_batches_with_drafts(server):
    assert server.step() == server.direct()
    hidden, batch = server.batch()
    batch.num_draft_tokens = 1
    output, _, _ = server.runner.sample(hidden, batch, None)
    assert output.sampled_token_ids.flatten().tolist() == [stub.ENGINE_TOKEN] * ROWS


class Masked(Model):
    def compute_logits(self, hidden_states):
        logits = super().compute_logits(hidden_states)
        logits[:, 7] = torch.finfo(logits.dtype).min
        return logits


class Scaled(Model):
    def compute_logits(self, hidden_states):
        return super().compute_logits(hidden_states / 2)


class Biased(Model):
    def compute_logits(self, hidden_states):
        bias = torch.ones(len(self.lm_head.weight))
        return self.logits_processor(self.lm_head, hidden_states, embedding_bias=bias)


class Twice(Model):
    def compute_logits(self, hidden_states):
        return super().compute_logits(hidden_states) + super().compute_logits(hidden_states)


@pytest.mark.parametrize(
    "model, reason",
    [
        (Masked, "the logits of Masked are not those of its head"),
        (Scaled, "the logits of Scaled are not those of its head"),
        (Biased, "the head has a bias"),
        (Twice, "the logits of Twice come from 2 logits processors"),
    ],
)
def test_vllm_draws_from_the_logits_of_a_model_that_changes_them(caplog, model, reason):
    plugin.register()
    server = Server(model=model)
    assert server.step() == [stub.ENGINE_TOKEN] * ROWS
    assert warnings(caplog) == [f"vLLM draws its own tokens: {reason}"]


def test_new_weights_are_read(server):
    assert server.step() == server.direct()
    for replace in (False, True):
        server.weight = server.weight.flip(0).contiguous()
        if replace:
            server.runner.model.lm_head.weight = torch.nn.Parameter(server.weight.clone(), requires_grad=False)
        else:
            server.runner.model.lm_head.weight.data.copy_(server.weight)
        assert server.step() == server.direct()


def test_a_failed_row_has_token_0_and_a_warning_in_a_later_step(server, caplog):
    want = server.direct()
    server.hidden[2] = float("nan")
    assert server.step() == [want[0], want[1], 0, want[3]] and not warnings(caplog)
    server.step([0])
    assert not warnings(caplog)  # the GPU has not run the first step
    expected = "1 of 4 rows have token 0 instead of a draw. The first is request r2: a logit is NaN"
    for _ in range(3):
        server.step([0])
        assert warnings(caplog) == [expected]


def test_no_step_reads_values_of_tensors(server):
    server.set("top_p", [0.9, 1.0, 0.5, 0.7])
    server.step([1])
    server.sampler.penalties_state.use_penalty[server.slots[0]] = True
    with Reads():
        server.runner.sample(*server.batch([1, 2]), None)
        server.runner.sample(*server.batch(), None)
    with pytest.raises(AssertionError), Reads():
        torch.ones(1).item()


def test_no_step_waits_for_a_gpu(monkeypatch):
    if not torch.cuda.is_available():
        skip("cuda", "torch has no GPU")
    monkeypatch.undo()
    stub.install(monkeypatch)
    plugin.register()
    server = Server("cuda")
    server.set("temperature", [0.7, 1.0, 0.0, 2.0])
    server.set("top_p", [0.9, 1.0, 0.5, 0.7])
    want = server.direct()
    assert server.step() == want
    server.sampler.penalties_state.use_penalty[server.slots[0]] = True
    lists = {"allowed": [3, 40, 41, 40], "bias": {40: 1000.0, 41: 2000.0}, "stop": [41]}
    server.sampler.logits_processors[0].add_request(server.slots[2], int(server.positions[2]), min_tokens=2, **lists)
    want[2] = 40
    batches = [server.batch([1, 2]), server.batch()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [server.runner.sample(*batch, None)[0].sampled_token_ids for batch in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [output.flatten().tolist() for output in outputs] == [want[1:3], [stub.ENGINE_TOKEN, *want[1:]]]


def test_the_environment_variable_turns_the_plugin_off(monkeypatch):
    monkeypatch.setenv("FLASH_SAMPLING_VLLM", "0")
    plugin.register()
    assert Server().step() == [stub.ENGINE_TOKEN] * ROWS
    monkeypatch.setenv("FLASH_SAMPLING_VLLM", "1")
    plugin.register()
    assert Server().step() == Server().direct()


def test_a_second_registration_changes_nothing():
    plugin.register()
    once = stub.GPUModelRunner.sample
    plugin.register()
    assert stub.GPUModelRunner.sample is once and stub.GPUModelRunner.sample.__wrapped__.__code__ is not once.__code__


def sample_with_a_new_parameter(self, hidden_states, input_batch, grammar_output, nonce):
    pass


@pytest.mark.parametrize(
    "change, reason",
    [
        (
            lambda patch: patch.setattr(stub.GPUModelRunner, "sample", sample_with_a_new_parameter),
            "GPUModelRunner.sample of vllm.v1.worker.gpu.model_runner has the parameters "
            "self hidden_states input_batch grammar_output nonce, instead of",
        ),
        (
            lambda patch: patch.delitem(stub.InputBatch.__dataclass_fields__, "positions"),
            "InputBatch has unknown or missing attributes: positions",
        ),
        (
            lambda patch: patch.delattr(sys.modules["vllm.v1.worker.gpu.sample.sampler"], "Sampler"),
            "has no attribute 'Sampler'",
        ),
        (
            lambda patch: patch.setitem(sys.modules, "vllm.v1.worker.gpu.model_runner", None),
            "vllm.v1.worker.gpu.model_runner",
        ),
    ],
)
def test_vllm_with_other_interfaces_does_not_change(monkeypatch, caplog, change, reason):
    change(monkeypatch)
    before = stub.GPUModelRunner.sample
    plugin.register()
    [warning] = warnings(caplog)
    assert warning.startswith("vLLM draws its own tokens: ") and reason in warning
    assert stub.GPUModelRunner.sample is before


def test_the_wheel_has_the_entry_point():
    [entry] = importlib.metadata.entry_points(group="vllm.general_plugins", name="flash_sampling")
    assert entry.load() is plugin.register


def test_an_installed_vllm_has_the_known_interfaces(monkeypatch):
    monkeypatch.undo()
    library("vllm")
    plugin._check_interfaces()
