"""Checks and times the plugin inside the installed vLLM, on one GPU, and writes a record. Exits with 1 if checks fail.

    python benches/vllm_engine.py [--model DIR | --layers 28 --hidden 1024] [--batch-invariant | --schedules]
        [--record FILE]

Without `--model`, the model has Qwen3's architecture, random weights and an untied head. The default shape is that of
Qwen3-0.6B. The head scales the logits to a standard deviation of 4, so that about 50 tokens are likely, as in text. The
engine runs in this process, with model runner V2, CUDA graphs of decode steps and no compilation. `--engine` replaces
arguments of `LLM`, as JSON. Every request has a seed.

The checks run requests with mixed parameters in one batch. vllm_checks.py explains the table of the checks. With
`--batch-invariant`, vLLM's layers are batch-invariant. One more check then compares the tokens of whole requests alone
with their tokens in the batch. With `--schedules`, the checks of vllm_schedules.py replace these checks, the layers are
batch-invariant, and steps are not timed.

The time of a decode step is the time between two calls of `GPUModelRunner.sample`. "CPU" is the time of a call. "GPU"
is the time between two CUDA events around the call. Both include the LM head. The samplers alternate between runs.
"""

import argparse
import json
import os
import sys
import tempfile
from math import sqrt
from statistics import median
from time import perf_counter

import torch
import vllm_schedules
from vllm_checks import SHIFTED_SEEDS, Comparison, Verdicts, judge, kinds

HEAD = 128
LOGITS_STD = 4.0
SEED = 1000  # The seed of the first request of the checks.
WARMUP = 8  # first steps of each run, which are not timed
ALONE = 16
EOS = 256

CASES = {
    "temperature": {},
    "greedy": {"temperature": 0},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs": {"logprobs": 5},
}


def write_checkpoint(folder: str, layers: int, hidden: int):
    """Writes a checkpoint of Qwen3's architecture with random weights, without a tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "vocab_size": 151936}
    sizes |= {"num_attention_heads": max(16, hidden // HEAD), "num_key_value_heads": 8, "head_dim": HEAD}
    torch.manual_seed(1)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=False, eos_token_id=EOS, **sizes)).bfloat16()
    model.lm_head.weight.data.normal_(std=LOGITS_STD / sqrt(hidden))
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()


def write_tokenizer(folder: str):
    """Writes a tokenizer whose tokens are single bytes. Grammars and bad words need a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = {name: token for token, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(tokens | {"<end>": EOS}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


def generate(llm, sample, given: dict[int, dict], tokens: int, seeds: int = SEED) -> dict[int, list[int]]:
    """Runs one request for each index in `given`, with the function `sample` instead of `GPUModelRunner.sample`.

    given: the parameters of each request, by its index. Returns the tokens of each request.
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


def check(llm, samplers: dict, args, verdicts: Verdicts):
    """Runs the checks, and writes the table and the verdicts."""
    of_kinds = kinds(args.tokens)
    names = list(of_kinds)
    requests = {index: of_kinds[names[index % len(names)]] for index in range(args.requests)}
    comparison = Comparison(*samplers.values(), lambda seed: names[(seed - SEED) % len(names)])
    generate(llm, lambda *given: comparison.step(*given), requests, args.tokens)
    judge(comparison, of_kinds, verdicts)
    if args.batch_invariant:
        run = lambda given, seeds=SEED: generate(llm, samplers["plugin"], given, args.tokens, seeds)
        batch, picked = run(requests), list(requests.items())[:ALONE]
        for seeds, is_equal in ((SEED, True), (SEED + SHIFTED_SEEDS, False)):
            equal = sum(run({index: given}, seeds)[index] == batch[index] for index, given in picked)
            text = f"{equal} of {len(picked)} requests have the same tokens alone as in the batch"
            text = text if is_equal else f"control: with shifted seeds, {text}"
            verdicts.add((equal == len(picked)) == is_equal, text)


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
    parser.add_argument("--schedules", action="store_true", help="run the checks of vllm_schedules.py")
    parser.add_argument("--requests", type=int, default=64, help="number of requests of the checks")
    parser.add_argument("--tokens", type=int, default=64, help="number of tokens of each request")
    parser.add_argument("--sequences", default="1,8,64,256")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of timed runs; 0: no times")
    parser.add_argument("--record")
    args = parser.parse_args()
    args.sequences = [int(count) for count in args.sequences.split(",")]
    if args.tokens < 16 or args.requests < len(kinds(args.tokens)):
        parser.error(f"--tokens must be at least 16, and --requests at least {len(kinds(16))}")
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    args.batch_invariant |= args.schedules
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
            if args.schedules:
                write_tokenizer(folder)
        sizes = sorted({1, args.requests, *args.sequences})
        options = {"model": args.model or folder, "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0}
        options |= {"max_num_seqs": sizes[-1], "max_num_batched_tokens": 8192, "max_model_len": 1024}
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
        options |= {"gpu_memory_utilization": 0.5, "enable_prefix_caching": False, "compilation_config": graphs}
        options |= (vllm_schedules.ENGINE if args.schedules else {}) | args.engine
        llm = vllm.LLM(**options)
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        if not hasattr(GPUModelRunner.sample, "is_flash_sampling"):
            sys.exit("vLLM did not load the plugin")
        samplers = {"plugin": GPUModelRunner.sample, "vLLM": GPUModelRunner.sample.__wrapped__}
        versions = f"vllm {vllm.__version__}; torch {torch.__version__}; flash-sampling {flash_sampling.__version__}"
        say(f"{torch.cuda.get_device_name()}; {versions}")
        shape = f"Qwen3 with {args.layers} layers, width {args.hidden}, logits' standard deviation {LOGITS_STD}"
        requests = "schedules" if args.schedules else f"{args.requests} requests"
        say(f"{args.model or shape}; {requests}, {args.tokens} tokens each")
        if args.batch_invariant or args.engine:
            say(f"batch-invariant: {args.batch_invariant}; engine: {json.dumps(args.engine)}")
        verdicts = Verdicts(say)
        if args.schedules:
            vllm_schedules.check(llm, samplers, args.tokens, verdicts)
        else:
            check(llm, samplers, args, verdicts)
            if args.rounds:
                times(llm, samplers, args, say)
        say("\nall checks passed" if verdicts.are_passed else "\nsome checks FAILED")
    sys.exit(not verdicts.are_passed)


if __name__ == "__main__":
    main()
