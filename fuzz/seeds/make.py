"""Writes the seeds: small valid files as first inputs of the fuzzer."""

import json
import pathlib
import struct

here = pathlib.Path(__file__).parent


def put(path, data):
    (here / path).write_bytes(data)


def safetensors(tensors):
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def npy(descr, shape, data, version=1):
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


put("safetensors/one", safetensors({"w": ("BF16", [2, 3], bytes(12))}))
put("safetensors/two", safetensors({"w": ("F32", [3], bytes(12)), "lm_head.weight": ("F16", [1, 2], bytes(4))}))
put("npy/matrix", npy("<f4", "(2, 3)", bytes(24)))
put("npy/vector", npy("<f2", "(3,)", bytes(6), version=2))
put("mask/shared", npy("<u4", "(2,)", b"\xff" * 8))
put("mask/rows", npy("<i4", "(3, 2)", b"\xff" * 24))
put("checkpoint/index", json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "a.safetensors"}}).encode())
config = {"vocab_size": 9, "tie_word_embeddings": False, "final_logit_softcapping": 30.0, "logits_scaling": 8}
put("checkpoint/config", json.dumps(config).encode())
put("checkpoint/qwen3", (here.resolve().parents[1] / "crates/cli/tests/checkpoints/qwen3/config.json").read_bytes())
put("checkpoint/nested", json.dumps({"text_config": {"vocab_size": 9, "logit_scale": 0.0625}}).encode())
put("logit_bias/list", b"3:1.5,7:-inf, 9:-2e-3")
put("mass_histogram/bins", struct.pack("<fQQ", 1.5, 12 << 48 | 1 << 30, 11 << 48 | 3 << 30))
put("shard_summary/untouched", b"\x02")
put("shard_summary/edited", b"\x03\x10\x00\x01")
