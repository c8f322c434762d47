"""Checks and times the plugin inside the installed vLLM, on one GPU, and writes a record. A failed check exits with 1.

    python benches/vllm_engine.py [--model DIR | --layers 28 --hidden 1024] [--batch-invariant] [--record FILE]

Without `--model`, the model has Qwen3's architecture, random weights and an untied head. The default shape is that of
Qwen3-0.6B. The head scales the logits to a standard deviation of 4, so that about 50 tokens are likely, as in text. The
engine runs in this process, with model runner V2, CUDA graphs of decode steps and no compilation. `--engine` replaces
arguments of `LLM`, as JSON. Every request has a seed.

The checks run requests with mixed parameters in one batch. In each step, the plugin draws the batch. Then vLLM's own
sampler draws from the same hidden states, and both samplers draw every row alone. The table of checks has a line for
each kind of request:

    equal       the number of tokens that equal the tokens of vLLM's sampler. Its noise differs, so few random tokens do
    outside     the number of tokens that vLLM's filters drop. Rounding moves tokens across a cutoff
    gap         the largest logit minus the logit of the token, if the parameters leave one choice (maximum)
    z           the mean log-probability of tokens minus its expectation under vLLM's probabilities, in standard errors
    logprobs    the largest error of the returned log-probabilities

The unit of gaps and errors is a rounding step: the epsilon of the model's type, times the largest absolute logit of the
row. With `--batch-invariant`, vLLM's layers are batch-invariant. One more check then compares the tokens of whole
requests alone with their tokens in the batch.

The time of a decode step is the time between two calls of `GPUModelRunner.sample`. "CPU" is the time of a call. "GPU"
is the time between two CUDA events around the call. Both include the LM head. The samplers alternate between runs.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from math import sqrt
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

HEAD = 128
LOGITS_STD = 4.0
SEED = 1000  # The seed of the first request of the checks.
Z_LIMIT = 4.5
GAP_LIMIT, LOGPROB_LIMIT = 2, 1  # in rounding steps
OUTSIDE_LIMIT = 0.02  # share of the tokens of a kind of request with a filter
WARMUP = 8  # first steps of each run, which are not timed
SHIFTED_SEEDS, ALONE = 1 << 20, 16

CASES = {
    "temperature": {},
    "greedy": {"temperature": 0},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs": {"logprobs": 5},
}
ONE_CHOICE = {"greedy", "greedy, penalties", "greedy, logprobs", "top-k 1"}
FILTERED = {"top-k 50, top-p 0.9", "top-p", "min-p", "top-k 20, penalty, logprobs", "top-k 2000"}
OF_VLLM = {"top-k 2000"}  # The plugin leaves these rows to vLLM's sampler.


def kinds(tokens: int) -> dict[str, dict]:
    """Returns the parameters of each kind of request, by its name."""
    likely = {"logit_bias": {5: 12.0, 6: 12.0}, "stop_token_ids": [5, 6]}
    return {
        "plain": {},
        "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
        "top-p": {"temperature": 0.9, "top_p": 0.8},
        "min-p": {"temperature": 1.2, "min_p": 0.05},
        "top-k 1": {"top_k": 1},
        "top-k 2000": {"top_k": 2000, "max_tokens": tokens // 2},
        "penalties": {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.4},
        "repetition penalty": {"temperature": 0.6, "repetition_penalty": 1.3},
        "bias": {"temperature": 0.8, "logit_bias": {17: 9.0, 400: 7.5, 99: -50.0}},
        "allowed tokens": {"allowed_token_ids": list(range(1000, 1400))},
        "min tokens": {"temperature": 0.7, "min_tokens": tokens // 2, **likely},
        "logprobs": {"logprobs": 5},
        "top-k 20, penalty, logprobs": {"temperature": 0.7, "top_k": 20, "presence_penalty": 1.0, "logprobs": 3},
        "greedy": {"temperature": 0},
        "greedy, penalties": {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        "greedy, logprobs": {"temperature": 0, "logprobs": 5},
    }


def write_checkpoint(folder: str, layers: int, hidden: int):
    """Writes a checkpoint of Qwen3's architecture with random weights, without a tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "vocab_size": 151936}
    sizes |= {"num_attention_heads": max(16, hidden // HEAD), "num_key_value_heads": 8, "head_dim": HEAD}
    torch.manual_seed(1)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=False, eos_token_id=151645, **sizes)).bfloat16()
    model.lm_head.weight.data.normal_(std=LOGITS_STD / sqrt(hidden))
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()


