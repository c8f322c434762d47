"""What the tests of the plugin of vLLM share: a model, a model runner with requests, and direct draws of their rows."""

from types import SimpleNamespace

import numpy
import pytest
import stub_vllm as stub
import torch
from conftest import Problem, skip
from engines import Enqueued, Event

from flash_sampling import Head, History, Sampler, SamplingParams, _vllm_draws
from flash_sampling import vllm as plugin

VOCAB, HIDDEN, ROWS, MAX_LEN = 1000, 32, 4, 128
# The parameters of a request that have no effect.
NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": None,
    "logprobs": None,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "allowed_token_ids": None,
    "logit_bias": None,
    "min_tokens": 0,
    "all_stop_token_ids": set(),
    "structured_outputs": None,
    "bad_words_token_ids": None,
    "logprob_token_ids": None,
}


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """vLLM, on the CPU."""
    stub.install(monkeypatch)
    monkeypatch.setattr(_vllm_draws, "Sampler", Enqueued)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.delenv("FLASH_SAMPLING_VLLM", raising=False)


class Model(torch.nn.Module):
    def __init__(self, engine, weight, **options):
        super().__init__()
        self.lm_head = engine.ParallelLMHead(weight)
        self.logits_processor = engine.LogitsProcessor(VOCAB, **options)
        self.rows = 0

    def compute_logits(self, hidden_states):
        self.rows += len(hidden_states)
        return self.logits_processor(self.lm_head, hidden_states)


class Server:
    """A model runner with requests in slots 7, 6, 5, ..., and a direct call of a sampler for the same rows."""

    def __init__(self, device="cpu", model=Model, engine=stub, **options):
        problem = Problem(rows=ROWS, vocab=VOCAB + 24, hidden=HIDDEN)
        self.engine, self.device, self.options = engine, torch.device(device), options
        self.hidden, self.weight = torch.tensor(problem.hidden), torch.tensor(problem.weight)
        self.weight[VOCAB:] = 9 * self.hidden[0]  # padding with large logits
        self.slots = numpy.arange(7, 7 - ROWS, -1)
        self.positions = numpy.array([5, 0, 90, 7])
        model = model(engine, self.weight.to(device), **options)
        self.runner = engine.GPUModelRunner(model, 8, VOCAB, MAX_LEN, self.device)
        self.sampler = self.runner.sampler
        self.set("seeds", [5, -5, 6, 2**63 - 1])
        # Sequences of likely tokens, with the most likely ones in prompts and outputs. Tokens after the end of a
        # sequence are those of an earlier request.
        requests, numbers = self.sampler.req_states, numpy.random.default_rng(3)
        best = (self.hidden @ self.weight[:VOCAB].T).argsort(descending=True)[:, :100].numpy()
        self.sequences = numpy.stack([numbers.choice(row, MAX_LEN) for row in best])
        self.sequences[:, [0, 4]] = best[:, :2]
        self.prompt_lens = numpy.array([4, 1, 60, 3])
        for slot, tokens in zip(self.slots, self.sequences):
            requests.all_token_ids.write(slot, tokens.tolist())
        requests.prompt_len.np[self.slots] = self.prompt_lens
        requests.prompt_len.copy_to_uva()

    def set(self, name, values):
        """Sets a parameter of the rows."""
        getattr(self.sampler.sampling_states, name).np[self.slots] = values
        self.sampler.sampling_states.apply_staged_writes()

    def leave(self, row):
        """Adds a parameter to a row, with which vLLM's own sampler draws."""
        self.sampler.logprob_token_ids_state.num_token_ids.np[self.slots[row]] = 2

    def batch(self, rows=range(ROWS), tokens=2):
        """The hidden states and the batch of rows. Each row draws from the last of its one or two tokens."""
        rows = list(rows)
        on = lambda values: torch.as_tensor(numpy.asarray(values), device=self.device)  # noqa: E731
        slots, positions = self.slots[rows], self.positions[rows]
        hidden = torch.stack([torch.full((len(rows), HIDDEN), 9.0), self.hidden[rows]], 1)[:, -tokens:]
        requests = self.sampler.req_states
        prefill_lens = requests.prefill_len.np[slots]
        requests.total_len.gpu[slots] = on(numpy.maximum(positions + 1, prefill_lens).astype(numpy.int32))
        batch = self.engine.InputBatch(
            req_ids=[f"r{row}" for row in rows],
            num_reqs=len(rows),
            idx_mapping=on(slots),
            idx_mapping_np=slots,
            expanded_idx_mapping=on(slots),
            num_tokens=tokens * len(rows),
            num_draft_tokens=0,
            # vLLM pads the batches of CUDA graphs.
            seq_lens=on(numpy.append(positions + 1, 0).astype(numpy.int32)),
            seq_lens_cpu_upper_bound=torch.tensor(numpy.append(positions + 1, 0)),
            has_prefill=bool((positions < prefill_lens).any()),
            logits_indices=on(numpy.arange(tokens - 1, tokens * len(rows), tokens, dtype=numpy.int32)),
            cu_num_logits=on(numpy.arange(len(rows) + 1, dtype=numpy.int32)),
        )
        return hidden.reshape(-1, HIDDEN).to(self.device), batch

    def step(self, rows=range(ROWS), grammar=None, tokens=2, is_new=True):
        """The tokens of a step. is_new: vLLM has added a request since the last step."""
        if is_new:
            self.sampler.add_request(0, SimpleNamespace(**NEUTRAL))
        output, num_sampled, num_rejected = self.runner.sample(*self.batch(rows, tokens), grammar)
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

    def history(self, row):
        """The tokens of a row's prompt and output."""
        tokens = self.sequences[row, : self.positions[row] + 1].tolist()
        return tokens[: self.prompt_lens[row]], tokens[self.prompt_lens[row] :]

    def sample(self, given, history=None, **options):
        """The results of direct draws of all rows.

        given: for some rows, more parameters of `SamplingParams`. history: the prompt and the output of a row.
        """
        states = self.sampler.sampling_states
        params = []
        for row, slot in enumerate(self.slots):
            names = ("temperature", "top_k", "top_p", "min_p")
            columns = {name: getattr(states, name).np[slot].item() for name in names}
            params.append(SamplingParams(**columns, **options, **given.get(row, {})))
        sampler = Sampler(Head(self.weight, vocab_size=VOCAB), max_logprobs=128)
        keys = {"seed": [int(seed) % 2**64 for seed in states.seeds.np[self.slots]], "position": self.positions + 1}
        histories = [History(*(history or self.history)(row)) for row in range(ROWS)]
        return sampler.sample(self.hidden, params, histories, **keys)

    @property
    def draws(self):
        return plugin._DRAWS[self.runner]


@pytest.fixture
def server():
    plugin.register()
    return Server()


def server_on_gpu(monkeypatch):
    """A server on a GPU, with the plugin and without the replacements of `engine`."""
    if not torch.cuda.is_available():
        skip("cuda", "torch has no GPU")
    monkeypatch.undo()
    stub.install(monkeypatch)
    plugin.register()
    return Server("cuda")
