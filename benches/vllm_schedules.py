"""The checks of `vllm_engine.py --schedules`: the plugin while vLLM's scheduler splits, preempts and aborts requests.

The engine has few blocks of KV cache and a small budget of tokens, so that the scheduler

  * prefills long prompts in chunks, beside requests that decode,
  * preempts requests and resumes them later, in another slot, with the tokens of their prompts and outputs,
  * starts requests whose first tokens are in the prefix cache.

A new request arrives every few steps, while others decode. Some requests have a grammar, so vLLM's sampler draws their
rows beside the rows of the plugin. Some requests have two sequences. Some requests are aborted, and the next request
has the same id. Each of these events is counted, and a count of 0 is a failure.

Both samplers draw every step from the same hidden states (vllm_checks.py). Then each request runs alone, with an empty
prefix cache. The layers are batch-invariant, so the request must have the same tokens. A request may differ only
if the hidden states of the first different token differ too: then vLLM's layers are the cause. Two controls change the
plugin, and the checks must reject both:

  * the plugin counts the tokens of an output before a preemption as tokens of the prompt,
  * the plugin does not notice that a new request has the slot of an earlier request.
"""

from collections import Counter
from copy import copy
from dataclasses import dataclass, field, replace

import torch
from vllm_checks import Comparison, Verdicts, judge, kinds

# The arguments of `LLM`. 96 blocks hold 1536 tokens: only a few of the longest requests fit.
ENGINE = {
    "skip_tokenizer_init": False,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "enable_chunked_prefill": True,
    "max_model_len": 768,
    "num_gpu_blocks_override": 96,
    "block_size": 16,
    "enable_prefix_caching": True,
    "max_logprobs": 20,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    },
}
SEED, SEEDS = 5000, 4  # the seed of the first request, and the number of seeds of each request
PROMPTS = (20, 90, 200, 380)  # approximate numbers of tokens
SHARED = 96  # number of tokens of the prefix that many prompts share
ARRIVAL = 3  # steps between the arrivals of requests
ROUNDS = 3  # number of requests of each kind
ABORTED, ABORT_AFTER = 3, 10  # number of aborted requests, and their tokens before the abort
EVENTS = ("preemptions", "resumed with output", "chunks beside decoding", "cached prefixes", "aborted", "reused ids")
STALE = 8  # number of requests of the second control
FEW = "few tokens, penalty"  # A frequent kind, because its tokens depend most on the tokens before them.


@dataclass
class Request:
    """A request of the test. `tokens` has the tokens of each of its sequences."""

    index: int
    kind: str
    parameters: dict
    prompt: list[int]
    arrival: int
    is_aborted: bool = False
    tokens: dict[int, list[int]] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        return SEED + SEEDS * self.index


def kinds_of(tokenizer, tokens: int) -> dict[str, dict]:
    """Returns the kinds of requests of vllm_checks.py, and more kinds. tokenizer: None if the engine has none."""
    from vllm.sampling_params import StructuredOutputsParams

    of_kinds = kinds(tokens) | {"two sequences": {"n": 2, "frequency_penalty": 0.5, "temperature": 0.8}}
    of_kinds[FEW] = {"allowed_token_ids": [*range(1000, 1010)], "frequency_penalty": 0.8}
    if tokenizer is None:
        return of_kinds
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdef"]
    grammar = {"structured_outputs": StructuredOutputsParams(regex="[a-f]{8,24}"), "ignore_eos": False}
    bad_words = {"allowed_token_ids": letters, "bad_words": ["a", "bc", "fed", "dd"]}
    return of_kinds | {"bad words": bad_words, "grammar": grammar}