def generate(llm, sample, given: dict[int, dict], tokens: int, seeds: int = SEED) -> dict[int, list[int]]:
    """Runs one request for each index in `given`, with the function `sample` instead of `GPUModelRunner.sample`.

    given: the parameters of the request of each index. Returns the tokens of each request.
    """
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    plain = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    parameters = [SamplingParams(seed=seeds + index, **plain | own) for index, own in given.items()]
    ids = lambda index: [(7919 * index + 104729 * place + 13) % 30000 for place in range(5 + index % 23)]
    prompts = [{"prompt_token_ids": ids(index)} for index in given]
    before, GPUModelRunner.sample = GPUModelRunner.sample, sample
    try:
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
    finally:
        GPUModelRunner.sample = before
    return {index: list(output.outputs[0].token_ids) for index, output in zip(given, outputs)}


def moments(scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the log-probability of each row's token, and the mean and variance of this figure over all draws."""
    logprobs = scores.log_softmax(-1)
    probs, finite = logprobs.exp(), logprobs.clamp(min=-1e30)
    mean = (probs * finite).sum(-1)
    variance = (probs * (finite - mean[:, None]) ** 2).nan_to_num(0, 0, 0).sum(-1)
    return logprobs.gather(1, tokens[:, None])[:, 0], mean, variance


def z_score(rows: list[dict], name: str) -> float:
    """Returns the sum of the log-probabilities `name` minus its expectation, in standard deviations."""
    rows = [row for row in rows if row[name][0] > float("-inf")]
    variance = sum(row[name][2] for row in rows)
    return sum(row[name][0] - row[name][1] for row in rows) / sqrt(variance) if variance > 1e-6 else 0.0


def logprob_errors(output, raw: Tensor, counts: Tensor, step: Tensor) -> Tensor:
    """Returns the largest error of the log-probabilities of each row, in rounding steps; infinity if a rank is wrong.

    raw: the log-probabilities of vLLM's logits. counts: the number of results of each row, or -1 without results.
    """
    result, step = output.logprobs_tensors, step[:, None]
    values, ids = result.logprobs, result.logprob_token_ids.long().clamp(0, raw.shape[1] - 1)
    place = torch.arange(values.shape[1], device=raw.device)
    errors = (values - raw.gather(1, ids)).abs()
    # The first result is the drawn token. The others have the largest log-probabilities.
    largest = raw.topk(values.shape[1]).values.roll(1, 1)
    errors = torch.where(place > 0, errors.maximum((values - largest).abs()), errors)
    errors = torch.where(place <= counts[:, None], errors / step, 0).amax(1)
    drawn, rank = raw.gather(1, ids[:, :1]), result.selected_token_ranks.view(-1)
    is_rank = (rank > (raw > drawn + 2 * step).sum(1)) & (rank <= (raw > drawn - 2 * step).sum(1))
    return torch.where(is_rank | (counts < 0), errors, float("inf"))


def only(batch, row: int):
    """Returns a batch that has only one row of the given batch."""
    columns = "idx_mapping idx_mapping_np expanded_idx_mapping expanded_local_pos seq_lens seq_lens_cpu_upper_bound"
    names = ["req_ids", "logits_indices", *columns.split()]
    first = {name: getattr(batch, name)[:2] for name in ("cu_num_logits", "cu_num_logits_np")}
    return replace(batch, num_reqs=1, **first, **{name: getattr(batch, name)[row : row + 1] for name in names})


class Comparison:
    """Draws each step with the plugin and with vLLM's sampler, and collects figures of all rows."""

    def __init__(self, plugin, own, names: list[str]):
        from flash_sampling._vllm_draws import Draws

        self.plugin, self.own, self.names, self.rows, self.drawn = plugin, own, names, defaultdict(list), []
        draw = Draws.draw

        def recorded(this, hidden, batch, rows):
            self.drawn = list(range(batch.num_reqs)) if rows.at is None else rows.at.tolist()
            return draw(this, hidden, batch, rows)

        Draws.draw = recorded

    def step(self, runner, hidden, batch, grammar):
        self.drawn = []
        result = self.plugin(runner, hidden, batch, grammar)
        drawn, tokens = self.drawn, result[0].sampled_token_ids[:, 0].clone()
        sampler, slots, at = runner.sampler, batch.idx_mapping_np, batch.logits_indices
        states, logits = sampler.sampling_states, runner.model.compute_logits(hidden[at])
        given = batch.expanded_idx_mapping, batch.idx_mapping, slots, batch.positions[at], batch.input_ids[at]
        given += batch.expanded_local_pos, batch.seq_lens_cpu_upper_bound.numpy()
        unfiltered = sampler.apply_sampling_params(logits, *given, skip_top_k_top_p=True).float()
        own, kept = sampler.sample(logits, *given)
        own, kept = own.view(-1), kept.float()
        step = torch.finfo(logits.dtype).eps * logits.float().abs().amax(-1)
        alone = [self.plugin(runner, hidden, only(batch, row), None)[0] for row in range(len(slots))]
        own_alone = [self.own(runner, hidden, only(batch, row), None)[0] for row in range(len(slots))]
        states.seeds.gpu, seeds = states.seeds.gpu + SHIFTED_SEEDS, states.seeds.gpu
        shifted = self.plugin(runner, hidden, batch, grammar)[0].sampled_token_ids[:, 0]
        states.seeds.gpu = seeds
        first = lambda outputs: torch.cat([output.sampled_token_ids[:, 0] for output in outputs])
        columns = {
            "is_equal": tokens == own,
            "gap": (unfiltered.amax(-1) - unfiltered.gather(1, tokens[:, None])[:, 0]) / step,
            "is_same_alone": first(alone) == tokens,
            "is_own_same_alone": first(own_alone) == own,
            "is_same_shifted": shifted == tokens,
        }
        for name, scores, drawn_tokens in (("z", kept, tokens), ("own_z", kept, own), ("hot_z", kept / 1.5, tokens)):
            columns[name] = torch.stack(moments(scores, drawn_tokens), 1)
        if result[0].logprobs_tensors is not None:
            counts = torch.as_tensor(states.num_logprobs[slots], device=logits.device)
            columns["logprobs"] = logprob_errors(result[0], logits.float().log_softmax(-1), counts, step)
        columns = {name: column.tolist() for name, column in columns.items()}
        for row, seed in enumerate(states.seeds.np[slots]):
            figures = {name: column[row] for name, column in columns.items()}
            self.rows[self.names[(int(seed) - SEED) % len(self.names)]].append(figures | {"is_drawn": row in drawn})
        return result


def check(llm, samplers: dict, args, say) -> bool:
    """Runs the checks, and writes the table and the verdicts. Returns whether all checks passed."""
    of_kinds = kinds(args.tokens)
    names, passed = list(of_kinds), []
    requests = {index: of_kinds[names[index % len(names)]] for index in range(args.requests)}
    comparison = Comparison(*samplers.values(), names)
    generate(llm, lambda *given: comparison.step(*given), requests, args.tokens)
    groups, z = comparison.rows, {}
    say("\n| request | rows | rows of the plugin | equal | outside | gap | z, plugin | z, vLLM | logprobs |")
    say("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    count = lambda rows, test: sum(map(test, rows))
    is_outside = lambda row: row["z"][0] == float("-inf")
    for name, rows in groups.items():
        z[name] = [0.0, 0.0] if name in ONE_CHOICE else [z_score(rows, "z"), z_score(rows, "own_z")]
        cells = [name, len(rows), *(count(rows, lambda row: row[key]) for key in ("is_drawn", "is_equal"))]
        cells += [count(rows, is_outside), f"{max(row['gap'] for row in rows):.2f}" if name in ONE_CHOICE else ""]
        cells += [f"{score:+.2f}" for score in z[name]] if name not in ONE_CHOICE else ["", ""]
        cells.append(f"{max(row['logprobs'] for row in rows):.2f}" if "logprobs" in of_kinds[name] else "")
        say("| " + " | ".join(map(str, cells)) + " |")
    say("")

    def verdict(is_passed: bool, text: str):
        passed.append(bool(is_passed))
        say(f"{'pass' if is_passed else 'FAIL'}: {text}")

    some = lambda test: [row for name in groups if test(name) for row in groups[name]]
    rows, choices = some(lambda name: True), some(lambda name: name not in ONE_CHOICE)
    drawn = [row for row in rows if row["is_drawn"]]
    expected = len(some(lambda name: name not in OF_VLLM))
    wrong = count(some(lambda name: name in OF_VLLM), lambda row: row["is_drawn"]) + expected - len(drawn)
    text = f"the plugin drew {len(drawn)} rows (expected {expected}), vLLM's sampler {len(rows) - len(drawn)}"
    verdict(drawn and not wrong, text)
    limit = lambda name: OUTSIDE_LIMIT * len(groups[name]) + 1 if name in FILTERED else 0
    far = [name for name in groups if name not in ONE_CHOICE and count(groups[name], is_outside) > limit(name)]
    verdict(not far, f"vLLM's filters keep the tokens, except for rounding at cutoffs: {far or 'all requests'}")
    gaps = [row["gap"] for row in some(lambda name: name in ONE_CHOICE)]
    text = f"the largest gap of {len(gaps)} rows with one choice is {max(gaps):.2f}, limit {GAP_LIMIT}"
    verdict(max(gaps) <= GAP_LIMIT, text)
    largest = [max(abs(scores[which]) for scores in z.values()) for which in range(2)]
    verdict(max(largest) < Z_LIMIT, f"|z| is {largest[0]:.2f} (plugin) and {largest[1]:.2f} (vLLM), limit {Z_LIMIT}")
    hot = z_score(choices, "hot_z")
    verdict(abs(hot) > Z_LIMIT, f"control: z is {hot:+.2f} if vLLM's temperatures are multiplied by 1.5")
    errors = [row["logprobs"] for row in some(lambda name: "logprobs" in of_kinds[name])]
    text = f"the largest error of log-probabilities of {len(errors)} rows is {max(errors):.2f}, limit {LOGPROB_LIMIT}"
    verdict(max(errors) <= LOGPROB_LIMIT, text)
    different = {key: count(drawn, lambda row: not row[key]) for key in drawn[0] if "same" in key} if drawn else {}
    text = f"{different.get('is_same_alone')} of {len(drawn)} rows of the plugin have another token alone"
    verdict(drawn and not different["is_same_alone"], f"{text} (vLLM's sampler: {different.get('is_own_same_alone')})")
    text = f"control: with shifted seeds, {different.get('is_same_shifted')} rows have another token"
    verdict(drawn and different["is_same_shifted"], text)
    if args.batch_invariant:
        run = lambda given, seeds=SEED: generate(llm, samplers["plugin"], given, args.tokens, seeds)
        batch, picked = run(requests), list(requests.items())[:ALONE]
        for seeds, is_equal in ((SEED, True), (SEED + SHIFTED_SEEDS, False)):
            equal = sum(run({index: given}, seeds)[index] == batch[index] for index, given in picked)
            text = f"{equal} of {len(picked)} requests have the same tokens alone as in the batch"
            verdict((equal == len(picked)) == is_equal, text if is_equal else f"control: with shifted seeds, {text}")
    return all(passed)


def times(llm, samplers: dict, args, say):
    """Writes the times of decode steps and of `sample`, for each case and number of sequences."""
    say(f"\nMedians of the decode steps of {args.rounds} rounds; steps in ms, `sample` in us")
    columns = "step, vLLM | step, plugin | vLLM / plugin | CPU, vLLM | CPU, plugin | GPU, vLLM | GPU, plugin"
    say(f"| requests | sequences | {columns} |\n| --- | ---: |{' ---: |' * 7}")
    for case, given in CASES.items():
        for count in args.sequences:
            requests, found = dict.fromkeys(range(count), given), {name: ([], [], []) for name in samplers}
            for turn in range(2 * args.rounds + 2):  # The first two turns are not timed.
                name = list(samplers)[(turn + turn // 2) % 2]
                calls = []

                def timed(runner, hidden, batch, grammar):
                    if batch.num_reqs != count or batch.num_tokens != count:
                        return samplers[name](runner, hidden, batch, grammar)
                    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                    start = perf_counter()
                    events[0].record()
                    result = samplers[name](runner, hidden, batch, grammar)
                    events[1].record()
                    calls.append((start, perf_counter() - start, *events))
                    return result

                generate(llm, timed, requests, args.tokens)
                torch.cuda.synchronize()
                if turn >= 2:
                    steps, on_cpu, on_gpu = found[name]
                    calls = calls[WARMUP:]
                    steps += [1e3 * (after[0] - before[0]) for before, after in zip(calls, calls[1:])]
                    on_cpu += [1e6 * call[1] for call in calls]
                    on_gpu += [1e3 * call[2].elapsed_time(call[3]) for call in calls]
            step, cpu, gpu = ([median(found[name][part]) for name in ("vLLM", "plugin")] for part in range(3))
            cells = [case, count, *(f"{time:.3f}" for time in step), f"{step[0] / step[1]:.3f}"]
            say("| " + " | ".join(map(str, cells + [f"{time:.0f}" for time in cpu + gpu])) + " |")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="the folder of a checkpoint")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--engine", type=json.loads, default={}, help="arguments of LLM, as JSON")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--requests", type=int, default=64, help="requests of the checks")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each request")
    parser.add_argument("--sequences", default="1,8,64,256")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the times; 0 skips the times")
    parser.add_argument("--record")
    args = parser.parse_args()
    args.sequences = [int(count) for count in args.sequences.split(",")]
    if args.tokens < 16 or args.requests < len(kinds(args.tokens)):
        parser.error(f"--tokens must be at least 16, and --requests at least {len(kinds(16))}")
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(args.batch_invariant))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import vllm

    import flash_sampling

    record = open(args.record, "w") if args.record else None

    def say(line: str):
        print(line, flush=True)
        if record:
            print(line, file=record, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            write_checkpoint(folder, args.layers, args.hidden)
        sizes = sorted({1, args.requests, *args.sequences})
        options = {"model": args.model or folder, "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0}
        options |= {"max_num_seqs": sizes[-1], "max_num_batched_tokens": 8192, "max_model_len": 1024}
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
        options |= {"gpu_memory_utilization": 0.5, "enable_prefix_caching": False, "compilation_config": graphs}
        options |= args.engine
        llm = vllm.LLM(**options)
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        if not hasattr(GPUModelRunner.sample, "is_flash_sampling"):
            sys.exit("vLLM did not load the plugin")
        samplers = {"plugin": GPUModelRunner.sample, "vLLM": GPUModelRunner.sample.__wrapped__}
        versions = f"vllm {vllm.__version__}; torch {torch.__version__}; flash-sampling {flash_sampling.__version__}"
        say(f"{torch.cuda.get_device_name()}; {versions}")
        shape = f"Qwen3 with {args.layers} layers, width {args.hidden}, logits' standard deviation {LOGITS_STD}"
        say(f"{args.model or shape}; {args.requests} requests, {args.tokens} tokens each")
        if args.batch_invariant or args.engine:
            say(f"batch-invariant: {args.batch_invariant}; engine: {json.dumps(args.engine)}")
        is_passed = check(llm, samplers, args, say)
        if args.rounds:
            times(llm, samplers, args, say)
        say("\nall checks passed" if is_passed else "\nsome checks FAILED")
    sys.exit(not is_passed)


if __name__ == "__main__":
    main()
