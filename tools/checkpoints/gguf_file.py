"""Writes a small Llama or Qwen3 checkpoint in Hugging Face's layout as a GGUF file, with names and rows in llama.cpp's order.

    pip install gguf numpy
    python tools/checkpoints/gguf_file.py crates/cli/models/stories crates/cli/tests/checkpoints/gguf/stories.gguf --types stories
    python tools/checkpoints/gguf_file.py crates/cli/tests/checkpoints/llama crates/cli/tests/checkpoints/gguf/llama.gguf
    python tools/checkpoints/gguf_file.py crates/cli/tests/checkpoints/qwen3 crates/cli/tests/checkpoints/gguf/qwen3.gguf

The tests of `generate` read these files. `--types stories` has Q8_0 for the embedding and the attention, and Q4_0 for the
feed-forward layers. Without it, matrices stay bf16. Vectors are float32.
"""

import argparse
import json
import math
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def tensors(folder):
    """Name and float32 values of each bf16 tensor."""
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, info in json.loads(data[8:start]).items():
            if name != "__metadata__":
                assert info["dtype"] == "BF16", name
                begin, end = (start + offset for offset in info["data_offsets"])
                high = np.frombuffer(data[begin:end], "<u2").astype(np.uint32) << 16
                yield name, high.view(np.float32).reshape(info["shape"])


def renamed(name):
    part, suffix = name.rsplit(".", 1)
    if part in MODEL:
        return f"{MODEL[part]}.{suffix}"
    layer, part = part.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{LAYER[part]}.{suffix}"


def interleaved(values, heads):
    """The two halves of each head's rows, alternately: llama.cpp rotates neighbours."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def rope_factors(config, rope):
    """Divisors of the rotary frequencies: Llama 3's scaling."""
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for pair in range(config["head_dim"] // 2):
        turns = original * rope["rope_theta"] ** (-2 * pair / config["head_dim"]) / math.tau
        kept = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / (kept + (1 - kept) / rope["factor"]))
    return np.array(factors, np.float32)


def add_tokenizer(writer, folder, config):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = dict(tokenizer["model"]["vocab"])
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted((vocab | special).items(), key=lambda item: item[1])
    assert [id for _, id in tokens] == list(range(len(tokens)))
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t, _ in tokens])
    writer.add_token_merges(merges)
    for add, key in [(writer.add_bos_token_id, "bos_token_id"), (writer.add_eos_token_id, "eos_token_id")]:
        if config.get(key) is not None:
            add(config[key])
    writer.add_add_bos_token(tokenizer["post_processor"] is not None and "single" in tokenizer["post_processor"])


def add_shape(writer, config, rope_theta):
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope_theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("folder", type=Path)
    args.add_argument("out", type=Path)
    args.add_argument("--types", choices=["bf16", "stories"], default="bf16")
    args = args.parse_args()
    config = json.loads((args.folder / "config.json").read_text())
    rope = config["rope_parameters"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(args.out, config["model_type"])
    add_shape(writer, config, rope["rope_theta"])
    add_tokenizer(writer, args.folder, config)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(config, rope))
    for name, values in tensors(args.folder):
        name = renamed(name)
        if config["model_type"] == "llama" and (".attn_q." in name or ".attn_k." in name):
            values = interleaved(values, heads if ".attn_q." in name else kv_heads)
        if values.ndim == 1:
            writer.add_tensor(name, values)
            continue
        kind = Type.BF16
        if args.types == "stories":
            kind = Type.Q4_0 if ".ffn_" in name else Type.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(args.out, args.out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