def traffic(of_kinds: dict[str, dict], vocab: int) -> list[Request]:
    """Returns requests of all kinds, with prompts of mixed lengths. Many of the prompts share a prefix."""
    pairs = [[kind, FEW] if at % 4 == 0 else [kind] for at, kind in enumerate(of_kinds)]
    names, requests = sum(pairs, []) * ROUNDS, []
    for index, kind in enumerate(names + names[:ABORTED]):
        length = PROMPTS[(index + index // len(PROMPTS)) % len(PROMPTS)] + index % 13
        prompt = [(7919 * index + 104729 * place + 13) % vocab for place in range(length)]
        if index % 2 == 0 and length > SHARED:
            prompt[:SHARED] = [(31 * place + 7) % vocab for place in range(SHARED)]
        requests.append(Request(index, kind, of_kinds[kind], prompt, ARRIVAL * index))
    for request in requests[2 : 2 + 5 * ABORTED : 5]:
        request.is_aborted = True
    return requests


class Events:
    """Counts events of the scheduler. `resumed` has the seeds of requests that had an output when they were resumed."""

    def __init__(self, llm):
        self.scheduler, self.counts = llm.llm_engine.engine_core.engine_core.scheduler, Counter()
        self.resumed, self.schedule = set(), self.scheduler.schedule
        self.scheduler.schedule = self.counted

    def counted(self, *given):
        output = self.schedule(*given)
        self.counts["steps"] += 1
        self.counts["preemptions"] += len(output.preempted_req_ids or ())
        is_chunk = [self.scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens]
        self.counts["chunks beside decoding"] += sum(is_chunk) if not all(is_chunk) else 0
        for request in output.scheduled_new_reqs:
            has_output = len(request.prefill_token_ids) > request.prompt_len
            self.counts["resumed with output"] += has_output
            self.counts["cached prefixes"] += request.num_computed_tokens > 0
            if has_output:
                self.resumed.add(request.sampling_params.seed)
        return output

    def end(self):
        self.scheduler.schedule = self.schedule


def serve(llm, sample, requests: list[Request], tokens: int, counts: Counter | None = None) -> dict:
    """Serves requests that arrive at their steps, with the function `sample` instead of `GPUModelRunner.sample`.

    Writes the tokens to the requests. Returns the hidden state of each pair (seed, length of the sequence).
    """
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    engine, counts, states = llm.llm_engine, counts if counts is not None else Counter(), {}
    waiting, current, aborted = sorted(requests, key=lambda request: request.arrival), {}, []

    def recorded(runner, hidden, batch, grammar):
        result = sample(runner, hidden, batch, grammar)
        rows, lens = hidden[batch.logits_indices].clone(), batch.seq_lens_cpu_upper_bound.tolist()
        for row, seed in enumerate(runner.sampler.sampling_states.seeds.np[batch.idx_mapping_np].tolist()):
            states.setdefault((seed, lens[row]), rows[row])  # After a resume, vLLM computes earlier states again.
        return result

    before, GPUModelRunner.sample = GPUModelRunner.sample, recorded
    llm.reset_prefix_cache()
    try:
        step = 0
        while waiting or engine.has_unfinished_requests():
            while waiting and (waiting[0].arrival <= step or not engine.has_unfinished_requests()):
                request = waiting.pop(0)
                name = aborted.pop() if aborted else f"r{request.index}"
                counts["reused ids"] += name != f"r{request.index}"
                given = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
                parameters = SamplingParams(seed=request.seed, **given | request.parameters)
                engine.add_request(name, {"prompt_token_ids": request.prompt}, parameters)
                current[name] = request
            for output in engine.step():
                request = current[output.request_id]
                request.tokens |= {one.index: list(one.token_ids) for one in output.outputs}
                if request.is_aborted and len(request.tokens[0]) >= ABORT_AFTER and not output.finished:
                    engine.abort_request([output.request_id])
                    aborted.append(output.request_id)
                    counts["aborted"] += 1
            step += 1
        engine.step()  # The last step may still be in vLLM's queue.
    finally:
        GPUModelRunner.sample = before
    return states


def alone(llm, sample, requests: list[Request], tokens: int) -> tuple[list[Request], dict]:
    """Serves each request alone. Returns copies of the requests with their tokens, and all hidden states."""
    copies, states = [], {}
    for request in requests:
        copies.append(replace(request, arrival=0, is_aborted=False, tokens={}))
        states |= serve(llm, sample, copies[-1:], tokens)
    return copies, states


def differences(found, expected) -> tuple[list[Request], list[Request]]:
    """Compares the tokens of requests. `found` and `expected` have the requests, and the hidden states of their steps.

    Returns two lists of requests whose tokens differ. At the first different token, the requests of the first list have
    equal hidden states, and the requests of the second list have different hidden states.
    """
    wrong, excused = [], []
    for request, want in zip(found[0], expected[0], strict=True):
        for part, others in want.tokens.items():
            tokens = request.tokens.get(part, [])
            end = len(tokens) if request.is_aborted else max(len(tokens), len(others))
            at = next((at for at in range(end) if tokens[at : at + 1] != others[at : at + 1]), None)
            if at is None:
                continue
            key = request.seed + part, len(request.prompt) + at
            pair = [states.get(key) for _, states in (found, expected)]
            is_excused = all(state is not None for state in pair) and not torch.equal(*pair)
            (excused if is_excused else wrong).append(request)
            break
    return wrong, excused


class PrefilledPrompts:
    """The states of requests for a faulty plugin: all tokens of the last prefill count as the prompt."""

    def __init__(self, states):
        self.states = states

    def __getattr__(self, name: str):
        return getattr(self.states, "prefill_len" if name == "prompt_len" else name)


def with_prefilled_prompts(init):
    """Returns `Rows.__init__` of a faulty plugin: it counts the output before a preemption as part of the prompt."""

    def changed(self, draws, engine, batch, rows):
        engine = copy(engine)
        engine.req_states = PrefilledPrompts(engine.req_states)
        init(self, draws, engine, batch, rows)

    return changed


def check(llm, samplers: dict, tokens: int, verdicts: Verdicts):
    """Runs the checks, and writes the table and the verdicts."""
    config = llm.llm_engine.model_config
    of_kinds = kinds_of(None if config.skip_tokenizer_init else llm.get_tokenizer(), tokens)
    if "grammar" not in of_kinds:
        verdicts.say("skipped: grammars and bad words, because the engine has no tokenizer")
    requests = traffic(of_kinds, min(30000, config.get_vocab_size()))
    events, plugin = Events(llm), samplers["plugin"]
    kind_of = lambda seed: requests[(seed - SEED) // SEEDS].kind
    comparison = Comparison(*samplers.values(), kind_of)
    found = requests, serve(llm, lambda *given: comparison.step(*given), requests, tokens, events.counts)
    events.end()
    judge(comparison, of_kinds, verdicts)
    events.counts["incomplete prompts"] = comparison.incomplete
    names = [*EVENTS, "incomplete prompts"]
    if "grammar" in of_kinds:
        events.counts["steps with grammars"] = comparison.beside_grammars
        names.append("steps with grammars")
    rows = sum(map(len, comparison.rows.values()))
    verdicts.say(f"\n{len(requests)} requests, {rows} rows: {dict(events.counts)}")
    verdicts.say(f"resumed with output: {', '.join(sorted({kind_of(seed) for seed in events.resumed}))}")
    missing = [name for name in names if not events.counts[name]]
    verdicts.add(not missing, f"events of the schedule that did not happen: {missing or 'none'}")
    text = f"{comparison.miscounted} rows have a different number of tokens with vLLM's sampler"
    verdicts.add(not comparison.miscounted, text)

    expected = alone(llm, plugin, requests, tokens)
    wrong, excused = differences(found, expected)
    is_resumed = lambda request: not events.resumed.isdisjoint(range(request.seed, request.seed + SEEDS))
    same = [request for request in requests if request not in wrong + excused]
    resumed, same_resumed = (sum(map(is_resumed, of)) for of in (requests, same))
    text = f"{len(same)} of {len(requests)} requests have the same tokens alone ({same_resumed} of {resumed} resumed)"
    text += f"; {len(excused)} differ because vLLM's layers returned different hidden states"
    verdicts.add(not wrong and 2 * len(same) > len(requests) and 2 * same_resumed > resumed, text)
    if wrong:
        verdicts.say(f"different tokens from the same hidden states: {[(of.index, of.kind) for of in wrong]}")
    controls(llm, plugin, requests, expected, tokens, verdicts)


def controls(llm, plugin, requests: list[Request], expected, tokens: int, verdicts: Verdicts):
    """Serves requests with faulty plugins, and writes whether the tokens differ from the expected tokens."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler as EngineSampler

    from flash_sampling._vllm_rows import Rows

    def control(text: str, found, expected):
        wrong, _ = differences(found, expected)
        of_kinds = ", ".join(sorted({request.kind for request in wrong}))
        verdict = f"rejected, {len(wrong)} requests differ: {of_kinds}" if wrong else "not rejected"
        verdicts.add(wrong, f"control: {text}: {verdict}")

    init, add_request = Rows.__init__, EngineSampler.add_request
    try:
        Rows.__init__ = with_prefilled_prompts(init)
        again = [replace(request, tokens={}) for request in requests]
        found = again, serve(llm, plugin, again, tokens)
        control("the plugin counts the output before a preemption as part of the prompt", found, expected)
        Rows.__init__ = init
        EngineSampler.add_request = add_request.__wrapped__
        found, of = alone(llm, plugin, requests[:STALE], tokens), (expected[0][:STALE], expected[1])
        control("the plugin does not notice a new request in the same slot", found, of)
    finally:
        Rows.__init__, EngineSampler.add_request = init, add_request
