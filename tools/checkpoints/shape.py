"""Writes a checkpoint with the shape of Qwen3-0.6B and random weights, and a tokenizer of the same size, to time `generate`.

    pip install gguf numpy
    python tools/checkpoints/shape.py DIR          # bf16 in Hugging Face's layout, 1.2 GB
    python tools/checkpoints/shape.py FILE.gguf    # Q8_0, with the vectors in float32, 0.6 GB
"""

import json
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf_file import add_shape, renamed

HIDDEN, WIDE, LAYERS, QUERIES, KEYS, VOCAB = 1024, 3072, 28, 2048, 1024, 151936
LAYER = {
    "input_layernorm": [HIDDEN], "post_attention_layernorm": [HIDDEN], "self_attn.q_norm": [128], "self_attn.k_norm": [128],
    "self_attn.q_proj": [QUERIES, HIDDEN], "self_attn.k_proj": [KEYS, HIDDEN], "self_attn.v_proj": [KEYS, HIDDEN],
    "self_attn.o_proj": [HIDDEN, QUERIES], "mlp.gate_proj": [WIDE, HIDDEN], "mlp.up_proj": [WIDE, HIDDEN],
    "mlp.down_proj": [HIDDEN, WIDE],
}
SHAPES = {"model.embed_tokens.weight": [VOCAB, HIDDEN], "model.norm.weight": [HIDDEN]} | {
    f"model.layers.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in LAYER.items()
}
CONFIG = {
    "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": LAYERS,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "max_position_embeddings": 40960, "tie_word_embeddings": True, "hidden_act": "silu", "vocab_size": VOCAB, "bos_token_id": 0,
}


def tensors():
    random = np.random.default_rng(1)
    for name, shape in SHAPES.items():
        if len(shape) == 1:
            yield name, np.ones(shape, np.float32)
        else:
            yield name, random.standard_normal(shape, np.float32) * np.float32(0.12 if "embed" in name else 0.03)


def write_folder(out):
    out.mkdir(parents=True, exist_ok=True)
    header, at = {}, 0
    for name, shape in SHAPES.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(out / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in tensors():
            gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16).tofile(file)
    (out / "config.json").write_text(json.dumps(CONFIG))
    words = {"type": "BPE", "vocab": {f"w{i}": i for i in range(VOCAB)}, "merges": []}
    parts = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    (out / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], **parts, "model": words}))


def write_gguf(out):
    writer = gguf.GGUFWriter(out, "qwen3")
    add_shape(writer, CONFIG, CONFIG["rope_theta"])
    # The characters of all bytes, as in GPT-2, then words.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    tokens = [chr(c) for c in visible] + [chr(0x100 + i) for i in range(256 - len(visible))]
    tokens += [f"w{i}" for i in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["w 0"])
    writer.add_bos_token_id(0)
    # No text ends early.
    writer.add_eos_token_id(VOCAB - 1)
    for name, values in tensors():
        kind = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(renamed(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


out = Path(sys.argv[1])
write_gguf(out) if out.suffix == ".gguf" else write_folder(out)
