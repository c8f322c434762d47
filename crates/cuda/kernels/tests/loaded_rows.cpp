// Computes the rows that a block of the fused Hopper kernel loads. Reads columns, cluster and rows of the batch, as little-endian
// words, from standard input, and writes one word per case to standard output. src/device/fused_hopper.rs compares them with the
// host's.
#include <algorithm>
#include <cstdio>

// CUDA has this function without a namespace.
using std::min;

#include "flash_sampling/fused_hopper/schedule.cuh"

using namespace flash_sampling;

int main() {
    for (u32 words[3]; fread(words, sizeof(words), 1, stdin) == 1;) {
        const u32 rows = fused_hopper::loaded_rows(words[0], words[1], words[2]);
        fwrite(&rows, sizeof(rows), 1, stdout);
    }
    return 0;
}
