"""Times decode steps with several samplers on one GPU, in Qwen3's shapes with random weights, and writes a record.

    python benches/decode.py [--models 1.7b,8b] [--sequences 1,8,64,256] [--tables steps,neighbours] [--record FILE]

A step is the layers, the LM head and the draw, in one CUDA graph. The attention reads 512 tokens of each sequence.
Every sequence has its own seed. The final norm scales the logits to a standard deviation of 4, so that about 50 tokens
are likely, as in text. The samplers are:

    ours        the draw within the LM head's matmul, `Sampler.enqueue`
    torch       the matmul, softmax and multinomial; a sort applies filters; one random stream for all sequences
    flashinfer  the matmul, then FlashInfer's sampling functions with a seed and an offset for each row
    vllm        the matmul, then vLLM's Triton kernels for top-k, top-p and Gumbel noise. The environment variable
                VLLM_SOURCE names the folder of vLLM's package

Before each replay of a graph, a write to other memory evicts all weights from the caches of the GPU. Within a step, the
layers evict the weight of the LM head in the same way. Each replay of head and draw alone has other hidden states,
because the time of FlashInfer's method for top-p depends on them.

The record begins with the versions of the packages and the commit of this project, which the environment variable
FLASH_SAMPLING_COMMIT names. The record also names the samplers that are left out because a package is absent.

"Saved" compares another sampler with ours. Each round of measurements gives the difference between the times of the two
steps, and the difference between the two times of head and draw alone. "Saved" is the median of the first difference
divided by the median of the second. "Saved" is 1 if our step is shorter by the same time as our head and draw.

A second table shows how filters or another seed for one row change the tokens of the other rows and the time of a call.
The second table also shows whether a row has the same token alone as in the batch. torch has no seed for a row, so an
engine can only reseed the random stream of all rows. The table counts the tokens that this reseeding changes, and has
no time for it.
"""

import argparse
import functools
import os
import runpy
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle, product
from statistics import mean, median
from time import sleep

import torch
from decode_samplers import DEVICE, SAMPLERS
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

import flash_sampling

