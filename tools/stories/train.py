"""Trains the built-in model: a tiny Llama on stories of the grammar, written as a Hugging Face folder.

    pip install torch transformers tokenizers safetensors
    python tools/stories/train.py --out crates/cli/models/stories

The text, the vocabulary and the order of training depend only on the seed. The training takes about 15 minutes on one CPU
thread. Another machine may round sums differently, so its weights are similar but not equal.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from grammar import stories
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

END = "<|endoftext|>"  # between stories: it ends one story and begins the next
VOCAB, CONTEXT, BATCH = 2048, 128, 32


def tokenizer(texts):
    """A byte-level byte-pair vocabulary."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    return bpe


def batches(tokens, steps, generator):
    """Windows of the text at random positions."""
    for _ in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=generator)
        yield torch.stack([tokens[s : s + CONTEXT] for s in starts])


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("--stories", type=int, default=40_000)
    args.add_argument("--steps", type=int, default=600)
    args.add_argument("--layers", type=int, default=4)
    args.add_argument("--hidden", type=int, default=128)
    args = args.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    texts = stories(args.seed, args.stories)
    bpe = tokenizer(texts[:10_000])
    end = bpe.token_to_id(END)
    tokens = torch.tensor([t for story in bpe.encode_batch(texts) for t in [end, *story.ids]])
    size = bpe.get_vocab_size()
    print(f"{len(tokens)} tokens of {args.stories} stories; a vocabulary of {size}", flush=True)

    config = LlamaConfig(
        vocab_size=size, hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=end, eos_token_id=end, pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.05)
    started, smooth = time.time(), None
    for step, batch in enumerate(batches(tokens, args.steps, torch.Generator().manual_seed(args.seed))):
        warm, done = min(1.0, (step + 1) / 50), step / args.steps
        optimizer.param_groups[0]["lr"] = 4e-3 * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
        if step % 20 == 19:
            print(f"step {step + 1}: loss {smooth:.4f} nats a token, {time.time() - started:.0f} s", flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end, do_sample=True, temperature=0.8)
    model.save_pretrained(args.out)
    # A prompt is the beginning of a story.
    bpe.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, end)])
    bpe.save(str(args.out / "tokenizer.json"), pretty=False)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    (args.out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    main()
