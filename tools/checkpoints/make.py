"""Makes the small checkpoints of crates/cli/tests/checkpoints, and the outputs of `transformers` on them.

    pip install torch transformers tokenizers safetensors
    python tools/checkpoints/make.py --out crates/cli/tests/checkpoints

A Llama (own head, biases, Llama 3's rotary frequencies, one file), a Qwen3 (tied head, shards) and a Gemma 2 (tied head, caps, a
window shorter than the sequences, a full layer before a sliding one), all with random weights in bf16. The file greedy.json of
each has prompts, the greedy tokens of `transformers` in float32, and their log-probabilities.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

END = "<|end|>"
PROMPTS = ["The naïve fox — 42!", "a", "It was a dark and stormy night, and nobody was awake but the old clock on the wall. " * 2]
TOKENS = 24
# The smallest allowed gap between the two largest logits: far above float32 rounding.
MARGIN = 0.01


def tokenizer():
    """The tokens are bytes, and one token that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bpe.add_special_tokens([END])
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return bpe


def randomise(model, generator):
    """Sets random weights, large enough for clear winners; factors of norms are not 1 and biases are not 0."""
    # Gemma 2 scales embeddings by the root of their width, and adds 1 to the weights of norms. Its head is also the embedding, so
    # small embeddings and a large last norm make the layers decide.
    is_gemma = model.config.model_type == "gemma2"
    embedding_scale, norm_mean = (0.3 * model.config.hidden_size**-0.5, 0.0) if is_gemma else (1.0, 1.0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 2:
            parameter.data = noise * (embedding_scale if "embed" in name else 1.5 / parameter.shape[1] ** 0.5)
        else:
            parameter.data = 0.2 * noise + (0.0 if name.endswith("bias") else norm_mean)
    if is_gemma:
        model.model.norm.weight.data += 3.0


def greedy(model, bpe, prompt):
    """The greedy tokens after a prompt, their log-probabilities, and the smallest gap of a winner."""
    tokens, drawn, logprobs, lead = bpe.encode(prompt).ids, [], [], float("inf")
    prompt_tokens = list(tokens)
    for _ in range(TOKENS):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        best = logits.topk(2)
        lead = min(lead, (best.values[0] - best.values[1]).item())
        token = best.indices[0].item()
        logprobs.append(round(torch.log_softmax(logits.double(), 0)[token].item(), 6))
        tokens.append(token)
        drawn.append(token)
    return {"prompt": prompt, "prompt_tokens": prompt_tokens, "tokens": drawn, "logprobs": logprobs}, lead


@torch.no_grad()
def make(folder, model_of, config, bpe, shard):
    for seed in range(1000):
        model = model_of(config).float()
        randomise(model, torch.Generator().manual_seed(seed))
        model = model.to(torch.bfloat16)
        exact = model_of(config).float().eval()
        exact.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
        made = [greedy(exact, bpe, prompt) for prompt in PROMPTS]
        drawn = [m["tokens"] for m, _ in made]
        are_distinct = all(bpe.get_vocab_size() - 1 not in tokens and len({*tokens}) > 3 for tokens in drawn)
        if are_distinct and min(lead for _, lead in made) > MARGIN:
            break
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "generation_config.json").unlink(missing_ok=True)
    bpe.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "greedy.json").write_text(json.dumps([m for m, _ in made], indent=1) + "\n")
    print(folder, "seed", seed, "lead", min(lead for _, lead in made), "bytes", sum(f.stat().st_size for f in folder.iterdir()))


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--out", type=Path, required=True)
    out = args.parse_args().out
    torch.set_num_threads(1)
    bpe = tokenizer()
    sizes = dict(
        vocab_size=bpe.get_vocab_size(), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=bpe.token_to_id(END), pad_token_id=None,
    )
    llama3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64}
    config = LlamaConfig(**sizes, attention_bias=True, mlp_bias=True, rope_parameters=llama3, tie_word_embeddings=False)
    make(out / "llama", LlamaForCausalLM, config, bpe, "1GB")
    config = Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    make(out / "qwen3", Qwen3ForCausalLM, config, bpe, "40KB")
    config = Gemma2Config(
        **sizes, head_dim=16, query_pre_attn_scalar=8, attn_logit_softcapping=2.0, final_logit_softcapping=5.0, sliding_window=6,
        layer_types=["full_attention", "sliding_attention"], rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    make(out / "gemma2", Gemma2ForCausalLM, config, bpe, "1GB")


if __name__ == "__main__":
    main()
