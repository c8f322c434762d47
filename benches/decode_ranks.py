"""Times decode steps over several GPUs with several samplers, and writes a record. Each process (rank) has a shard of
the LM head.

    torchrun --nproc-per-node 2 benches/decode_ranks.py [--models 1.7b,8b] [--sequences 1,8,64,256] [--record FILE]

A step and the columns of the table are defined in decode.py. Every rank computes all layers, with the same weights;
only the head is split into shards. The time of a replay is the time on the slowest rank. The samplers:

    ours        the draw within the matmul of each shard, `Sampler.enqueue`; the ranks exchange draws, and logits for
                filters
    torch, flashinfer, vllm
                the matmul of each shard, an all-gather of logits by NCCL, then the sampler of decode_samplers.py on
                every rank
"""

import argparse

import torch
import torch.distributed as dist
from decode import CONTEXT, LOGITS_STD, STEP_TABLE, VOCAB, Layers, made, microseconds, times, versions
from decode_samplers import FlashInfer, Torch, Vllm

import flash_sampling
from flash_sampling.torch import group


class Ours:
    def __init__(self, shard, rows, ranks):
        head = flash_sampling.Head(shard, first_token=dist.get_rank() * len(shard), vocab_size=VOCAB)
        self.sampler = flash_sampling.Sampler(head, max_rows=rows, group=ranks)

    def draw(self, hidden, out, keys, filters):
        self.sampler.enqueue(hidden, out, **keys, **filters)


def gathered(sampler):
    """Returns the class of a sampler of decode_samplers.py that draws from the logits of all shards, gathered on every
    rank."""

    class Gathered(sampler):
        def __init__(self, shard, rows, ranks):
            super().__init__(shard, rows)

        def multiply(self, hidden):
            own = super().multiply(hidden)
            parts = own.new_empty(dist.get_world_size(), *own.shape)
            dist.all_gather_into_tensor(parts, own)
            return parts.transpose(0, 1).reshape(len(hidden), -1)

    return Gathered


SAMPLERS = {"ours": Ours, "torch": gathered(Torch), "flashinfer": gathered(FlashInfer), "vllm": gathered(Vllm)}


def slowest(graphs, advance, rounds, replays):
    """Measures as `microseconds` does, on all ranks at the same time, and returns the times of the slowest rank."""
    series = torch.tensor(microseconds(graphs, advance, rounds, replays, dist.barrier), device="cuda")
    dist.all_reduce(series, dist.ReduceOp.MAX)
    return series.tolist()


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
    say(f"{CONTEXT} tokens of context, logits' standard deviation {LOGITS_STD}; medians of {args.rounds}; microseconds")
    ranks = group()
    with torch.inference_mode():
        for model in args.models.split(","):
            torch.manual_seed(1)  # Equal weights, tokens and random streams on all ranks.
            layers = Layers(model)
            layers.lm_head = layers.lm_head.chunk(world)[rank].clone()
            say("\n" + "\n".join(STEP_TABLE))
            for rows in map(int, args.sequences.split(",")):
                samplers = made(SAMPLERS, (layers.lm_head, rows, ranks), say)
                times(layers, samplers, model, rows, args, say, slowest)
                del samplers
                torch.cuda.empty_cache()
            del layers


if __name__ == "__main__":
    main()
