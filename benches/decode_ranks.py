"""Times head and draw over several GPUs, by sampler, and writes a record. Each process has a shard of the head.

    torchrun --nproc-per-node 2 benches/decode_ranks.py [--models 1.7b,8b] [--sequences 1,8,64,256] [--record FILE]

The parameters and the tokens are in device memory, and a call is a CUDA graph. The time of a call is the median on the
slowest rank. The samplers:

    ours   the draw within the matmul of each shard, `Sampler.enqueue`; the ranks exchange draws, and logits for filters
    torch  the matmul of each shard, an all-gather of logits by NCCL, softmax and multinomial; a sort applies filters
    vllm   the same logits as torch, then vLLM's Triton kernels, as in decode.py
"""

import argparse
from statistics import median

import torch
import torch.distributed as dist
from decode import FILTERS, LOGITS_STD, SHAPES, VOCAB, Torch, Vllm, captured, replay_time, versions

import flash_sampling
from flash_sampling.torch import group


class Ours:
    def __init__(self, shard, rows, ranks):
        head = flash_sampling.Head(shard, first_token=dist.get_rank() * len(shard), vocab_size=VOCAB)
        self.sampler = flash_sampling.Sampler(head, max_rows=rows, group=ranks)

    def draw(self, hidden, out, keys, filters):
        self.sampler.enqueue(hidden, out, **keys, **filters)


def gathered(sampler):
    """Returns the class of a sampler of decode.py that draws from the logits of all shards, gathered on every rank."""

    class Gathered(sampler):
        def __init__(self, shard, rows, ranks):
            super().__init__(shard, rows)

        def multiply(self, hidden):
            own = super().multiply(hidden)
            parts = own.new_empty(dist.get_world_size(), *own.shape)
            dist.all_gather_into_tensor(parts, own)
            return parts.transpose(0, 1).reshape(len(hidden), -1)

    return Gathered


SAMPLERS = {"ours": Ours, "torch": gathered(Torch), "vllm": gathered(Vllm)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="1.7b,8b")
    parser.add_argument("--sequences", default="1,8,64,256")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--record")
    args = parser.parse_args()
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    record = open(args.record, "w") if args.record and rank == 0 else None

    def say(line):
        if rank == 0:
            print(line, flush=True)
            if record:
                print(line, file=record, flush=True)

    say(f"{world} x {versions()}")
    say(f"logits' standard deviation {LOGITS_STD}; medians of {args.rounds}; microseconds")
    say("| model | sequences | filters | sampler | head and draw | over ours |")
    say("| --- | ---: | --- | --- | ---: | ---: |")
    ranks = group()
    with torch.inference_mode():
        for model in args.models.split(","):
            width = SHAPES[model][1]
            torch.manual_seed(rank)
            shard = torch.randn(VOCAB // world, width, device="cuda", dtype=torch.bfloat16).mul_(0.02)
            for rows in map(int, args.sequences.split(",")):
                times(shard, model, rows, ranks, args.rounds, say)


def times(shard, model, rows, ranks, rounds, say):
    """Writes the times of head and draw for each sampler and each kind of filters."""
    hidden = torch.randn(rows, shard.shape[1], device="cuda") * (LOGITS_STD / (0.02 * shard.shape[1] ** 0.5))
    hidden = hidden.bfloat16()
    dist.broadcast(hidden, 0)
    keys = {"seed": torch.arange(rows, device="cuda"), "position": torch.zeros(rows, device="cuda", dtype=torch.int64)}
    kinds = {"top_k": torch.int32, "top_p": torch.float32}
    for what, filters in FILTERS.items():
        ours = None
        columns = {key: torch.full((rows,), value, device="cuda", dtype=kinds[key]) for key, value in filters.items()}
        for name, sampler in SAMPLERS.items():
            sampler, out = sampler(shard, rows, ranks), torch.zeros(rows, device="cuda", dtype=torch.int64)
            graph = captured(lambda: sampler.draw(hidden, out, keys, columns))
            dist.barrier()
            series = []
            for _ in range(rounds):
                graph.replay()  # The timed replays follow, so the ranks do not wait for a late host.
                series.append(replay_time(graph, 20))
            time = torch.tensor(median(series), device="cuda")
            dist.all_reduce(time, dist.ReduceOp.MAX)
            all_tokens = [torch.zeros_like(out) for _ in range(dist.get_world_size())]
            dist.all_gather(all_tokens, out)
            assert name == "torch" or all((tokens == out).all() for tokens in all_tokens), name
            ours = ours or time.item()
            say(f"| {model} | {rows} | {what} | {name} | {time.item():.1f} | {time.item() / ours:.2f} |")
            del graph


if __name__ == "__main__":
    main()
