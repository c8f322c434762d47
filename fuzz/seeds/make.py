"""Writes the seeds: small valid files as first inputs of the fuzzer."""

import json
import pathlib
import struct

here = pathlib.Path(__file__).parent


def put(path, data):
    (here / path).write_bytes(data)


def safetensors(tensors, **metadata):
    header, data = {"__metadata__": metadata} if metadata else {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def digest_of_words(words, digest=0x9E3779B97F4A7C15):
    for word in words:
        digest = (digest ^ word) * 0x9E3779B97F4A7C15 % 2**64
        digest ^= digest >> 29
    return digest


def digest(data):
    """The digest of bytes, as in crates/core/src/backend/digest.rs."""
    words = struct.unpack(f"<{len(data) // 32 * 4}Q", data[:len(data) // 32 * 32])
    chains = [digest_of_words(words[k::4], 1 + k) for k in range(4)] if words else []
    return digest_of_words([*chains, *data[len(words) * 8:], len(data)])


def shadow(weight, codes, scales, errors, norms):
    """The shadow of a float32 weight; codes are rows of 64 bytes."""
    numbers = [struct.pack(f"<{len(codes)}f", *part) for part in (scales, errors, norms)]
    own = digest_of_words([digest_of_words(map(digest, codes)), *map(digest, numbers)])
    rows = [struct.pack(f"<{len(row)}f", *row) for row in weight]
    return safetensors(
        {"codes": ("I8", [len(codes), 64], b"".join(codes)),
         **{name: ("F32", [len(codes)], data) for name, data in zip(["scales", "errors", "norms"], numbers)}},
        digest=f"{own:016x}", weight_digest=f"{digest_of_words(map(digest, rows)):016x}",
        weight_dtype="f32", weight_shape=f"[{len(weight)}, {len(weight[0])}]",
    )


def npy(descr, shape, data, version=1):
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


def gguf_string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_value(value):
    """The type and the bytes of a value; a list has the type of its first element."""
    if isinstance(value, str):
        return 8, gguf_string(value)
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    elements = [gguf_value(element) for element in value]
    return 9, struct.pack("<IQ", elements[0][0], len(elements)) + b"".join(data for _, data in elements)


def gguf(keys, tensors, data):
    """A file of keys, and tensors of name, dimensions (fastest first), type and offset."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for key, value in keys.items():
        kind, content = gguf_value(value)
        out += gguf_string(key) + struct.pack("<I", kind) + content
    for name, dims, kind, offset in tensors:
        out += gguf_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return out + bytes(-len(out) % 32) + bytes(data)


def gguf_tokenizer(model, tokens, **more):
    names = {"model": model, "tokens": tokens, "token_type": [1] * len(tokens), "bos_token_id": 0, **more}
    return {f"tokenizer.ggml.{name}": value for name, value in names.items()}


llama = {
    "general.architecture": "llama", "llama.block_count": 1, "llama.embedding_length": 4, "llama.feed_forward_length": 4,
    "llama.attention.head_count": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.context_length": 8,
}
layer = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
vectors = [("output_norm.weight", [4], 0, 0)] + [(f"blk.0.{part}.weight", [4], 0, 0) for part in layer if "norm" in part]
matrices = [(f"blk.0.{part}.weight", [4, 4], 0, 32) for part in layer if "norm" not in part]
pieces = ["<s>", "<unk>", "\u2581", "o", "n", "on", "\u2581on"]
scores = [0.0, 0.0, -5.0, -4.0, -3.0, -1.0, -2.0]
put("gguf/model", gguf(
    llama | gguf_tokenizer("llama", pieces, scores=scores, unknown_token_id=1),
    [("token_embd.weight", [4, 7], 0, 96), ("rope_freqs.weight", [1], 0, 0), *vectors, *matrices], struct.pack("<f", 1) * 64,
))
put("gguf/blocks", gguf(
    {"general.alignment": 64, "nested": [[1, 2], [3]], "flags": [True]},
    [("a", [32, 2], 8, 0), ("b", [256], 14, 128), ("c", [32], 39, 384), ("d", [3], 10, 0)], 448,
))
put("gguf/bytes", gguf(
    gguf_tokenizer("gpt2", ["O", "n", "c", "On", "\u0120"], pre="llama-bpe", merges=["O n"], add_bos_token=True), [], 0,
))
put("safetensors/one", safetensors({"w": ("BF16", [2, 3], bytes(12))}))
put("safetensors/two", safetensors({"w": ("F32", [3], bytes(12)), "lm_head.weight": ("F16", [1, 2], bytes(4))}))
codes = [bytes([0, 127]) + bytes(62), bytes([129, 32]) + bytes(62)]
put("shadow/small", shadow([[0.0, 1.0], [-2.0, 0.5]], codes, [1 / 127, 2 / 127], [0.01, 0.01], [1.1, 2.1]))
put("npy/matrix", npy("<f4", "(2, 3)", bytes(24)))
put("npy/vector", npy("<f2", "(3,)", bytes(6), version=2))
put("mask/shared", npy("<u4", "(2,)", b"\xff" * 8))
put("mask/rows", npy("<i4", "(3, 2)", b"\xff" * 24))
put("checkpoint/index", json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "a.safetensors"}}).encode())
config = {"vocab_size": 9, "tie_word_embeddings": False, "final_logit_softcapping": 30.0, "logits_scaling": 8}
put("checkpoint/config", json.dumps(config).encode())
for name in ["qwen3", "gemma2"]:
    put(f"checkpoint/{name}", (here.resolve().parents[1] / f"crates/cli/tests/checkpoints/{name}/config.json").read_bytes())
put("checkpoint/nested", json.dumps({"text_config": {"vocab_size": 9, "logit_scale": 0.0625}}).encode())
put("logit_bias/list", b"3:1.5,7:-inf, 9:-2e-3")
put("mass_histogram/bins", struct.pack("<fQQ", 1.5, 12 << 48 | 1 << 30, 11 << 48 | 3 << 30))
put("shard_summary/untouched", b"\x02")
put("shard_summary/edited", b"\x03\x10\x00\x01")
