"""The plugin of SGLang, over stubs of SGLang: its tokens are those of a direct call; the rest is SGLang's."""

import importlib.metadata
import sys
from types import SimpleNamespace

import numpy
import pytest
from conftest import Problem, library, no_waits, skip

from flash_sampling import Sampler

torch = library("torch")
import stub_sglang as stub  # noqa: E402
from engines import Enqueued, Event, Reads, warnings  # noqa: E402

from flash_sampling import _engines  # noqa: E402
from flash_sampling import sglang as plugin  # noqa: E402

VOCAB, ROWS = 3000, 4
ALL = stub.TOP_K_ALL


class EnqueuedLogits(Enqueued):
    made = []

    @staticmethod
    def for_logits(vocab_size, max_rows, *, backend):
        assert backend == "cpu"
        EnqueuedLogits.made.append(EnqueuedLogits(vocab_size, max_rows))
        return EnqueuedLogits.made[-1]

    def __init__(self, vocab_size, max_rows):
        self.sampler = Sampler.for_logits(vocab_size, max_rows)
        self.calls = []


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """SGLang, on the CPU."""
    stub.install(monkeypatch)
    EnqueuedLogits.made.clear()
    monkeypatch.setattr(plugin, "Sampler", EnqueuedLogits)
    monkeypatch.setattr(plugin, "is_nvidia", lambda device: device.type == "cpu")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.delenv("FLASH_SAMPLING_SGLANG", raising=False)


class Server:
    """A batch, a sampler of SGLang for it, and a direct call of a sampler for the same rows."""

    def __init__(self, device="cpu", backend="pytorch", rows=ROWS):
        self.problem = Problem(rows=rows, vocab=VOCAB)
        self.device, self.rows = device, rows
        self.sampler = stub.create_sampler(backend)
        self.params = {
            "temperature": [1.0] * rows, "top_k": [ALL] * rows, "top_p": [1.0] * rows, "min_p": [0.0] * rows,
            "seed": [5 + row for row in range(rows)], "position": [7 * row for row in range(rows)],
        }
        self.changes = {}

    def info(self, rows):
        """What SGLang makes of the parameters of requests: greedy rows have top_k 1, and flags are for the batch."""
        params = {name: [values[row] for row in rows] for name, values in self.params.items()}
        on = lambda name, dtype: torch.tensor(params[name], dtype=dtype, device=self.device)  # noqa: E731
        top_k, is_known = params["top_k"], ALL not in params["top_k"]
        return stub.SamplingBatchInfo(**{
            "temperatures": on("temperature", torch.float32).view(-1, 1),
            "top_ps": on("top_p", torch.float32),
            "top_ks": on("top_k", torch.int32),
            "min_ps": on("min_p", torch.float32),
            "sampling_seed": on("seed", torch.int64),
            "is_all_greedy": max(top_k) == 1,
            "is_any_greedy": min(top_k) == 1,
            "need_top_p_sampling": min(params["top_p"]) < 1,
            "need_top_k_sampling": min(top_k) < ALL,
            "need_min_p_sampling": max(params["min_p"]) > 0,
            "max_top_k": max(top_k) if is_known else None,
            "vocab_size": VOCAB,
            **self.changes,
        })

    def call(self, rows):
        """The arguments of a call of the sampler."""
        logits = torch.tensor(self.problem.logits[rows], device=self.device)
        self.output = SimpleNamespace(next_token_logits=logits, next_token_logprobs=None)
        positions = torch.tensor([self.params["position"][row] for row in rows], device=self.device)
        return self.output, self.info(rows), False, [0] * len(rows), [None] * len(rows), positions

    def step(self, rows=None, return_logprob=False, **options):
        """The tokens of a step."""
        output, info, _, *rest = self.call(list(range(self.rows)) if rows is None else rows)
        tokens = self.sampler(output, info, return_logprob, *rest, **options)
        assert self.sampler.synced is tokens
        return tokens.tolist()

    def direct(self, logits=None):
        """The tokens of a direct call."""
        params = dict(self.params)
        greedy = [k == 1 for k in params["top_k"]]
        params["temperature"] = [0 if is_greedy else t for is_greedy, t in zip(greedy, params["temperature"])]
        params["top_k"] = [0 if k == ALL or is_greedy else k for is_greedy, k in zip(greedy, params["top_k"])]
        params["position"] = [position + 1 for position in params["position"]]
        params["seed"] = [seed % 2**64 for seed in params["seed"]]
        sampler = Sampler.for_logits(VOCAB, max(256, self.rows))
        return sampler(self.problem.logits if logits is None else logits, **params).tolist()


