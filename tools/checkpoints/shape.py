"""Writes a checkpoint with the shape of Qwen3-0.6B and random weights (1.2 GB), and a tokenizer of the same size, to time `generate`.

    python tools/checkpoints/shape.py DIR
"""

import json
import struct
import sys
from pathlib import Path

import torch

out = Path(sys.argv[1])
out.mkdir(parents=True, exist_ok=True)
H, I, L, Q, K, V = 1024, 3072, 28, 2048, 1024, 151936
shapes = {"model.embed_tokens.weight": [V, H], "model.norm.weight": [H]}
for i in range(L):
    p = f"model.layers.{i}."
    shapes |= {p + "input_layernorm.weight": [H], p + "post_attention_layernorm.weight": [H], p + "self_attn.q_norm.weight": [128],
               p + "self_attn.k_norm.weight": [128], p + "self_attn.q_proj.weight": [Q, H], p + "self_attn.k_proj.weight": [K, H],
               p + "self_attn.v_proj.weight": [K, H], p + "self_attn.o_proj.weight": [H, Q], p + "mlp.gate_proj.weight": [I, H],
               p + "mlp.up_proj.weight": [I, H], p + "mlp.down_proj.weight": [H, I]}
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1)
header, at = {}, 0
for n, s in shapes.items():
    size = 2 * torch.Size(s).numel()
    header[n] = {"dtype": "BF16", "shape": s, "data_offsets": [at, at + size]}
    at += size
text = json.dumps(header).encode()
with open(out / "model.safetensors", "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text)
    for n, s in shapes.items():
        w = torch.ones(s, device=dev) if len(s) == 1 else torch.randn(s, device=dev) * (0.12 if "embed" in n else 0.03)
        f.write(w.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
config = {
    "model_type": "qwen3", "hidden_size": H, "intermediate_size": I, "num_hidden_layers": L, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 40960,
    "tie_word_embeddings": True, "hidden_act": "silu", "vocab_size": V, "bos_token_id": 0,
}
(out / "config.json").write_text(json.dumps(config))
words = {"type": "BPE", "vocab": {f"w{i}": i for i in range(V)}, "merges": []}
parts = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
(out / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], **dict.fromkeys(parts), "model": words}))