VOCAB, KV_HEADS, HEAD, CONTEXT = 151936, 8, 128, 512
# layers, width, width of the feed-forward part, heads
SHAPES = {"0.6b": (28, 1024, 3072, 16), "1.7b": (28, 2048, 6144, 16), "8b": (36, 4096, 12288, 32)}
FILTERS = {"none": {}, "top-p 0.95": {"top_p": 0.95}, "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9}}
LOGITS_STD = 4.0
NEIGHBOURS, POSITIONS = 64, 8
ANOTHER_SEED, NO_SEEDS = "another seed", "no seeds"
NEIGHBOUR_ROUNDS = 15
STEPS, DRAWS = 2, 16  # replays in one measurement: of steps, and of head and draw alone
PAUSE, SPIN = 0.03, 1_000_000  # in seconds, and in clock cycles of the GPU
CACHE = 256 << 20  # bytes, more than the caches of a GPU hold


class Layers:
    """The layers of a step, from tokens [rows] to normalised hidden states [rows, width], with a static cache."""

    def __init__(self, shape: str):
        self.count, self.width, self.ffn, self.heads = SHAPES[shape]
        weight = lambda *size: torch.randn(size, device=DEVICE, dtype=torch.bfloat16).mul_(0.02)
        self.embedding, self.lm_head = weight(VOCAB, self.width), weight(VOCAB, self.width)
        self.layers = [
            {
                "qkv": weight((self.heads + 2 * KV_HEADS) * HEAD, self.width),
                "out": weight(self.width, self.heads * HEAD),
                "gate_up": weight(2 * self.ffn, self.width),
                "down": weight(self.width, self.ffn),
            }
            for _ in range(self.count)
        ]
        self.norm = torch.ones(self.width, device=DEVICE, dtype=torch.bfloat16)
        self.head_norm = torch.ones(HEAD, device=DEVICE, dtype=torch.bfloat16)
        self.final_norm = self.norm * (LOGITS_STD / (0.02 * self.width**0.5))
        angles = torch.arange(CONTEXT, device=DEVICE)[:, None] / 1e6 ** (torch.arange(0, HEAD, 2, device=DEVICE) / HEAD)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.rotary = torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)

    def cache(self, rows: int) -> Tensor:
        """Returns random keys and values of a context: [layers, 2, rows, key-value heads, tokens, head width]."""
        return torch.randn(self.count, 2, rows, KV_HEADS, CONTEXT, HEAD, device=DEVICE, dtype=torch.bfloat16)

    def step(self, tokens: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        """Returns the normalised hidden states of one step, and writes the step's keys and values to the cache."""
        rows, states = len(tokens), embedding(tokens, self.embedding)
        at = positions[:1] % CONTEXT  # The cache keeps the last CONTEXT tokens.
        cos, sin = (table[at] for table in self.rotary)
        for layer, (keys, values) in zip(self.layers, cache):
            heads = linear(rms_norm(states, [self.width], self.norm, 1e-6), layer["qkv"]).view(rows, -1, HEAD)
            turned, value = heads.split([self.heads + KV_HEADS, KV_HEADS], 1)
            turned = rms_norm(turned, [HEAD], self.head_norm, 1e-6)
            turned = torch.addcmul(turned * cos, turned.roll(HEAD // 2, -1), sin)
            query, key = turned.split([self.heads, KV_HEADS], 1)
            keys.index_copy_(2, at, key[:, :, None])
            values.index_copy_(2, at, value[:, :, None])
            # The query heads of a group share keys and values.
            mixed = scaled_dot_product_attention(query.reshape(rows, KV_HEADS, -1, HEAD), keys, values)
            states = torch.addmm(states, mixed.reshape(rows, -1), layer["out"].T)
            gate, up = linear(rms_norm(states, [self.width], self.norm, 1e-6), layer["gate_up"]).chunk(2, -1)
            states = torch.addmm(states, silu(gate).mul_(up), layer["down"].T)
        return rms_norm(states, [self.width], self.final_norm, 1e-6)


def captured(work) -> torch.cuda.CUDAGraph:
    """Runs the work twice, then captures the work as a CUDA graph."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@functools.cache
def other_memory() -> Tensor:
    return torch.empty(CACHE, device=DEVICE, dtype=torch.uint8)


def cold_time(graph: torch.cuda.CUDAGraph, advance, begin) -> float:
    """Calls `begin` and `advance`, and returns the time of a replay with cold caches, in us. The GPU spins while the
    host enqueues the replay."""
    begin()
    torch.cuda._sleep(SPIN)
    advance()
    other_memory().zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def microseconds(
    graphs: list[torch.cuda.CUDAGraph], advance, rounds: int, replays: int, begin=lambda: None
) -> list[list[float]]:
    """Returns mean times of a replay in us: [graphs][rounds]. Each round starts with another graph, so a drift of
    the GPU's speed affects all graphs. The GPU pauses before each measurement, because its clocks fall under constant
    load. Before each replay, the function calls `begin`, and then `advance`, which enqueues a change of the inputs."""
    times = [[] for _ in graphs]
    for first in range(rounds):
        for turn in range(len(graphs)):
            graph, series = (each[(first + turn) % len(graphs)] for each in (graphs, times))
            sleep(PAUSE)
            series.append(mean(cold_time(graph, advance, begin) for _ in range(replays)))
    return times


def neighbours(layers: Layers, model: str, rows: int, say):
    """Writes how filters or another seed of a row change the other rows, and whether a row has the same token alone."""
    tokens = torch.randint(VOCAB, (rows,), device=DEVICE)
    start = torch.full((rows,), CONTEXT, device=DEVICE)
    hidden = layers.step(tokens, start, layers.cache(rows)).clone()
    seeds = torch.arange(1, rows + 1, device=DEVICE)
    others, positions, everyone = slice(0, rows - 1), range(POSITIONS), slice(None)
    off = {"top_k": torch.full((rows,), VOCAB, device=DEVICE, dtype=torch.int32), "top_p": torch.ones(rows, device=DEVICE)}
    samplers = made(SAMPLERS, (layers.lm_head, rows), lambda line: None)
    cases = [*list(FILTERS.items())[1:], (ANOTHER_SEED, {})]
    for (what, filters), (name, sampler) in product(cases, samplers.items()):
        columns = {key: off[key].clone() for key in filters}
        for key, value in filters.items():
            columns[key][-1] = value
        has_another_seed, new_seeds = what == ANOTHER_SEED, seeds.clone()
        if has_another_seed:
            new_seeds[-1] = rows + 1

        def drawn(at: slice, position: int, changed: bool = False) -> Tensor:
            """Returns the tokens of rows `at`. If `changed`, the last row has the filters or the other seed."""
            # torch's random stream, for samplers without seeds of rows.
            torch.manual_seed(position + POSITIONS * (changed and has_another_seed))
            keys = {"seed": (new_seeds if changed else seeds)[at], "position": start[at] + position}
            out = torch.zeros(len(keys["seed"]), device=DEVICE, dtype=torch.int64)
            given = columns if changed else {}
            sampler.draw(hidden[at], out, keys, {name: column[at] for name, column in given.items()})
            return out

        plain = torch.stack([drawn(everyone, position) for position in positions])
        beside = torch.stack([drawn(everyone, position, changed=True) for position in positions])
        alone = torch.stack(
            [torch.cat([drawn(slice(row, row + 1), position) for row in range(rows)]) for position in positions]
        )
        out, moving = torch.zeros_like(tokens), start.clone()
        calls = [(seeds, {}), (new_seeds, columns)][: 2 if sampler.has_seeds or not has_another_seed else 1]
        graphs = []
        for of_rows, given in calls:
            keys = {"seed": of_rows, "position": moving}
            graphs.append(captured(lambda: sampler.draw(hidden, out, keys, given)))
        medians = [median(series) for series in microseconds(graphs, lambda: moving.add_(1), NEIGHBOUR_ROUNDS, DRAWS)]
        counts = [(plain[:, others] != beside[:, others]).sum().item(), (plain != alone).sum().item()]
        cells = [model, what, name, f"{counts[0]} of {plain[:, others].numel()}", f"{counts[1]} of {plain.numel()}"]
        cells += [f"{time:.1f}" for time in medians] + [NO_SEEDS] * (2 - len(medians))
        cells += [f"{medians[1] / medians[0]:.3f}" if len(medians) == 2 else NO_SEEDS]
        say("| " + " | ".join(cells) + " |")
        if has_another_seed and torch.equal(plain[:, -1], beside[:, -1]):
            say(f"{name}: the other seed changes no token of its own row")


def versions() -> str:
    """Returns the GPU, the versions of all packages, and the commit of this project."""
    try:
        flashinfer = version("flashinfer-python")
    except PackageNotFoundError:
        flashinfer = "absent"
    try:
        vllm = runpy.run_path(os.path.join(os.environ["VLLM_SOURCE"], "_version.py"))["__version__"]
    except KeyError:
        vllm = "absent"
    except OSError:
        vllm = "of an unknown version"
    commit = os.environ.get("FLASH_SAMPLING_COMMIT", "unknown")
    ours = f"flash-sampling {flash_sampling.__version__}, commit {commit}"
    return f"{torch.cuda.get_device_name()}; torch {torch.__version__}; {ours}; FlashInfer {flashinfer}; vLLM {vllm}"


def made(classes: dict[str, type], arguments: tuple, say) -> dict[str, object]:
    """Returns the samplers whose packages are installed."""
    samplers = {}
    for name, sampler in classes.items():
        try:
            samplers[name] = sampler(*arguments)
        except (ImportError, KeyError) as error:
            say(f"{name} is left out: {error!r}")
    return samplers


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="1.7b,8b")
    parser.add_argument("--sequences", default="1,8,64,256")
    parser.add_argument("--tables", default="steps,neighbours")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--record")
    args = parser.parse_args()
    record = open(args.record, "w") if args.record else None

    def say(line: str):
        print(line, flush=True)
        if record:
            print(line, file=record, flush=True)

    say(versions())
    say(f"{CONTEXT} tokens of context, logits' standard deviation {LOGITS_STD}; medians of {args.rounds}; microseconds")
    torch.manual_seed(1)
    with torch.inference_mode():
        for model in args.models.split(","):
            layers = Layers(model)
            if "steps" in args.tables.split(","):
                say("\n" + "\n".join(STEP_TABLE))
                for rows in map(int, args.sequences.split(",")):
                    times(layers, made(SAMPLERS, (layers.lm_head, rows), say), model, rows, args, say)
                    torch.cuda.empty_cache()
            if "neighbours" in args.tables.split(","):
                say(f"\nOne of {NEIGHBOURS} rows has filters or another seed; microseconds of head and draw")
                say("\n".join(NEIGHBOUR_TABLE))
                neighbours(layers, model, NEIGHBOURS, say)
            del layers


STEP_TABLE = [
    "| model | sequences | filters | sampler | step | head and draw alone | its share | step over ours | saved |",
    "| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |",
]
NEIGHBOUR_TABLE = [
    "| model | one row has | sampler | tokens of others that it changes | tokens that differ alone | without it | with it | ratio |",
    "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
]


def times(layers: Layers, samplers: dict[str, object], model: str, rows: int, args, say, measure=microseconds):
    """Writes the times of whole steps, and of head and draw alone, for each sampler and each kind of filters."""
    cache = layers.cache(rows)
    tokens = torch.randint(VOCAB, (rows,), device=DEVICE)
    positions = torch.full((rows,), CONTEXT, device=DEVICE)
    keys = {"seed": torch.arange(1, rows + 1, device=DEVICE), "position": positions}
    given = cycle([layers.step(torch.randint_like(tokens, VOCAB), positions, cache) for _ in range(DRAWS)])
    hidden = next(given).clone()

    def next_hidden():
        positions.add_(1)
        hidden.copy_(next(given))

    for what, filters in FILTERS.items():
        kinds = {"top_k": torch.int32, "top_p": torch.float32}
        columns = {name: torch.full((rows,), value, device=DEVICE, dtype=kinds[name]) for name, value in filters.items()}
        names, steps, draws, outs = [], [], [], []
        for name, sampler in samplers.items():
            out = torch.zeros(rows, device=DEVICE, dtype=torch.int64)

            def step():
                sampler.draw(layers.step(tokens, positions, cache), out, keys, columns)
                tokens.copy_(out)
                positions.add_(1)

            try:
                # The capture raises an exception for a sampler that a CUDA graph cannot hold.
                graphs = captured(step), captured(lambda: sampler.draw(hidden, out, keys, columns))
            except Exception as error:
                say(f"{name}, {what}, {rows} sequences: {type(error).__name__}: {str(error)[:200]}")
                continue
            names.append(name)
            steps.append(graphs[0])
            draws.append(graphs[1])
            outs.append(out)  # The graphs write to `out`, so it must stay alive.
            assert ((0 <= out) & (out < VOCAB)).all(), name
        step_times = measure(steps, lambda: positions.add_(1), args.rounds, STEPS)
        draw_times = measure(draws, next_hidden, args.rounds, DRAWS)
        if "ours" not in names:
            continue
        ours = names.index("ours")
        more = lambda series, base: median(time - own for time, own in zip(series, base))
        for name, in_step, alone in zip(names, step_times, draw_times):
            step_time, draw_time = median(in_step), median(alone)
            share, ratio = draw_time / step_time, step_time / median(step_times[ours])
            saved = "" if name == "ours" else f"{more(in_step, step_times[ours]) / more(alone, draw_times[ours]):.2f}"
            cells = [model, rows, what, name, f"{step_time:.0f}", f"{draw_time:.1f}", f"{share:.1%}", f"{ratio:.3f}", saved]
            say("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()