@pytest.fixture
def server():
    plugin.register()
    return Server()


@pytest.mark.parametrize("backend", ["pytorch", "flashinfer"])
def test_tokens_are_those_of_a_direct_call(backend, caplog):
    plugin.register()
    server = Server(backend=backend)
    server.params |= {"temperature": [0.7, 1.0, 1.0, 2.0], "seed": [5, -5, 6, 2**63 - 1]}
    assert server.step() == server.direct()
    server.params["top_p"] = [0.9, 1.0, 0.5, 0.7]
    server.params["top_k"] = [50, 5, 1, 1024]
    server.params["min_p"] = [0.0, 0.2, 0.0, 0.1]
    assert server.step() == server.direct() and not warnings(caplog)
    [sampler] = EnqueuedLogits.made
    assert sampler.calls[1:] == [["temperature"], ["min_p", "temperature", "top_k", "top_p"]]
    assert Server(backend="ascend").step() == [stub.ENGINE_TOKEN] * ROWS


def test_a_greedy_row_has_the_largest_logit(server):
    server.params |= {"top_k": [1, ALL, ALL, 1], "top_p": [0.5, 1.0, 1.0, 1.0]}
    tokens = server.step()
    assert tokens == server.direct()
    assert [tokens[0], tokens[3]] == server.problem.logits.argmax(1)[[0, 3]].tolist()
    assert server.step([0, 3]) == [tokens[0], tokens[3]]
    [sampler] = EnqueuedLogits.made
    assert sampler.calls[1:] == [["temperature", "top_k", "top_p"], ["temperature"]]


def test_a_token_does_not_depend_on_other_rows(server):
    server.params |= {"temperature": [0.7, 1.0, 3.0, 2.0], "top_p": [0.9, 1.0, 0.5, 0.7], "top_k": [ALL, 5, ALL, 2000]}
    want = server.step()
    assert want[3] == stub.ENGINE_TOKEN not in want[:3]
    assert [server.step([row]) for row in range(ROWS)] == [[token] for token in want]
    assert server.step([2, 3, 0]) == [want[2], want[3], want[0]]


def test_sglang_draws_rows_with_a_large_top_k(server, caplog):
    server.params["top_k"] = [1024, 1025, VOCAB - 1, VOCAB]
    [drawn, *_] = [server.step() for _ in range(3)]
    assert not warnings(caplog)
    server.params["top_k"] = [1024, ALL, ALL, ALL]
    want = server.direct()
    assert drawn == [want[0], stub.ENGINE_TOKEN, stub.ENGINE_TOKEN, want[3]]


def test_sglang_does_not_draw_where_no_top_k_is_large(server, monkeypatch):
    monkeypatch.setattr(stub.Sampler, "_sample_from_probs", None)
    server.params["top_k"] = [1024, 5, 1, 3]
    assert server.step() == server.direct()
    server.params["top_k"] = [ALL] * ROWS
    assert server.step() == server.direct()


def test_a_large_top_k_with_min_p_and_seeds_fails(server, caplog, monkeypatch):
    """SGLang refuses min-p with seeds, by an assertion that stops the server."""
    monkeypatch.setattr(_engines, "_STEPS", 1)
    server.params |= {"top_k": [ALL, 2000, 1, 5], "min_p": [0.0, 0.0, 0.0, 0.1]}
    tokens = server.step()
    assert tokens[1] == 0 and stub.ENGINE_TOKEN not in tokens
    for _ in range(3):
        server.step([0])
    [warning] = warnings(caplog)
    assert warning.startswith("1 of 4 rows have token 0 instead of a draw. The first is row 1: ")


