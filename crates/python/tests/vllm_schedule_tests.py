"""The plugin over vLLM's own states of requests, while requests are split, preempted, resumed, finished and replaced.

A random schedule changes the states as vLLM's scheduler and model runner do. In each step, each token of the plugin is
compared with the logits that vLLM processed.
"""

from dataclasses import dataclass, fields
from types import SimpleNamespace

import numpy
import pytest
import stub_vllm as stub
import torch
from vllm_server import HIDDEN, NEUTRAL, VOCAB, Server, engine  # noqa: F401
from vllm_source_tests import perturbed_argmax, source  # noqa: F401

from flash_sampling import _vllm_rows

STEPS, SLOTS, LENGTH = 80, 8, 40
WORDS = [[token] for token in range(0, 12, 2)] + [[token, token + 1] for token in range(1, 12)]
# The parameters of the kinds of requests. With few allowed tokens, sequences repeat tokens and parts of bad words.
FEW = {"allowed_token_ids": [*range(12)], "temperature": 3.0}
KINDS = [
    {},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    FEW | {"frequency_penalty": 2.0},
    FEW | {"presence_penalty": 5.0, "repetition_penalty": 3.0, "logprobs": 3},
    FEW | {"bad_words_token_ids": WORDS},
    FEW | {"min_tokens": 6, "all_stop_token_ids": {*range(8)}},
    {"logit_bias": {token: 20.0 for token in range(12)}, "temperature": 2.0, "top_k": 5},
]


@dataclass
class Request:
    name: str
    parameters: dict
    tokens: list[int]
    prompt_len: int
    seed: int
    computed: int = 0

    @property
    def has_grammar(self):
        return self.seed % 9 == 0


