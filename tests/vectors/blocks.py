"""Writes blocks.txt: digests of weights that PyPI's gguf decodes (needs gguf and numpy).

python3 tests/vectors/blocks.py > tests/vectors/blocks.txt

A type has 65536 blocks of hashed bytes. Block n has the f16 factor of bits n, so all factors occur, and so do all codes.
"""

import gguf
import numpy as np

BLOCKS = 1 << 16
# Type, then the offsets of its f16 factors.
TYPES = {"Q8_0": [0], "Q4_0": [0], "IQ4_NL": [0], "MXFP4": [], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def hashed(seed, index):
    """The finaliser of splitmix64, as in tests/src/data.rs."""
    z = np.uint64(seed) + (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def main():
    np.seterr(all="ignore")
    print("# type blocks digest: sum of (2 i + 1) times the bits of weight i, modulo 2^64; a NaN counts as 0x7fc00000.")
    print("# Written by blocks.py. tests/tests/blocks.rs has the same blocks.")
    for seed, (name, factors) in enumerate(TYPES.items()):
        qtype = gguf.GGMLQuantizationType[name]
        size = gguf.GGML_QUANT_SIZES[qtype][1]
        blocks = hashed(seed, np.arange(BLOCKS * size, dtype=np.uint64)).astype(np.uint8).reshape(BLOCKS, size)
        number = np.arange(BLOCKS, dtype=np.uint64)
        for at, factor in zip(factors, [1, 40503]):
            bits = (number * np.uint64(factor)).astype("<u2")
            blocks[:, at : at + 2] = bits.view(np.uint8).reshape(BLOCKS, 2)
        weights = gguf.dequantize(blocks, qtype).astype(np.float32).reshape(-1)
        bits = np.where(np.isnan(weights), np.uint32(0x7FC00000), weights.view(np.uint32)).astype(np.uint64)
        digest = int((bits * (np.arange(bits.size, dtype=np.uint64) * np.uint64(2) + np.uint64(1))).sum(dtype=np.uint64))
        print(f"{name.lower()} {BLOCKS} {digest:#018x}")


main()