def test_requests_without_seeds_have_new_noise_in_each_step(server):
    server.changes["sampling_seed"] = None
    server.step()
    [sampler] = EnqueuedLogits.made
    seeds = sampler.seeds.tolist()
    server.step()
    seeds += sampler.seeds.tolist()
    assert len({seed >> 32 for seed in seeds}) == len({seed & 0xFFFFFFFF for seed in seeds}) == 2 * ROWS
    torch.manual_seed(7)
    first = server.step()
    torch.manual_seed(7)
    assert server.step() == first


def test_logits_are_those_of_custom_processors(server):
    without = server.direct()
    server.changes |= {"has_custom_logit_processor": True, "custom_params": without}
    logits = server.problem.logits.copy()
    logits[:, without] = -numpy.inf
    assert server.step() == server.direct(logits) != without


@pytest.mark.parametrize("is_original", [False, True])
def test_log_probabilities_are_those_of_the_drawn_tokens(server, monkeypatch, is_original):
    monkeypatch.setattr(sys.modules[plugin._MODULE], "SGLANG_RETURN_ORIGINAL_LOGPROB", is_original)
    server.params["temperature"] = [0.5, 1.0, 2.0, 3.0]
    tokens = server.step(return_logprob=True)
    assert tokens == server.direct()
    temperatures = [[1.0] if is_original else [t] for t in server.params["temperature"]]
    want = torch.log_softmax(torch.tensor(server.problem.logits) / torch.tensor(temperatures), dim=-1)
    want = want[torch.arange(ROWS), tokens]
    assert torch.allclose(server.output.next_token_logprobs, want, rtol=1e-5)
    server.step()
    assert server.output.next_token_logprobs is None


BATCHES_OF_THE_ENGINE = {
    "sampling masks": lambda server, patch: server.changes.update(sampling_mask_batch_indices=torch.tensor([1])),
    "watermarks": lambda server, patch: server.changes.update(has_watermark_candidates=True),
    "on-policy reinforcement learning": lambda server, patch: setattr(server.sampler, "rl_on_policy_target", "fsdp"),
    "another device": lambda server, patch: patch.setattr(plugin, "is_nvidia", lambda device: False),
}


@pytest.mark.parametrize("change", BATCHES_OF_THE_ENGINE.values(), ids=BATCHES_OF_THE_ENGINE)
def test_sglang_draws_what_is_not_supported(server, monkeypatch, change):
    assert server.step() == server.direct()
    change(server, monkeypatch)
    assert server.step() == [stub.ENGINE_TOKEN] * ROWS


def test_sglang_draws_if_there_is_no_sampler(server, monkeypatch, caplog):
    """For example, because NVRTC is not installed."""
    monkeypatch.setattr(EnqueuedLogits, "enqueue", None)
    assert server.step() == server.step([0, 1, 2, 3]) == [stub.ENGINE_TOKEN] * ROWS
    assert warnings(caplog) == ["SGLang draws its own tokens: 'NoneType' object is not callable"]


def test_sglang_draws_if_log_probabilities_have_other_logits(server):
    assert server.step(logprob_logits=torch.zeros(ROWS, VOCAB)) == [stub.ENGINE_TOKEN] * ROWS