class Schedule:
    """A model runner whose requests a random schedule changes. `events` counts the changes."""

    def __init__(self, source, seed=0):
        self.source, self.server, self.numbers = source, Server(engine=source), numpy.random.default_rng(seed)
        server = self.server
        server.weight[:VOCAB] += torch.randn(VOCAB, HIDDEN, generator=torch.manual_seed(1))  # no logits tie
        server.runner.model.lm_head.weight.data.copy_(server.weight)
        server.runner.structured_outputs_worker = SimpleNamespace(apply_grammar_bitmask=lambda *given: None)
        self.states, self.sampler = server.runner.req_states, server.sampler
        self.running, self.preempted, self.added = [], [], 0
        names = ("preempted", "resumed", "replaced", "finished", "incomplete", "grammars")
        self.events = dict.fromkeys(names, 0)

    def new(self):
        """A new request. It may have the name of a finished request."""
        kind, length = self.added % len(KINDS), int(self.numbers.integers(1, 20))
        self.added += 1
        tokens = self.numbers.integers(0, 12, length).tolist()
        name = f"r{self.added % 11}"
        taken = {request.name for request in self.running + self.preempted}
        name = name if name not in taken else f"r{self.added}x"
        return Request(name, KINDS[kind], tokens, length, self.added)

    def start(self, request, at=None):
        """Adds a new or a resumed request to the states, as `GPUModelRunner.add_requests` does."""
        request.computed = 0
        self.states.add_request(request.name, request.prompt_len, request.tokens, 0, 64)
        slot = self.states.req_id_to_index[request.name]
        given = SimpleNamespace(**NEUTRAL | {"seed": request.seed} | request.parameters)
        self.sampler.add_request(slot, given)
        self.running.insert(len(self.running) if at is None else at, request)

    def stop(self, at):
        """Removes a running request from the states, as `GPUModelRunner.finish_requests` does."""
        request = self.running.pop(at)
        self.states.remove_request(request.name)
        return request

    def change(self):
        """Changes the requests before a step."""
        decoding = [at for at, request in enumerate(self.running) if request.computed >= request.prompt_len]
        event = self.numbers.integers(0, 6)
        if event == 0 and decoding:
            self.preempted.append(self.stop(int(self.numbers.choice(decoding))))
            self.events["preempted"] += 1
        elif event == 1 and decoding:
            # A request with a short prompt has the slot of a request, and its place in the batch.
            at = int(self.numbers.choice(decoding))
            self.stop(at)
            request = self.new()
            request.tokens, request.prompt_len = request.tokens[:1], 1
            self.start(request, at)
            self.events["replaced"] += 1
        elif event == 2 and decoding:
            self.stop(int(self.numbers.choice(decoding)))
            self.events["finished"] += 1
        elif self.preempted and len(self.running) < SLOTS and event > 2:
            self.start(self.preempted.pop(0))
            self.events["resumed"] += 1
        while len(self.running) < 3:
            self.start(self.new())
        for at in reversed(range(len(self.running))):
            if len(self.running[at].tokens) > LENGTH:
                self.stop(at)
        self.states.apply_staged_writes()
        self.sampler.apply_staged_writes()

    def batch(self):
        """The hidden states and the batch of a step, in vLLM's order, and the requests of its rows."""
        counts = {}
        for request in self.running:
            left = len(request.tokens) - request.computed
            counts[request.name] = min(left, 1 + int(self.numbers.integers(0, 8)))
        rows = sorted(self.running, key=lambda request: (counts[request.name] != 1, counts[request.name]))
        tokens = [counts[request.name] for request in rows]
        ends = numpy.cumsum(tokens)
        hidden = torch.full((ends[-1], HIDDEN), 9.0)
        for request, count, end in zip(rows, tokens, ends):
            request.computed += count
            numbers = numpy.random.default_rng([request.computed, *request.tokens[: request.computed]])
            hidden[end - 1] = torch.tensor(numbers.integers(-1, 2, HIDDEN))
        slots = numpy.array([self.states.req_id_to_index[request.name] for request in rows])
        lens = numpy.array([request.computed for request in rows], dtype=numpy.int32)
        given = {
            "req_ids": [request.name for request in rows],
            "num_reqs": len(rows),
            "num_tokens": int(ends[-1]),
            "num_draft_tokens": 0,
            "idx_mapping": torch.tensor(slots),
            "idx_mapping_np": slots,
            "expanded_idx_mapping": torch.tensor(slots),
            "expanded_local_pos": torch.zeros(len(rows), dtype=torch.int32),
            "seq_lens": torch.tensor(lens),
            "seq_lens_cpu_upper_bound": torch.tensor(lens),
            "has_prefill": bool((lens - tokens < self.states.prefill_len.np[slots]).any()),
            "logits_indices": torch.tensor(ends - 1),
            "positions": torch.tensor(numpy.concatenate([range(end - n, end) for end, n in zip(lens, tokens)])).long(),
            "input_ids": torch.zeros(int(ends[-1]), dtype=torch.int32),
            "cu_num_logits": torch.arange(len(rows) + 1, dtype=torch.int32),
            "cu_num_logits_np": numpy.arange(len(rows) + 1),
        }
        of = self.source.names["InputBatch"]
        return hidden, of(**{field.name: given.get(field.name) for field in fields(of)}), rows

    def step(self):
        self.change()
        hidden, batch, rows = self.batch()
        is_complete = [request.computed == len(request.tokens) for request in rows]
        names = [request.name for request, complete in zip(rows, is_complete) if complete and request.has_grammar]
        grammar = stub.GrammarOutput(names, None) if names else None
        raw = hidden[batch.logits_indices] @ self.server.weight[:VOCAB].T
        at, zeros = batch.positions[batch.logits_indices], torch.zeros(len(rows), dtype=torch.int32)
        slots = batch.idx_mapping_np
        given = (batch.idx_mapping, batch.idx_mapping, slots, at, zeros, zeros, batch.seq_lens_cpu_upper_bound.numpy())
        processed = self.sampler.sample(raw, *given)[1]
        view = SimpleNamespace(sampler=self.sampler, slots=slots, positions=at.numpy())
        want = perturbed_argmax(view, processed)
        output, num_sampled, _ = self.server.runner.sample(hidden, batch, grammar)
        drawn = output.sampled_token_ids[:, 0].tolist()
        assert num_sampled.tolist() == [int(complete) for complete in is_complete]
        self.events["incomplete"] += is_complete.count(False)
        self.events["grammars"] += len(names)
        for row, (request, slot) in enumerate(zip(rows, slots)):
            if is_complete[row]:
                token = drawn[row]
                assert token == (stub.ENGINE_TOKEN if request.name in names else want[row]), request
                # vLLM's `post_update`.
                self.states.all_token_ids.gpu[slot, len(request.tokens)] = token
                request.tokens = [*request.tokens, token]
                self.states.total_len.gpu[slot] = len(request.tokens)
                self.sampler.penalties_state.output_bin_counts[slot, token] += 1


def test_tokens_are_those_of_the_logits_that_vllm_processed_in_any_schedule(source):  # noqa: F811
    schedule = Schedule(source)
    for _ in range(STEPS):
        schedule.step()
    assert min(schedule.events.values()) > 2, schedule.events


def test_a_plugin_that_does_not_notice_a_new_request_is_rejected(source, monkeypatch):  # noqa: F811
    """The first negative control of the test above."""
    sampler = source.names["Sampler"]
    monkeypatch.setattr(sampler, "add_request", sampler.add_request.__wrapped__)
    schedule = Schedule(source)
    with pytest.raises(AssertionError):
        for _ in range(STEPS):
            schedule.step()


def test_a_plugin_that_takes_output_before_a_preemption_for_the_prompt_is_rejected(source, monkeypatch):  # noqa: F811
    """The second negative control."""
    init = _vllm_rows.Rows._add_history

    def add_history(self):
        lens = self.history.prompt_len
        self.history = SimpleNamespace(**vars(self.history) | {"prompt_len": self.history.prefill_len})
        init(self)
        self.history.prompt_len = lens

    monkeypatch.setattr(_vllm_rows.Rows, "_add_history", add_history)
    schedule = Schedule(source)
    with pytest.raises(AssertionError):
        for _ in range(STEPS):
            schedule.step()