def test_an_empty_batch_has_no_tokens(server):
    empty = SimpleNamespace(next_token_logits=torch.zeros(0, VOCAB))
    assert server.sampler(empty, server.info([0]), False, [], [], torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_a_failed_row_has_token_0_and_a_warning_in_a_later_step(server, caplog, monkeypatch):
    monkeypatch.setattr(_engines, "_STEPS", 1)
    want = server.direct()
    server.problem.logits[2] = numpy.nan
    assert server.step() == [want[0], want[1], 0, want[3]]
    for _ in range(2):
        server.step([0])
        assert not warnings(caplog)
    for _ in range(3):
        server.step([0])
        assert warnings(caplog) == ["1 of 4 rows have token 0 instead of a draw. The first is row 2: a logit is NaN"]


def test_a_batch_of_many_rows_has_a_sampler_of_its_size():
    plugin.register()
    server = Server(rows=300)
    assert server.step() == server.direct() and server.step([1, 2]) == server.direct()[1:3]
    assert [made.sampler.max_rows for made in EnqueuedLogits.made] == [512, 256]


def test_no_step_reads_values_of_tensors(server):
    server.params |= {"top_k": [1, 5, ALL, 2000], "top_p": [0.9, 1.0, 0.5, 0.7]}
    call = server.call([0, 1, 2, 3])
    with Reads():
        server.sampler(*call)
        server.sampler(*call)


def test_no_step_waits_for_a_gpu(monkeypatch):
    if not torch.cuda.is_available():
        skip("cuda", "torch has no GPU")
    monkeypatch.undo()
    stub.install(monkeypatch)
    plugin.register()
    server = Server("cuda")
    server.params |= {"top_k": [1, 5, ALL, 2000], "top_p": [0.9, 1.0, 0.5, 1.0]}
    want = server.step()
    server.params["top_k"][3] = ALL
    assert want == [*server.direct()[:3], stub.ENGINE_TOKEN]
    server.params["top_k"][3] = 2000
    call = server.call([0, 1, 2, 3])
    with no_waits():
        tokens = server.sampler(*call)
    assert tokens.tolist() == want


def test_the_environment_variable_turns_the_plugin_off(monkeypatch):
    monkeypatch.setenv("FLASH_SAMPLING_SGLANG", "0")
    plugin.register()
    assert Server().step() == [stub.ENGINE_TOKEN] * ROWS
    monkeypatch.setenv("FLASH_SAMPLING_SGLANG", "1")
    plugin.register()
    assert Server().step() == Server().direct()


def test_a_second_registration_changes_nothing_and_other_factories_stay():
    stub.register_sampler_backend("flashinfer", stub.Sampler)
    plugin.register()
    factories = dict(stub._CUSTOM_SAMPLER_FACTORIES)
    plugin.register()
    assert stub._CUSTOM_SAMPLER_FACTORIES == factories == {"flashinfer": stub.Sampler, "pytorch": plugin._make}


def forward(self, logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions):
    pass


@pytest.mark.parametrize(
    "change, reason",
    [
        (
            lambda patch: patch.setattr(stub.Sampler, "forward", forward),
            "Sampler.forward of sglang.srt.layers.sampler has the parameters self logits_output sampling_info",
        ),
        (
            lambda patch: patch.setitem(stub.SamplingBatchInfo.__dataclass_fields__, "typical_ps", None),
            "SamplingBatchInfo has unknown or missing attributes: typical_ps",
        ),
        (
            lambda patch: patch.delattr(sys.modules[plugin._MODULE], "SGLANG_RETURN_ORIGINAL_LOGPROB"),
            "SGLANG_RETURN_ORIGINAL_LOGPROB",
        ),
        (lambda patch: patch.setitem(sys.modules, plugin._MODULE, None), plugin._MODULE),
    ],
)
def test_sglang_with_other_interfaces_does_not_change(monkeypatch, caplog, change, reason):
    change(monkeypatch)
    plugin.register()
    [warning] = warnings(caplog)
    assert warning.startswith("SGLang draws its own tokens: ") and reason in warning
    assert not stub._CUSTOM_SAMPLER_FACTORIES


def test_a_sampler_of_sglang_without_a_known_attribute_stays(monkeypatch, caplog):
    plugin.register()

    def init(self):
        torch.nn.Module.__init__(self)

    monkeypatch.setattr(stub.Sampler, "__init__", init)
    assert type(Server().sampler) is stub.Sampler
    assert "Sampler has no rl_on_policy_target, output_logprob_processor" in warnings(caplog)[0]


def test_the_wheel_has_the_entry_point():
    [entry] = importlib.metadata.entry_points(group="sglang.srt.plugins", name="flash_sampling")
    assert entry.load() is plugin.register


def test_an_installed_sglang_has_the_known_interfaces(monkeypatch):
    monkeypatch.undo()
    library("sglang")
    plugin._check_interfaces()
